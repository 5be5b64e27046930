"""Caveats that several modes share, in the same words, so that they cancel out in a comparison of modes."""

from collections.abc import Iterator

from kproxy_core.contract.values import Caveat, Update
from kproxy_core.model.address import Protocol, format_address
from kproxy_core.plan.service_plan import ServicePlan


def sorted_plans(update: Update) -> list[ServicePlan]:
    return [plan for _, plan in sorted(update.plans.items())]


def of_node_ports(
    update: Update, *, loopback: bool, any_local_address: bool, wants_relays: bool = False
) -> Iterator[Caveat]:
    """Yield the addresses on which node ports are not served, by configuration or not.

    Yields nothing on a node without node ports. *loopback*: the mode now serves them on loopback.
    *any_local_address*: it can serve them on local addresses that no interface has. *wants_relays*: see
    `Backend.wants_relays`.
    """
    plans = [plan for plan in sorted_plans(update) if plan.node_port]
    if not plans:
        return
    node = update.node
    ports = f"{node.family.label} node ports"
    if not node.node_ports_anywhere:
        where = ", ".join(map(format_address, node.node_port_addresses))
        yield Caveat(f"{ports} are served on {where} only" if where else f"{ports} are not served")
    if not (node.node_ports_anywhere and any_local_address):
        yield Caveat(f"{ports} are not served on local addresses that no interface has")
    if not loopback:
        is_relayed = wants_relays and node.relays_node_ports
        yield from filter(None, (of_loopback(plan, is_relayed=is_relayed) for plan in plans))
        if is_relayed:
            where = format_address(node.family.loopback)
            yield Caveat(f"connections to node ports on {where} end with the kproxy process", lost=False)


def of_loopback(plan: ServicePlan, *, is_relayed: bool) -> Caveat | None:
    """Return the caveat of a node port that no rule serves on loopback; None: a relay does as rules would."""
    where = format_address(plan.family.loopback)
    if not is_relayed or plan.key.protocol is Protocol.SCTP:
        return Caveat(f"node port {plan.node_port} is not served on {where}", plan.key)
    if plan.external_policy_local:
        return Caveat(f"node port {plan.node_port} reaches endpoints on this node only if dialled on {where}",
                      plan.key, lost=bool(plan.cluster) and not plan.local)  # fmt: skip
    return None


def of_removed_endpoints(update: Update) -> Iterator[Caveat]:
    """Yield the service ports whose connections cannot be reset, where their Services ask for it."""
    for plan in sorted_plans(update):
        if plan.resets_removed and plan.key.protocol is Protocol.SCTP:
            yield Caveat("SCTP connections to removed endpoints are not reset", plan.key)


_BEYOND_LIMITS = {
    "addresses": Caveat("load balancer IPs and external IPs beyond the limit are not served"),
    "source ranges": Caveat("source ranges beyond the limit admit no client"),
    "endpoints": Caveat("endpoints beyond the limit are not used", lost=False),
    "hash": Caveat("the hash takes too much of the node: the choice is left to chance", lost=False),
    "exact weights": Caveat("exact weights take too much of the node: they are rounded", lost=False),
}
"""By the words of `ServicePlan.left_out`."""


def of_limits(update: Update) -> Iterator[Caveat]:
    """Yield what service ports ask for beyond their limits, in any mode."""
    for plan in sorted_plans(update):
        for what in plan.left_out:
            yield _BEYOND_LIMITS[what]._replace(service_port=plan.key)


def of_unclaimed_ports(update: Update) -> Iterator[Caveat]:
    """Yield the caveat of a mode that handles only the Services' own ports of their ClusterIPs."""
    if any(plan.cluster_ip is not None for plan in update.plans.values()):
        yield Caveat("connections to other ports of ClusterIPs are not refused", lost=False)
