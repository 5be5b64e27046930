"""A byte stream cut into frames, each with its length before it. No I/O."""

from kproxy_core.apiclient.lines import MAX_LINE

_HEADER = 4
"""Bytes of a frame's length, in network order: apimachinery's LengthDelimitedFramer."""


class Frames:
    """Cuts a stream into the bodies of its frames.

    Skips empty frames, and skips and counts frames of more than *limit* bytes, holding none of their bytes.
    """

    __slots__ = ("_held", "_limit", "_skip", "_too_long")

    def __init__(self, limit: int = MAX_LINE) -> None:
        self._too_long = 0
        self._limit = limit
        self._held = bytearray()
        self._skip = 0
        """Bytes left of a frame that is too long."""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the frames that end in *data*, the next bytes of the stream."""
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        held = self._held
        held += data[skipped:]
        frames: list[bytes] = []
        start = 0
        while len(held) >= (body := start + _HEADER):
            size = int.from_bytes(held[start:body], "big")
            end = body + size
            if size > self._limit:
                self._too_long += 1
                self._skip = max(end - len(held), 0)
            elif end > len(held):
                break
            elif size:
                frames.append(bytes(held[body:end]))
            start = end
        del held[:start]
        return frames

    def take_too_long(self) -> int:
        """Return and reset the number of skipped frames that were longer than the limit."""
        count, self._too_long = self._too_long, 0
        return count
