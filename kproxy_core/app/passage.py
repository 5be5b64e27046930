"""What becomes of an explained packet on this node: all rules of nf_tables, routing and forwarding.

The rules of a service proxy are followed as those of any other program: its plans say what should come of
them. Where it translates elsewhere than in rules of nf_tables, the packet is followed from there on.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

from kproxy_core.app.drops import is_of_others
from kproxy_core.app.explain import Case, decide_case
from kproxy_core.app.programs import (
    REMEDY,
    TRANSLATING_TABLES,
    is_chain_of_service_proxy,
    is_not_service_chain,
    is_of_service_proxy,
    is_table_of_service_proxy,
)
from kproxy_core.app.programs import Program as Writer
from kproxy_core.contract.values import KernelSide, Translation
from kproxy_core.model.address import Address, Family, format_socket, is_loopback
from kproxy_core.model.service import Destination
from kproxy_core.nft.expressions import CERTAIN, BaseChain, Branch, HeldSet, Ruleset
from kproxy_core.nft.interpret import End, Fate, Program, Way
from kproxy_core.nft.packet import (
    LOOPBACK,
    NO_INTERFACE,
    RTN_UNREACHABLE,
    Connection,
    Depends,
    Flow,
    Interface,
    Node,
    Number,
    Packet,
    Place,
    Route,
    Seen,
    Status,
    Tracking,
)
from kproxy_core.nft.rules import HeldRule
from kproxy_core.observe.logs import printable
from kproxy_core.plan.fate import EndpointShare, Origin, Outcome, stand_in
from kproxy_core.plan.fate import Fate as Planned

DEPENDS = "depends"
"""The outcome of packets that end in different ways, or of which not everything is known."""
_MOST_ENDPOINTS = 10
"""Endpoints to which packets are followed one by one; of more, some."""
_MOST_DRAWN = 256
"""Endpoints that rules may draw; of a Service with more, packets are followed to some."""
_MOST_PLACES = 3
_MOST_DOUBTS = 3


class NodeKernel(Protocol):
    """What the kernel of this node tells besides its rules. All raise OSError."""

    def leaving(self, destination: Address, mark: int) -> Route: ...

    def forwarded(self, destination: Address, mark: int) -> Route:
        """Return the route of a packet that arrived by some interface."""

    def arrived(self, destination: Address, source: Address, interface: str, mark: int) -> Route: ...

    def towards(self, address: Address) -> Interface | None:
        """Return the interface to which the route to *address* leads; None without one."""

    def addresses(self, interface: Interface) -> Sequence[Address]: ...

    def ports(self, interface: Interface) -> frozenset[str]:
        """Return the names of a bridge's ports."""

    def filters_bridge(self, interface: Interface, family: Family) -> bool:
        """Return whether rules for IP meet packets between the ports of a bridge (br_netfilter)."""

    def is_recent(self, name: str, source: Address) -> bool | None:
        """Return whether a list of match ``recent`` holds an address; None if it can't be read."""

    def chain_names(self, family: str, table: str) -> frozenset[str]:
        """Return the names of the chains of a table; none without it."""

    def writer(self, place: Place) -> Writer | None:
        """Return the program that wrote a rule or policy; None: not known."""

    def rule_text(self, place: Place) -> str:
        """Return a rule as nft writes it; "" for a policy, or if it cannot."""


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
    place: Place | None = None
    """The rule or policy that ends it, translates it elsewhere or exempts it."""

    @property
    def is_settled(self) -> bool:
        """It depends on nothing but the endpoint that is drawn."""
        return self.doubts == ()

    @property
    def is_untouched(self) -> bool:
        """No rule has ended it, translated it, or kept it from being translated."""
        return self.outcome in (Outcome.UNTOUCHED, Outcome.DROPPED) and self.place is None


class Share(NamedTuple):
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
    ways: tuple[Share, ...] = ()
    """If that depends on something."""
    remedy: str = ""
    caveat: str = ""


def passage(case: Case, side: KernelSide | None, program: Program, kernel: NodeKernel) -> Passage:
    """Return what becomes of the packet of *case*. *side*: what the mode's own objects do. Raises OSError."""
    planned, sent = decide_case(case), case.question.packet
    fate = side.fate if side is not None and side.fate is not None else planned
    ways = list(_ways(case, side, fate, _Walk(case, program, kernel)))
    if planned.outcome is Outcome.REFUSED and is_loopback(sent.destination) and not any(
            way.is_others for way in ways):
        return Passage(planned.outcome.value, planned.because, ())  # Nothing listens there.
    told, some = _told(ways, planned, fate, kernel), _spread(fate.choices)
    is_drawn = side is None or side.translation is Translation.RULES
    if len(some) == len(fate.choices) or (is_drawn and len(fate.choices) <= _MOST_DRAWN):
        return told
    return told._replace(caveat=f"packets are followed to {len(some)} of {len(fate.choices):,} endpoints")


