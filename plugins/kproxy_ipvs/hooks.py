"""The hook implementations of the ipvs mode. Heavy modules are imported when a hook needs them."""

from collections.abc import Sequence

from kproxy_core.contract import values
from kproxy_core.contract.errors import SyncFailed
from kproxy_core.contract.hooks import hookimpl
from kproxy_core.linux.errors import HostError

MODE = "ipvs"


@hookimpl
def kproxy_describe() -> values.Description:
    return values.Description(
        mode=MODE,
        summary="virtual servers of the kernel's IPVS, with ipsets and constant iptables rules",
        contract=(1, 8),
        preference=10,
        fallback="iptables",
        options=("scheduler", "excludeCIDRs", "strictARP", "tcpTimeout", "tcpFinTimeout", "udpTimeout"),
        interfaces=("kube-ipvs0",),
    )


@hookimpl
def kproxy_detect(
    settings: values.BackendSettings, trial: values.Trial | None, load_modules: bool
) -> values.Detection:
    from kproxy_ipvs.detect import detect

    return detect(settings, trial, load_modules=load_modules)


@hookimpl
def kproxy_cleanup(settings: values.BackendSettings, dry_run: bool, own_only: bool) -> values.Leftovers:
    """Delete virtual servers, device, rules and sets of this mode, including kube-proxy's."""
    from kproxy_ipvs.cleanup import cleanup
    from kproxy_ipvs.settings import read_excluded

    return cleanup(read_excluded(settings), dry_run=dry_run, own_only=own_only)


@hookimpl
def kproxy_retire(settings: values.BackendSettings) -> values.Leftovers:
    """Delete all objects of this mode that no connection through IPVS needs."""
    from kproxy_ipvs.retire import retire
    from kproxy_ipvs.settings import read_excluded

    return retire(read_excluded(settings))


@hookimpl
def kproxy_supersede(dry_run: bool) -> values.Leftovers:
    """Delete kube-proxy's own objects, and all rules in the iptables variant that the node does not use."""
    from kproxy_ipvs.cleanup import supersede

    return supersede(dry_run=dry_run)


@hookimpl
def kproxy_prepare(settings: values.BackendSettings) -> None:
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
def kproxy_caveats(update: values.Update, settings: values.BackendSettings) -> Sequence[values.Caveat]:
    """Return the deviations of IPVS: node ports, affinity, scheduling."""
    from kproxy_ipvs.detect import caveats
    from kproxy_ipvs.settings import read_settings

    return caveats(update, scheduler=read_settings(settings).scheduler)


@hookimpl
def kproxy_make_backend(mode: str, settings: values.BackendSettings) -> values.Backend | None:
    if mode != MODE:
        return None
    from kproxy_ipvs.backend import IpvsBackend

    return IpvsBackend(settings)
