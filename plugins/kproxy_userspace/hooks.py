"""The hook implementations of the userspace mode. Heavy modules are imported when a hook needs them."""

from collections.abc import Sequence

from kproxy_core.contract import (
    Backend,
    BackendSettings,
    Caveat,
    Description,
    Detection,
    Leftovers,
    Trial,
    Update,
    hookimpl,
)


@hookimpl
def kproxy_describe() -> Description:
    """Describe the mode, the last resort: every other one forwards in the kernel."""
    return Description(
        mode="userspace",
        summary="redirects to relays of its own; also without any privileges",
        contract=(1, 1),
        preference=-100,
        forwards=False,
        options=(
            "listen", "bindAddress", "portRange", "udpIdleTimeout", "removedEndpoints", "drainTimeout",
            "halfClosedTimeout", "workers", "syncPeriod",
        ),
    )


@hookimpl
def kproxy_detect(
    settings: BackendSettings, trial: Trial | None, load_modules: bool
) -> Detection:
    from kproxy_userspace.detect import detect

    return detect(settings, trial, load_modules=load_modules)


@hookimpl
def kproxy_cleanup(dry_run: bool, own_only: bool) -> Leftovers:
    """Delete the portals, including kube-proxy's."""
    from kproxy_userspace.cleanup import cleanup

    return cleanup(dry_run=dry_run, own_only=own_only)


@hookimpl
def kproxy_caveats(update: Update, settings: BackendSettings) -> Sequence[Caveat]:
    """Return the limits of relays: hidden client addresses, no traffic policies, no SCTP."""
    from kproxy_userspace.detect import caveats
    from kproxy_userspace.settings import read_settings

    return caveats(update, read_settings(settings))


@hookimpl
def kproxy_make_backend(settings: BackendSettings) -> Backend:
    from kproxy_userspace.backend import UserspaceBackend

    return UserspaceBackend(settings)
