"""The addresses of the node that serve node ports.

kube-proxy 1.36, pkg/proxy/util/nodeport_addresses.go. Unlike there, a family serves no node
ports at all if they are restricted to an unknown set of addresses: with ``primary``
while the node's address is unknown, and with networks of the other family only.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from kproxy_core.model.address import Address, Cidr, Family, is_loopback
from kproxy_core.model.node import NodePortAddresses


class NodePortSelection(NamedTuple):
    addresses: tuple[Address, ...]
    """Sorted, without loopback."""
    anywhere: bool = False
    """Every local address except loopback serves, including those that no interface has."""
    problem: str = ""
    """The reason why node ports are not served, for the operator; "" if they are."""


def select_node_port_addresses(
    wanted: NodePortAddresses, own: Address | None, addresses: Collection[Address], family: Family
) -> NodePortSelection:
    """Select those of the node's *addresses*. *own* is its address in *family*, None: unknown."""
    if wanted == "primary":
        if own is None:
            return NodePortSelection((), problem=f"the node's own {family.label} address is not known")
        networks = [Cidr(own, family.bits)]
    else:
        networks = [network for network in wanted if network.family is family]
        if not wanted or any(network.prefix == 0 for network in networks):
            return NodePortSelection(_within([Cidr(family.unspecified, 0)], addresses), anywhere=True)
        if not networks:
            return NodePortSelection((), problem=f"nodePortAddresses has no {family.label} network")
    chosen = _within(networks, addresses)
    if not chosen:
        return NodePortSelection((), problem=f"no address of this node is in {', '.join(map(str, networks))}")
    return NodePortSelection(chosen)


def includes_loopback(wanted: NodePortAddresses, family: Family) -> bool:
    if wanted == "primary":
        return False
    first = family.loopback_cidr.network
    return not wanted or any(n.family is family and (first in n or is_loopback(n.network)) for n in wanted)


def _within(networks: Collection[Cidr], addresses: Iterable[Address]) -> tuple[Address, ...]:
    return tuple(sorted({
        address for address in addresses
        if not is_loopback(address) and any(address in network for network in networks)
    }))
