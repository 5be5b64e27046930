"""Counters of a relay worker, in memory that it shares with the proxy: reading them costs no message."""

import enum
import mmap
import os
from collections.abc import MutableSequence

Counts = MutableSequence[int]
"""One worker's counts, indexed by `Counter`. Only its own thread writes."""

_WORD = 8


class Counter(enum.IntEnum):
    """The places of counts. `inspection.metrics` describes each."""

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
"""Counts that end with their worker. All others only grow."""


def make_counts() -> int:
    """Return a descriptor of shared memory that holds the counts of one worker, all 0. Raises OSError."""
    fd = os.memfd_create("kproxy-counts")
    os.ftruncate(fd, _WORD * len(Counter))
    return fd


def open_counts(fd: int) -> Counts:
    """Map the counts behind *fd*, which may be closed afterwards."""
    counts: Counts = memoryview(mmap.mmap(fd, _WORD * len(Counter))).cast("Q")  # type: ignore[assignment]
    return counts
