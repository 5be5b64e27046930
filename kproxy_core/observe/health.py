"""What this proxy says about its own health: kube-proxy 1.36, pkg/proxy/healthcheck/proxy_health.go.

One lock, no I/O: the sync loop reports, the HTTP server asks. Beyond kube-proxy, ``/healthz``
waits for the first successful sync, and the body names the problem of a failing one.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kproxy_core.model.address import Family


class HealthAnswer(NamedTuple):
    """The answer to one health request."""

    ok: bool
    body: bytes
    """One line of JSON."""


class _FamilyState:
    __slots__ = ("pending_since", "problem", "updated_ns")

    def __init__(self) -> None:
        self.updated_ns: int | None = None
        """Wall clock time of the last successful sync, in nanoseconds."""
        self.pending_since: float | None = None
        """Monotonic time of the oldest request since then."""
        self.problem = ""


class ProxyHealth:
    """Health per IP family, and whether load balancers should use this node."""

    def __init__(
        self,
        families: Sequence[Family],
        *,
        timeout: float,
        node_required: bool,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """*timeout*: seconds that a requested sync may stay undone (2 x syncPeriod).

        *node_required*: until a Node object is seen the node is not eligible (with an API
        server). Otherwise a missing Node object does no harm (manifests).
        """
        self._timeout = timeout
        self._node_eligible = not node_required
        self._wall_ns = wall_ns
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._states = {family: _FamilyState() for family in families}
        self._held = ""

    def hold(self, reason: str) -> None:
        """Not ready, because of *reason*, until `release`; alive and serving all the same."""
        with self._lock:
            self._held = reason

    def release(self) -> None:
        """The reason given to `hold` is gone."""
        self.hold("")

    def queued(self, family: Family) -> None:
        """A sync is requested; call it for each request once the sources are complete."""
        with self._lock:
            state = self._states[family]
            if state.pending_since is None:
                state.pending_since = self._monotonic()

    def synced(self, family: Family) -> None:
        """A sync succeeded: nothing is pending, no problem is left."""
        with self._lock:
            state = self._states[family]
            state.updated_ns = self._wall_ns()
            state.pending_since = None
            state.problem = ""

    def failed(self, family: Family, problem: str) -> None:
        """A sync failed: *problem* is shown until one succeeds. What is pending stays so."""
        with self._lock:
            self._states[family].problem = problem

    def node_seen(self, eligible: bool) -> None:
        """The Node object was added or changed. (Its deletion changes nothing.)"""
        with self._lock:
            self._node_eligible = eligible

    def healthy(self) -> bool:
        """Every family has synced at least once and none is overdue (node eligibility not counted)."""
        with self._lock:
            return self._in_sync() and self._alive(self._monotonic())

    def healthz(self) -> HealthAnswer:
        """Ready: healthy, not held, and the node is eligible."""
        with self._lock:
            healthy = self._in_sync() and self._alive(self._monotonic()) and not self._held
            return self._answer(healthy and self._node_eligible, healthy, with_node=True)

    def livez(self) -> HealthAnswer:
        """Alive: no family is overdue. Waiting for the first sync is no reason to be restarted."""
        with self._lock:
            alive = self._alive(self._monotonic())
            return self._answer(alive, alive, with_node=False)

    def _in_sync(self) -> bool:
        return all(state.updated_ns is not None for state in self._states.values())

    def _alive(self, now: float) -> bool:
        return not any(self._overdue(state, now) for state in self._states.values())

    def _overdue(self, state: _FamilyState, now: float) -> bool:
        return state.pending_since is not None and now - state.pending_since >= self._timeout

    def _answer(self, ok: bool, healthy: bool, with_node: bool) -> HealthAnswer:
        now_ns, now = self._wall_ns(), self._monotonic()
        newest = max((state.updated_ns or 0 for state in self._states.values()), default=0)
        document: dict[str, object] = {
            "lastUpdated": _rfc3339(now_ns if ok else newest),
            "currentTime": _rfc3339(now_ns),
        }
        if with_node:
            document["nodeEligible"] = self._node_eligible
        document["healthy"] = healthy
        status = {
            family.label: {"lastUpdated": _rfc3339(state.updated_ns or 0),
                           "healthy": not self._overdue(state, now)}
            for family, state in self._states.items()
            if state.updated_ns is not None or state.pending_since is not None
        }
        if status:
            document["status"] = status
        problems = [
            f"{family.label}: {state.problem or 'no sync has succeeded yet'}"
            for family, state in self._states.items() if state.problem or state.updated_ns is None
        ]
        if self._held:
            problems.append(self._held)
        if problems:
            document["problems"] = problems
        return HealthAnswer(ok, json.dumps(document, separators=(",", ":")).encode())


def _rfc3339(nanoseconds: int) -> str:
    """Wall clock time in UTC with up to 9 fractional digits, as Go writes it; 0: Go's zero time."""
    if not nanoseconds:
        return "0001-01-01T00:00:00Z"
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    fraction = f".{rest:09d}".rstrip("0").rstrip(".")
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + fraction + "Z"
