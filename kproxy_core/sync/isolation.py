"""Service ports that a backend fails to program are left out, so that it serves all others.

If the backend names them, the core believes it. Else it finds them by halves, one sync at a time: what fails
writes nothing, and what succeeds serves.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from itertools import islice

from kproxy_core.contract.values import Measurement
from kproxy_core.model.address import Family
from kproxy_core.model.service import ServiceName, ServicePortKey
from kproxy_core.model.timing import Backoff
from kproxy_core.sync.observer import Synced, SyncObserver

MOST_FAILURES = 128
"""Limit of the failed syncs of one search. Service ports that it has not found to work are left out then."""
_FIRST_RETRY = 1.0
"""Seconds until what was left out is tried again for the first time."""
_MOST_REPORTED = 100
"""Limit for the Services that are reported after one sync."""
_NOT_TRIED = "not tried again yet, because many service ports fail"


class Isolation:
    """The service ports of one family that are left out, and the search for them. Pure.

    Times are seconds of any one clock.
    """

    def __init__(self, *, longest: float) -> None:
        """*longest* is the upper bound of the delay in seconds until what was left out is tried again."""
        self.left_out: dict[ServicePortKey, str] = {}
        """Service ports that the backend failed to program, with the reason."""
        self.trial: tuple[ServicePortKey, ...] | None = None
        """Those that the next sync tries; (): none, to learn whether it succeeds without all suspects.

        None: there is no search.
        """
        self.retry_at: float | None = None
        """When all that are left out are tried again; None: none is."""
        self._groups: deque[tuple[ServicePortKey, ...]] = deque()
        """Suspects that wait for their trial."""
        self._waiting: set[ServicePortKey] = set()
        self._reasons: dict[ServicePortKey, str] = {}
        """Why suspects were left out before this search."""
        self._failures = 0
        self._backoff = Backoff(first=_FIRST_RETRY, longest=longest)

    @property
    def withheld(self) -> Set[ServicePortKey]:
        """The service ports that the next sync must not contain."""
        return self._waiting | self.left_out.keys() if self._waiting else self.left_out.keys()

    @property
    def unserved(self) -> dict[ServicePortKey, str]:
        """The service ports that are not served, or not as they should be, with the reason."""
        if not self._reasons:
            return dict(self.left_out)
        return {key: reason for key, reason in self._reasons.items() if key in self._waiting} | self.left_out

    def leave_out(self, named: Iterable[ServicePortKey], reason: str, now: float) -> None:
        """Leave out the service ports that the backend has named."""
        self.left_out |= dict.fromkeys(named, reason)
        self._retry_later(now)

    def search(self, suspects: Collection[ServicePortKey], now: float, *, first_without: bool) -> None:
        """Begin to search among *suspects*. *first_without*: the first sync is made without all of them."""
        self._failures = 0
        self._split(tuple(suspects))
        if first_without:
            self.trial = ()
        else:
            self._next(now)

    def add(self, changed: Iterable[ServicePortKey], now: float) -> None:
        """Have service ports that have changed meanwhile tried next, by themselves.

        Those that were left out need not wait for their time.
        """
        group = tuple(changed)
        if not group:
            return
        for key in group:
            if (reason := self.left_out.pop(key, "")):
                self._reasons[key] = reason
        self._groups.appendleft(group)
        self._waiting.update(group)
        if self.trial is None:
            self._failures = 0
            self._next(now)

    def retry(self, now: float) -> None:
        """Try all that are left out again, if it is time."""
        if self.trial is None and self.retry_at is not None and now >= self.retry_at:
            suspects, self.left_out = self.left_out, {}
            self._reasons = suspects
            self._failures = 0
            self._groups.append(tuple(suspects))
            self._waiting.update(suspects)
            self._next(now)

    def forget(self) -> None:
        """Leave nothing out any more: another backend serves."""
        self.left_out, self._reasons, self.trial, self.retry_at = {}, {}, None, None
        self._groups.clear()
        self._waiting.clear()
        self._backoff.reset()

    def succeeded(self, now: float) -> None:
        """Take the success of a sync with `trial`."""
        if self.trial is None:
            return
        for key in self.trial:
            self._reasons.pop(key, None)
        self._next(now)

    def failed(self, reason: str, now: float) -> bool:
        """Take the failure of a sync with `trial`. Return False if no service port is its cause."""
        if self.trial is None:
            return False
        if not self.trial:
            self.trial = None
            self._groups.clear()
            self._waiting.clear()
            return False
        self._failures += 1
        if len(self.trial) == 1:
            self.left_out[self.trial[0]] = reason
        else:
            self._split(self.trial)
        if self._failures >= MOST_FAILURES:
            self.left_out |= {key: self._reasons.get(key, _NOT_TRIED) for key in self._waiting}
            self._groups.clear()
            self._waiting.clear()
        self._next(now)
        return True

    def _split(self, group: tuple[ServicePortKey, ...]) -> None:
        half = (len(group) + 1) // 2
        self._groups.extendleft(part for part in (group[half:], group[:half]) if part)
        self._waiting.update(group)

    def _next(self, now: float) -> None:
        """Choose the next trial, or end the search."""
        if self._groups:
            self.trial = self._groups.popleft()
            self._waiting.difference_update(self.trial)
        else:
            self.trial, self._reasons = None, {}
            self._retry_later(now)

    def _retry_later(self, now: float) -> None:
        if self.left_out:
            self.retry_at = now + self._backoff.delay()
        else:
            self.retry_at = None
            self._backoff.reset()


class UnservedServices(SyncObserver):
    """Reports service ports that are not served, or only in part, and counts them."""

    def __init__(self, report: Callable[[ServiceName, str], None]) -> None:
        """*report* is told of each service port once, with the reason."""
        self._report = report
        self._unserved: dict[Family, Mapping[ServicePortKey, str]] = {}

    def sync_succeeded(self, synced: Synced) -> None:
        unserved = synced.plans.unserved
        before = self._unserved.get(synced.family, {})
        self._unserved[synced.family] = unserved
        new = (key for key in unserved if key not in before)
        for key in islice(new, _MOST_REPORTED):
            self._report(key.service, f"{key} is not served: {unserved[key]}")

    def measure(self) -> list[Measurement]:
        """Return the number of service ports that are not served, by family. From any thread."""
        return [
            Measurement("kproxy_unserved_service_ports",
                        "Service ports that are not programmed, or only in part", "gauge", len(unserved),
                        {"ip_family": family.label})
            for family, unserved in list(self._unserved.items())
        ]  # fmt: skip
