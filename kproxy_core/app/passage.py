"""What becomes of an explained packet on this node: all rules of nf_tables, routing and forwarding.

The rules of a service proxy are followed as those of any other program: its plans say what should come of
them. Where it translates elsewhere than in rules of nf_tables, the packet is followed from there on.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from kproxy_core.app.explain import Case, decide_case
from kproxy_core.contract.values import KernelSide, Translation
from kproxy_core.model.address import Address, format_socket
from kproxy_core.model.service import Destination
from kproxy_core.nft.expressions import BaseChain, HeldRule, HeldSet, Ruleset
from kproxy_core.nft.interpret import End, Fate, Program
from kproxy_core.nft.packet import (
    NO_INTERFACE,
    Flow,
    Interface,
    Node,
    Number,
    Packet,
    Place,
    Route,
    Seen,
    Status,
)
from kproxy_core.observe.logs import printable
from kproxy_core.plan.fate import EndpointShare, Origin, Outcome, stand_in
from kproxy_core.plan.fate import Fate as Planned

DEPENDS = "depends"
"""The outcome of packets that end in different ways, or of which not everything is known."""
_MOST_ENDPOINTS = 10
"""Endpoints of one answer to which packets are followed."""
_MOST_PLACES = 3
_MOST_DOUBTS = 3


class Routing(Protocol):
    """The routes of this node."""

    def leaving(self, destination: Address, mark: int) -> Route: ...

    def arrived(self, destination: Address, source: Address, interface: str, mark: int) -> Route: ...

    def towards(self, address: Address) -> Interface | None:
        """Return the interface to which the route to *address* leads; None without one."""

    def addresses(self, interface: Interface) -> Sequence[Address]: ...


class _Way(NamedTuple):
    """One of the ways that such packets take."""

    outcome: Outcome | None
    """None: not known."""
    text: str
    is_others: bool
    """Not the service proxy decides it, but another program or the kernel."""
    share: float
    doubts: tuple[str, ...] | None = ()
    """What is not known and decides whether the packet takes this way; None: how it ends is not known."""

    @property
    def is_settled(self) -> bool:
        """It depends on nothing but the endpoint that is drawn."""
        return self.doubts == ()


class Way(NamedTuple):
    """One of the ways in which packets end."""

    outcome: str
    because: str
    share: float | None
    """Of new connections; None: it depends on what is not known."""

    def __str__(self) -> str:
        share = "" if self.share is None else f"{self.share:.1%} "
        return f"{share}{self.outcome}{': ' if self.because else ''}{self.because}"


class Passage(NamedTuple):
    """What becomes of the packets of one answer."""

    outcome: str
    because: str
    places: tuple[str, ...]
    """Where others end them, or may, in words."""
    ways: tuple[Way, ...] = ()
    """If that depends on something."""


def passage(case: Case, side: KernelSide | None, program: Program, routing: Routing) -> Passage:
    """Return what becomes of the packet of *case*. *side*: what the mode's own objects do. Raises OSError."""
    planned = decide_case(case)
    fate = side.fate if side is not None and side.fate is not None else planned
    ways = list(_ways(case, side, fate, program, routing))
    return _told(ways, planned, fate)


# The packet and its node.


def _ways(
    case: Case, side: KernelSide | None, fate: Planned, program: Program, routing: Routing
) -> Iterator[_Way]:
    translation = Translation.RULES if side is None else side.translation
    sent = case.question.packet
    if translation is Translation.RULES:
        dialled = Destination(sent.destination, sent.port)
        wanted = {choice.where for choice in fate.choices}
        yield from _followed(case, dialled, sent.origin, wanted, side, program, routing)
        return
    if fate.outcome is not Outcome.FORWARDED:
        yield _Way(fate.outcome, fate.because, is_others=False, share=1.0)
        return
    origin = sent.origin
    if translation is not Translation.SOCKET:  # It comes to this node first, which sends it on.
        dialled = Destination(sent.destination, sent.port)
        first = list(_followed(case, dialled, origin, None, side, program, routing))
        if any(way.outcome is not Outcome.FORWARDED for way in first):
            yield from first
            return
        origin = Origin.NODE
    for choice in _few(fate.choices):
        for way in _followed(case, choice.where, origin, {choice.where}, side, program, routing):
            yield way._replace(share=way.share * choice.share)


def _few(choices: Sequence[EndpointShare]) -> Sequence[EndpointShare]:
    return choices[:_MOST_ENDPOINTS]


