"""Traced packets: announcements of the rules they meet, put together packet by packet."""

import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from kproxy_core.linux.conntrack import FlowTuple
from kproxy_core.linux.conntrack_events import FlowEvent, FlowEventType
from kproxy_core.linux.errors import HostError, doing
from kproxy_core.linux.libnftables import CommandRefused, Listing, NftOption, list_chain, list_tables
from kproxy_core.model.address import Address, Family, Protocol, family_of
from kproxy_core.model.service import Destination
from kproxy_core.netlink.messages import NETLINK_NETFILTER, NFGENMSG, Malformed, attributes, messages, text
from kproxy_core.netlink.sockets import Announcements, NetlinkSocket
from kproxy_core.nft.expressions import BaseChain
from kproxy_core.nft.messages import FAMILIES, KIND
from kproxy_core.nft.objects import OWNER, Chain, Hook, Table
from kproxy_core.nft.rules import (
    COUNTER,
    CT_INVALID,
    CT_UNTRACKED,
    DESTINATION_PORT,
    L4_PROTOCOL,
    SCTP_INIT,
    TRACE,
    Rule,
    counted,
    ct_state,
    destination_address,
    equals,
    is_local,
    is_of,
    jump,
    limit,
    source_address,
    tcp_flags,
)
from kproxy_core.nft.ruleset import ListedRuleset
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
    """With `way`, only in the first announcement about a packet of each base chain; else 0."""
    way: FlowTuple | None
    """As it is when it comes to the chain."""
    input: int = 0
    """The number of the interface by which it arrived; 0: none."""


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
            int.from_bytes(found.get(10, b""), "big"),
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


# The tables that mark packets to trace. The kernel deletes them with the socket that made them.

TABLES: Final = "kproxy-trace-"
"""The names of such tables begin with this."""
_AT_DEVICES, _BEFORE, _BEHIND = "received", "before", "tracked"
"""The beginnings of the names of chains: at the interfaces, before and behind connection tracking."""
_TRACKED_ALREADY, _UNTRACKED, _INVALID = "tracked-already", "untracked", "invalid"
"""The chains to which packets go that connection tracking takes for no new connection."""
_FIRST, _SECOND = -(1 << 31), 1 - (1 << 31)
"""Before all chains. br_netfilter is the first at hook prerouting (NF_IP_PRI_FIRST): it spares packets the
hook that they have passed in the bridge."""
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


