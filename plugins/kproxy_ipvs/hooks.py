"""The hook implementations of the ipvs mode. Heavy modules are imported when a hook needs them."""

from collections.abc import Sequence

from kproxy_core.backend import api
from kproxy_core.backend.errors import SyncFailed
from kproxy_core.backend.hookspecs import hookimpl
from kproxy_core.host.errors import HostError

MODE = "ipvs"


@hookimpl
def kproxy_describe() -> api.Description:
    return api.Description(
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
    settings: api.BackendSettings, trial: api.Trial | None, load_modules: bool
) -> api.Detection:
    from kproxy_ipvs.questions.detect import detect

    return detect(settings, trial, load_modules=load_modules)


@hookimpl
def kproxy_cleanup(settings: api.BackendSettings, dry_run: bool, own_only: bool) -> api.Leftovers:
    """Delete virtual servers, device, rules and sets of this mode, including kube-proxy's."""
    from kproxy_ipvs.questions.cleanup import cleanup
    from kproxy_ipvs.settings import read_excluded

    return cleanup(read_excluded(settings), dry_run=dry_run, own_only=own_only)


@hookimpl
def kproxy_retire(settings: api.BackendSettings) -> api.Leftovers:
    """Delete all objects of this mode that no connection through IPVS needs."""
    from kproxy_ipvs.questions.retire import retire
    from kproxy_ipvs.settings import read_excluded

    return retire(read_excluded(settings))


@hookimpl
def kproxy_supersede(dry_run: bool) -> api.Leftovers:
    """Delete kube-proxy's own objects, and all rules in the iptables variant that the node does not use."""
    from kproxy_ipvs.questions.cleanup import supersede

    return supersede(dry_run=dry_run)


@hookimpl
def kproxy_prepare(settings: api.BackendSettings) -> None:
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
def kproxy_caveats(update: api.Update, settings: api.BackendSettings) -> Sequence[api.Caveat]:
    """Return the deviations of IPVS: node ports, affinity, scheduling."""
    from kproxy_ipvs.questions.caveats import caveats
    from kproxy_ipvs.settings import read_settings

    return caveats(update, scheduler=read_settings(settings).scheduler)


@hookimpl
def kproxy_make_backend(mode: str, settings: api.BackendSettings) -> api.Backend | None:
    if mode != MODE:
        return None
    from kproxy_ipvs.backend import IpvsBackend

    return IpvsBackend(settings)
