"""The addresses of the node that serve node ports.

kube-proxy 1.36, pkg/proxy/util/nodeport_addresses.go. Unlike there, a family serves no node
ports at all if they are restricted to an unknown set of addresses: with ``primary``
while the node's address is unknown, and with networks of the other family only.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kproxy_core.model.address import Address, Cidr, Family, family_of, is_loopback


@dataclass(frozen=True, slots=True)
class Everywhere:
    """Every address of the node, because nothing is configured."""


@dataclass(frozen=True, slots=True)
class WithinNetworks:
    """The node's addresses within these networks, of both families."""

    networks: tuple[Cidr, ...]


@dataclass(frozen=True, slots=True)
class PrimaryOnly:
    """The node's own addresses, one of each family as far as they are known."""

    addresses: tuple[Address, ...]


NodePortChoice = Everywhere | WithinNetworks | PrimaryOnly
"""The request in nodePortAddresses. An unknown primary address is not the same as no restriction."""


class NodePortSelection(NamedTuple):
    addresses: tuple[Address, ...]
    """Sorted, without loopback."""
    anywhere: bool = False
    """Every local address except loopback serves, including those that no interface has."""
    problem: str = ""
    """The reason why node ports are not served, for the operator; "" if they are."""


def select_node_port_addresses(
    choice: NodePortChoice, addresses: Collection[Address], family: Family
) -> NodePortSelection:
    everywhere = (Cidr(family.unspecified, 0),)
    match choice:
        case Everywhere():
            return NodePortSelection(_within(everywhere, addresses), anywhere=True)
        case WithinNetworks(networks):
            networks = tuple(network for network in networks if network.family is family)
            if any(network.prefix == 0 for network in networks):
                return NodePortSelection(_within(everywhere, addresses), anywhere=True)
            if not networks:
                return NodePortSelection((), problem=f"nodePortAddresses has no {family.label} network")
        case PrimaryOnly(own):
            networks = tuple(Cidr(address, family.bits) for address in own if family_of(address) is family)
            if not networks:
                return NodePortSelection((), problem=f"the node's own {family.label} address is not known")
    chosen = _within(networks, addresses)
    if not chosen:
        wanted = ", ".join(map(str, networks))
        return NodePortSelection((), problem=f"no address of this node is in {wanted}")
    return NodePortSelection(chosen)


def includes_loopback(choice: NodePortChoice, family: Family) -> bool:
    match choice:
        case Everywhere():
            return True
        case WithinNetworks(networks):
            first = family.loopback_cidr.network
            return any(n.family is family and (first in n or is_loopback(n.network)) for n in networks)
        case PrimaryOnly():
            return False


def _within(networks: Iterable[Cidr], addresses: Iterable[Address]) -> tuple[Address, ...]:
    networks = tuple(networks)
    return tuple(sorted({
        address for address in addresses
        if not is_loopback(address) and any(address in network for network in networks)
    }))
