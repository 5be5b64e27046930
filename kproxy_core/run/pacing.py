"""When the sync loop may run next. Pure: the time is always an argument (monotonic, in seconds)."""

from kproxy_core.backend.api import Scope


class Pacing:
    """Bounds how often the sync loop runs, without making a lone change wait.

    A run needs a token. There are at most *burst* of them; one comes back every *min_interval*
    seconds, counted from the end of the last run, as in kube-proxy's bounded-frequency runner. A
    failed run is repeated after *retry_start* seconds, then twice as long, up to *retry_cap*; a
    new request meanwhile brings it forward to *retry_on_request* seconds after the failure,
    because the new change may be the cure. *full_period* after a successful full run the next
    one is due.
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
        raise NotImplementedError

    def request(self, now: float, scope: Scope = Scope.CHANGED) -> None:
        """Something is to be synced. RESYNC sticks until a full run succeeded."""
        raise NotImplementedError

    def due(self, now: float) -> Scope | None:
        """What to run now; None: nothing yet."""
        raise NotImplementedError

    def next_wakeup(self, now: float) -> float | None:
        """When `due` will answer if nothing is requested meanwhile (<= *now*: it does); None: never."""
        raise NotImplementedError

    def ran(self, started: float, ended: float, scope: Scope, ok: bool) -> None:
        """A run of *scope* took from *started* to *ended*. Requests made before *started* are settled if *ok*."""
        raise NotImplementedError
