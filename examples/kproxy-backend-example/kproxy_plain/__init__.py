"""The plugin: the hooks that kproxy calls for every mode. Imports nothing heavy."""

from collections.abc import Sequence

from kproxy_core.contract import (
    Backend,
    BackendSettings,
    Caveat,
    Description,
    Detection,
    Leftovers,
    Protocol,
    Requirement,
    Update,
    hookimpl,
)


@hookimpl
def kproxy_describe() -> Description:
    """Describe the mode. Its node ports are served on the node's own address only."""
    return Description(
        mode="plain",
        summary="plain nftables rules, a chain for each service port",
        contract=(1, 0),
        default_node_port_addresses=("primary",),
    )


@hookimpl
def kproxy_detect(settings: BackendSettings) -> Detection:
    """Let nft check the constant rules against this kernel, without applying them."""
    from kproxy_plain.table import try_rules

    problem = try_rules(settings.families)
    return Detection(
        (
            Requirement(
                what="nft, and permission to program this kernel",
                met=not problem,
                found=problem or "nft accepts the rules",
                remedy="run as root, and install nftables" if problem else "",
            ),
        ),
    )


@hookimpl
def kproxy_caveats(update: Update) -> Sequence[Caveat]:
    """Return the features of *update* that this mode does not implement."""
    found = []
    for key, plan in update.plans.items():
        if plan.affinity_seconds:
            found.append(Caveat("session affinity is not kept", key))
        is_relayed = update.node.relays_node_ports and key.protocol is not Protocol.SCTP
        if plan.node_port and update.node.node_ports_on_loopback and not is_relayed:
            found.append(Caveat(f"node port {plan.node_port} is not served on localhost", key))
    return found


@hookimpl
def kproxy_cleanup(dry_run: bool) -> Leftovers:
    """Delete our tables. kube-proxy never uses them, so *own_only* makes no difference."""
    from kproxy_plain.table import delete_tables

    return delete_tables(dry_run)


@hookimpl
def kproxy_make_backend(settings: BackendSettings) -> Backend:
    """Return a new backend. It touches the kernel only when it syncs."""
    from kproxy_plain.backend import PlainBackend

    return PlainBackend(settings.families, settings.masquerade_bit)
