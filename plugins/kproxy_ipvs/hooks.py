"""The hook implementations of the ipvs mode. Heavy modules are imported when a hook needs them."""

from collections.abc import Sequence

from kproxy_core.contract import (
    Backend,
    BackendSettings,
    Caveat,
    Description,
    Detection,
    HostError,
    Leftovers,
    SyncFailed,
    Trial,
    Update,
    hookimpl,
)


@hookimpl
def kproxy_describe() -> Description:
    return Description(
        mode="ipvs",
        summary="virtual servers of the kernel's IPVS, with ipsets and constant iptables rules",
        contract=(1, 1),
        preference=10,
        fallback="iptables",
        options=("scheduler", "excludeCIDRs", "strictARP", "tcpTimeout", "tcpFinTimeout", "udpTimeout"),
        interfaces=("kube-ipvs0",),
    )


@hookimpl
def kproxy_detect(
    settings: BackendSettings, trial: Trial | None, load_modules: bool
) -> Detection:
    from kproxy_ipvs.detect import detect

    return detect(settings, trial, load_modules=load_modules)


@hookimpl
def kproxy_cleanup(settings: BackendSettings, dry_run: bool, own_only: bool) -> Leftovers:
    """Delete virtual servers, device, rules and sets of this mode, including kube-proxy's."""
    from kproxy_ipvs.cleanup import cleanup
    from kproxy_ipvs.settings import read_excluded

    return cleanup(read_excluded(settings), dry_run=dry_run, own_only=own_only)


@hookimpl
def kproxy_retire(settings: BackendSettings) -> Leftovers:
    """Delete all objects of this mode that no connection through IPVS needs."""
    from kproxy_ipvs.retire import retire
    from kproxy_ipvs.settings import read_excluded

    return retire(read_excluded(settings))


@hookimpl
def kproxy_supersede(dry_run: bool) -> Leftovers:
    """Delete kube-proxy's own objects, and all rules in the iptables variant that the node does not use."""
    from kproxy_ipvs.cleanup import supersede

    return supersede(dry_run=dry_run)


@hookimpl
def kproxy_prepare(settings: BackendSettings) -> None:
    """Load the kernel modules and set the sysctls, which need all privileges."""
    from kproxy_ipvs.kernel.requirements import ensure_settings, load_modules
    from kproxy_ipvs.settings import read_settings

    wanted = read_settings(settings)
    try:
        load_modules(wanted.scheduler)
        ensure_settings(wanted)
    except HostError as error:
        raise SyncFailed(str(error)) from error


@hookimpl
def kproxy_caveats(update: Update, settings: BackendSettings) -> Sequence[Caveat]:
    """Return the deviations of IPVS: node ports, affinity, scheduling."""
    from kproxy_ipvs.detect import caveats
    from kproxy_ipvs.settings import read_settings

    return caveats(update, read_settings(settings))


@hookimpl
def kproxy_make_backend(settings: BackendSettings) -> Backend:
    from kproxy_ipvs.backend import IpvsBackend

    return IpvsBackend(settings)
