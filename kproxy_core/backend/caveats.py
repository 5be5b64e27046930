"""Caveats that several modes have: in the same words, so that they cancel out when modes are compared."""

from collections.abc import Iterator

from kproxy_core.backend.api import Caveat, Update
from kproxy_core.model.address import format_address
from kproxy_core.plan.service_plan import ServicePlan


def sorted_plans(update: Update) -> list[ServicePlan]:
    """The plans of *update* in the order of their keys."""
    return [plan for _, plan in sorted(update.plans.items())]


def of_node_ports(update: Update, *, loopback: bool, any_local_address: bool) -> Iterator[Caveat]:
    """Where node ports are not served, configured so or not; nothing on a node without node ports.

    *loopback*: the mode serves them there, now. *any_local_address*: it can serve them on one that no
    interface has.
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
        for plan in plans:
            unserved = format_address(node.family.loopback)
            yield Caveat(f"node port {plan.node_port} is not served on {unserved}", plan.key)


def of_unclaimed_ports(update: Update) -> Iterator[Caveat]:
    """For a mode that leaves ClusterIPs alone but for the ports of their Services."""
    if any(plan.cluster_ip is not None for plan in update.plans.values()):
        yield Caveat("connections to other ports of ClusterIPs are not refused", lost=False)
