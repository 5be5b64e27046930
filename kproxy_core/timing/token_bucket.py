"""A token bucket."""

import math
import threading


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
