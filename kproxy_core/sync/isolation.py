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
_MOST_WITHOUT_SUCCESS = 8
"""Limit of the failed syncs of a search among all, beyond one for each halving, until one succeeds."""
_FIRST_RETRY = 1.0
"""Seconds until what was left out is tried again for the first time."""
_LONGEST_UNPROVEN = 30.0
"""Upper bound in seconds of the delay while the machine may be the cause: nothing was written since."""
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
        """Of this search."""
        self._most_futile: int | None = None
        """Failures after which a search without success ends; None: the kernel accepts the other plans."""
        self._accused: set[ServicePortKey] = set()
        """Those left out in this search that were not before."""
        self._is_proven = True
        """Something was written since a service port was left out: the machine is not the cause."""
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

    @property
    def must_resync(self) -> bool:
        """The trial is to show that the kernel accepts a full sync."""
        return self.trial is not None and (not self.trial or self._most_futile is not None)

    def leave_out(self, named: Iterable[ServicePortKey], reason: str, now: float) -> None:
        """Leave out the service ports that the backend has named."""
        self.left_out |= dict.fromkeys(named, reason)
        self._backoff.reset()
        self._retry_later(now)

    def search(self, suspects: Collection[ServicePortKey], now: float, *, first_without: bool) -> None:
        """Begin to search among *suspects*. *first_without*: the first sync is made without all of them.

        Otherwise they are all that exist, and the search ends if it looks as if none is the cause.
        """
        most = None if first_without else len(suspects).bit_length() + _MOST_WITHOUT_SUCCESS
        self._begin(most)
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
            if key in self.left_out:
                self._reasons[key] = self.left_out.pop(key)
                self._accused.discard(key)
        self._groups.appendleft(group)
        self._waiting.update(group)
        if self.trial is None:
            self._begin(None)
            self._next(now)

    def retry(self, now: float) -> None:
        """Try all that are left out again, if it is time."""
        if self.trial is None and self.retry_at is not None and now >= self.retry_at:
            suspects, self.left_out = self.left_out, {}
            self._reasons = suspects
            self._begin(None)
            self._groups.append(tuple(suspects))
            self._waiting.update(suspects)
            self._next(now)

    def forget(self) -> None:
        """Leave nothing out any more: another backend serves."""
        self.left_out, self._reasons, self.trial, self.retry_at = {}, {}, None, None
        self._groups.clear()
        self._waiting.clear()
        self._begin(None)
        self._backoff.reset()
        self._is_proven = True

    def succeeded(self, now: float, *, wrote: bool) -> None:
        """Take the success of a sync, with `trial` if there is one. *wrote*: something, to the kernel."""
        self._is_proven = self._is_proven or wrote
        if self.trial is None:
            return
        if self._most_futile is not None:
            self._most_futile = None
            self._pardon()
        for key in self.trial:
            self._reasons.pop(key, None)
        self._next(now)

    def failed(self, reason: str, now: float) -> bool:
        """Take the failure of a sync with `trial`. Return False if no service port is its cause."""
        if self.trial is None:
            return False
        self._failures += 1
        if not self.trial or (self._most_futile is not None and self._failures > self._most_futile):
            self.trial = None
            self._pardon()
            self._groups.clear()
            self._waiting.clear()
            self.left_out |= self._reasons
            self._reasons = {}
            self._retry_later(now)
            return False
        if len(self.trial) == 1:
            self._accuse(self.trial[0], reason)
        else:
            self._split(self.trial)
        if self._failures >= MOST_FAILURES:
            self.left_out |= {key: self._reasons.get(key, _NOT_TRIED) for key in self._waiting}
            self._groups.clear()
            self._waiting.clear()
        self._next(now)
        return True

    def _accuse(self, key: ServicePortKey, reason: str) -> None:
        if key not in self._reasons:
            self._accused.add(key)
            self._backoff.reset()
            self._is_proven = False
        self.left_out[key] = reason

    def _begin(self, most_futile: int | None) -> None:
        self._failures, self._most_futile, self._accused = 0, most_futile, set()

    def _pardon(self) -> None:
        """Suspect again those that this search has found: perhaps nothing could be written then."""
        if group := tuple(self._accused):
            self._accused = set()
            for key in group:
                del self.left_out[key]
            self._groups.append(group)
            self._waiting.update(group)

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
            delay = self._backoff.delay()
            self.retry_at = now + (delay if self._is_proven else min(delay, _LONGEST_UNPROVEN))
        else:
            self.retry_at = None
            self._backoff.reset()


class UnservedServices(SyncObserver):
    """Reports service ports that are not served, or only in part, and counts them."""

    def __init__(self, report: Callable[[ServiceName, str], None]) -> None:
        """*report* is told of each service port once, with the reason."""
        self._report = report
        self._unserved: dict[Family, Mapping[ServicePortKey, str]] = {}
        self._left_out: dict[Family, Mapping[ServiceName, tuple[str, ...]]] = {}

    def sync_succeeded(self, synced: Synced) -> None:
        unserved = synced.plans.unserved
        before = self._unserved.get(synced.family, {})
        self._unserved[synced.family] = unserved
        new = (key for key in unserved if key not in before)
        for key in islice(new, _MOST_REPORTED):
            self._report(key.service, f"{key} is not served: {unserved[key]}")
        known, budget = self._left_out.get(synced.family, {}), synced.plans.budget
        if known != budget.left_out:
            self._left_out[synced.family] = dict(budget.left_out)
            changed = (name for name in budget.left_out if name not in known)
            for name in islice(changed, _MOST_REPORTED):
                self._report(name, f"not served in full: {budget.describe(name)}")

    def measure(self) -> list[Measurement]:
        """Return the number of service ports that are not served, by family. From any thread."""
        return [
            Measurement("kproxy_unserved_service_ports",
                        "Service ports that are not programmed, or only in part", "gauge", len(unserved),
                        {"ip_family": family.label})
            for family, unserved in list(self._unserved.items())
        ]  # fmt: skip