def _followed(
    case: Case, dialled: Destination, origin: Origin, wanted: set[Destination] | None,
    side: KernelSide | None, program: Program, routing: Routing,
) -> Iterator[_Way]:
    """Yield the ways of a packet to *dialled*. *wanted*: endpoints to come to; None: this node, to be sent on."""
    sent, node = case.question.packet, _node(routing)
    is_from_node = origin is Origin.NODE
    is_own = sent.origin is Origin.NODE or not is_from_node
    flow = Flow(sent.source if is_own else None, dialled.address, None, dialled.port)
    arrives = NO_INTERFACE if is_from_node else _arrives(case, routing)
    seen = Seen(Packet.of(sent.family, sent.protocol, flow), arrives, NO_INTERFACE, is_from_node)
    result = program.interpret(seen, node)
    own = {place for place in result.rules if is_of_service_proxy(place)}
    for end in result.ends:
        yield _way(end, wanted, side, has_met_own=bool(own))
    for chain in result.unread:
        if chain.hook != "egress" and (arrives is None or not arrives.name):
            where = f"nft table {chain.family} {chain.table}, chain {chain.name} at hook {chain.hook}"
            yield _Way(None, f"{where} is not followed", is_others=True, share=0.0, doubts=None)


def _arrives(case: Case, routing: Routing) -> Interface | None:
    """Return the interface by which the packet comes; None: not known."""
    sent = case.question.packet
    found = routing.towards(sent.source)
    if case.is_typical and sent.origin is Origin.POD and found == routing.towards(
            stand_in(Origin.OUTSIDE, case.question.node)):
        return None  # The route to an example's address says nothing about pods.
    return found


def _node(routing: Routing) -> Node:
    def route(address: Address, mark: Number) -> Route | None:
        return routing.leaving(address, mark) if isinstance(mark, int) else None

    def arriving(seen: Seen) -> Route | None:
        flow = seen.packet.flow
        if flow.destination is None or not isinstance(seen.mark, int):
            return None
        if seen.input is None or flow.source is None:
            return routing.leaving(flow.destination, seen.mark)
        return routing.arrived(flow.destination, flow.source, seen.input.name, seen.mark)

    return Node(route, lambda interface, _: routing.addresses(interface), arriving)


# One end of its ways.


def _way(
    end: End, wanted: set[Destination] | None, side: KernelSide | None, *, has_met_own: bool
) -> _Way:
    outcome, text, is_others = _outcome(end, wanted, side, has_met_own=has_met_own)
    doubts = dict.fromkeys(sorted(each.text for case in end.branch.chance.cases for each in case))
    return _Way(outcome, text, is_others, end.share, None if outcome is None else tuple(doubts))


def _outcome(
    end: End, wanted: set[Destination] | None, side: KernelSide | None, *, has_met_own: bool
) -> tuple[Outcome | None, str, bool]:
    """Return the outcome at *end*, its reason, and whether another than a service proxy decides it."""
    seen, place = end.seen, end.place
    flow, connection = seen.packet.flow, seen.connection
    if end.fate in (Fate.DROPPED, Fate.REJECTED) and place is not None:
        outcome = Outcome.DROPPED if end.fate is Fate.DROPPED else Outcome.REFUSED
        return outcome, _at(place, end), not is_of_service_proxy(place)
    if end.fate is Fate.UNROUTABLE:
        return Outcome.DROPPED, end.why or "it has no route", True
    if end.fate not in (Fate.DELIVERED, Fate.SENT):
        return None, _at(place, end) if place is not None else end.fate.value, True
    if wanted is None:
        if end.fate is Fate.DELIVERED:
            return Outcome.FORWARDED, "", False
        return Outcome.UNTOUCHED, _untouched(seen, end), True
    by = connection.translated_by if connection is not None else None
    if flow.destination is None or flow.port is None:
        if by is not None and is_of_service_proxy(by):  # The endpoint that affinity remembers.
            return Outcome.FORWARDED, "", False
        return None, "it is translated to an address that is not known", True
    where = Destination(flow.destination, flow.port)
    if where in wanted:
        return Outcome.FORWARDED, "", False
    if connection is not None and connection.status & Status.DST_NAT and by is not None:
        text = f"{_named(by)} translates it to {format_socket(*where)}"
        return Outcome.UNTOUCHED, text, not is_of_service_proxy(by)
    if side is not None and side.fate is not None and side.fate.outcome is not Outcome.UNTOUCHED and (
            seen.untracked_by is None and not has_met_own):
        return None, "the rules that serve it are not those of nf_tables", False
    return Outcome.UNTOUCHED, _untouched(seen, end), seen.untracked_by is not None


def _untouched(seen: Seen, end: End) -> str:
    if seen.untracked_by is not None:
        return f"{_named(seen.untracked_by)} exempts it from translation: it is not tracked"
    return "it is delivered to this node" if end.fate is Fate.DELIVERED else "it is sent on as it came"


