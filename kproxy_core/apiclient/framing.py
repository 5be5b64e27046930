"""Where things end in a stream of bytes: the pure half of HTTP and of a watch.

Bytes arrive in pieces cut anywhere; these classes take them as they come and
give back what the framing holds. No I/O, and no copy that can be avoided: the
usual piece holds whole chunks with whole lines.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple, Protocol

MAX_HEAD = 64 << 10
"""Bytes of a response's head; servers of HTTP send far less."""

MAX_LINE = 64 << 20
"""Bytes of one line of a watch: etcd's limit for an object is 1.5 MB, unless it was raised."""

_MAX_CHUNK_LINE = 4096
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\r\n]*)?")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?", re.DOTALL)


class ProtocolError(Exception):
    """What the server sent is not HTTP as we know it, or it stopped in the middle."""


class Head(NamedTuple):
    """The head of a response."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case; the last value where a name occurs twice."""
    persistent: bool
    """The connection may be used again after the body."""

    def body(self) -> "Body":
        """What takes the framing off this response's body.

        Raises ProtocolError if the head contradicts itself.
        """
        coding = self.headers.get("transfer-encoding", "").strip().lower()
        length = self.headers.get("content-length")
        if self.status in (204, 304):
            return SizedBody(0)
        if coding:
            if coding != "chunked":
                raise ProtocolError(f"unknown transfer coding {coding!r}")
            return ChunkedBody()
        if length is None:
            return UnsizedBody()
        if not (length.isascii() and length.isdigit() and len(length) < 16):
            raise ProtocolError(f"bad content length {length!r}")
        return SizedBody(int(length))


def parse_head(raw: bytes) -> Head:
    """The head of a response, from *raw* bytes up to and without the empty line.

    Raises ProtocolError if that is not what they are.
    """
    first, *lines = raw.split(b"\r\n")
    match = _STATUS_LINE.fullmatch(first)
    if not match:
        raise ProtocolError(f"not an HTTP response: {first[:80]!r}")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or name.strip() != name:
            raise ProtocolError(f"bad header line {line[:80]!r}")
        headers[name.decode("latin-1").lower()] = value.strip().decode("latin-1")
    connection = headers.get("connection", "").lower()
    persistent = connection != "close" if match[1] == b"1" else connection == "keep-alive"
    return Head(int(match[2]), headers, persistent)


class Body(Protocol):
    """The framing of one response's body."""

    ended: bool
    """Nothing more belongs to this body."""

    def feed(self, data: bytes) -> bytes:
        """The payload in *data*, the next bytes received.

        Raises ProtocolError if the framing is broken.
        """

    def close(self) -> None:
        """The server closed the connection. Raises ProtocolError if that cut the body short."""


class ChunkedBody:
    """Chunked transfer coding (RFC 9112, section 7.1)."""

    __slots__ = ("_held", "_missing", "_state", "ended")

    def __init__(self) -> None:
        self.ended = False
        self._state = _SIZE
        self._missing = 0
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        if self._held:
            data, self._held = self._held + data, b""
        pieces = []
        position, end = 0, len(data)
        while position < end:
            if self._state is _DATA:
                piece = data[position:position + self._missing]
                pieces.append(piece)
                position += len(piece)
                self._missing -= len(piece)
                if not self._missing:
                    self._state = _DATA_END
                continue
            if self.ended:
                raise ProtocolError("bytes after the end of a chunked body")
            stop = data.find(b"\r\n", position)
            if stop < 0:
                if end - position > _MAX_CHUNK_LINE:
                    raise ProtocolError("endless chunk header")
                self._held = data[position:]
                break
            self._line(data[position:stop])
            position = stop + 2
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        if not self.ended:
            raise ProtocolError("the server closed the connection inside a chunked body")

    def _line(self, line: bytes) -> None:
        if self._state is _SIZE:
            match = _CHUNK_SIZE.fullmatch(line)
            if not match:
                raise ProtocolError(f"bad chunk size {line[:80]!r}")
            self._missing = int(match[1], 16)
            self._state = _DATA if self._missing else _TRAILER
        elif self._state is _DATA_END:
            if line:
                raise ProtocolError(f"a chunk is longer than its size: {line[:80]!r}")
            self._state = _SIZE
        elif not line:
            self.ended = True


_SIZE, _DATA, _DATA_END, _TRAILER = "size", "data", "end of data", "trailer"


class SizedBody:
    """A body whose length the head told."""

    __slots__ = ("_missing", "ended")

    def __init__(self, length: int) -> None:
        self._missing = length
        self.ended = not length

    def feed(self, data: bytes) -> bytes:
        if len(data) > self._missing:
            raise ProtocolError("bytes after the end of a body")
        self._missing -= len(data)
        self.ended = not self._missing
        return data

    def close(self) -> None:
        if not self.ended:
            raise ProtocolError(f"the server closed the connection {self._missing} bytes too early")


class UnsizedBody:
    """A body that ends where the connection does."""

    __slots__ = ("ended",)

    def __init__(self) -> None:
        self.ended = False

    def feed(self, data: bytes) -> bytes:
        return data

    def close(self) -> None:
        self.ended = True


class Lines:
    """Cuts a stream into lines, without their ends.

    Leaves out empty lines and, counted, those of more than *limit* bytes.
    """

    __slots__ = ("_held", "_limit", "_size", "_skipping", "_too_long")

    def __init__(self, limit: int = MAX_LINE) -> None:
        self._too_long = 0
        self._limit = limit
        self._held: list[bytes] = []
        self._size = 0
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that end in *data*, the next bytes of the stream."""
        lines = data.split(b"\n")
        rest = lines.pop()
        if lines:
            if self._skipping:
                self._skipping = False
                del lines[0]
            elif self._held:
                lines[0] = b"".join([*self._held, lines[0]])
            self._held, self._size = [], 0
            lines = [line for line in lines if line]
        if rest and not self._skipping:
            self._held.append(rest)
            self._size += len(rest)
            if self._size > self._limit:
                self._held, self._size = [], 0
                self._skipping = True
                self._too_long += 1
        return lines

    def take_too_long(self) -> int:
        """How many lines longer than the limit were left out since the last call."""
        count, self._too_long = self._too_long, 0
        return count
