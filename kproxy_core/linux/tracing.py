"""Traced packets: announcements of the rules they meet, put together packet by packet."""

import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kproxy_core.linux.conntrack import FlowEvent, FlowEventType, FlowTuple
from kproxy_core.linux.errors import HostError, doing
from kproxy_core.linux.libnftables import CommandRefused, Listing, NftOption, list_chain, list_tables
from kproxy_core.model.address import Address, Family, Protocol, family_of
from kproxy_core.model.service import Destination
from kproxy_core.netlink.messages import NFGENMSG, Malformed, attributes, messages, text
from kproxy_core.netlink.sockets import Announcements
from kproxy_core.nft.messages import FAMILIES, KIND, Command
from kproxy_core.nft.objects import OWNER, Chain, Hook, Table
from kproxy_core.nft.rules import (
    DESTINATION_PORT,
    L4_PROTOCOL,
    TRACE,
    Rule,
    ct_state,
    destination_address,
    equals,
    is_local,
    limit,
    source_address,
)
from kproxy_core.nft.transaction import RulesetSocket

_NFNLGRP_NFTRACE = 9
_TRACE = KIND | 17
_NFT_TRACETYPE_RULE = 3
_DROP, _ACCEPT = 0, 1
_JUMPS = {-3: "jump", -4: "goto", -5: "return", -1: "continue"}


class TraceEvent(NamedTuple):
    packet: int
    """The same number for all announcements about one packet."""
    is_rule: bool
    """Of a rule, not of a policy or of the end of a chain."""
    family: str
    """nft's name: ``ip``, ``ip6``, ``inet``."""
    table: str
    chain: str
    handle: int
    """Of the rule; 0: no rule."""
    verdict: str
    """``accept``, ``drop``, ``jump CHAIN``, ``continue``."""
    protocol: int
    """With `way`, only in the first announcement about a packet; else 0."""
    way: FlowTuple | None


def trace_events() -> Announcements[TraceEvent]:
    """Follow the traced packets from now on. Raises HostError without CAP_NET_ADMIN."""
    with doing("trace packets, which requires CAP_NET_ADMIN"):
        return Announcements((_NFNLGRP_NFTRACE,), parse)


def parse(data: bytes) -> Iterator[TraceEvent]:
    """Yield the announcements in one datagram."""
    for kind, _, _, start, end in messages(data):
        if kind != _TRACE:
            continue
        found = attributes(data, start + NFGENMSG.size, end)
        if start == end:
            raise Malformed("an announcement of a rule without a family")
        protocol, way = _way(found.get(8, b""), found.get(9, b""))
        yield TraceEvent(
            int.from_bytes(found.get(6, b""), "big"),
            int.from_bytes(found.get(4, b""), "big") == _NFT_TRACETYPE_RULE,
            FAMILIES.get(data[start], "?"), text(found.get(1, b"")), text(found.get(2, b"")),
            int.from_bytes(found.get(3, b""), "big"), _verdict(found), protocol, way,
        )  # fmt: skip


def _verdict(found: dict[int, bytes]) -> str:
    parts = {1: found[16]} if 16 in found else attributes(found.get(5, b""))
    code, chain = int.from_bytes(parts.get(1, b""), "big", signed=True), text(parts.get(2, b""))
    if code == _DROP:
        return "drop"
    name = "accept" if code == _ACCEPT else _JUMPS.get(code, f"verdict {code}")
    return f"{name} {chain}".rstrip()


def _way(network: bytes, transport: bytes) -> tuple[int, FlowTuple | None]:
    """Return protocol, addresses and ports of the headers of a packet."""
    if len(network) < 20 or len(transport) < 4:
        return 0, None
    if network[0] >> 4 == 4:
        protocol, source, destination = network[9], network[12:16], network[16:20]
    elif len(network) >= 40:
        protocol, source, destination = network[6], network[8:24], network[24:40]
    else:
        return 0, None
    source_port, port = struct.unpack_from(">HH", transport)
    return protocol, FlowTuple(Address(source), source_port, Address(destination), port)


# The table that marks packets to trace. The kernel deletes it with the socket that made it.

_PRIORITY = -190
"""After connection tracking, before every translation and before kube-proxy's rules."""
_PER_SECOND = 50
"""Limit for traced packets per second: each costs an announcement for every rule that it meets."""


class Match(NamedTuple):
    """The packets to trace: the first ones of connections."""

    family: Family
    destination: Address | None
    """None: any address of this node."""
    protocol: Protocol
    port: int
    source: Address | None
    """None: any."""