class Marks:
    """The tables that mark packets, which exist until this is closed."""

    def __init__(self, name: str, matches: Sequence[Match], devices: Sequence[str] = ()) -> None:
        """Also mark packets as they are received by *devices*, of which one may be deleted meanwhile.

        Raises HostError.
        """
        self.problem = ""
        """The reason why packets are not marked at *devices*."""
        self._name = name
        self._families = tuple(dict.fromkeys(match.family for match in matches))
        with doing("write rules that trace packets"):
            self._connection = RulesetSocket.open()
            try:
                if devices:
                    self._mark_at(matches, devices)
                for family in self._families:
                    of_family = [match for match in matches if match.family is family]
                    self._write(Table(family, name, flags=OWNER), marking_chains(of_family))
            except BaseException:
                self._connection.close()
                raise

    def _mark_at(self, matches: Sequence[Match], devices: Sequence[str]) -> None:
        table = Table(Family.IPV4, self._name, flags=OWNER, is_netdev=True)
        try:
            with doing("trace packets from the interfaces on"):
                self._write(table, receiving_chains(matches, devices))
        except HostError as error:
            said = str(error)
            self.problem = said if len(said) < 300 else f"{said[:150]} ... {said[-100:]}"  # It names devices.

    def _write(self, table: Table, chains: Iterable[Chain]) -> None:
        self._connection.run([table.create(), *table.write(chains)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def arrived(self) -> int:
        """Return how many first packets came to the first hook so far, traced or not. Raises HostError."""
        with doing("count packets"), NetlinkSocket.open(NETLINK_NETFILTER) as sock:
            listed = ListedRuleset(sock)
            return sum(
                counted(rule) or 0 for family in self._families for hook in _HOOKS
                for rule in listed.rules(family.ip, self._name, f"{_BEFORE}-{hook}"))


_HOOKS = ("prerouting", "output")


def chains_before_ip() -> list[BaseChain]:
    """Return the chains that packets may meet before the first hook of IP: at interfaces and in bridges.

    Raises HostError.
    """
    with doing("list the chains at interfaces"), NetlinkSocket.open(NETLINK_NETFILTER) as sock:
        return [each for each in ListedRuleset(sock).base_chains()
                if is_outside_ip(each) and each.hook != "egress"]


def is_outside_ip(chain: BaseChain) -> bool:
    """Return whether *chain*, of another program than a trace, is at interfaces or in bridges."""
    is_outside = chain.family in ("netdev", "bridge") or chain.hook == "ingress"
    return is_outside and not chain.table.startswith(TABLES)


def marking_chains(matches: Sequence[Match]) -> list[Chain]:
    """Return the chains that have packets of one family traced."""
    before = tuple(_first_packets(match) for match in matches)
    behind = tuple(rule for match in matches for rule in _by_state(match))
    return [
        Chain(_TRACKED_ALREADY), Chain(_UNTRACKED), Chain(_INVALID),
        *(Chain(f"{_BEFORE}-{hook}", before, Hook("filter", hook, _SECOND)) for hook in _HOOKS),
        *(Chain(f"{_BEHIND}-{hook}", behind, Hook("filter", hook, _PRIORITY)) for hook in _HOOKS),
    ]  # fmt: skip


_MOST_DEVICES = 255
"""Limit for the interfaces of a chain: fewer than NFT_NETDEVICE_MAX."""


def receiving_chains(matches: Iterable[Match], devices: Sequence[str]) -> list[Chain]:
    """Return the chains that have packets traced as *devices* receive them."""
    rules = tuple((is_of(match.family), *_first_packets(match)) for match in matches)
    parts = [tuple(devices[at : at + _MOST_DEVICES]) for at in range(0, len(devices), _MOST_DEVICES)]
    return [Chain(f"{_AT_DEVICES}-{number}", rules, Hook("filter", "ingress", _FIRST, part))
            for number, part in enumerate(parts)]


def _first_packets(match: Match) -> Rule:
    """Return the rule that marks and counts the packets of *match* that may open connections."""
    of_protocol = equals(L4_PROTOCOL, match.protocol)
    opening: Mapping[Protocol, Rule] = {
        Protocol.TCP: (tcp_flags("syn", of=("fin", "syn", "rst", "ack")),), Protocol.UDP: (of_protocol,),
        Protocol.SCTP: (of_protocol, SCTP_INIT),
    }
    return (*opening[match.protocol], *_wanted(match), COUNTER, limit(_PER_SECOND), TRACE)


def _by_state(match: Match) -> Iterator[Rule]:
    """Yield the rules that mark new connections, and tell which packets that were marked before are not."""
    wanted = (equals(L4_PROTOCOL, match.protocol), *_wanted(match))
    yield (*wanted, ct_state("new"), limit(_PER_SECOND), TRACE)
    yield (*wanted, ct_state("established"), jump(_TRACKED_ALREADY))
    yield (*wanted, CT_UNTRACKED, jump(_UNTRACKED))
    yield (*wanted, CT_INVALID, jump(_INVALID))


def _wanted(match: Match) -> Rule:
    family = match.family
    destination = is_local("daddr")
    if match.destination is not None:
        destination = equals(destination_address(family), match.destination)
    source = () if match.source is None else (equals(source_address(family), match.source),)
    return (destination, *source, equals(DESTINATION_PORT, match.port))


PATIENCE = 1.0
"""Timeout in seconds for an answer of the endpoint."""


NEW, TRACKED_ALREADY, UNTRACKED, INVALID = "new", "tracked already", "untracked", "invalid"
"""What connection tracking takes a packet for."""
_STATES = {f"jump {_TRACKED_ALREADY}": TRACKED_ALREADY, f"jump {_UNTRACKED}": UNTRACKED,
           f"jump {_INVALID}": INVALID}


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
    state: str = ""
    """What connection tracking took it for, such as `NEW`; "": the packet was not seen behind it."""
    has_arrived: bool = False
    """It came to the first hook of its family, unless it was only seen in connection tracking."""
    endpoint: Destination | None = None
    """None: it opened no connection."""
    source: Address | None = None
    """The sender as the endpoint sees it."""
    translated: bool = False
    answered: float | None = None
    """Seconds after `began`."""
    refused: bool = False
    """The endpoint refused the connection."""
    passed: set[tuple[str, int]] = field(default_factory=set)
    """The chains that marked it, each with the interface by which it arrived."""
    is_repeated: bool = False
    """It was sent again."""
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
        self._by_id: dict[int, TracedPacket | None] = {}
        """None: a packet that was sent again, or one that is not wanted."""
        self._known: set[_Key] = set()

    def trace(self, event: TraceEvent, now: float) -> None:
        if event.table == self._table:
            self._marked(event, now)
        if event.table.startswith(TABLES):
            return
        packet = self._by_id[event.packet] if event.packet in self._by_id else self._renumbered(event)
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
        if event.change is FlowEventType.ENDED and packet is None:
            self._known.discard(key)
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

    def _marked(self, event: TraceEvent, now: float) -> None:
        """Note which packet announcements of a number are about."""
        packet = self._by_id.get(event.packet)
        if event.way is not None:
            key = event.protocol, event.way
            packet = self._packets.get(key)
            if packet is None and event.is_rule:
                start = self._start_wanted if self._is_dialled(event.way) else self._start
                packet = start(key, now)
            if packet is not None and (event.chain, event.input) in packet.passed:
                packet.is_repeated, packet = True, None
            self._by_id[event.packet] = packet
        if packet is None:
            return
        packet.passed.add((event.chain, event.input))
        packet.has_arrived = packet.has_arrived or not event.chain.startswith(_AT_DEVICES)
        if event.chain.startswith(_BEHIND):
            packet.state = packet.state or _STATES.get(event.verdict, NEW)

    def _renumbered(self, event: TraceEvent) -> TracedPacket | None:
        """Return the packet that has another number behind a bridge; None: it is another one.

        A number depends on the interface of arrival (nf_tables_trace.c).
        """
        if event.way is None:
            return None
        key = event.protocol, event.way[:2]
        found = next((packet for (protocol, way), packet in self._packets.items()
                      if (protocol, way[:2]) == key and packet.passed and not packet.is_repeated), None)
        self._by_id[event.packet] = found
        return found

    def _start(self, key: _Key, now: float) -> TracedPacket | None:
        """Return a new packet; None if one of *key* was seen before."""
        if key in self._known:
            return None
        self._known.add(key)
        packet = self._packets[key] = TracedPacket(now, *key)
        return packet

    def _start_flow(self, event: FlowEvent, key: _Key, now: float) -> TracedPacket | None:
        """Return a new packet if the flow that begins with it is wanted."""
        if self._is_dialled(key[1]) and event.reply.source != key[1].destination:
            return None
        return self._start_wanted(key, now)

    def _is_dialled(self, way: FlowTuple) -> bool:
        """Return whether a socket may have dialled a frontend for an endpoint at the end of *way*."""
        return bool(self._find_dialled) and Destination(way.destination, way.port) in self._endpoints

    def _start_wanted(self, key: _Key, now: float) -> TracedPacket | None:
        """Return a new packet if its sender dialled a frontend that is traced, or may have."""
        protocol, way = key
        dialled = None
        if self._find_dialled is not None and self._is_dialled(way):
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
