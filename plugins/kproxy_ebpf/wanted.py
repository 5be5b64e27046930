"""The map elements for a service plan. Pure.

Omits frontends for which the rules must decide: those without usable endpoints, SCTP, and, because the source
of a connection is unknown at connect(), load balancer IPs with source ranges and Services that hash it.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kproxy_core.contract import Destination, NodeView, Protocol, ServicePlan, Update, family_of
from kproxy_ebpf import names
from kproxy_ebpf.batch import (
    MASQUERADES_PODS,
    PRESENT,
    RESETS,
    SHORT_CIRCUITS,
    address_key,
    frontend_key,
    node_port_key,
)


class FrontendElement(NamedTuple):
    """One element of the map of frontends: an address that local sockets dial."""

    key: bytes
    flags: int
    """Of `batch.MASQUERADES_PODS`, `batch.SHORT_CIRCUITS` and `batch.RESETS`."""


class Group(NamedTuple):
    """Frontends of one service port that lead to the same endpoints."""

    name: str
    """``cluster`` or ``local``: the plan's endpoints in use."""
    frontends: tuple[FrontendElement, ...]
    endpoints: tuple[Destination, ...]
    """Of each slot."""


def wanted(plan: ServicePlan) -> Iterator[Group]:
    """Yield the groups of frontends of *plan* that programs translate.

    External frontends use the endpoints of the whole cluster whatever their policy is: a local socket takes
    the short circuit (kube-proxy 1.36, pkg/proxy/topology.go), unless `frontends_left_by_pods` says that the
    rules decide.
    """
    if plan.key.protocol is Protocol.SCTP or plan.hash_by:
        return
    internal: list[FrontendElement] = []
    resets = RESETS * (plan.resets_removed and plan.key.protocol is Protocol.TCP)
    if plan.cluster_ip is not None:
        internal.append(FrontendElement(frontend_key(plan.cluster_ip, plan.key.protocol, plan.port), resets))
    keys = [
        frontend_key(address, plan.key.protocol, plan.port)
        for address in (plan.external_ips if plan.source_ranges else plan.external_addresses)
    ]
    if plan.node_port:
        keys.append(node_port_key(plan.family, plan.key.protocol, plan.node_port))
    flag = SHORT_CIRCUITS[plan.family] if plan.external_policy_local else MASQUERADES_PODS
    external = [FrontendElement(key, flag | resets) for key in keys]
    if plan.internal_policy_local:
        if internal and plan.local:
            yield Group("local", tuple(internal), plan.local_slots)
        internal = []
    if (internal or external) and plan.cluster:
        yield Group("cluster", (*internal, *external), plan.cluster_slots)


def of_node(update: Update) -> dict[str, dict[bytes, bytes]]:
    """Return the elements of the maps `names.OF_NODE`.

    Programs leave a frontend at an address of the node to the rules: another program may listen there, such
    as NodeLocal DNSCache on kube-dns' ClusterIP, and exempt its packets from NAT.
    """
    own = (address for address in update.addresses if family_of(address) is update.family)
    return {
        names.NODE_ADDRESSES: node_addresses(update.node),
        names.OWN_ADDRESSES: {address_key(address): PRESENT for address in own},
    }


def node_addresses(node: NodeView) -> dict[bytes, bytes]:
    """Return the elements of the map of addresses that serve node ports.

    The value is 1 where only the node's own namespace may use the address: loopback, which every pod has too.
    """
    found = {address_key(address): b"\0\0\0\0" for address in node.node_port_addresses}
    if node.node_ports_on_loopback:
        found[address_key(node.family.loopback)] = b"\1\0\0\0"
    return found


def only_node_clients(clients: str, node: NodeView) -> bool:
    """Return whether the rules decide for sockets of pods. *clients* is the mode's option of that name.

    The source of a connection is unknown at connect(), so rules that masquerade by the source must decide.
    """
    by_interface = node.local_source is not None and node.local_source.cidr is None
    return clients == "node" or node.masquerade_all or (clients == "auto" and by_interface)


def frontends_left_by_pods(clients: str, node: NodeView) -> int:
    """Return the flags of frontends for which the rules decide about sockets of pods.

    Rules that cannot recognise pods treat them like any client of a frontend with policy Local.
    """
    masquerading = MASQUERADES_PODS * (clients != "all")
    return RESETS | masquerading | (SHORT_CIRCUITS[node.family] if node.local_source is None else 0)
