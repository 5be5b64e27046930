"""A byte stream cut into frames, each with its length before it. No I/O."""

from kproxy_core.apiclient.lines import MAX_LINE

_HEADER = 4
"""Bytes of a frame's length, in network order: apimachinery's LengthDelimitedFramer."""


class Frames:
    """Cuts a stream into the bodies of its frames.

    Skips empty frames, and skips and counts frames of more than *limit* bytes, holding none of their bytes.
    """

    __slots__ = ("_held", "_limit", "_missing", "_skip", "_too_long")

    def __init__(self, limit: int = MAX_LINE) -> None:
        self._too_long = 0
        self._limit = limit
        self._held = bytearray()
        self._missing = _HEADER
        """Bytes that the header, or the frame whose header is held, still lacks."""
        self._skip = 0
        """Bytes left of a frame that is too long."""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the frames that end in *data*, the next bytes of the stream."""
        if self._skip >= len(data):
            self._skip -= len(data)
            return []
        if self._skip:
            data, self._skip = data[self._skip:], 0
        if len(data) < self._missing:
            self._held += data
            self._missing -= len(data)
            return []
        if self._held:
            data = bytes(self._held) + data
            self._held.clear()
        frames: list[bytes] = []
        start = 0
        while True:
            body = start + _HEADER
            if len(data) < body:
                self._missing = body - len(data)
                break
            size = int.from_bytes(data[start:body], "big")
            end = body + size
            if size > self._limit:
                self._too_long += 1
                if end > len(data):
                    self._skip, self._missing = end - len(data), _HEADER
                    return frames
            elif end > len(data):
                self._missing = end - len(data)
                break
            elif size:
                frames.append(data[body:end])
            start = end
        self._held += data[start:]
        return frames

    def take_too_long(self) -> int:
        """Return and reset the number of skipped frames that were longer than the limit."""
        count, self._too_long = self._too_long, 0
        return count
