"""Messages between the proxy and its relay workers.

Both ends run the same program on the same interpreter, so a message is a marshalled value after its length.
"""

import marshal
import socket
import struct
from collections.abc import Iterable
from typing import Any

from kproxy_core.linux.relay.orders import Close, Command, Recall, ReportConnected, ReportCounts, Reset, Serve

_LENGTH = struct.Struct("=I")
_AT_ONCE = 1 << 16
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
