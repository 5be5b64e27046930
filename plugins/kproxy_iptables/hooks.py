"""Hook implementations of the plugin. Heavy modules are imported only when a hook needs them."""

from collections.abc import Sequence

from kproxy_core.contract import values
from kproxy_core.contract.hooks import hookimpl

MODE = "iptables"


@hookimpl
def kproxy_describe() -> values.Description:
    return values.Description(
        mode=MODE,
        summary="the chains and rules of kube-proxy's iptables mode",
        contract=(1, 8),
        preference=50,
        fallback=("nftables", "userspace"),
        options=("localhostNodePorts", "syncPeriod"),
    )


@hookimpl
def kproxy_detect(
    settings: values.BackendSettings, trial: values.Trial | None, load_modules: bool
) -> values.Detection:
    from kproxy_iptables.detect import detect

    return detect(settings, trial, load_modules=load_modules)


@hookimpl
def kproxy_cleanup(dry_run: bool, own_only: bool) -> values.Leftovers:
    """Delete the chains and rules of this mode, including those of kube-proxy."""
    if own_only:  # kube-proxy uses the same names, and removes what it does not need when it starts.
        return values.Leftovers(MODE)
    from kproxy_iptables.cleanup import cleanup

    return cleanup(dry_run=dry_run)


@hookimpl
def kproxy_supersede(dry_run: bool) -> values.Leftovers:
    """Delete leftovers of older versions, and this mode's rules in the unused variant of iptables."""
    from kproxy_iptables.cleanup import supersede

    return supersede(dry_run=dry_run)


@hookimpl
def kproxy_prepare(settings: values.BackendSettings) -> None:
    """Enable route_localnet if node ports are served on localhost."""
    from kproxy_iptables.kernel import enable_route_localnet
    from kproxy_iptables.settings import read_settings

    if read_settings(settings).localhost_node_ports:
        enable_route_localnet()


@hookimpl
def kproxy_caveats(update: values.Update, settings: values.BackendSettings) -> Sequence[values.Caveat]:
    """Return addresses on which node ports are not served, and limits of session affinity."""
    from kproxy_iptables.detect import caveats
    from kproxy_iptables.settings import read_settings

    return caveats(update, localhost_node_ports=read_settings(settings).localhost_node_ports)


@hookimpl
def kproxy_make_backend(mode: str, settings: values.BackendSettings) -> values.Backend | None:
    if mode != MODE:
        return None
    from kproxy_iptables.backend import IptablesBackend

    return IptablesBackend(settings)
