"""When the sync loop may run next. Pure: the time is always an argument (monotonic, in seconds)."""

from kproxy_core.backend.api import Scope


class Pacing:
    """Bounds how often the sync loop runs, without making a lone change wait.

    A run needs a token. There are at most *burst* of them; one comes back every *min_interval*
    seconds, counted from the end of the last run (kube-proxy's bounded-frequency runner). A
    failed run is repeated after *retry_start* seconds, then twice as long, up to *retry_cap*; a
    new request meanwhile brings it forward to *retry_on_request* seconds after the failure,
    because the new change may be the cure. A run that left something undone, and is else a success, is
    repeated after the same delays; nothing waits for that. *full_period* after a successful full run
    the next one is due.
    """

    def __init__(
        self,
        *,
        min_interval: float,
        retry_cap: float,
        full_period: float = 3600.0,
        burst: int = 2,
        retry_start: float = 0.1,
        retry_on_request: float = 1.0,
    ) -> None:
        """All in seconds; *min_interval* may be 0, everything else is positive."""
        self._min_interval = min_interval
        self._retry_cap = retry_cap
        self._full_period = full_period
        self._burst = burst
        self._retry_start = retry_start
        self._retry_on_request = retry_on_request

        self._wanted: Scope | None = None
        self._requested_at = 0.0
        self._tokens = float(burst)
        self._ended_at = 0.0
        self._failures = 0
        self._retry_at = 0.0
        self._undone = 0
        """Runs in a row that left something undone."""
        self._again_at: float | None = None
        self._full_at: float | None = None

    def look_often(self) -> None:
        """Nobody tells what others change: a full run is due *retry_cap* after the last one."""
        self._full_period = min(self._full_period, self._retry_cap)
        if self._full_at is not None:
            self._full_at = min(self._full_at, self._ended_at + self._full_period)

    def request(self, now: float, scope: Scope = Scope.CHANGED) -> None:
        """Something is to be synced. RESYNC sticks until a full run succeeded."""
        self._requested_at = now
        if self._wanted is not Scope.RESYNC:
            self._wanted = scope
        if self._failures:
            self._retry_at = min(self._retry_at, self._ended_at + self._retry_on_request)

    def due(self, now: float) -> Scope | None:
        """What to run now; None: nothing yet."""
        if now < self._earliest():
            return None
        if self._full_at is not None and now >= self._full_at:
            return Scope.RESYNC
        if self._wanted is None and self._again_at is not None and now >= self._again_at:
            return Scope.CHANGED
        return self._wanted

    def next_wakeup(self, now: float) -> float | None:
        """When `due` will answer if nothing is requested meanwhile (never before *now*); None: never."""
        if self._wanted is not None:
            return max(now, self._earliest())
        times = [at for at in (self._full_at, self._again_at) if at is not None]
        return max(now, self._earliest(), min(times)) if times else None

    def ran(self, started: float, ended: float, scope: Scope, ok: bool, *, undone: bool = False) -> None:
        """A run of *scope* took from *started* to *ended*.

        If *ok* it settled what was requested up to *started*, but a RESYNC only if it was one; and but for
        what it left *undone*.
        """
        if self._min_interval > 0:
            regained = (started - self._ended_at) / self._min_interval
            self._tokens = max(0.0, min(self._burst, self._tokens + regained) - 1)
        self._ended_at = ended
        if not ok:
            self._failures += 1
            self._retry_at = ended + self._delay(self._failures)
            if self._wanted is not Scope.RESYNC:
                self._wanted = scope
            return
        self._failures = 0
        self._undone = self._undone + 1 if undone else 0
        self._again_at = ended + self._delay(self._undone) if undone else None
        if scope is Scope.RESYNC or self._full_at is None:  # The first after a switch may have been any.
            self._full_at = ended + self._full_period
        if scope is Scope.RESYNC or self._wanted is not Scope.RESYNC:
            self._wanted = Scope.CHANGED if self._requested_at > started else None

    def _delay(self, times: int) -> float:
        """After so many failures in a row."""
        return min(self._retry_start * 2.0 ** min(times - 1, 32), self._retry_cap)

    def _earliest(self) -> float:
        """When the next run may start, whatever is wanted."""
        next_token = self._ended_at + max(0.0, 1 - self._tokens) * self._min_interval
        return max(next_token, self._retry_at) if self._failures else next_token
