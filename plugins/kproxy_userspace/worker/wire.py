"""Messages between the proxy and its relay workers.

Both ends run the same program on the same interpreter, so a message is a marshalled value after its length.
"""

import marshal
import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from kproxy_userspace.names import Endpoint

_LENGTH = struct.Struct("=I")
_AT_ONCE = 1 << 16


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
    frontend: Endpoint | None = None
    """Count connections for this frontend; see `Count`. None: count none."""


class Report(NamedTuple):
    """A request, alone in its message, for the connections that were counted since the last one."""


class Recall(NamedTuple):
    """A request, alone in its message, for the endpoints that affinity gives a client, by relay."""

    client: str


class Count(NamedTuple):
    """Connections to one endpoint."""

    udp: bool
    frontend: Endpoint
    """Its address is "" for a node port of any address."""
    endpoint: Endpoint
    numbers: tuple[int, ...]
    """All connections, those that failed by `api.Failure`, and handshakes by `api.Handshake`."""


class Close(NamedTuple):
    """An order to stop listening for a service port."""

    relay: int
    endpoints_removed: bool
    """Its endpoints are removed too; otherwise another worker or mode accepts from now on."""


Order = Serve | Close
Question = Report | Recall
Command = Order | Question
Answer = list[tuple[int, str]]
"""The relays that could not be served, with the reason."""


Values = Answer | list[tuple[Any, ...]]
"""Lists of plain tuples."""


class PeerGone(Exception):
    """The other end closed the connection."""


def send(sock: socket.socket, message: Values) -> None:
    """Send one message. Raises PeerGone."""
    data = marshal.dumps(message)
    try:
        sock.sendall(_LENGTH.pack(len(data)) + data)
    except OSError as error:
        raise PeerGone(str(error)) from error


def receive(sock: socket.socket) -> list[Any]:
    """Wait for one message. Raises PeerGone, or TimeoutError if the socket has a timeout."""
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    values = marshal.loads(_exactly(sock, length))
    assert isinstance(values, list)
    return values


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            part = sock.recv(min(_AT_ONCE, size - len(data)))
        except TimeoutError:
            raise
        except OSError as error:
            raise PeerGone(str(error)) from error
        if not part:
            raise PeerGone("the connection was closed")
        data += part
    return bytes(data)


def as_values(messages: Sequence[Command | Count]) -> Values:
    """Return *messages* as plain tuples, which marshal accepts."""
    return [tuple(message) for message in messages]


def as_commands(values: list[Any]) -> list[Command]:
    of_length: dict[int, type[Command]] = {len(each._fields): each for each in (Serve, Close, Report, Recall)}
    return [of_length[len(value)](*value) for value in values]
