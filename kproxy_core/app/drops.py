"""Places where chains of other programs end packets, or keep a service proxy from translating them. Pure."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kproxy_core.app.programs import is_not_service_chain, is_table_of_service_proxy
from kproxy_core.model.address import Address, Family, Protocol, format_address, format_socket
from kproxy_core.nft.expressions import CERTAIN, BaseChain, Branch, Chance, Ruleset
from kproxy_core.nft.interpret import End, Fate, Program, Way, track
from kproxy_core.nft.packet import (
    LOOPBACK,
    RTN_LOCAL,
    RTN_UNICAST,
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


class FilteredPacket(NamedTuple):
    """The first packet of a connection at one hook. None: not known."""

    family: Family
    protocol: Protocol
    source: Address | None
    destination: Address | None
    port: int | None
    """Destination port."""
    input: Interface | None
    output: Interface | None
    dialled: Address | None
    """The destination before any translation, and its port."""
    dialled_port: int | None
    is_translated: bool
    is_from_node: bool
    is_to_node: bool
    is_dialled_on_node: bool | None = None
    """Whether the destination before any translation is an address of the node."""


class Drop(NamedTuple):
    """A place where the packet ends, or may end."""

    family: str
    table: str
    chain: str
    rule: int | None
    """Position in the chain, from 1; None: the chain's policy."""
    handle: int
    """nft's handle of the rule; 0: none."""
    rejects: bool
    """The sender is told."""
    packets: int | None
    """Packets that ended here so far; None: not counted."""
    is_met: bool
    """The rule matches the packet; False: it may."""
    doubts: tuple[str, ...]
    """Statements of which it is not known whether they match, each with its rule: one before may accept the
    packet, or one of this rule may not match it."""
    translates_to: tuple[Address | None, int | None] | None = None
    """Another program translates the packet here, to an address and a port; None: it does not."""
    exempts: bool = False
    """The packet does not end: it is exempt from tracking, so that no rule translates it."""

    @property
    def is_certain(self) -> bool:
        return self.is_met and not self.doubts

    @property
    def place(self) -> Place:
        return Place(self.family, self.table, self.chain, self.rule, self.handle)


def drops(
    ruleset: Ruleset, way: Iterable[tuple[str, FilteredPacket]], *, with_nat: bool | None = None
) -> list[Drop]:
    """Return the places where chains may end a packet, translate or exempt it; none after a certain one.

    *way* are the hooks in their order, each with the packet there, which is translated already: chains before
    the translation see it as it was. Tables of service proxies are left out. *with_nat*: chains of type nat
    count; by default, if it is known which port was dialled. Raises OSError.
    """
    found: list[Drop] = []
    ended: Chance | None = None
    branches: list[Branch] = []
    program = Program(ruleset)
    for hook, packet in way:
        is_dialled = packet.dialled_port is not None if with_nat is None else with_nat
        follows = is_of_others if is_dialled else _is_filter_of_others
        walk = Way(program, _node_of(packet), follows, is_not_service_chain)
        branches = [_at(branch, packet) for branch in branches] or [
            Branch(_first(packet, hook), CERTAIN)]
        diverted: list[Branch] = []
        if hook in ("prerouting", "output"):
            passed = walk.hook(hook, branches, _translation_of(packet))
            diverted = [branch for branch in passed if _diverting(branch.seen, packet) is not None]
            branches = [branch for branch in passed if _diverting(branch.seen, packet) is None]
        else:
            branches = walk.hook(hook, branches)
        for end in walk.ends:
            is_drop = end.fate in (Fate.DROPPED, Fate.REJECTED)
            if end.place is None or not (is_drop or (end.fate is Fate.UNKNOWN and end.place.rule is None)):
                continue
            ended = end.branch.chance if ended is None else ended.or_else(end.branch.chance)
            found.append(_drop(end, end.place, is_certain=ended.is_certain))
            if ended.is_certain:
                return found
        for branch in diverted:
            ended = branch.chance if ended is None else ended.or_else(branch.chance)
            found.append(_diversion(branch, packet, is_certain=ended.is_certain))
            if ended.is_certain:
                return found
        if not branches:
            break
    return found