def open_table(name: str, matches: Sequence[Match]) -> RulesetSocket:
    """Create the table *name*, which exists until the connection is closed. Raises HostError."""
    commands: list[Command] = []
    for family in dict.fromkeys(match.family for match in matches):
        table = Table(family, name, flags=OWNER)
        of_family = [match for match in matches if match.family is family]
        commands += [table.create(), *table.write(marking_chains(of_family))]
    with doing("write rules that trace packets"):
        connection = RulesetSocket.open()
        try:
            connection.run(commands)
        except BaseException:
            connection.close()
            raise
    return connection


def marking_chains(matches: Iterable[Match]) -> list[Chain]:
    """Return the chains that have packets traced."""
    rules = tuple(map(_rule, matches))
    return [Chain(hook, rules, Hook("filter", hook, _PRIORITY)) for hook in ("prerouting", "output")]


def _rule(match: Match) -> Rule:
    family = match.family
    destination = is_local("daddr")
    if match.destination is not None:
        destination = equals(destination_address(family), match.destination)
    source = () if match.source is None else (equals(source_address(family), match.source),)
    return (
        equals(L4_PROTOCOL, match.protocol), destination, *source, equals(DESTINATION_PORT, match.port),
        ct_state("new"), limit(_PER_SECOND), TRACE,
    )  # fmt: skip


PATIENCE = 1.0
"""Timeout in seconds for an answer of the endpoint."""


@dataclass(slots=True)
class TracedPacket:
    """The first packet of a connection, and everything known about it."""

    began: float
    protocol: int
    way: FlowTuple
    """Before any translation."""
    rules: list[TraceEvent] = field(default_factory=list)
    """Rules that it met, and the policy that dropped it, without a handle."""
    dropped: bool = False
    """The last rule dropped or refused it."""
    endpoint: Destination | None = None
    """None: it opened no connection."""
    source: Address | None = None
    """The sender as the endpoint sees it."""
    translated: bool = False
    answered: float | None = None
    """Seconds after `began`."""
    refused: bool = False
    """The endpoint refused the connection."""
    dialled: Destination | None = None
    """The frontend, if the destination was already an endpoint in the first packet; None: it is not known."""


FindDialled = Callable[[int, FlowTuple], Destination | None]
"""Returns the frontend that the sender of a protocol's packet dialled; None if it is not known."""

_Key = tuple[int, FlowTuple]


