"""The plugin's hooks. Heavy modules are imported where they are used."""

from collections.abc import Sequence

from kproxy_core.backend import api
from kproxy_core.backend.hookspecs import hookimpl

MODE = "nftables"


@hookimpl
def kproxy_describe() -> api.Description:
    """Describe the mode. As in kube-proxy, node ports are by default on the primary addresses only."""
    return api.Description(
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
    settings: api.BackendSettings, trial: api.Trial | None, load_modules: bool
) -> api.Detection:
    from kproxy_nftables.questions.detect import detect

    return detect(settings, trial, load_modules=load_modules)


@hookimpl
def kproxy_cleanup(dry_run: bool, own_only: bool) -> api.Leftovers:
    """Delete our tables and those of kube-proxy's nftables mode."""
    from kproxy_nftables.questions.cleanup import cleanup

    return cleanup(dry_run=dry_run, own_only=own_only)


@hookimpl
def kproxy_supersede(dry_run: bool) -> api.Leftovers:
    """Delete the tables of kube-proxy's nftables mode."""
    from kproxy_nftables.questions.cleanup import supersede

    return supersede(dry_run=dry_run)


@hookimpl
def kproxy_caveats(update: api.Update) -> Sequence[api.Caveat]:
    from kproxy_nftables.questions.caveats import caveats

    return caveats(update)


@hookimpl
def kproxy_make_backend(mode: str, settings: api.BackendSettings) -> api.Backend | None:
    if mode != MODE:
        return None
    from kproxy_nftables.backend import NftablesBackend

    return NftablesBackend(settings)
