"""A byte stream cut into lines or frames. No I/O."""

from io import BytesIO

MAX_LINE = 4 << 20
"""Limit in bytes for one line or frame, a little above the largest object that an API server stores."""

_HEADER = 4
"""Bytes of a frame's length, in network order: apimachinery's LengthDelimitedFramer."""


class Lines:
    """Cuts a stream into lines with their ends.

    Skips empty lines, and lines of more than *limit* bytes besides their ends.
    """

    __slots__ = ("_held", "_limit", "_skipping")

    def __init__(self, limit: int = MAX_LINE) -> None:
        self._limit = limit
        self._held = bytearray()
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes | None]:
        """Return the lines that end in *data*, the next of the stream; None: it is too long."""
        lines = BytesIO(data).readlines()  # split() compares each byte, this calls memchr
        found: list[bytes | None] = []
        rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        if lines:
            if self._skipping:
                self._skipping = False
                del lines[0]
            elif self._held:
                lines[0] = b"".join((self._held, lines[0]))
            self._held.clear()
            found += [line if len(line) <= self._limit + 1 else None for line in lines if line != b"\n"]
        if rest and not self._skipping:
            self._held += rest
            if len(self._held) > self._limit:
                self._held.clear()
                self._skipping = True
                found.append(None)
        return found


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
