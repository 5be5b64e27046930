"""Resets of TCP connections to removed endpoints, after syncs (`plan.removed_endpoints`).

Connection tracking knows the connections that rules translate, and a table of nf_tables resets them, which
outlives this process as the connections do. Relays and backends reset connections that they make themselves.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple
from typing import Protocol as TypingProtocol
from weakref import WeakSet

from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.errors import BackendError
from kproxy_core.contract.values import IsRemoved, Leftovers
from kproxy_core.linux.conntrack import find_pairs
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.resets import Pair, ResetTable, delete_resets
from kproxy_core.model.address import Address, Family, Protocol, Socket
from kproxy_core.model.service import Destination, ServicePortKey
from kproxy_core.model.timing import Backoff
from kproxy_core.plan.removed_endpoints import SECOND_LOOK, RemovedEndpoints, dialled_service_port
from kproxy_core.plan.service_plan import Frontend, ServicePlan
from kproxy_core.sync.observer import Synced, SyncObserver
from kproxy_core.sync.plans import FamilyPlans

log = logging.getLogger("kproxy.run")

_SETTLED = 0.1
"""Seconds between the loss of an endpoint and the search: it may only have moved to another EndpointSlice."""
_REST = 10.0
"""Seconds between searches while connections to removed endpoints are left."""
_LONGEST_RETRY = 60.0
"""Seconds after a failed search."""
_REST_SHARE = 2
"""The shortest rest after a search, as a multiple of its CPU time: a busy machine makes it longer, but not
costlier."""

Find = Callable[[Family, IsRemoved, Collection[Destination] | None], Collection[Pair]]
"""Returns the pairs of removed endpoints that have connections, of these endpoints only; None: of all."""


class Table(TypingProtocol):
    """See `ResetTable`."""

    def read(self) -> frozenset[Pair]: ...

    def write(self, wanted: Collection[Pair]) -> None: ...

    def distrust(self) -> None: ...


class ResetResult(NamedTuple):
    family: Family
    pairs: int
    """Pairs of a frontend and a removed endpoint that have connections."""
    reset: int
    """Connections of relays and sockets that were reset."""
    problem: str
    """Why a search or a change failed, which is repeated; "": it did not."""


def clean_up_resets(*, dry_run: bool) -> Leftovers:
    """Delete the tables of both families: no connection is reset any more."""
    removed: list[str] = []
    errors: list[str] = []
    for family in Family:
        try:
            removed += delete_resets(family, dry_run=dry_run)
        except HostError as error:
            errors.append(str(error))
    return Leftovers(tuple(removed), tuple(errors), mode="resets")


def find_tracked(
    family: Family, is_removed: IsRemoved, endpoints: Collection[Destination] | None
) -> Collection[Pair]:
    """Search the kernel's table of connections; a `Find`. Raises HostError."""
    def is_wanted(dialled: Socket, endpoint: Destination) -> bool:
        return is_removed(frontend_of(dialled), endpoint)

    return [Pair(*each) for each in find_pairs(family, is_wanted, endpoints)]


def frontend_of(dialled: Socket) -> Frontend:
    address, port = dialled
    return Frontend(address, Protocol.TCP, port)


class _FamilyResets:
    """The state of one family, which the loop's thread and that of the searches share."""

    def __init__(self, table: Table) -> None:
        self.lock = threading.Lock()
        """Guards everything else."""
        self.table = table
        self.removed = RemovedEndpoints()
        self.pairs: frozenset[Pair] = frozenset()
        """Those in the table."""
        self.was_read = False
        """What an earlier process has left in the table is known."""
        self.is_synced = False
        self.due: float | None = None
        """When to search; None: there is nothing to search for."""
        self.instances: WeakSet[BackendInstance] = WeakSet()
        """All that have served: connections outlive their mode."""
        self.serving: BackendInstance | None = None
        self._owner: Callable[[Frontend], ServicePlan | None] = lambda _: None
        self._node_port_addresses: frozenset[Address] = frozenset()
        self.own: frozenset[Address] = frozenset()
        """Addresses of the node."""
        self.failures = Backoff(longest=_LONGEST_RETRY)

    def follow(self, plans: FamilyPlans) -> None:
        self.own = plans.addresses
        self._owner = plans.owner
        self._node_port_addresses = frozenset(plans.node.node_port_addresses)

    def key_of(self, frontend: Frontend) -> ServicePortKey | None:
        """Return the service port that is dialled at *frontend*. From any thread."""
        return dialled_service_port(frontend, self._owner, self._node_port_addresses)

    def is_removed(self, pair: Pair) -> bool:
        key = self.key_of(frontend_of(pair.dialled))
        return key is not None and self.removed.is_removed(key, pair.endpoint)

    def spare_returned(self) -> None:
        """Stop resetting connections to endpoints that have returned. Raises HostError, OSError."""
        if not self.was_read:
            self.pairs = self.table.read()
            self.was_read = True
        if not all(map(self.is_removed, self.pairs)):
            self.write(self.pairs)

    def write(self, pairs: Iterable[Pair]) -> None:
        """Have connections of those *pairs* reset whose endpoint is removed. Raises HostError, OSError."""
        removed = frozenset(filter(self.is_removed, pairs))
        self.table.write(removed)
        self.pairs = removed


def _start(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="kproxy-resets", daemon=True).start()


