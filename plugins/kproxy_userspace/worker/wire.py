"""Messages between the proxy and its relay workers.

Both ends run the same program on the same interpreter, so a message is a marshalled value after its length.
"""

import marshal
import socket
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

from kproxy_userspace.names import Endpoint

_LENGTH = struct.Struct("=I")
_AT_ONCE = 1 << 16

Dialled = tuple[bytes | None, int, int]
"""Address, protocol and port of a `Frontend`, of the types that marshal accepts."""


class WorkerSettings(NamedTuple):
    """Arguments of every worker, as seconds."""

    udp_idle: float
    drain: float
    """Time limit for connections to a removed endpoint; negative: none."""
    half_closed: float
    """Time after which a connection that is half-closed and idle is reset."""


class Serve(NamedTuple):
    """An order to listen for a service port, or to serve it from other endpoints."""

    relay: int
    """The relay's number, chosen by the proxy."""
    service_port: int
    """The number of its service port. Relays of the same one share the clients' endpoints."""
    udp: bool
    address: str
    """The local address to listen on, which also determines the family."""
    port: int
    endpoints: tuple[Endpoint, ...]
    affinity_seconds: int
    frontend: Dialled | None = None
    """Count connections for this frontend; see `Count`. None: count none."""


class ReportCounts(NamedTuple):
    """A request for the connections that were counted since the last one."""


class Recall(NamedTuple):
    """A request for the endpoints of a client's affinity, by relay."""

    client: str


class ReportConnected(NamedTuple):
    """A request for relays and endpoints that have open TCP connections between them, closed relays
    included."""


class Reset(NamedTuple):
    """An order to reset the connections of a relay to some endpoints, answered by their number."""

    relay: int
    endpoints: tuple[Endpoint, ...]


class Count(NamedTuple):
    """Connections to one endpoint."""

    frontend: Dialled
    endpoint: Endpoint
    numbers: tuple[int, ...]
    """Number of connections, of those that failed by `Failure`, and of handshakes by `Handshake`."""


class Close(NamedTuple):
    """An order to stop listening for a service port."""

    relay: int
    endpoints_removed: bool
    """Its endpoints are removed too; otherwise another worker or mode accepts from now on."""


Order = Serve | Close
Question = ReportCounts | Recall | ReportConnected | Reset
Command = Order | Question
_KINDS: tuple[type[Command], ...] = (Serve, Close, ReportCounts, Recall, ReportConnected, Reset)


def send(sock: socket.socket, messages: Iterable[tuple[Any, ...]]) -> None:
    """Send one message. Raises OSError."""
    data = marshal.dumps([tuple(each) for each in messages])  # It accepts no subclass of tuple.
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive(sock: socket.socket) -> list[Any]:
    """Wait for one message. Raises OSError, which is a TimeoutError if the socket has a timeout."""
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    values: list[Any] = marshal.loads(_exactly(sock, length))
    return values


def _exactly(sock: socket.socket, size: int) -> bytearray:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(min(_AT_ONCE, size - len(data)))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data


def encoded(commands: Iterable[Command]) -> list[tuple[Any, ...]]:
    """Return *commands* as the values that `as_commands` reads."""
    return [(_KINDS.index(type(each)), *each) for each in commands]


def as_commands(values: list[Any]) -> list[Command]:
    return [_KINDS[kind](*fields) for kind, *fields in values]