class Tracer:
    """Joins announcements of rules and of connection tracking by packet. All times are seconds of one clock.

    No I/O.
    """

    def __init__(
        self, table: str, matches: Collection[Match], is_local: Callable[[Address], bool],
        endpoints: Collection[Destination] = (), dialled: FindDialled | None = None,
    ) -> None:
        """*table* marks the packets.

        With *dialled*, connections straight to one of *endpoints* are reported too, unless it returns another
        frontend.
        """
        self._table = table
        self._matches = matches
        self._is_local = is_local
        self._endpoints = frozenset(endpoints)
        self._find_dialled = dialled
        self._packets: dict[_Key, TracedPacket] = {}
        self._by_id: dict[int, TracedPacket] = {}
        self._known: set[_Key] = set()

    def trace(self, event: TraceEvent, now: float) -> None:
        if event.table == self._table:
            if event.handle and event.way is not None:
                self._begin_trace(event.packet, (event.protocol, event.way), now)
            return
        packet = self._by_id.get(event.packet)
        if packet is None:
            return
        if event.is_rule and event.handle:
            packet.rules.append(event)
        elif event.verdict == "drop":
            packet.rules.append(event._replace(handle=0))
        packet.dropped = packet.dropped or event.verdict == "drop"

    def flow(self, event: FlowEvent, now: float) -> None:
        key = event.protocol, event.original
        packet = self._packets.get(key)
        if packet is None and event.change is FlowEventType.NEW:
            packet = self._start_flow(event, key, now)
        if packet is None:
            return
        reply = event.reply
        if event.change is not FlowEventType.ENDED or packet.endpoint is None:
            packet.endpoint = Destination(reply.source, reply.source_port)
            packet.source = reply.destination
            packet.translated = packet.endpoint != (event.original.destination, event.original.port)
        if event.is_answered and packet.answered is None:
            packet.answered = now - packet.began
        elif event.change is FlowEventType.ENDED and packet.answered is None:
            packet.refused = True

    @property
    def is_busy(self) -> bool:
        """Announcements about a packet may still arrive."""
        return bool(self._packets)

    def finished(self, now: float) -> Iterator[TracedPacket]:
        """Yield each packet once, when no more announcements about it can arrive."""
        for key, packet in list(self._packets.items()):
            ended = packet.dropped or packet.refused or packet.answered is not None
            if ended or now - packet.began >= PATIENCE:
                del self._packets[key]
                self._by_id = {number: each for number, each in self._by_id.items() if each is not packet}
                yield packet

    def _begin_trace(self, number: int, key: _Key, now: float) -> None:
        """Note that announcements about *number* are about the packet of *key*, unless it was sent again."""
        packet = self._packets.get(key) or self._start(key, now)
        if packet is not None and all(packet is not traced for traced in self._by_id.values()):
            self._by_id[number] = packet

    def _start(self, key: _Key, now: float) -> TracedPacket | None:
        """Return a new packet; None if one of *key* was seen before."""
        if key in self._known:
            return None
        self._known.add(key)
        packet = self._packets[key] = TracedPacket(now, *key)
        return packet

    def _start_flow(self, event: FlowEvent, key: _Key, now: float) -> TracedPacket | None:
        """Return a new packet if the flow that begins with it is wanted."""
        protocol, way = key
        dialled = None
        if self._find_dialled and Destination(way.destination, way.port) in self._endpoints:
            if event.reply.source != way.destination:
                return None
            dialled = self._find_dialled(protocol, way)
            if dialled is None:
                return self._start(key, now)
            way = way._replace(destination=dialled.address, port=dialled.port)
        if not any(self._matches_way(match, protocol, way) for match in self._matches):
            return None
        packet = self._start(key, now)
        if packet is not None:
            packet.dialled = dialled
        return packet

    def _matches_way(self, match: Match, protocol: int, way: FlowTuple) -> bool:
        if (match.protocol, match.port) != (protocol, way.port) or match.source not in (None, way.source):
            return False
        if match.destination is None:
            return family_of(way.destination) is match.family and self._is_local(way.destination)
        return way.destination == match.destination


# Texts of rules.

_TABLE = re.compile(r"^table (\S+) (\S+) \{(.*?)^\}", re.DOTALL | re.MULTILINE)
_CHAIN = re.compile(r"^\tchain (\S+) \{(.*?)^\t\}", re.DOTALL | re.MULTILINE)
_RULE = re.compile(r"^\t\t(.+) # handle (\d+)$", re.MULTILINE)
_STYLE: Final[tuple[NftOption, ...]] = ("handle_output", "stateless_output", "terse_output")
_WITHOUT_SETS = frozenset({"filter", "nat", "mangle", "raw", "security"})

_Place = tuple[str, str, str]
"""Family, table and chain."""


class RuleTexts:
    """Rules as nft prints them, by handle. A chain is listed when one of its rules is needed."""

    def __init__(self) -> None:
        self._chains: dict[_Place, dict[int, str]] = {}
        self.problems: list[str] = []
        """The reasons why rules are known by their handles only."""

    def text(self, rule: TraceEvent) -> str:
        """Return the text of *rule*; its handle if the rule is gone or cannot be listed."""
        if not rule.handle:
            return "the chain's policy"
        place = rule.family, rule.table, rule.chain
        if place not in self._chains:
            self._chains |= {place: {}} | self._list(place)
        return self._chains[place].get(rule.handle, f"handle {rule.handle}")

    def _list(self, place: _Place) -> dict[_Place, dict[int, str]]:
        """Return the rules of a chain, and of others if one command lists these as well.

        Tables of iptables have many rules and no sets, so their chains are listed one by one.
        """
        try:
            text, unread = self._listed(place)
        except HostError as error:
            text, unread = "", (str(error),)
        self.problems += [problem for problem in unread if problem not in self.problems]
        return {
            (family, table, chain): {int(handle): text for text, handle in _RULE.findall(rules)}
            for family, table, chains in _TABLE.findall(text)
            for chain, rules in _CHAIN.findall(chains)
        }

    @staticmethod
    def _listed(place: _Place) -> Listing:
        if place[1] not in _WITHOUT_SETS:
            return list_tables(place[0], _STYLE)
        try:
            return Listing(list_chain(*place, _STYLE), ())
        except CommandRefused:  # The chain is gone.
            return Listing("", ())
