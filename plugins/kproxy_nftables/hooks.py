"""The plugin's hooks. Heavy modules are imported where they are used."""

from collections.abc import Sequence

from kproxy_core.contract import values
from kproxy_core.contract.hooks import hookimpl

MODE = "nftables"


@hookimpl
def kproxy_describe() -> values.Description:
    """Describe the mode. As in kube-proxy, node ports are by default on the primary addresses only."""
    return values.Description(
        mode=MODE,
        summary="constant nf_tables rules, services in map elements",
        contract=(1, 8),
        preference=100,
        default_node_port_addresses=("primary",),
        fallback=("iptables", "userspace"),
        options=("flowtable",),
    )


@hookimpl
def kproxy_detect(
    settings: values.BackendSettings, trial: values.Trial | None, load_modules: bool
) -> values.Detection:
    from kproxy_nftables.detect import detect

    return detect(settings, trial, load_modules=load_modules)


@hookimpl
def kproxy_cleanup(dry_run: bool, own_only: bool) -> values.Leftovers:
    """Delete our tables and those of kube-proxy's nftables mode."""
    from kproxy_nftables.cleanup import cleanup

    return cleanup(dry_run=dry_run, own_only=own_only)


@hookimpl
def kproxy_supersede(dry_run: bool) -> values.Leftovers:
    """Delete the tables of kube-proxy's nftables mode."""
    from kproxy_nftables.cleanup import supersede

    return supersede(dry_run=dry_run)


@hookimpl
def kproxy_caveats(update: values.Update) -> Sequence[values.Caveat]:
    from kproxy_nftables.detect import caveats

    return caveats(update)


@hookimpl
def kproxy_make_backend(mode: str, settings: values.BackendSettings) -> values.Backend | None:
    if mode != MODE:
        return None
    from kproxy_nftables.backend import NftablesBackend

    return NftablesBackend(settings)
