"""Hook implementations of the plugin. Heavy modules are imported only when a hook needs them."""

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
    return Description(
        mode="iptables",
        summary="the chains and rules of kube-proxy's iptables mode",
        contract=(1, 1),
        preference=50,
        fallback=("nftables", "userspace"),
        options=("localhostNodePorts", "syncPeriod"),
    )


@hookimpl
def kproxy_detect(
    settings: BackendSettings, trial: Trial | None, load_modules: bool
) -> Detection:
    from kproxy_iptables.detect import detect

    return detect(settings, trial, load_modules=load_modules)


@hookimpl
def kproxy_cleanup(dry_run: bool, own_only: bool) -> Leftovers:
    """Delete the chains and rules of this mode, including those of kube-proxy."""
    if own_only:  # kube-proxy uses the same names, and removes what it does not need when it starts.
        return Leftovers()
    from kproxy_iptables.cleanup import cleanup

    return cleanup(dry_run=dry_run)


@hookimpl
def kproxy_supersede(dry_run: bool) -> Leftovers:
    """Delete leftovers of older versions, and this mode's rules in the unused variant of iptables."""
    from kproxy_iptables.cleanup import supersede

    return supersede(dry_run=dry_run)


@hookimpl
def kproxy_prepare(settings: BackendSettings) -> None:
    """Enable route_localnet if node ports are served on localhost."""
    from kproxy_iptables.kernel import enable_route_localnet
    from kproxy_iptables.settings import read_settings

    if read_settings(settings).localhost_node_ports:
        enable_route_localnet()


@hookimpl
def kproxy_caveats(update: Update, settings: BackendSettings) -> Sequence[Caveat]:
    """Return addresses on which node ports are not served, and limits of session affinity."""
    from kproxy_iptables.detect import caveats
    from kproxy_iptables.settings import read_settings

    return caveats(update, read_settings(settings))


@hookimpl
def kproxy_make_backend(settings: BackendSettings) -> Backend:
    from kproxy_iptables.backend import IptablesBackend

    return IptablesBackend(settings)
