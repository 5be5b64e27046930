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

MODE = "ipvs"


@hookimpl
def kproxy_describe() -> Description:
    """The mode and its defaults."""
    return Description(
        mode=MODE,
        summary="virtual servers of the kernel's IPVS, with ipsets and constant iptables rules",
        contract=(1, 1),
        preference=10,
        fallback="iptables",
        interfaces=("kube-ipvs0",),
    )


@hookimpl
def kproxy_detect(settings: BackendSettings, trial: Trial | None, load_modules: bool) -> Detection:
    """Whether this kernel has IPVS and what goes with it."""
    from kproxy_ipvs.detect import detect

    return detect(settings, trial, load_modules=load_modules)


@hookimpl
def kproxy_cleanup(settings: BackendSettings, dry_run: bool, own_only: bool) -> Leftovers:
    """Delete virtual servers, device, rules and sets of this mode, kube-proxy's as well."""
    from kproxy_ipvs.cleanup import cleanup
    from kproxy_ipvs.settings import read_excluded

    return cleanup(read_excluded(settings), dry_run=dry_run, own_only=own_only)


@hookimpl
def kproxy_retire(settings: BackendSettings) -> Leftovers:
    """Delete what the connections that still go through IPVS do not need."""
    from kproxy_ipvs.retire import retire
    from kproxy_ipvs.settings import read_excluded

    return retire(read_excluded(settings))


@hookimpl
def kproxy_supersede(dry_run: bool) -> Leftovers:
    """Delete the rules of this mode that are in the other of nf_tables and the legacy interface."""
    from kproxy_ipvs.cleanup import supersede

    return supersede(dry_run=dry_run)


@hookimpl
def kproxy_prepare(settings: BackendSettings) -> None:
    """The kernel's modules, and the sysctls that they bring."""
    from kproxy_ipvs.kernel.requirements import ensure_settings, load_modules
    from kproxy_ipvs.settings import read_settings

    wanted = read_settings(settings)
    load_modules(wanted.scheduler)
    ensure_settings(wanted)


@hookimpl
def kproxy_caveats(update: Update, settings: BackendSettings) -> Sequence[Caveat]:
    """What IPVS does otherwise: node ports, affinity, scheduling."""
    from kproxy_ipvs.caveats import caveats
    from kproxy_ipvs.settings import read_settings

    return caveats(update, scheduler=read_settings(settings).scheduler)


@hookimpl
def kproxy_make_backend(mode: str, settings: BackendSettings) -> Backend | None:
    """The backend, if *mode* is ours."""
    if mode != MODE:
        return None
    from kproxy_ipvs.backend import IpvsBackend

    return IpvsBackend(settings)
