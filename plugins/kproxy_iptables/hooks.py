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

MODE = "iptables"


@hookimpl
def kproxy_describe() -> Description:
    """The mode and its defaults."""
    return Description(
        mode=MODE,
        summary="the chains and rules of kube-proxy's iptables mode",
        contract=(1, 1),
        preference=50,
        fallback="userspace",
    )


@hookimpl
def kproxy_detect(settings: BackendSettings, trial: Trial | None, load_modules: bool) -> Detection:
    """Whether there is an iptables here that can do what the rules need."""
    from kproxy_iptables.detect import detect

    return detect(settings, trial, load_modules=load_modules)


@hookimpl
def kproxy_cleanup(dry_run: bool, own_only: bool) -> Leftovers:
    """Delete the chains and rules of this mode, kube-proxy's as well."""
    if own_only:  # A kube-proxy has the same names, and whatever it does not need it removes at its start.
        return Leftovers(MODE)
    from kproxy_iptables.cleanup import cleanup

    return cleanup(dry_run=dry_run)


@hookimpl
def kproxy_supersede(dry_run: bool) -> Leftovers:
    """Delete the rules of this mode that are in the other of nf_tables and the legacy interface."""
    from kproxy_iptables.cleanup import supersede

    return supersede(dry_run=dry_run)


@hookimpl
def kproxy_prepare(settings: BackendSettings) -> None:
    """What node ports on localhost need."""
    from kproxy_iptables.kernel.requirements import enable_route_localnet
    from kproxy_iptables.settings import read_settings

    if read_settings(settings).localhost_node_ports:
        enable_route_localnet()


@hookimpl
def kproxy_caveats(update: Update, settings: BackendSettings) -> Sequence[Caveat]:
    """Where node ports are not served, and how many clients affinity remembers."""
    from kproxy_iptables.caveats import caveats
    from kproxy_iptables.settings import read_settings

    return caveats(update, localhost_node_ports=read_settings(settings).localhost_node_ports)


@hookimpl
def kproxy_make_backend(mode: str, settings: BackendSettings) -> Backend | None:
    """The backend, if *mode* is ours."""
    if mode != MODE:
        return None
    from kproxy_iptables.backend import IptablesBackend

    return IptablesBackend(settings)
