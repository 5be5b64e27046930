"""The proxy's own health, and health check node ports (kube-proxy 1.36, pkg/proxy/healthcheck; KEP-1669)."""

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from kproxy_core.model.address import Address, Family
from kproxy_core.model.node import NodeObject, NodeView
from kproxy_core.model.service import ServiceName
from kproxy_core.observe.messages import Answer
from kproxy_core.observe.server import HttpServer, Listener
from kproxy_core.plan.health_checks import HealthCheck
from kproxy_core.sync.observer import Synced, SyncFailure, SyncObserver

log = logging.getLogger("kproxy.health")


class _FamilyState(Struct):
    updated_ns: int | None = None
    """Wall clock time of the last successful sync, in nanoseconds."""
    pending_since: float | None = None
    """Monotonic time of the oldest request since then."""
    problem: str = ""
    foreign_changes: int = 0


class Problem(NamedTuple):
    """Something that is wrong, in words."""

    about: str
    """What it concerns, such as ``syncs`` or ``objects``: one of few."""
    text: str


_MOST_NAMED = 20
"""Limit for the problems of one reader that are named; the others are counted."""


class Condition(Struct, frozen=True, kw_only=True):
    """The proxy's health at one moment. Times are in seconds since the epoch."""

    is_well: bool
    """Every family is synced, no change is overdue, and nothing else is wrong."""
    since: float
    """When `is_well` became what it is."""
    problems: list[str]
    last_sync: float | None
    """The newest successful sync; None: none yet."""
    lag: float
    """Age in seconds of the oldest change that is not programmed yet; 0: everything is."""
    foreign_changes: int
    """Changes by other processes that were noticed, each of which is repaired."""