def _diverting(seen: Seen, packet: FilteredPacket) -> Place | None:
    """Return the rule of another program that has translated the packet, or exempted it from translation."""
    if packet.is_translated and seen.untracked_by is not None:
        return seen.untracked_by
    connection = seen.connection
    return connection.translated_by if connection and connection.status & Status.DST_NAT else None


def _diversion(branch: Branch, packet: FilteredPacket, *, is_certain: bool) -> Drop:
    place = _diverting(branch.seen, packet)
    assert place is not None
    found = _drop(End(Fate.SENT, "", place, None, branch), place, is_certain=is_certain)
    if branch.seen.untracked_by is not None:
        return found._replace(exempts=True)
    flow = branch.seen.packet.flow
    return found._replace(translates_to=(flow.destination, flow.port))


def _drop(end: End, place: Place, *, is_certain: bool) -> Drop:
    chance = end.branch.chance
    is_met = is_certain or (not any(doubt.matched for doubt in chance.random) and any(
        not any(doubt.matched for doubt in case) for case in chance.cases))
    return Drop(
        *place, end.fate is Fate.REJECTED, end.packets, is_met, () if is_certain else chance.doubts)


def _node_of(packet: FilteredPacket) -> Node:
    """Return a node with the routes that *packet* takes."""

    def route(address: Address, mark: Number) -> Route | None:
        if address == packet.source:
            return Route(RTN_LOCAL, LOOPBACK) if packet.is_from_node else Route(RTN_UNICAST, packet.input)
        if address == packet.destination:
            return Route(RTN_LOCAL, LOOPBACK) if packet.is_to_node else Route(RTN_UNICAST, packet.output)
        if address == packet.dialled and packet.is_dialled_on_node is not None:
            return Route(RTN_LOCAL if packet.is_dialled_on_node else RTN_UNICAST, None)
        return None

    return Node(route)


def _first(packet: FilteredPacket, hook: str) -> Seen:
    """Return *packet* as the first chains of its first hook see it."""
    flow = Flow(packet.source, packet.dialled, None, packet.dialled_port)
    before = hook in ("prerouting", "output")
    # Within hook "output" it keeps the interface to which it was routed before the translation.
    output = None if hook == "output" and packet.is_translated else packet.output
    seen = Seen(Packet.of(packet.family, packet.protocol, flow), packet.input, output, packet.is_from_node)
    return seen if before else _translation_of(packet)(track(seen))


def _at(branch: Branch, packet: FilteredPacket) -> Branch:
    """Return a packet as it comes to the next hook."""
    return branch._replace(seen=branch.seen._replace(
        input=packet.input, output=packet.output, is_from_node=packet.is_from_node))


def _translation_of(packet: FilteredPacket) -> Callable[[Seen], Seen]:
    """Return the translation that a service proxy makes."""

    def translate(seen: Seen) -> Seen:
        flow = seen.packet.flow._replace(destination=packet.destination, port=packet.port)
        connection = seen.connection
        if connection is not None and packet.is_translated:
            connection = connection._replace(
                status=connection.status | Status.DST_NAT | Status.DST_NAT_DONE, reply=flow.reversed())
        return seen._replace(packet=seen.packet.with_flow(flow), connection=connection)

    return translate


def _is_filter_of_others(chain: BaseChain) -> bool:
    return chain.type != "nat" and is_of_others(chain)


def is_of_others(chain: BaseChain) -> bool:
    """Return whether a chain is in no table of kproxy's or kube-proxy's, which ``kproxy explain`` reads."""
    return not is_table_of_service_proxy(chain.table)


# In words.


def in_words(drop: Drop, what: str = "it") -> str:
    """Return a drop in words, as ``nft table inet firewalld, chain filter_FORWARD, rule 12 drops it``.

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
