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


class Channel:
    """One end of the socket between the proxy and a worker. Never waits for the other end."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._unsent = bytearray()
        self._received = bytearray()

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        """The socket's buffer is full. `flush` once there is room."""
        return bool(self._unsent)

    def send(self, message: Iterable[tuple[Any, ...]]) -> None:
        """Send one message, or as much as there is room for. Raises OSError."""
        data = marshal.dumps([tuple(each) for each in message])  # It accepts no subclass of tuple.
        self._unsent += _LENGTH.pack(len(data)) + data
        self.flush()

    def flush(self) -> None:
        """Send what `send` has left. Raises OSError."""
        try:
            while self._unsent:
                del self._unsent[:self._sock.send(memoryview(self._unsent)[:_AT_ONCE].tobytes())]
        except BlockingIOError:
            return

    def receive(self) -> list[list[Any]]:
        """Return the messages that have arrived. Raises OSError, also if the other end is closed."""
        try:
            data = self._sock.recv(_AT_ONCE)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionError("the connection was closed")
        self._received += data
        found: list[list[Any]] = []
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            found.append(marshal.loads(self._received[_LENGTH.size:end]))
            del self._received[:end]
        return found

    def close(self) -> None:
        self._sock.close()


def encoded(commands: Iterable[Command]) -> list[tuple[Any, ...]]:
    """Return *commands* as the values that `as_commands` reads."""
    return [(_KINDS.index(type(each)), *each) for each in commands]


def as_commands(values: list[Any]) -> list[Command]:
    return [_KINDS[kind](*fields) for kind, *fields in values]
