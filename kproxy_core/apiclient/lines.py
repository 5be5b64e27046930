"""A byte stream cut into lines. No I/O."""

from io import BytesIO

MAX_LINE = 4 << 20
"""Limit in bytes for one line of a watch, a little above the largest object that an API server stores."""


class Lines:
    """Cuts a stream into lines with their ends.

    Skips empty lines, and lines of more than *limit* bytes besides their ends.
    """

    __slots__ = ("_held", "_limit", "_size", "_skipping")

    def __init__(self, limit: int = MAX_LINE) -> None:
        self._limit = limit
        self._held: list[bytes] = []
        self._size = 0
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
                lines[0] = b"".join([*self._held, lines[0]])
            self._held, self._size = [], 0
            found += [line if len(line) <= self._limit + 1 else None for line in lines if line != b"\n"]
        if rest and not self._skipping:
            self._held.append(rest)
            self._size += len(rest)
            if self._size > self._limit:
                self._held, self._size = [], 0
                self._skipping = True
                found.append(None)
        return found
