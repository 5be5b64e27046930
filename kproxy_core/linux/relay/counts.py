"""Counts of a relay worker: connections, failures and handshakes, in memory shared with the proxy."""

import enum
import errno
import mmap
import os
from bisect import bisect
from collections.abc import Iterator, MutableSequence

from kproxy_core.linux.relay.orders import Count, Dialled, Endpoint

# Counters in shared memory: reading them costs no message.

Counts = MutableSequence[int]
"""One worker's counts, indexed by `Counter`. Only its own thread writes."""

_WORD = 8


class Counter(enum.IntEnum):
    """Indices of counts."""

    CONNECTIONS = 0
    ACCEPTED = 1
    DIAL_FAILURES = 2
    GIVEN_UP = 3
    BYTES_TO_ENDPOINTS = 4
    BYTES_TO_CLIENTS = 5
    FLOWS = 6
    DATAGRAMS_TO_ENDPOINTS = 7
    DATAGRAMS_TO_CLIENTS = 8
    SHORTAGES = 9
    HALF_CLOSED_TIMEOUTS = 10


GAUGES = (Counter.CONNECTIONS, Counter.FLOWS)
"""Counts that end with their worker. All others are cumulative."""


def make_counts() -> int:
    """Return a descriptor of shared memory that holds the counts of one worker, all 0. Raises OSError."""
    fd = os.memfd_create("kproxy-counts")
    os.ftruncate(fd, _WORD * len(Counter))
    return fd


def open_counts(fd: int) -> Counts:
    """Map the counts behind *fd*, which may be closed afterwards."""
    counts: Counts = memoryview(mmap.mmap(fd, _WORD * len(Counter))).cast("Q")  # type: ignore[assignment]
    return counts


# Connections, failures and handshakes by frontend and endpoint.

MADE, REFUSED, UNANSWERED, RESET, _HANDSHAKES = range(5)
"""Indices in `Count.numbers`. The module of `Failure` and `Handshake` is too large to import here."""

_FAILURES = {errno.ECONNREFUSED: REFUSED, errno.ECONNRESET: RESET, errno.EPIPE: RESET}

_BOUNDS = (250_000, 1_000_000, 4_000_000, 16_000_000, 64_000_000, 256_000_000, 1_000_000_000)
"""Bounds of `Handshake` in nanoseconds."""
_SUM = _HANDSHAKES + len(_BOUNDS) + 1
_NONE = (0,) * (_SUM + 1)

Numbers = list[int]
"""Numbers of a pair of frontend and endpoint, at the indices above; the sum in nanoseconds."""


class Tally:
    """Connections since the last report."""

    def __init__(self) -> None:
        self.begun: list[FrontendCounts] = []
        """Counts that are not empty."""

    def report(self) -> list[Count]:
        """Return all counts, and restart at 0. Drops pairs without any."""
        counts = [count for counted in self.begun for count in counted.report()]
        self.begun = [counted for counted in self.begun if counted]
        return counts


class FrontendCounts(dict[Endpoint, Numbers]):
    """The connections to one frontend, by endpoint.

    Numbers are looked up, and created, for each use: a report may have dropped them. A dictionary needs no
    call of Python code, most of which is not in the processor's caches for a new connection.
    """

    __slots__ = ("_frontend", "_tally")

    def __init__(self, tally: Tally, frontend: Dialled) -> None:
        super().__init__()
        self._frontend = frontend
        self._tally = tally

    def __missing__(self, endpoint: Endpoint) -> Numbers:
        if not self:
            self._tally.begun.append(self)
        numbers = self[endpoint] = list(_NONE)
        return numbers

    def shake(self, endpoint: Endpoint, nanoseconds: int) -> None:
        """Count a TCP handshake that took *nanoseconds*."""
        numbers = self[endpoint]
        numbers[_HANDSHAKES + bisect(_BOUNDS, nanoseconds)] += 1
        numbers[_SUM] += nanoseconds

    def report(self) -> Iterator[Count]:
        """Yield all counts, and restart at 0. Drops endpoints without any."""
        for endpoint, numbers in list(self.items()):
            if any(numbers):
                numbers[_SUM] //= 1000
                yield Count(self._frontend, endpoint, tuple(numbers))
                numbers[:] = _NONE
            else:
                del self[endpoint]


def failure_of(error: int) -> int:
    """Return the index of the failure of an attempt that ended with *error*; 0: it timed out."""
    return _FAILURES.get(error, UNANSWERED)
