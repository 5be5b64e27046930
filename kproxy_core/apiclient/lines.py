"""A byte stream cut into lines. No I/O."""

MAX_LINE = 4 << 20
"""Limit in bytes for one line of a watch, a little above the largest object that an API server stores."""


class Lines:
    """Cuts a stream into lines, without their ends.

    Skips empty lines, and skips and counts lines of more than *limit* bytes.
    """

    __slots__ = ("_held", "_limit", "_size", "_skipping", "_too_long")

    def __init__(self, limit: int = MAX_LINE) -> None:
        self._too_long = 0
        self._limit = limit
        self._held: list[bytes] = []
        self._size = 0
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that end in *data*, the next bytes of the stream."""
        lines = data.split(b"\n")
        rest = lines.pop()
        if lines:
            if self._skipping:
                self._skipping = False
                del lines[0]
            elif self._held:
                lines[0] = b"".join([*self._held, lines[0]])
            self._held, self._size = [], 0
            lines = [line for line in lines if line and not self._is_too_long(len(line))]
        if rest and not self._skipping:
            self._held.append(rest)
            self._size += len(rest)
            if self._is_too_long(self._size):
                self._held, self._size = [], 0
                self._skipping = True
        return lines

    def _is_too_long(self, size: int) -> bool:
        self._too_long += size > self._limit
        return size > self._limit

    def take_too_long(self) -> int:
        """Return and reset the number of skipped lines that were longer than the limit."""
        count, self._too_long = self._too_long, 0
        return count