# The packet and its node.


def _ways(case: Case, side: KernelSide | None, fate: Planned, walk: "_Walk") -> Iterator[_Way]:
    translation = Translation.RULES if side is None else side.translation
    sent, choices = case.question.packet, _spread(fate.choices)
    followed = sum(choice.share for choice in choices)
    dialled = Destination(sent.destination, sent.port)
    if translation is Translation.RULES and len(fate.choices) > _MOST_DRAWN:
        for choice in choices:
            for way in walk.followed(dialled, sent.origin, {choice.where}, translated_to=choice.where):
                yield way._replace(share=way.share * choice.share / followed)
        return
    if translation is Translation.RULES:
        ways = list(walk.followed(dialled, sent.origin, {choice.where for choice in fate.choices}))
        if side is None or fate.outcome is Outcome.UNTOUCHED or not any(
                way.is_untouched for way in ways) or walk.has_rules_of_proxy:
            yield from ways
            return
        # Its rules are those of iptables-legacy, which translate before the other tables filter.
        for choice in choices:
            for way in walk.followed(choice.where, sent.origin, {choice.where}, dialled=dialled):
                yield way._replace(share=way.share * choice.share / followed)
    if fate.outcome is not Outcome.FORWARDED:
        yield _Way(fate.outcome, fate.because, is_others=False, share=1.0)
    if fate.outcome is not Outcome.FORWARDED or translation is Translation.RULES:
        return
    if translation is not Translation.SOCKET:  # It comes to this node first, which sends it on.
        first = list(walk.followed(dialled, sent.origin, None))
        if any(way.outcome is not Outcome.FORWARDED for way in first):
            yield from first
            return
    for choice in choices:
        origin = sent.origin if translation is Translation.SOCKET else Origin.NODE
        for way in walk.followed(
                choice.where, origin, {choice.where}, is_relayed=translation is Translation.RELAY):
            yield way._replace(share=way.share * choice.share / followed)