class ConnectionResets(SyncObserver):
    """Resets connections to endpoints that Services have lost, where these ask for it.

    An endpoint that returns is spared before the backend can choose it again. Searches for connections run on
    a thread of their own, which exists while there is something to search for.
    """

    def __init__(
        self, families: Sequence[Family], done: Callable[[ResetResult], None], *,
        relayed: Callable[[Family, IsRemoved], int] = lambda _family, _is_removed: 0,
        table: Callable[[Family], Table] = ResetTable, find: Find = find_tracked,
        clock: Callable[[], float] = time.monotonic, start: Callable[[Callable[[], None]], None] = _start,
    ) -> None:
        """*done* is told the result of each search and of each failed change, on either thread.

        *relayed* resets connections that the core relays, and returns their number. *start* starts the
        thread.
        """
        self._relayed = relayed
        self._families = {family: _FamilyResets(table(family)) for family in families}
        self._done = done
        self._find = find
        self._clock = clock
        self._problems: dict[Family, str] = {}
        """Those that were logged."""
        self._waking = threading.Condition()
        """Guards `_FamilyResets.due` and the thread."""
        self._start = start
        self._runs = False
        """The thread exists."""

    def sync_planned(self, plans: FamilyPlans) -> None:
        of = self._families[plans.family]
        if not plans.reset_ports and of.was_read:
            return
        with of.lock:
            of.follow(plans)
            for key in plans.reset_ports:
                of.removed.expect(key, plans.kept(key), is_first=not of.is_synced)
            self._spare_returned(plans.family, of)

    def sync_succeeded(self, synced: Synced) -> None:
        of = self._families[synced.family]
        is_missing = synced.rules_were_missing and bool(of.pairs)
        with of.lock:
            of.instances.add(synced.instance)
            of.serving = synced.instance
            if not synced.follow_ups.reset_ports and of.is_synced and not is_missing:
                return
            of.follow(synced.plans)
            now = self._clock()
            reset_ports = synced.follow_ups.reset_ports
            has_lost = [of.removed.put(key, synced.plans.kept(key), now) for key in reset_ports]
            of.is_synced = True
            self._spare_returned(synced.family, of)
            if is_missing:
                of.table.distrust()
            if not is_missing and not any(has_lost):
                return
        self._search_at(of, now + _SETTLED)

    def due(self, family: Family) -> float | None:
        """Return when connections are searched for next; None: there is nothing to search for."""
        return self._families[family].due

    def search(self, family: Family) -> None:
        """Search for connections to removed endpoints, have them reset, and settle the next search."""
        of, began, cpu = self._families[family], self._clock(), time.thread_time()
        with of.lock:
            search = of.removed.search(began, of.own)

        def is_removed(of_port: Frontend | ServicePortKey, endpoint: Destination) -> bool:
            key = of.key_of(of_port) if isinstance(of_port, Frontend) else of_port
            return key is not None and all(
                each.is_removed(key, endpoint) for each in (search, of.removed))  # It may have returned.

        reset, problem = 0, ""
        try:
            found = self._find(family, is_removed, search.endpoints)
            with of.lock:
                of.write(found)
            reset = self._relayed(family, is_removed) + self._reset_by_backends(family, is_removed)
            with of.lock:
                of.removed.settle(search, (
                    (key, pair.endpoint) for pair in found if (key := of.key_of(frontend_of(pair.dialled)))))
        except (HostError, OSError, BackendError) as error:
            problem = str(error)
        self._settle(of, began, _REST_SHARE * (time.thread_time() - cpu), failed=bool(problem))
        self._report(ResetResult(family, len(of.pairs), reset, problem))

    def _reset_by_backends(self, family: Family, is_removed: IsRemoved) -> int:
        """Raises BackendError or HostError of the backend that serves: one that retires may be closed."""
        of = self._families[family]
        with of.lock:
            instances, serving = list(of.instances), of.serving
        reset = 0
        for instance in instances:
            try:
                reset += instance.reset_connections(family, is_removed)
            except (BackendError, HostError):
                if instance is serving:
                    raise
        return reset

    def _spare_returned(self, family: Family, of: _FamilyResets) -> None:
        try:
            of.spare_returned()
        except (HostError, OSError) as error:
            self._search_at(of, self._clock() + of.failures.delay())
            self._report(ResetResult(family, len(of.pairs), 0, str(error)))

    def _report(self, result: ResetResult) -> None:
        if result.problem and not self._problems.get(result.family):
            log.warning("could not reset connections to removed endpoints", extra={
                "fields": {"ip_family": result.family.label, "error": result.problem}})
        self._problems[result.family] = result.problem
        self._done(result)

    # When to search.

    def _search_at(self, of: _FamilyResets, at: float) -> None:
        with self._waking:
            of.due = at if of.due is None else min(of.due, at)
            self._waking.notify()
            if not self._runs:
                self._runs = True
                self._start(self._run)

    def _settle(self, of: _FamilyResets, began: float, rest: float, *, failed: bool) -> None:
        """Decide when to search again, after a search that began at *began*, and a *rest* in seconds."""
        now = self._clock()
        if not failed:
            of.failures.reset()
        with of.lock:
            newest = of.removed.newest
        with self._waking:
            times = [] if of.due is None else [of.due]
            if failed:
                times.append(now + of.failures.delay())
            elif newest is not None:
                times.append(newest + SECOND_LOOK if newest + SECOND_LOOK > began else now + _REST)
            of.due = max(min(times), now + rest) if times else None

    def _next(self) -> Family | None:
        """Wait until a family is due, and return it; None: none will be, and the thread ends."""
        with self._waking:
            while times := {family: of.due for family, of in self._families.items() if of.due is not None}:
                family = min(times, key=times.__getitem__)
                rest = times[family] - self._clock()
                if rest <= 0:
                    self._families[family].due = None
                    return family
                self._waking.wait(rest)
            self._runs = False
            return None

    def _run(self) -> None:
        while (family := self._next()) is not None:
            self.search(family)
