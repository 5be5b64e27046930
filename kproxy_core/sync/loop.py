"""The one thread where decisions are made.

Whatever other threads have to say waits in an inbox, as a call to make here. A turn plans
what changed, hands it to the backend, and once that has acknowledged it lets the readers
of the plans follow: health check node ports, stale UDP flows, metrics.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from kproxy_core.backend.api import Scope, Update
from kproxy_core.backend.instance import BackendInstance
from kproxy_core.model.address import Address, Family
from kproxy_core.observe.service_health import ServiceHealth
from kproxy_core.store.events import BadObject, Event
from kproxy_core.store.store import Store
from kproxy_core.sync.family_plans import FamilyPlans
from kproxy_core.sync.family_sync import FamilySync, Shared
from kproxy_core.sync.flow_cleaner import Cleaned
from kproxy_core.sync.inbox import Inbox
from kproxy_core.sync.node_facts import NodeFacts, NodeSettings
from kproxy_core.timing.pacing import Pacing

log = logging.getLogger("kproxy.run")

_T = TypeVar("_T")


class Loop:
    """Folds events in, and syncs each family when it is its turn.

    `emit`, `call`, `addresses_are`, `cleaned` and `stop` may be called from any thread, all but `call` also
    from signal handlers; everything else belongs to the thread of `run`.
    """

    def __init__(
        self,
        families: Sequence[Family],
        store: Store,
        facts: NodeFacts,
        instance: BackendInstance,
        shared: Shared,
        *,
        pacing: Callable[[], Pacing],
        service_health: Callable[[], ServiceHealth],
        all_synced: Callable[[], None] = lambda: None,
    ) -> None:
        """*pacing* and *service_health* are made for each of *families*.

        *all_synced* is called once, when every family has synced.
        """
        self._store = store
        self._facts = facts
        self._instance = instance
        self._shared = shared
        self._syncs = {
            family: FamilySync(FamilyPlans(family, store), instance, pacing(), service_health(), shared)
            for family in families
        }
        self._all_synced = all_synced
        self._inbox = Inbox()
        self._asked: set[Future[None]] = set()
        self._held = False
        self._started = False
        self._watching = False
        self._settled = False
        self._node_differs = True
        self._stopped = False
        self._ended = False

    # From any thread ----------------------------------------------------------------------

    def emit(self, events: list[Event]) -> None:
        """Take in what a source says."""
        self._inbox.put(partial(self._fold, events))

    def call(self, what: Callable[[], _T]) -> _T:
        """Have *what* called in the loop's thread; returns, or raises, what it does.

        Raises CancelledError if the loop ends before its turn comes. Not for the loop's own thread.
        """
        done: Future[None] = Future()
        results: list[_T] = []

        def run() -> None:
            self._asked.discard(done)
            try:
                results.append(what())
                done.set_result(None)
            except Exception as error:  # noqa: BLE001 - it is raised where it was asked for
                done.set_exception(error)

        self._asked.add(done)
        self._inbox.put(run)
        if self._ended:
            done.cancel()
        done.result()
        return results[0]

    def addresses_are(self, addresses: frozenset[Address]) -> None:
        """The addresses of the node's interfaces changed to these."""
        self._inbox.put(partial(self._set_addresses, addresses))

    def cleaned(self, cleaned: Cleaned) -> None:
        """Stale flows were deleted, or could not be."""
        self._inbox.put(partial(self._syncs[cleaned.family].cleaned, cleaned))

    def stop(self) -> None:
        """Let `run` return after the turn that is under way."""
        self._inbox.put(self._stop)

    # In the loop's own --------------------------------------------------------------------

    def run(self) -> None:
        """Work until stopped. Sleeps while nothing happens and no timer is due.

        Raises Unsupported if the backend finds that it can't work here.
        """
        try:
            while not self._stopped:
                self.turn(self._patience())
        finally:
            self._ended = True
            for asked in list(self._asked):
                asked.cancel()

    def turn(self, patience: float | None = 0.0) -> None:
        """Take in what is in the inbox, then do everything that is due.

        Waits up to *patience* seconds for something to come in; None: as long as it takes.
        """
        for call in self._inbox.take(patience):
            call()
        if self._stopped or self._held or not (self._started or self._start()):
            return
        if self._node_differs:
            self._node_differs = False
            for family, sync in self._syncs.items():
                sync.node_is(self._facts.view(family))
        for sync in self._syncs.values():
            sync.turn()
        if not self._settled:
            self._settle()

    def next_wakeup(self) -> float | None:
        """When `turn` has something to do if nothing is heard until then, by the clock; None: never."""
        if self._held or not self._started:
            return None
        now = self._shared.clock()
        times = [sync.next_wakeup(now) for sync in self._syncs.values()]
        return min((at for at in times if at is not None), default=None)

    @property
    def addresses(self) -> frozenset[Address]:
        """Of the node's interfaces."""
        return self._facts.addresses

    @property
    def settled(self) -> bool:
        """Every family has synced."""
        return self._settled

    def hold(self) -> None:
        """Sync nothing until `serve_with`: two modes are at work in the kernel. What changes waits."""
        self._held = True

    def updates(self, settings: NodeSettings) -> list[Update]:
        """All there is, as of the last turn, for each family of a node with these *settings*."""
        facts = self._facts.with_settings(settings)
        return [
            Update(family, Scope.RESYNC, facts.look(family), {}, sync.plans.plans, node_changed=True)
            for family, sync in self._syncs.items()
        ]

    def serve_with(
        self, instance: BackendInstance, settings: NodeSettings, pacing: Callable[[], Pacing], scope: Scope
    ) -> None:
        """From now on *instance* has the work, and has all that `updates` gave. *scope*: of its next sync."""
        self._held = False
        if instance is not self._instance:
            self._instance = instance
            self._facts = self._facts.with_settings(settings)
            for sync in self._syncs.values():
                sync.serve_with(instance, pacing())
            self._watch()
        self._node_differs = True
        for sync in self._syncs.values():
            sync.request(scope)

    def _patience(self) -> float | None:
        """Seconds until there is something to do."""
        at = self.next_wakeup()
        return None if at is None else max(0.0, at - self._shared.clock())

    def _start(self) -> bool:
        """Begin syncing once every source has delivered everything."""
        if not self._store.complete:
            return False
        self._started = True
        log.info("all sources are complete", extra={"fields": {"services": len(self._store.services)}})
        for sync in self._syncs.values():
            sync.request(Scope.RESYNC)
        return True

    def _settle(self) -> None:
        """What is done once after the first syncs."""
        synced = [sync.synced for sync in self._syncs.values()]
        if any(synced) and not self._watching:
            self._watching = True
            self._watch()
        if all(synced):
            self._settled = True
            self._all_synced()

    def _watch(self) -> None:
        instance = self._instance

        def damaged(family: Family, what: str) -> None:
            self._inbox.put(partial(self._damaged, instance, family, what))

        if not instance.watch(damaged):
            log.info("foreign changes go unnoticed until the next full sync")
            for sync in self._syncs.values():
                sync.look_often()

    def _fold(self, events: list[Event]) -> None:
        store, metrics = self._store, self._shared.metrics
        services, slices = store.counts.service_changes, store.counts.endpoint_changes
        for event in events:
            store.fold(event)
            if isinstance(event, BadObject):
                log.warning("not used: %s", event)
                metrics.bad_object(event.kind)
        if store.counts.service_changes != services:
            metrics.service_events(store.counts.service_changes - services, store.pending_service_changes)
        if store.counts.endpoint_changes != slices:
            metrics.endpoint_events(store.counts.endpoint_changes - slices, store.pending_endpoint_changes)
        if store.node is not self._facts.node or store.service_cidrs != self._facts.service_cidrs:
            self._set_node()
        if self._started:
            for family, sync in self._syncs.items():
                if store.changed(family):
                    sync.request()

    def _set_node(self) -> None:
        self._facts.node = self._store.node
        self._facts.service_cidrs = self._store.service_cidrs
        self._node_differs = True
        if self._store.node is not None:
            self._shared.health.node_seen(self._store.node.eligible)

    def _set_addresses(self, addresses: frozenset[Address]) -> None:
        self._facts.addresses = addresses
        self._node_differs = True

    def _damaged(self, instance: BackendInstance, family: Family, what: str) -> None:
        """Another process changed what *instance* programmed; during a switch, the other mode may have."""
        sync = self._syncs.get(family)
        if sync is not None and instance is self._instance and not self._held:
            sync.damaged(what)

    def _stop(self) -> None:
        self._stopped = True
