"""A byte stream cut into frames, each with its length before it. No I/O."""

from kproxy_core.apiclient.lines import MAX_LINE

_HEADER = 4
"""Bytes of a frame's length, in network order: apimachinery's LengthDelimitedFramer."""


class Frames:
    """Cuts a stream into the bodies of its frames.

    Skips empty frames, and frames of more than *limit* bytes, holding none of their bytes.
    """

    __slots__ = ("_held", "_limit", "_skip")

    def __init__(self, limit: int = MAX_LINE) -> None:
        self._limit = limit
        self._held = bytearray()
        self._skip = 0
        """Bytes left of a frame that is too long."""

    def feed(self, data: bytes) -> list[bytes | None]:
        """Return the frames that end in *data*, the next of the stream; None: it is too long."""
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        held = self._held
        held += data[skipped:]
        frames: list[bytes | None] = []
        start = 0
        while len(held) >= (body := start + _HEADER):
            size = int.from_bytes(held[start:body], "big")
            end = body + size
            if size > self._limit:
                frames.append(None)
                self._skip = max(end - len(held), 0)
            elif end > len(held):
                break
            elif size:
                frames.append(bytes(held[body:end]))
            start = end
        del held[:start]
        return frames
