"""The plugin: what kproxy asks of it, answered without importing anything heavy."""

from collections.abc import Sequence

from kproxy_core.backend.api import (
    Backend,
    BackendSettings,
    Caveat,
    Description,
    Detection,
    Leftovers,
    Trial,
    Update,
)
from kproxy_core.backend.hookspecs import hookimpl

MODE = "userspace"


@hookimpl
def kproxy_describe() -> Description:
    """The last resort: every other mode forwards in the kernel."""
    return Description(
        mode=MODE,
        summary="redirects to relays of its own; also without any privileges",
        contract=(1, 4),
        preference=-100,
    )


@hookimpl
def kproxy_detect(settings: BackendSettings, trial: Trial | None, load_modules: bool) -> Detection:
    """Whether traffic can be redirected here."""
    from kproxy_userspace.detect import detect

    return detect(settings, trial, load_modules=load_modules)


@hookimpl
def kproxy_cleanup(dry_run: bool, own_only: bool) -> Leftovers:
    """Remove the portals, kube-proxy's as well."""
    from kproxy_userspace.cleanup import cleanup

    return cleanup(dry_run=dry_run, own_only=own_only)


@hookimpl
def kproxy_caveats(update: Update, settings: BackendSettings) -> Sequence[Caveat]:
    """What a relay can't do: clients' addresses, policies, SCTP, to outlive its process."""
    from kproxy_userspace.caveats import caveats
    from kproxy_userspace.settings import read_settings

    wanted = read_settings(settings)
    return caveats(update, listen=wanted.listen, udp_idle_seconds=wanted.udp_idle_seconds)


@hookimpl
def kproxy_make_backend(mode: str, settings: BackendSettings) -> Backend | None:
    """The backend, if *mode* is ours."""
    if mode != MODE:
        return None
    from kproxy_userspace.backend import UserspaceBackend

    return UserspaceBackend(settings)
