"""Deviations of this mode from the rules that it stands on. Pure."""

from collections.abc import Iterator

from kproxy_core.backend.api import Caveat, Update
from kproxy_core.backend.caveats import sorted_plans
from kproxy_core.model.address import Family, format_address
from kproxy_ebpf.wanted import only_node_clients, wanted


def caveats(update: Update, *, clients: str, whole_node: bool, notrack: bool = False) -> Iterator[Caveat]:
    """Yield the deviations of connect-time translation. *whole_node*: every cgroup is covered."""
    plans = [plan for plan in sorted_plans(update) if any(True for _ in wanted(plan))]
    if not plans:
        return
    if only_node_clients(clients, update.node):
        yield Caveat("sockets of pods are left to the rules", lost=False)
    else:
        if clients == "all":
            yield Caveat("pods reach external frontends with their own address as source", lost=False)
        if whole_node:
            yield Caveat(
                "containers of this machine that are not of this cluster are translated too", lost=False
            )
    if notrack:
        yield Caveat("rules that match conntrack states do not recognise replies to this node", lost=False)
    for plan in plans:
        if plan.affinity_seconds:
            yield Caveat("session affinity tells clients apart by network namespace, not by address",
                         plan.key, lost=False)  # fmt: skip
        if plan.node_port and update.node.node_ports_on_loopback:
            where = format_address(update.node.family.loopback)
            yield Caveat(
                f"node port {plan.node_port} is served on {where} to the node itself",
                plan.key, lost=False, only_here=update.node.family is Family.IPV6)  # fmt: skip
