"""The way of explained packets through filter chains of other programs, in words. Pure."""

from collections.abc import Callable, Iterator

from kproxy_core.app.explain import Case
from kproxy_core.linux.nft_filters import NO_INTERFACE, Drop, FilteredPacket, Filters, Interface, drops
from kproxy_core.model.address import Address
from kproxy_core.observe.logs import printable
from kproxy_core.plan.fate import EndpointShare, Fate, Origin, Outcome, is_own, stand_in

_MOST_ENDPOINTS = 20
"""Endpoints of one answer whose packets are followed."""
_MOST_PLACES = 3
"""Places in one answer."""
_LOOPBACK = Interface("lo", 1)


def places(
    case: Case, fate: Fate, filters: Filters, towards: Callable[[Address], Interface | None]
) -> list[str]:
    """Return the places where other programs' chains end the packet of *case*, or may end it.

    *towards* returns the interface that leads to an address. Raises OSError.
    """
    found: dict[str, None] = {}
    for choice in fate.choices[:_MOST_ENDPOINTS] if fate.outcome is Outcome.FORWARDED else ():
        found |= dict.fromkeys(map(place, drops(filters, _way(case, choice, towards))))
    return list(found)[:_MOST_PLACES]


def _way(
    case: Case, choice: EndpointShare, towards: Callable[[Address], Interface | None]
) -> Iterator[tuple[str, FilteredPacket]]:
    """Yield the hooks that the packet passes on the way to an endpoint, each with the packet there."""
    question = case.question
    sent, where = question.packet, choice.where
    is_from_node = sent.origin is Origin.NODE
    is_to_node = is_own(where.address, question.node, question.addresses)
    out = _LOOPBACK if is_to_node else towards(where.address)
    arrives = NO_INTERFACE if is_from_node else towards(sent.source)
    if case.is_typical and sent.origin is Origin.POD and arrives == towards(
            stand_in(Origin.OUTSIDE, question.node)):
        arrives = None  # The route to an example's address says nothing about pods.
    packet = FilteredPacket(
        sent.family, sent.protocol, sent.source, where.address, where.port,
        arrives, out, sent.destination, sent.port,
        is_translated=(where.address, where.port) != (sent.destination, sent.port),
        is_from_node=is_from_node, is_to_node=is_to_node, mark=None if choice.masqueraded else 0)
    if is_from_node:
        yield "output", packet
    else:
        yield "prerouting", packet
        if not is_to_node:
            yield "forward", packet
    if is_to_node:
        yield "input", packet._replace(input=_LOOPBACK if is_from_node else packet.input)
    else:
        yield "postrouting", packet


def place(drop: Drop, what: str = "it") -> str:
    """Return the place in words, as ``nft table inet firewalld, chain filter_FORWARD, rule 12 drops it``.

    *what* are the packets.
    """
    rule = f"rule {drop.rule}" if drop.rule is not None else "its policy"
    verb = "reject" if drop.rejects else "drop"
    verb = f"{verb}s {what}" if drop.is_met else f"may {verb} {what}"
    if drop.is_met and drop.doubts:
        verb += f" unless an earlier rule accepts {what}"
    counted = "" if drop.packets is None else f" ({drop.packets} packets so far)"
    doubts = f"; not understood: {', '.join(drop.doubts[:3])}" if drop.doubts else ""
    if len(drop.doubts) > 3:
        doubts += f" and {len(drop.doubts) - 3} more"
    return printable(
        f"nft table {drop.family} {drop.table}, chain {drop.chain}, {rule} {verb}{counted}{doubts}")