class ProxyHealth(SyncObserver):
    """Health per IP family, and the node's eligibility for load balancers. Any thread may call; no I/O.

    Unlike kube-proxy, ``/healthz`` waits for the first successful sync, and the body shows the error of a
    failing one.
    """

    def __init__(
        self, families: Sequence[Family], *, timeout: float, node_required: bool,
        wall_ns: Callable[[], int] = time.time_ns, monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """*timeout*: limit in seconds for a pending sync (2 x syncPeriod).

        *node_required*: the node is not eligible without its Node object (API server). Otherwise a missing
        Node object is ignored (manifests).
        """
        self._timeout = timeout
        self._node_eligible = not node_required
        self._wall_ns = wall_ns
        self._monotonic = monotonic
        self._lock = threading.RLock()
        self._states = {family: _FamilyState() for family in families}
        self._held = ""
        self._others: dict[tuple[Family | None, str], str] = {}
        self._readers: dict[str, Callable[[], Iterable[str]]] = {}
        self._read: Sequence[Problem] = ()
        """What `_readers` said when they were asked last."""
        self._was_well = False
        self._since_ns = wall_ns()

    def report(self, what: str, family: Family | None, problem: str) -> None:
        """Show the *problem* of something else than the syncs; "": it is over. The proxy is healthy.

        *family* None: it concerns no family more than the other.
        """
        with self._lock:
            self._others.pop((family, what), None)
            if problem:
                self._others[family, what] = problem
            self._note()

    def include(self, about: str, read: Callable[[], Iterable[str]]) -> None:
        """Show what *read* returns, which is asked on the threads of those who ask. The proxy is healthy."""
        self._readers[about] = read

    def hold(self, reason: str) -> None:
        """Report not ready, with *reason*, until `release`. The proxy is still alive and serving."""
        with self._lock:
            self._held = reason
            self._note()

    def release(self) -> None:
        self.hold("")

    def sync_requested(self, family: Family) -> None:
        with self._lock:
            state = self._states[family]
            if state.pending_since is None:
                state.pending_since = self._monotonic()

    def damage_found(self, family: Family) -> None:
        with self._lock:
            self._states[family].foreign_changes += 1
            self.sync_requested(family)

    def sync_succeeded(self, synced: Synced) -> None:
        """Nothing is pending. The service ports that could not be served are shown."""
        with self._lock:
            state = self._states[synced.family]
            state.updated_ns = self._wall_ns()
            state.pending_since = None
            state.problem = synced.problem
            self._note()

    def sync_failed(self, failure: SyncFailure) -> None:
        """The error is shown until a sync succeeds."""
        with self._lock:
            self._states[failure.family].problem = str(failure.error)
            self._note()

    def node_seen(self, node: NodeObject) -> None:
        with self._lock:
            self._node_eligible = node.eligible

    def healthy(self) -> bool:
        """Return True if every family has synced and none is overdue, whatever the node's eligibility."""
        with self._lock:
            return self._alive() and all(state.updated_ns is not None for state in self._states.values())

    def healthz(self, problems: Sequence[str] | None = None) -> Answer:
        """Answer for readiness: healthy, not held, and the node is eligible. *problems*, if known already."""
        if problems is None:
            problems = self.problems()
        with self._lock:
            healthy = self.healthy() and not self._held
            return self._answer(healthy and self._node_eligible, healthy, problems, with_node=True)

    def livez(self) -> Answer:
        """Answer for liveness: no family is overdue. A restart would not speed up the first sync."""
        problems = self.problems()
        with self._lock:
            alive = self._alive()
            return self._answer(alive, alive, problems, with_node=False)

    def alive(self) -> bool:
        """Return what `livez` answers."""
        with self._lock:
            return self._alive()

    def condition(self) -> Condition:
        problems = self.problems()
        with self._lock:
            now, states = self._monotonic(), self._states.values()
            newest = max((state.updated_ns or 0 for state in states), default=0)
            pending = [state.pending_since for state in states if state.pending_since is not None]
            return Condition(
                is_well=self._was_well, since=self._since_ns / 1e9, problems=problems,
                last_sync=newest / 1e9 if newest else None, lag=now - min(pending, default=now),
                foreign_changes=sum(state.foreign_changes for state in states))

    def problems(self) -> list[str]:
        """Return why the proxy is not ready, and what is not served as meant. Not on the loop's thread.

        Of each reader, `_MOST_NAMED` problems at most, and the number of the others.
        """
        return self._named(self.all_problems())

    def last_problems(self) -> list[str]:
        """Return `problems`, with what readers said when they were asked last. For the loop's thread."""
        with self._lock:
            return self._named([*self._own_problems(), *self._read])

    def _named(self, problems: Iterable[Problem]) -> list[str]:
        named: list[str] = []
        of_reader = Counter[str]()
        for about, text in problems:
            of_reader[about] += 1
            if about not in self._readers or of_reader[about] <= _MOST_NAMED:
                named.append(text)
        more = {about: count - _MOST_NAMED for about, count in of_reader.items() if about in self._readers}
        return [*named, *(f"{about}: {count:,} more problems" for about, count in more.items() if count > 0)]

    def all_problems(self) -> list[Problem]:
        """Return every problem. Not on the loop's thread, because readers are asked."""
        read: list[Problem] = []
        for about, reader in self._readers.items():
            try:
                read += [Problem(about, text) for text in reader()]
            except Exception:  # a probe that fails would end a proxy that serves
                log.exception("bug: problems cannot be told", extra={"fields": {"about": about}})
        with self._lock:
            self._read = read
            self._note()
            return [*self._own_problems(), *read]

    def _own_problems(self) -> list[Problem]:
        now = self._monotonic()
        found = [Problem("syncs", f"{family.label}: {problem}") for family, state in self._states.items()
                 if (problem := self._problem(state, now))]
        found += [
            Problem(what, f"{family.label}: {what}: {problem}" if family else f"{what}: {problem}")
            for (family, what), problem in self._others.items()]
        return [*found, Problem("start", self._held)] if self._held else found

    def _note(self) -> None:
        """Remember when the proxy became well, or no longer so: if it is late, since its oldest change."""
        is_well = not self._read and not self._own_problems()
        if is_well != self._was_well:
            now = self._monotonic()
            late = [now - (state.pending_since or now) for state in self._states.values()
                    if self._overdue(state, now)]
            self._was_well = is_well
            self._since_ns = self._wall_ns() - int(max(late, default=0) * 1e9)

    def _problem(self, state: _FamilyState, now: float) -> str:
        if state.problem:
            return state.problem
        if self._overdue(state, now):
            return f"changes have been waiting for {now - (state.pending_since or now):.0f} s"
        return "" if state.updated_ns is not None else "no sync has succeeded yet"

    def _alive(self) -> bool:
        now = self._monotonic()
        return not any(self._overdue(state, now) for state in self._states.values())

    def _overdue(self, state: _FamilyState, now: float) -> bool:
        return state.pending_since is not None and now - state.pending_since >= self._timeout

    def _answer(self, ok: bool, healthy: bool, problems: Sequence[str], *, with_node: bool) -> Answer:
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
        if problems:
            document["problems"] = problems
        body = json.dumps(document, separators=(",", ":")).encode()
        return Answer(200 if ok else 503, body, "application/json")


def _rfc3339(nanoseconds: int) -> str:
    """Format wall clock time in UTC as Go does, with up to 9 fractional digits; 0: Go's zero time."""
    if not nanoseconds:
        return "0001-01-01T00:00:00Z"
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    fraction = f".{rest:09d}".rstrip("0").rstrip(".")
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + fraction + "Z"


class ServiceHealth(SyncObserver):
    """The health check node ports of one family, which follow the acknowledged plans.

    Called from one thread; the server's thread answers.
    """

    def __init__(
        self, family: Family, server: HttpServer, healthy: Callable[[], bool],
        failed: Callable[[ServiceName, str], None] = lambda service, problem: None,
    ) -> None:
        """*healthy*: see `ProxyHealth.healthy`.

        *failed* is called on the server's thread when a Service's port cannot be opened. That is retried.
        """
        self._family = family
        self._server = server
        self._healthy = healthy
        self._failed = failed
        self._addresses: tuple[Address, ...] = ()
        self._services: dict[ServiceName, HealthCheck] = {}
        self._listeners: dict[ServiceName, Listener] = {}

    def sync_succeeded(self, synced: Synced) -> None:
        if synced.family is self._family:
            self.apply(synced.follow_ups.health_checks)

    def node_changed(self, node: NodeView) -> None:
        """Listen on the addresses of *node* that serve node ports. Ignores the other family's."""
        if node.family is not self._family:
            return
        anywhere = (node.family.unspecified,)
        addresses = anywhere if node.node_ports_anywhere else node.node_port_addresses
        if node.node_ports_on_loopback and not node.node_ports_anywhere:
            addresses = (*addresses, node.family.loopback)
        if addresses == self._addresses:
            return
        self._addresses = addresses
        for service in self._services:
            self._close(service)
        for service in self._services:
            self._open(service)

    def apply(self, changes: Mapping[ServiceName, HealthCheck | None]) -> None:
        """Open, update and close ports. None: the Service has none."""
        opening = []
        for service, check in changes.items():
            before = self._services.get(service)
            if before is not None and (check is None or check.port != before.port):
                self._close(service)
            if check is None:
                self._services.pop(service, None)
                continue
            self._services[service] = check
            if service not in self._listeners:
                opening.append(service)
        for service in opening:  # after all are closed: a port may move from one Service to another
            self._open(service)

    def _open(self, service: ServiceName) -> None:
        port = self._services[service].port
        self._listeners[service] = self._server.listen(
            f"health check node port of {service}",
            [(address, port) for address in self._addresses],
            lambda _: self._answer(service),
            failed=lambda error: self._failed(service, f"port {port} cannot be opened: {error}"),
        )

    def _close(self, service: ServiceName) -> None:
        self._listeners.pop(service).close()

    def _answer(self, service: ServiceName) -> Answer:
        check = self._services.get(service)
        if check is None:
            return Answer(200, b"")  # as kube-proxy, for a port removed while the client connected
        healthy = self._healthy()
        document = {
            "service": {"namespace": service.namespace, "name": service.name},
            "localEndpoints": check.ready,
            "serviceProxyHealthy": healthy,
        }
        return Answer(
            200 if check.ready and healthy else 503,
            json.dumps(document, indent="\t").encode(),
            "application/json",
            (("X-Load-Balancing-Endpoint-Weight", str(check.ready)),),
        )
