"""Delays, rates and deadlines as functions of a clock, and problems that repeat."""

import math
import threading
from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)

FIRST = 0.1
"""Delay in seconds after the first failure, by default."""

LONGEST = 30.0
"""Upper bound of a delay in seconds, by default."""

ANSWERED = 1.0
"""Upper bound in seconds once an unreachable server answers again, even with an error: it may be starting."""

LONGEST_ASKED = 300.0
"""Upper bound in seconds for a delay that a server asks for."""

STABLE = 5.0
"""Duration in seconds of a working attempt that resets the delay."""


class Backoff:
    """A delay that doubles from *first* to *longest* seconds.

    *chance*, uniform in [0, 1), shortens each delay by up to a half, so that the nodes of a cluster do not
    all return to the API server at once.
    """

    __slots__ = ("_chance", "_first", "_longest", "_next")

    def __init__(
        self, chance: Callable[[], float] = lambda: 0.0, *, first: float = FIRST, longest: float = LONGEST
    ) -> None:
        self._chance = chance
        self._first = first
        self._longest = longest
        self.reset()

    def reset(self) -> None:
        self._next = min(self._first, self._longest)

    def hasten(self) -> None:
        """Cap the next delay: the server answers again, if only with an error."""
        self._next = min(self._next, ANSWERED)

    def delay(self, lasted: float = 0.0, asked: float = 0.0) -> float:
        """Return the seconds to wait before the next attempt, after one that worked for *lasted* seconds.

        *asked* is the server's own Retry-After, a lower bound.
        """
        if lasted >= STABLE:
            self.reset()
        step, self._next = self._next, min(self._next * 2, self._longest)
        return max(step - step / 2 * self._chance(), min(asked, LONGEST_ASKED))


class Repeats:
    """Says which of many equal problems in a row to log: the first, then at intervals that double.

    Texts that never repeat count as one problem after the first `_DISTINCT`.
    """

    _DISTINCT = 8
    _RAREST = 128
    """Upper bound of an interval, in problems: an hour, if an attempt is made every 30 s."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def count(self, problem: str = "") -> int:
        """Return how often there was *problem* in this row, if it is to be logged; else 0."""
        if problem not in self._counts and len(self._counts) >= self._DISTINCT:
            problem = ""
        times = self._counts[problem] = self._counts.get(problem, 0) + 1
        return times if times & (times - 1) == 0 or times % self._RAREST == 0 else 0

    def end(self) -> None:
        """End the row: the next problem is the first again."""
        self._counts.clear()


class TokenBucket:
    """Up to *burst* tokens, refilled by one every *interval* seconds; an *interval* of 0 sets no limit.

    The state is the time at which the bucket is full again (generic cell rate algorithm). All times are the
    caller's clock, monotonic, in seconds. Any thread may call.
    """

    __slots__ = ("_full_at", "_interval", "_lock", "_slack")

    def __init__(self, interval: float, burst: int) -> None:
        self._interval = interval
        self._slack = (max(burst, 1) - 1) * interval
        self._full_at = -math.inf
        self._lock = threading.Lock()

    @property
    def next_at(self) -> float:
        """Time of the next token. A time in the past: one is available."""
        return self._full_at - self._slack

    def reserve(self, now: float) -> float:
        """Take a token, on credit if none is left. Return the seconds until it is due."""
        with self._lock:
            wait = self.next_at - now
            self._full_at = max(self._full_at, now) + self._interval
        return max(0.0, wait)

    def try_take(self, now: float) -> bool:
        with self._lock:
            if self.next_at > now:
                return False
            self._full_at = max(self._full_at, now) + self._interval
            return True

    def charge(self, started: float, ended: float) -> None:
        """Take a token, if one is left, for work from *started* to *ended*. None is added in that time."""
        with self._lock:
            taken = max(self._full_at, started) + self._interval
            self._full_at = min(taken, started + self._slack + self._interval) + ended - started


class Agenda(Generic[_K]):
    """Keys, each with the time at which it is due. A change costs the logarithm of their number."""

    __slots__ = ("_at", "_heap", "_serial")

    def __init__(self) -> None:
        self._at: dict[_K, float] = {}
        self._heap: list[tuple[float, int, _K]] = []
        """The same, and times that no longer count."""
        self._serial = count()

    @property
    def next_at(self) -> float | None:
        """Time at which the first key is due; None: there is no key."""
        heap = self._heap
        while heap and self._at.get(heap[0][2]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def add(self, key: _K, at: float) -> None:
        """Have *key* due at *at*, unless it is due earlier."""
        if at >= self._at.get(key, math.inf):
            return
        self._at[key] = at
        heappush(self._heap, (at, next(self._serial), key))
        if len(self._heap) > 2 * len(self._at) + 100:
            self._heap = [(time, next(self._serial), each) for each, time in self._at.items()]
            heapify(self._heap)

    def discard(self, key: _K) -> None:
        self._at.pop(key, None)

    def take_due(self, now: float) -> list[_K]:
        """Return the keys that are due at *now*, the first ones first, and drop them."""
        due = []
        while (at := self.next_at) is not None and at <= now:
            key = heappop(self._heap)[2]
            del self._at[key]
            due.append(key)
        return due
