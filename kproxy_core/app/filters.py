"""The way of explained packets through filter chains of other programs, in words. Pure."""

from collections.abc import Callable

from kproxy_core.app.drops import Drop, FilteredPacket, drops
from kproxy_core.app.explain import Case
from kproxy_core.contract.values import Translation
from kproxy_core.model.address import Address, format_address, format_socket
from kproxy_core.nft.expressions import Ruleset
from kproxy_core.nft.packet import LOOPBACK, NO_INTERFACE, Interface
from kproxy_core.observe.logs import printable
from kproxy_core.plan.fate import EndpointShare, Fate, Origin, Outcome, is_own, stand_in

_MOST_ENDPOINTS = 10
"""Endpoints of one answer whose packets are followed."""
_MOST_PLACES = 3
"""Places in one answer."""
Towards = Callable[[Address], Interface | None]
"""Returns the interface that leads to an address."""


def places(
    case: Case, fate: Fate, translation: Translation, filters: Ruleset, towards: Towards
) -> list[str]:
    """Return the places where other programs' chains end the packet of *case*, or may end it.

    Raises OSError.
    """
    found: dict[str, None] = {}
    for choice in fate.choices[:_MOST_ENDPOINTS] if fate.outcome is Outcome.FORWARDED else ():
        found |= dict.fromkeys(map(place, drops(filters, way(case, choice, translation, towards))))
    return list(found)[:_MOST_PLACES]


def way(
    case: Case, choice: EndpointShare, translation: Translation, towards: Towards
) -> list[tuple[str, FilteredPacket]]:
    """Return the hooks that the packet passes on the way to an endpoint, each with the packet there."""
    question = case.question
    sent, where = question.packet, choice.where
    is_from_node = sent.origin is Origin.NODE or translation is Translation.RELAY
    is_to_node = is_own(where.address, question.node, question.addresses)
    dialled = sent.destination, sent.port
    if translation in (Translation.SOCKET, Translation.RELAY):
        dialled = where
    arrives = NO_INTERFACE if is_from_node else towards(sent.source)
    if case.is_typical and sent.origin is Origin.POD and arrives == towards(
            stand_in(Origin.OUTSIDE, question.node)):
        arrives = None  # The route to an example's address says nothing about pods.
    mark: int | None = 1 << question.node.masquerade_bit if choice.masqueraded else 0
    if mark and (translation is not Translation.RULES or where.address == sent.source):
        mark = None  # Rules may know the hairpin by its addresses instead.
    packet = FilteredPacket(
        sent.family, sent.protocol, None if translation is Translation.RELAY else sent.source,
        where.address, where.port, arrives, LOOPBACK if is_to_node else towards(where.address), *dialled,
        is_translated=translation is Translation.RULES and dialled != where, is_from_node=is_from_node,
        is_to_node=is_to_node, mark=mark,
        is_dialled_on_node=is_own(dialled[0], question.node, question.addresses))
    if translation is Translation.VIRTUAL_SERVER:
        return _through_virtual_server(packet)
    found = [("output" if is_from_node else "prerouting", packet)]
    if is_to_node:
        return [*found, ("input", packet._replace(input=LOOPBACK if is_from_node else arrives))]
    return [*found, *([] if is_from_node else [("forward", packet)]), ("postrouting", packet)]


def _through_virtual_server(packet: FilteredPacket) -> list[tuple[str, FilteredPacket]]:
    """Return the hooks of a packet to an address of this node, which then sends it itself (IPVS)."""
    dialled = packet._replace(
        destination=packet.dialled, port=packet.dialled_port, output=LOOPBACK, is_to_node=True)
    sent_on = packet._replace(
        input=NO_INTERFACE, dialled=packet.destination, dialled_port=packet.port)
    before = [("output", dialled)] if packet.is_from_node else [("prerouting", dialled), ("input", dialled)]
    return [*before, ("output", sent_on), ("postrouting", sent_on)]


def place(drop: Drop, what: str = "it") -> str:
    """Return the place in words, as ``nft table inet firewalld, chain filter_FORWARD, rule 12 drops it``.

    *what* are the packets.
    """
    rule = f"rule {drop.rule}" if drop.rule is not None else "its policy"
    verb, end = ("reject" if drop.rejects else "drop"), ""
    if drop.exempts:
        verb, end = "exempt", " from translation: it is not tracked"
    if drop.translates_to is not None:
        address, port = drop.translates_to
        to = "another address" if address is None else format_address(address)
        verb = "translate"
        end = f" to {to}" if address is None or port is None else f" to {format_socket(address, port)}"
    verb = f"{verb}s {what}{end}" if drop.is_met else f"may {verb} {what}{end}"
    if drop.is_met and drop.doubts:
        verb += f" unless an earlier rule accepts {what}"
    counted = "" if drop.packets is None else f" ({drop.packets} packets so far)"
    doubts = f"; not understood: {', '.join(drop.doubts[:3])}" if drop.doubts else ""
    if len(drop.doubts) > 3:
        doubts += f" and {len(drop.doubts) - 3} more"
    return printable(
        f"nft table {drop.family} {drop.table}, chain {drop.chain}, {rule} {verb}{counted}{doubts}")
