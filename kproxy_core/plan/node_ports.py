"""Which addresses of the node serve node ports.

kube-proxy 1.36, pkg/proxy/util/nodeport_addresses.go. Unlike there, node ports are served nowhere
in a family when it is known that they should be restricted but not to what: when
``primary`` was asked for and the node's address is unknown, and when networks
were named, but none of that family.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kproxy_core.model.address import Address, Cidr, Family, family_of, is_loopback


@dataclass(frozen=True, slots=True)
class Everywhere:
    """Every address of the node: nothing was configured."""


@dataclass(frozen=True, slots=True)
class WithinNetworks:
    """The node's addresses within these networks, of both families."""

    networks: tuple[Cidr, ...]


@dataclass(frozen=True, slots=True)
class PrimaryOnly:
    """The node's own addresses, one of each family as far as they are known."""

    addresses: tuple[Address, ...]


NodePortChoice = Everywhere | WithinNetworks | PrimaryOnly
"""What nodePortAddresses asks for. An unknown primary address is not the same as no restriction."""


class NodePortSelection(NamedTuple):
    """The outcome for one family, as `NodeView` has it."""

    addresses: tuple[Address, ...]
    """Sorted, without loopback."""
    anywhere: bool = False
    """On every local address that is not loopback, also one that no interface has."""
    problem: str = ""
    """Why node ports are served nowhere, for the operator; "" if they are served."""


def select_node_port_addresses(
    choice: NodePortChoice, addresses: Collection[Address], family: Family
) -> NodePortSelection:
    """Apply *choice* to all *addresses* of the node's interfaces."""
    everywhere = (Cidr(Address(bytes(family.size)), 0),)
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
    """Whether *choice* asks for loopback addresses of *family* too."""
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
