"""Announcements of rules and of connection tracking, put together packet by packet. Pure."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from kproxy_core.host.conntrack.events import Change, Direction, FlowEvent
from kproxy_core.host.tracing.events import TraceEvent
from kproxy_core.host.tracing.table import Match
from kproxy_core.model.address import Address, family_of
from kproxy_core.model.endpoint import Destination

PATIENCE = 1.0
"""Seconds to wait for an answer."""


@dataclass(slots=True)
class TracedPacket:
    """The first packet of a connection, and everything known about it."""

    began: float
    protocol: int
    way: Direction
    """Before any translation."""
    rules: list[TraceEvent] = field(default_factory=list)
    """Those that it met, and the policy that dropped it, without a handle."""
    dropped: bool = False
    """By the last rule, which may have refused it."""
    endpoint: Destination | None = None
    """None: it opened no connection."""
    source: Address | None = None
    """The sender as the endpoint sees it."""
    translated: bool = False
    answered: float | None = None
    """Seconds after `began`."""
    refused: bool = False
    """By the endpoint."""
    dialled: Destination | None = None
    """The frontend, if the destination was already an endpoint in the first packet; None: it is not known."""


FindDialled = Callable[[int, Direction], Destination | None]
"""Returns the frontend that the sender of a protocol's packet dialled; None if it is not known."""

_Key = tuple[int, Direction]


class Tracer:
    """Puts announcements together. All times are seconds of one clock."""

    def __init__(
        self, table: str, matches: Collection[Match], is_local: Callable[[Address], bool],
        endpoints: Collection[Destination] = (), dialled: FindDialled | None = None,
    ) -> None:
        """*table* marks the packets.

        With *dialled*, connections straight to one of *endpoints* count, too, unless it returns another
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
        if packet is None and event.change is Change.NEW:
            packet = self._start_flow(event, key, now)
        if packet is None:
            return
        reply = event.reply
        if event.change is not Change.ENDED or packet.endpoint is None:
            packet.endpoint = Destination(reply.source, reply.source_port)
            packet.source = reply.destination
            packet.translated = packet.endpoint != (event.original.destination, event.original.port)
        if event.is_answered and packet.answered is None:
            packet.answered = now - packet.began
        elif event.change is Change.ENDED and packet.answered is None:
            packet.refused = True

    @property
    def is_busy(self) -> bool:
        """More may be learned about a packet."""
        return bool(self._packets)

    def finished(self, now: float) -> Iterator[TracedPacket]:
        """Yield each packet once, when nothing more can be learned about it."""
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

    def _matches_way(self, match: Match, protocol: int, way: Direction) -> bool:
        if (match.protocol, match.port) != (protocol, way.port) or match.source not in (None, way.source):
            return False
        if match.destination is None:
            return family_of(way.destination) is match.family and self._is_local(way.destination)
        return way.destination == match.destination