def _spread(choices: Sequence[EndpointShare]) -> Sequence[EndpointShare]:
    """Return some of the endpoints, from all parts of the list."""
    step = max(1, -(-len(choices) // _MOST_ENDPOINTS))
    return choices[::step]


class _Walk:
    """The ways of the packets of one case."""

    def __init__(self, case: Case, program: Program, kernel: NodeKernel) -> None:
        self._case = case
        self._program = program
        self._kernel = kernel

    @property
    def has_rules_of_proxy(self) -> bool:
        """Rules of a service proxy are among those of nf_tables."""
        of = self._case.question.node.family.ip
        return any(chain.table in TRANSLATING_TABLES for chain in self._program.base_chains()) or any(
            is_chain_of_service_proxy(name) for name in self._kernel.chain_names(of, "nat"))

    def followed(
        self, to: Destination, origin: Origin, wanted: set[Destination] | None, *,
        is_relayed: bool = False, dialled: Destination | None = None,
        translated_to: Destination | None = None,
    ) -> Iterator[_Way]:
        """Yield the ways of a packet to *to*.

        *wanted*: endpoints to come to; None: this node, which sends it on. *is_relayed*: a process of this
        node sends it, from an address of its own. *dialled*: the destination before a translation that no
        rule of nf_tables makes. *translated_to*: what the service proxy makes of it, whose rules are not
        followed then.
        """
        sent = self._case.question.packet
        source = None if is_relayed else sent.source
        flow = Flow(source, to.address, None, to.port)
        arrives = NO_INTERFACE if origin is Origin.NODE else _arrives(self._case, self._kernel)
        seen = Seen(
            Packet.of(sent.family, sent.protocol, flow), arrives, NO_INTERFACE, origin is Origin.NODE)
        if dialled is not None:
            original = flow._replace(destination=dialled.address, port=dialled.port)
            seen = seen._replace(tracking=Tracking.TRACKED, connection=Connection(
                original, flow.reversed(), Status.DST_NAT | Status.DST_NAT_DONE))
        if translated_to is not None:
            way = Way(self._program, _node(self._kernel, arrives), is_of_others, is_not_service_chain)
            way.follow(way.enter(Branch(seen, CERTAIN), partial(_translated, translated_to)))
            yield from (_way(end, wanted) for end in way.ends)
            return
        result = self._program.interpret(seen, _node(self._kernel, arrives))
        for end in result.ends:
            yield _way(end, wanted)
        for chain in result.unread if origin is not Origin.NODE else ():
            if chain.hook != "egress" and self._may_meet(chain, arrives):
                where = f"nft table {chain.family} {chain.table}, chain {chain.name} at hook {chain.hook}"
                yield _Way(None, f"{where} is not followed", is_others=True, share=0.0, doubts=None)

    def _may_meet(self, chain: BaseChain, arrives: Interface | None) -> bool:
        """Return whether packets may meet a chain of a bridge, or of the port by which they come to it."""
        if arrives is None:
            return True
        ports = self._kernel.ports(arrives)
        return bool(ports) and (
            chain.family == "bridge" or not (ports | {arrives.name}).isdisjoint(chain.devices))


def _translated(to: Destination, seen: Seen) -> Seen:
    flow, connection = seen.packet.flow._replace(destination=to.address, port=to.port), seen.connection
    if connection is None:
        return seen
    status = connection.status | Status.DST_NAT | Status.DST_NAT_DONE
    return seen._replace(
        packet=seen.packet.with_flow(flow),
        connection=connection._replace(status=status, reply=flow.reversed()))


def _arrives(case: Case, kernel: NodeKernel) -> Interface | None:
    """Return the interface by which the packet comes; None: not known."""
    sent = case.question.packet
    found = kernel.towards(sent.source)
    if case.is_typical and sent.origin is Origin.POD and found == kernel.towards(
            stand_in(Origin.OUTSIDE, case.question.node)):
        return None  # The route to an example's address says nothing about pods.
    return None if found == LOOPBACK else found


def _node(kernel: NodeKernel, arrives: Interface | None) -> Node:
    def route(address: Address, mark: Number) -> Route | None:
        return kernel.leaving(address, mark) if isinstance(mark, int) else None

    def arriving(seen: Seen) -> Route | None:
        flow = seen.packet.flow
        if flow.destination is None or not isinstance(seen.mark, int):
            return None
        if seen.input is None or flow.source is None:
            return kernel.forwarded(flow.destination, seen.mark)
        found = kernel.arrived(flow.destination, flow.source, seen.input.name, seen.mark)
        if found.type == RTN_UNREACHABLE and seen.packet.family is Family.IPV6 and kernel.filters_bridge(
                seen.input, Family.IPV6):
            back = kernel.leaving(flow.destination, seen.mark)
            return back if back.output == seen.input else found  # Bridged, not routed (br_netfilter_ipv6.c).
        return found

    def is_filtered_bridge(interface: Interface) -> bool:
        return any(kernel.filters_bridge(interface, family) for family in Family)

    def is_bridged(source: Address | None) -> bool | Depends:
        return Depends("match physdev") if arrives is None else is_filtered_bridge(arrives)

    def is_recent(name: str, source: Address | None) -> bool | Depends:
        held = None if source is None else kernel.is_recent(name, source)
        return Depends("match recent") if held is None else held

    return Node(
        route, lambda interface, _: kernel.addresses(interface), is_bridged=is_bridged, is_recent=is_recent,
        arriving=arriving,
        has_ingress_first=lambda interface: not is_filtered_bridge(interface))


# One end of its ways.


def _way(end: End, wanted: set[Destination] | None) -> _Way:
    doubts = dict.fromkeys(sorted(each.text for case in end.branch.chance.cases for each in case))
    found = _ended(end, wanted)
    return found._replace(share=end.share, doubts=None if found.outcome is None else tuple(doubts))


def _ended(end: End, wanted: set[Destination] | None) -> _Way:
    """Return the way to *end*, as if all packets took it."""
    seen, place = end.seen, end.place
    flow, connection = seen.packet.flow, seen.connection
    if place is not None and (verb := _VERBS.get(end.fate)):
        counted = "" if end.packets is None else f" ({end.packets} packets so far)"
        return _Way(_OUTCOMES.get(end.fate), f"{verb} it{counted}", not is_of_service_proxy(place), 1.0,
                    place=place)
    if end.fate is Fate.UNROUTABLE:
        return _Way(Outcome.DROPPED, end.why or "it has no route", True, 1.0)
    if end.fate not in (Fate.DELIVERED, Fate.SENT):
        return _Way(None, end.fate.value, True, 1.0, place=place)
    by = connection.translated_by if connection is not None else None
    is_proxys = by is not None and is_of_service_proxy(by)
    if flow.destination is None or flow.port is None:
        if is_proxys:  # The endpoint that affinity remembers.
            return _Way(Outcome.FORWARDED, "", False, 1.0)
        return _Way(None, "translates it to an address that is not known", True, 1.0, place=by)
    where = Destination(flow.destination, flow.port)
    if where in wanted if wanted is not None else end.fate is Fate.DELIVERED:
        return _Way(Outcome.FORWARDED, "", False, 1.0)
    if seen.untracked_by is not None:
        return _Way(Outcome.UNTOUCHED, "exempts it from translation: it is not tracked", True, 1.0,
                    place=seen.untracked_by)
    if by is not None and connection is not None and connection.status & Status.DST_NAT:
        return _Way(
            Outcome.UNTOUCHED, f"translates it to {format_socket(*where)}", not is_proxys, 1.0, place=by)
    told = "it is delivered to this node" if end.fate is Fate.DELIVERED else "it is sent on as it came"
    return _Way(Outcome.UNTOUCHED, told, False, 1.0)


_VERBS: Final = {Fate.DROPPED: "drops", Fate.REJECTED: "rejects", Fate.QUEUED: "queues", Fate.UNKNOWN: "ends"}
_OUTCOMES: Final = {Fate.DROPPED: Outcome.DROPPED, Fate.REJECTED: Outcome.REFUSED}


# In words.


def _told(ways: Sequence[_Way], planned: Planned, fate: Planned, kernel: NodeKernel) -> Passage:
    outcomes = {way.outcome for way in ways}
    others = [way for way in ways if way.is_others]
    places = tuple(dict.fromkeys(_placed(way, kernel) for way in others))[:_MOST_PLACES]
    remedy = next(filter(None, (_remedy(way, kernel) for way in others)), "")
    if len(outcomes) > 1 or None in outcomes:
        return _depends(ways, kernel)._replace(places=places, remedy=remedy)
    for expected in (planned, fate):
        if expected.outcome in outcomes and (expected.outcome is Outcome.FORWARDED or not others):
            return Passage(expected.outcome.value, expected.because, places)
    (outcome,) = filter(None, outcomes)
    because = "; ".join(dict.fromkeys(_said(way, kernel) for way in ways))
    return Passage(outcome.value, because, places, remedy=remedy)


def _depends(ways: Sequence[_Way], kernel: NodeKernel) -> Passage:
    """Return the answer for packets that end in several ways; with shares, if the endpoint alone decides."""
    is_settled = all(way.is_settled for way in ways)
    shares: dict[tuple[Outcome | None, str], float] = {}
    doubts: dict[str, None] = {}
    for way in ways:
        text = "" if way.outcome is Outcome.FORWARDED else _said(way, kernel)
        shares[way.outcome, text] = shares.get((way.outcome, text), 0.0) + way.share
        doubts |= dict.fromkeys(way.doubts or ())
    told = tuple(
        Share(outcome.value if outcome else "unknown", text, round(share, 6) if is_settled else None)
        for (outcome, text), share in shares.items())
    because = "; ".join(map(str, told[:_MOST_PLACES + 1]))
    return Passage(DEPENDS, because + _not_understood(tuple(doubts)), (), told)


def _said(way: _Way, kernel: NodeKernel) -> str:
    """Return what ends the packet, as ``nft table inet f, chain c, rule 12 (firewalld) drops it``."""
    if way.place is None:
        return way.text
    text = way.text
    if not way.is_settled:
        verb, _, rest = text.partition(" ")
        text = f"may {verb.removesuffix('s')} {rest}"
    place, writer = way.place, kernel.writer(way.place)
    rule = f"rule {place.rule}" if place.rule is not None else "its policy"
    by = f" ({writer.name})" if writer is not None else ""
    return printable(f"nft table {place.family} {place.table}, chain {place.chain}, {rule}{by} {text}")


def _placed(way: _Way, kernel: NodeKernel) -> str:
    rule = kernel.rule_text(way.place) if way.place is not None else ""
    return _said(way, kernel) + (f": {printable(rule)}" if rule else "") + _not_understood(way.doubts or ())


def _remedy(way: _Way, kernel: NodeKernel) -> str:
    if way.place is None or not way.is_settled:
        return ""
    writer = kernel.writer(way.place)
    if writer is not None:
        return writer.remedy
    return REMEDY if way.outcome in (Outcome.DROPPED, Outcome.REFUSED) else ""


def _not_understood(doubts: Sequence[str]) -> str:
    more = f" and {len(doubts) - _MOST_DOUBTS} more" if len(doubts) > _MOST_DOUBTS else ""
    return printable(f"; not understood: {', '.join(doubts[:_MOST_DOUBTS])}{more}") if doubts else ""


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
        if held is None or not is_table_of_service_proxy(table):
            return held
        return held._replace(is_filled_by_packets=False)
