"""The packet of a question, as rules of nf_tables and of iptables meet it first. Pure."""

from collections.abc import Callable, Container
from typing import Final

from kproxy_core.contract import Address, Origin, Question, is_own
from kproxy_core.nft.packet import (
    LOOPBACK,
    NO_INTERFACE,
    RTN_LOCAL,
    RTN_UNICAST,
    Flow,
    Interface,
    Number,
    Packet,
    Route,
    Seen,
)

_UPLINK: Final = Interface("?", 2)
"""The interface of all hosts but pods."""


def first_seen(question: Question) -> Seen:
    """Return the packet before it meets rules."""
    packet, local = question.packet, question.node.local_source
    arrived = _UPLINK
    if packet.origin is Origin.NODE:
        arrived = NO_INTERFACE
    elif packet.origin is Origin.POD and local is not None and local.cidr is None:
        arrived = Interface(local.interface or f"{local.interface_prefix}0", 3)
    flow = Flow(packet.source, packet.destination, None, packet.port)
    return Seen(Packet.of(packet.family, packet.protocol, flow), arrived, NO_INTERFACE,
                is_from_node=packet.origin is Origin.NODE)


def routes(question: Question, bound: Container[Address] = ()) -> Callable[[Address, Number], Route]:
    """Return the routes of the node: to itself, which has the addresses *bound*, too, or by its uplink."""

    def route(address: Address, _mark: Number) -> Route:
        is_local = address in bound or is_own(address, question.node, question.addresses)
        return Route(RTN_LOCAL, LOOPBACK) if is_local else Route(RTN_UNICAST, _UPLINK)

    return route
