"""Pacing of the syncs of one family."""

import math

from kproxy_core.contract.values import Scope
from kproxy_core.model.timing import Backoff, TokenBucket

_REST_SHARE = 4
"""Rest this many times the CPU time of a run: runs cost at most a fifth of one CPU."""

_FULL_PERIOD = 3600.0
"""Interval in seconds between full runs."""
_RETRY_ON_REQUEST = 1.0
"""Upper bound in seconds for the retry after a failure, once a new change may fix it."""

_SHORTEST_REPAIR_REST = 0.02
"""Seconds."""
_REPAIR_CREDIT = 1.0
"""Seconds of rest that repairs may postpone, so that two unrelated damages are both repaired at once."""


class Pacing:
    """Bounds how often one family is synced, without delaying a lone change.

    Without a *min_interval* runs are paced by their CPU time: after a partial run the next may start when
    four times as long has passed. A full run delays no change, because a change costs less. With a
    *min_interval* a run takes a token; there are *burst* of them, and one is added every *min_interval*
    seconds while nothing runs (kube-proxy's bounded-frequency runner).

    A failed run is repeated after a delay that doubles up to *retry_cap*. A request in the meantime moves the
    retry forward. A successful run that is incomplete is repeated after the same delays, but holds up no
    other change. A full run is due an hour after the last successful one.

    A repair is a full run that ignores all of these limits. It rests four times the cost of the full runs
    before it, so that a tool flushing our rules in a loop costs at most a fifth of one CPU.

    All times are the caller's clock, monotonic, in seconds.
    """

    def __init__(
        self, *, min_interval: float, retry_cap: float, burst: int = 2, shortest_rest: float = 0.001
    ) -> None:
        """All in seconds. A *min_interval* of 0: pace by cost, with at least *shortest_rest* between runs."""
        self._by_cost = min_interval <= 0
        self._tokens = TokenBucket(min_interval, burst)
        self._shortest_rest = shortest_rest
        self._longest_rest = retry_cap
        self._full_period = _FULL_PERIOD

        self._wanted: Scope | None = None
        self._requested_at = 0.0
        self._ended_at = 0.0
        self._rest_until = -math.inf
        self._full_at: float | None = None
        self._repair_wanted = False
        self._repair_rest_until = -math.inf
        self._repairs_paid_at = -math.inf
        """End of all rests after full runs."""
        self._failures = Backoff(longest=retry_cap)
        self._retry_at: float | None = None
        self._incomplete = Backoff(longest=retry_cap)
        self._again_at: float | None = None

    def look_often(self) -> None:
        """Run fully every *retry_cap* seconds, for a backend that does not notice foreign changes."""
        self._full_period = min(self._full_period, self._longest_rest)
        if self._full_at is not None:
            self._full_at = min(self._full_at, self._ended_at + self._full_period)

    def request(self, now: float, scope: Scope = Scope.CHANGED) -> None:
        """Request a run. A request for RESYNC is kept until a full run succeeds."""
        self._requested_at = now
        if self._wanted is not Scope.RESYNC:
            self._wanted = scope
        if self._retry_at is not None:
            self._retry_at = min(self._retry_at, self._ended_at + _RETRY_ON_REQUEST)

    def request_repair(self) -> None:
        """Request a full run when the rest after the last one is over."""
        self._repair_wanted = True

    def due(self, now: float) -> Scope | None:
        """Return the run that may start now, if any."""
        if self._repair_wanted and now >= self._repair_rest_until:
            return Scope.RESYNC
        if now < self._earliest():
            return None
        if self._full_at is not None and now >= self._full_at:
            return Scope.RESYNC
        if self._wanted is None and self._again_at is not None and now >= self._again_at:
            return Scope.CHANGED
        return self._wanted

    def next_wakeup(self, now: float) -> float | None:
        """Return the time, not before *now*, at which `due` returns a run without a further request."""
        times = [self._repair_rest_until] if self._repair_wanted else []
        if self._wanted is not None:
            times.append(self._earliest())
        else:
            times += [max(at, self._earliest()) for at in (self._full_at, self._again_at) if at is not None]
        return max(now, min(times)) if times else None

    def ran(
        self, started: float, ended: float, scope: Scope, ok: bool, *, cost: float, incomplete: bool = False,
    ) -> None:
        """Record a run from *started* to *ended* that took *cost* seconds of CPU time.

        If *ok*, it settles all requests up to *started*; a request for RESYNC only if the run was one.
        """
        rest = _REST_SHARE * cost
        self._ended_at = ended
        self._tokens.charge(started, ended)
        if scope is Scope.RESYNC:
            self._repair_wanted = False
            self._repairs_paid_at = max(self._repairs_paid_at, started) + (ended - started) + rest
            self._repair_rest_until = max(
                ended + _SHORTEST_REPAIR_REST, self._repairs_paid_at - _REPAIR_CREDIT)
            rest = 0.0
        self._rest_until = ended + min(max(rest, self._shortest_rest), self._longest_rest)
        if not ok:
            self._retry_at = ended + self._failures.delay()
            if self._wanted is not Scope.RESYNC:
                self._wanted = scope
            return
        self._failures.reset()
        self._retry_at = None
        if not incomplete:
            self._incomplete.reset()
        self._again_at = ended + self._incomplete.delay() if incomplete else None
        if scope is Scope.RESYNC or self._full_at is None:  # the first run after a mode switch may be partial
            self._full_at = ended + self._full_period
        if scope is Scope.RESYNC or self._wanted is not Scope.RESYNC:
            self._wanted = Scope.CHANGED if self._requested_at > started else None

    def _earliest(self) -> float:
        """Return the earliest start of the next run that is no repair."""
        at = self._rest_until if self._by_cost else self._tokens.next_at
        return at if self._retry_at is None else max(at, self._retry_at)
