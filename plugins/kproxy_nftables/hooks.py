"""The plugin's hooks. Heavy modules are imported where they are used."""

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
    """Describe the mode. As in kube-proxy, node ports are by default on the primary addresses only."""
    return Description(
        mode="nftables",
        summary="constant nf_tables rules, services in map elements",
        contract=(1, 1),
        preference=100,
        default_node_port_addresses=("primary",),
        fallback=("iptables", "userspace"),
        options=("flowtable", "calicoMarker"),
    )


@hookimpl
def kproxy_detect(
    settings: BackendSettings, trial: Trial | None, load_modules: bool
) -> Detection:
    from kproxy_nftables.detect import detect

    return detect(settings, trial, load_modules=load_modules)


@hookimpl
def kproxy_cleanup(dry_run: bool, own_only: bool) -> Leftovers:
    """Delete our tables, the marker, and the tables of kube-proxy's nftables mode."""
    from kproxy_nftables.cleanup import cleanup

    return cleanup(dry_run=dry_run, own_only=own_only)


@hookimpl
def kproxy_supersede(dry_run: bool) -> Leftovers:
    """Delete the tables of kube-proxy's nftables mode."""
    from kproxy_nftables.cleanup import supersede

    return supersede(dry_run=dry_run)


@hookimpl
def kproxy_caveats(update: Update) -> Sequence[Caveat]:
    from kproxy_nftables.detect import caveats

    return caveats(update)


@hookimpl
def kproxy_make_backend(settings: BackendSettings) -> Backend:
    from kproxy_nftables.backend import NftablesBackend

    return NftablesBackend(settings)
