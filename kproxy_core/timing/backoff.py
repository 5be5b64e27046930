"""When to ask, and when to ask again: decided here, slept elsewhere."""

import threading
from collections.abc import Callable

FIRST = 0.1
"""Seconds after the first failure."""

LONGEST = 30.0
"""Seconds that it grows to."""

ANSWERED = 1.0
"""Seconds at most after the first answer of a server that gave none: it may be about to serve."""

LONGEST_ASKED = 300.0
"""Seconds that a server may ask for at most."""

STABLE = 5.0
"""An attempt that went well for so many seconds makes what was before it forgotten."""


class Backoff:
    """Doubles from `FIRST` to `LONGEST`, each time less up to half of it by chance.

    Chance spreads the nodes of a cluster that all lost the same API server.
    """

    __slots__ = ("_chance", "_next")

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance
        self._next = FIRST

    def hasten(self) -> None:
        """The server answers again, though not as it should."""
        self._next = min(self._next, ANSWERED)

    def delay(self, lasted: float, asked: float = 0.0) -> float:
        """Seconds to wait, now that an attempt has ended that went well for *lasted* seconds.

        *asked*: what the server asked for (Retry-After), the least that is waited.
        """
        if lasted >= STABLE:
            self._next = FIRST
        step, self._next = self._next, min(self._next * 2, LONGEST)
        return max(step - step / 2 * self._chance(), min(asked, LONGEST_ASKED))


class RateLimit:
    """Lets *burst* requests through at once and *rate* of them a second in the long run.

    As client-go's flow control with clientConnection.qps and .burst; a negative
    *rate* is no limit. *clock*: monotonic seconds. Any thread may call.
    """

    __slots__ = ("_clock", "_full_at", "_lock", "_rate", "_slack")

    def __init__(self, rate: float, burst: int, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._slack = (max(burst, 1) - 1) / rate if rate > 0 else 0.0
        self._clock = clock
        self._full_at = clock()
        """When all that was let through would have been, one after the other."""
        self._lock = threading.Lock()

    def delay(self) -> float:
        """Seconds to wait before the request that asks; it is counted now."""
        if self._rate <= 0:
            return 0.0
        with self._lock:
            now = self._clock()
            turn = max(self._full_at, now)
            self._full_at = turn + 1 / self._rate
        return max(0.0, turn - self._slack - now)
