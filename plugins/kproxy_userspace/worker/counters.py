"""What a relay worker counts and the proxy reads, in memory that both have: nobody asks, nobody waits."""

import enum
import mmap
import os
from collections.abc import MutableSequence

Counts = MutableSequence[int]
"""Of one worker, by `Counter`. Only its own thread writes."""

_WORD = 8


class Counter(enum.IntEnum):
    """What is counted, and where."""

    CONNECTIONS = 0
    """TCP connections that were accepted and have not ended."""
    ACCEPTED = 1
    DIAL_FAILURES = 2
    """Attempts to reach an endpoint that were refused, or took too long."""
    GIVEN_UP = 3
    """Connections that got no endpoint at all."""
    BYTES_TO_ENDPOINTS = 4
    BYTES_TO_CLIENTS = 5
    FLOWS = 6
    """UDP clients that have an endpoint now."""
    DATAGRAMS_TO_ENDPOINTS = 7
    DATAGRAMS_TO_CLIENTS = 8


GAUGES = (Counter.CONNECTIONS, Counter.FLOWS)
"""What ends with the worker; all others only grow."""


def make_counts() -> int:
    """A descriptor of memory for the counts of one worker, all 0. Raises OSError."""
    fd = os.memfd_create("kproxy-counts")
    os.ftruncate(fd, _WORD * len(Counter))
    return fd


def open_counts(fd: int) -> Counts:
    """The counts behind *fd*, which may be closed afterwards."""
    counts: Counts = memoryview(mmap.mmap(fd, _WORD * len(Counter))).cast("Q")  # type: ignore[assignment]
    return counts