# In words.


def _told(ways: Sequence[_Way], planned: Planned, fate: Planned) -> Passage:
    outcomes = {way.outcome for way in ways}
    others = [way for way in ways if way.is_others]
    places = tuple(dict.fromkeys(map(_placed, others)))[:_MOST_PLACES]
    if len(outcomes) > 1 or None in outcomes:
        return _depends(ways, places)
    (outcome,) = outcomes
    for expected in (planned, fate):
        if outcome is expected.outcome and (outcome is Outcome.FORWARDED or not others):
            return Passage(expected.outcome.value, expected.because, places)
    (first, *_) = ways
    return Passage(first.outcome.value, "; ".join(dict.fromkeys(way.text for way in ways)), places)


def _depends(ways: Sequence[_Way], places: tuple[str, ...]) -> Passage:
    """Return the answer for packets that end in several ways. Shares are told if the endpoint alone decides."""
    is_settled = all(way.is_settled for way in ways)
    shares: dict[tuple[Outcome | None, str], float] = {}
    doubts: dict[str, None] = {}
    for way in ways:
        text = "" if way.outcome is Outcome.FORWARDED else way.text if is_settled else _perhaps(way)
        shares[way.outcome, text] = shares.get((way.outcome, text), 0.0) + way.share
        doubts |= dict.fromkeys(way.doubts or ())
    told = tuple(
        Way(outcome.value if outcome else "unknown", text, round(share, 6) if is_settled else None)
        for (outcome, text), share in shares.items())
    because = "; ".join(map(str, told[:_MOST_PLACES + 1]))
    return Passage(DEPENDS, because + _not_understood(tuple(doubts)), places, told)


def _placed(way: _Way) -> str:
    return _perhaps(way) + _not_understood(way.doubts or ())


def _perhaps(way: _Way) -> str:
    return way.text if way.is_settled else way.text.replace(" drops it", " may drop it").replace(
        " rejects it", " may reject it")


def _not_understood(doubts: Sequence[str]) -> str:
    more = f" and {len(doubts) - _MOST_DOUBTS} more" if len(doubts) > _MOST_DOUBTS else ""
    return printable(f"; not understood: {', '.join(doubts[:_MOST_DOUBTS])}{more}") if doubts else ""


def _named(place: Place) -> str:
    rule = f"rule {place.rule}" if place.rule is not None else "its policy"
    return printable(f"nft table {place.family} {place.table}, chain {place.chain}, {rule}")


def _at(place: Place, end: End) -> str:
    verb = {Fate.DROPPED: "drops", Fate.REJECTED: "rejects", Fate.QUEUED: "queues"}.get(end.fate, "ends")
    counted = "" if end.packets is None else f" ({end.packets} packets so far)"
    return f"{_named(place)} {verb} it{counted}"


_SERVICE_CHAIN: Final = re.compile(
    r"KUBE-(SERVICES|EXTERNAL-SERVICES|NODEPORTS|NODE-PORT|NODEPORT-NON-LOCAL|PROXY-FIREWALL|FORWARD|MARK-.*|"
    r"S(VC|VL|EP)-.*|EXT-.*|FW-.*|XLB-.*|FIREWALL|LOAD-BALANCER|SOURCE-RANGES-FIREWALL|POSTROUTING|"
    r"(PORTALS|NODEPORT)-(CONTAINER|HOST)|[A-Z]+-(FILTER|OUT-FILTER|ACCESS|SHORT-CIRCUIT))")


def is_of_service_proxy(place: Place) -> bool:
    """Return whether a rule is one of kproxy's or kube-proxy's."""
    return _is_table_of_service_proxy(place.table) or _SERVICE_CHAIN.fullmatch(place.chain) is not None


def _is_table_of_service_proxy(name: str) -> bool:
    return name in ("kproxy", "kube-proxy") or name.startswith("kproxy-")


class WithMemory:
    """A ruleset in which the sets of service proxies, which packets fill, know what they hold: affinity."""

    def __init__(self, ruleset: Ruleset) -> None:
        self._ruleset = ruleset

    def base_chains(self) -> Sequence[BaseChain]:
        return self._ruleset.base_chains()

    def rules(self, family: str, table: str, chain: str) -> Sequence[HeldRule]:
        return self._ruleset.rules(family, table, chain)

    def held_set(self, family: str, table: str, name: str) -> HeldSet | None:
        held = self._ruleset.held_set(family, table, name)
        return held._replace(is_filled_by_packets=False) if held and _is_table_of_service_proxy(table) else held
