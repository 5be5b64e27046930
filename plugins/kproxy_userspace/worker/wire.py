"""What the proxy tells its relay workers, and what they answer.

Both ends are one program on one interpreter, so messages are marshalled values behind their length.
"""

import marshal
import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from kproxy_userspace.names import Endpoint

_LENGTH = struct.Struct("=I")
_AT_ONCE = 1 << 16


class Serve(NamedTuple):
    """Listen for a service port, or serve it from other endpoints from now on."""

    relay: int
    """A number that the proxy chose; it stands for the service port."""
    udp: bool
    address: str
    """Where to listen; it also says which family."""
    port: int
    endpoints: tuple[Endpoint, ...]
    affinity_seconds: int


class Close(NamedTuple):
    """Listen no more for a service port."""

    relay: int
    gone: bool
    """Its endpoints are; else somebody else accepts from now on."""


Command = Serve | Close
Answer = list[tuple[int, str]]
"""The relays that could not be served, and why."""


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


def receive(sock: socket.socket) -> object:
    """Wait for one message. Raises PeerGone, or TimeoutError if the socket has a timeout."""
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    return marshal.loads(_exactly(sock, length))


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


def as_values(commands: Sequence[Command]) -> Values:
    """*commands* as marshal takes them."""
    return [tuple(command) for command in commands]


def as_commands(values: object) -> list[Command]:
    """The reverse of `as_values`."""
    assert isinstance(values, list)
    return [Close(*value) if len(value) == len(Close._fields) else Serve(*value) for value in values]
