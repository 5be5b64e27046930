"""The thread that makes all decisions, and the calls that other threads leave for it."""

import logging
import os
import select
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.values import Scope, SyncReport, Update
from kproxy_core.kube.store import Store
from kproxy_core.model.address import Address, Family
from kproxy_core.model.events import BadObject, Event
from kproxy_core.model.service import ServiceName, ServicePortKey
from kproxy_core.plan.quarantine import Quarantined
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_core.sync.family import FamilySync
from kproxy_core.sync.node_facts import NodeFacts, NodeSettings
from kproxy_core.sync.observer import Folded, Observers, SyncObserver
from kproxy_core.sync.pacing import Pacing
from kproxy_core.sync.plans import FamilyPlans

log = logging.getLogger("kproxy.run")

_T = TypeVar("_T")

Call = Callable[[], None]


class Inbox:
    """Calls that other threads leave for one thread to make.

    `put` may be called from any thread and from signal handlers, `take` by one thread.

    Waits with select instead of SimpleQueue.get, whose timeout may last for ever: if it expires before the
    thread sleeps, the rest is negative, which means no timeout (CPython 3.11, Modules/_queuemodule.c).
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call] = SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        os.close(self._bell)

    def put(self, call: Call) -> None:
        """Leave *call* for the next `take`."""
        self._calls.put(call)
        os.eventfd_write(self._bell, 1)

    def take(self, patience: float | None) -> list[Call]:
        """Return all calls, oldest first. Waits up to *patience* seconds for one; None: without limit."""
        if self._calls.empty() and patience != 0:
            select.select([self._bell], [], [], patience)
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        return [self._calls.get_nowait() for _ in range(self._calls.qsize())]


class Loop:
    """Takes in events, and syncs each family when that is due.

    Other threads put calls into its inbox. A turn makes these calls, plans the changes, passes them to the
    backend, and reports the result to the observers.

    `emit`, `call`, `post`, `set_addresses` and `stop` may be called from any thread, all but `call` also from
    signal handlers; everything else belongs to the thread of `run`.
    """

    def __init__(
        self, families: Sequence[Family], store: Store, facts: NodeFacts, instance: BackendInstance,
        *, pacing: Callable[[], Pacing], clock: Callable[[], float], cpu: Callable[[], float],
    ) -> None:
        """*pacing* is called for each of *families*. *clock*: monotonic seconds. *cpu*: CPU
        seconds of the calling thread and its children.
        """
        self._store = store
        self._facts = facts
        self._instance = instance
        self._observers = Observers()
        self._clock = clock
        self._syncs = {
            family: FamilySync(family, store, instance, pacing(), self._observers, clock, cpu)
            for family in families
        }
        self._inbox = Inbox()
        self._asked: set[Future[Any]] = set()
        self._held = False
        self._damage_on_hold: dict[Family, str] = {}
        """Damage reported since `hold`."""
        self._started = False
        self._watching = False
        self.settled = False
        """Every family has synced."""
        self._node_differs = True
        self._stopped = False
        self._ended = False

    def observe(self, observers: Iterable[SyncObserver]) -> None:
        """Tell *observers* of all syncs, in this order. Call it before `run`."""
        self._observers.add(observers)

    # From any thread ----------------------------------------------------------------------

    def emit(self, events: list[Event]) -> None:
        self._inbox.put(partial(self._fold, events))

    def call(self, what: Callable[[], _T]) -> _T:
        """Call *what* on the loop's thread. Return its result, or raise its exception.

        Raises CancelledError if the loop ends first. Not for the loop's own thread.
        """
        done: Future[_T] = Future()

        def run() -> None:
            self._asked.discard(done)
            try:
                done.set_result(what())
            except Exception as error:  # noqa: BLE001 - raised again by the caller
                done.set_exception(error)

        self._asked.add(done)
        self._inbox.put(run)
        if self._ended:
            done.cancel()
        return done.result()

    def post(self, call: Call) -> None:
        """Have *call* made on the loop's thread. Returns at once."""
        self._inbox.put(call)

    def set_addresses(self, addresses: frozenset[Address]) -> None:
        self._inbox.put(partial(self._set_addresses, addresses))

    def stop(self) -> None:
        """Have `run` return after the current turn."""
        self._inbox.put(self._stop)

    # On the loop's thread --------------------------------------------------------------------

    def run(self) -> None:
        """Run until stopped. Raises Unsupported if the backend cannot work here."""
        try:
            while not self._stopped:
                at = self.next_wakeup()
                self.turn(None if at is None else max(0.0, at - self._clock()))
        finally:
            self._ended = True
            for asked in list(self._asked):
                asked.cancel()

    def turn(self, patience: float | None = 0.0) -> None:
        """Make the calls in the inbox, then do everything that is due.

        Waits up to *patience* seconds for a call; None: without limit.
        """
        for call in self._inbox.take(patience):
            try:
                call()
            except Exception:  # the other calls must not wait for it
                log.exception("bug: a call of the sync loop failed")
        if self._stopped or self._held or not (self._started or self._start()):
            return
        if self._node_differs:
            self._node_differs = False
            for family, sync in self._syncs.items():
                sync.set_node(self._facts.view(family), self._facts.addresses)
        for sync in self._syncs.values():
            sync.turn()
        if not self.settled:
            self._settle()

    def next_wakeup(self) -> float | None:
        """Return the time at which `turn` has work without another call; None: never."""
        if self._held or not self._started:
            return None
        now = self._clock()
        times = [sync.next_wakeup(now) for sync in self._syncs.values()]
        return min((at for at in times if at is not None), default=None)

    @property
    def now(self) -> float:
        """Monotonic seconds. From any thread."""
        return self._clock()

    @property
    def addresses(self) -> frozenset[Address]:
        return self._facts.addresses

    @property
    def plans(self) -> Mapping[Family, FamilyPlans]:
        return {family: sync.plans for family, sync in self._syncs.items()}

    def set_quarantined(self, endpoints: Quarantined, services: Collection[ServiceName]) -> None:
        """Plan with *endpoints* in quarantine. *services*: those for which this may differ."""
        for sync in self._syncs.values():
            sync.set_quarantined(endpoints, services)

    def hold(self) -> None:
        """Pause syncs until `serve_with`, while two modes are programmed in the kernel."""
        self._held = True
        for sync in self._syncs.values():
            sync.pause()

    def updates(self, settings: NodeSettings) -> list[Update]:
        """Return full updates with the plans of the last turn, for a node with *settings*."""
        return self._updates(settings, lambda plans: plans.plans)

    def programmed(self, settings: NodeSettings) -> list[Update]:
        """Return full updates as `updates`, but without changes that the serving backend fails to program."""
        return self._updates(settings, lambda plans: plans.difference.programmed)

    def _updates(
        self, settings: NodeSettings, plans_of: Callable[[FamilyPlans], Mapping[ServicePortKey, ServicePlan]]
    ) -> list[Update]:
        facts = self._facts.with_settings(settings)
        return [
            Update(
                family, Scope.RESYNC, facts.look(family)[0], {}, plans_of(sync.plans), node_changed=True,
                addresses=facts.addresses)
            for family, sync in self._syncs.items()
        ]

    def update(self, instance: BackendInstance, update: Update) -> SyncReport:
        """Have *instance*, which is only tried or serves again, bring the kernel to *update*.

        The loop must be on hold. Raises whatever the backend raises.
        """
        return self._observers.update(instance, update)

    def serve_with(
        self, instance: BackendInstance, settings: NodeSettings, pacing: Callable[[], Pacing], scope: Scope
    ) -> None:
        """Sync *instance*, which has been given all `updates`, from now on, and next with *scope*."""
        self._held = False
        damage, self._damage_on_hold = self._damage_on_hold, {}
        if instance is not self._instance:
            self._instance = instance
            self._facts = self._facts.with_settings(settings)
            for sync in self._syncs.values():
                sync.serve_with(instance, pacing())
            self._watch()
        elif scope is not Scope.RESYNC:  # which repairs what a mode that was tried has changed
            for family, what in damage.items():
                self._syncs[family].report_damage(what)
        self._node_differs = True
        for sync in self._syncs.values():
            sync.request(scope)

    def _start(self) -> bool:
        """Start syncing if every source has delivered everything. Return False otherwise."""
        if not self._store.complete:
            return False
        self._started = True
        log.info("all sources are complete", extra={"fields": {"services": len(self._store.services)}})
        for sync in self._syncs.values():
            sync.request(Scope.RESYNC)
        return True

    def _settle(self) -> None:
        """Start watching after the first success, and report when every family has synced."""
        synced = [sync.is_synced for sync in self._syncs.values()]
        if any(synced) and not self._watching:
            self._watching = True
            self._watch()
        if all(synced):
            self.settled = True
            self._observers.all_synced()

    def _watch(self) -> None:
        instance = self._instance

        def damaged(family: Family, what: str) -> None:
            self._inbox.put(partial(self._damaged, instance, family, what))

        if not instance.watch(damaged):
            log.info("foreign changes are found only by full syncs")
            for sync in self._syncs.values():
                sync.pacing.look_often()

    def _fold(self, events: list[Event]) -> None:
        store = self._store
        services, slices = store.service_changes, store.endpoint_changes
        bad = []
        now = self._clock()
        for event in events:
            try:
                store.fold(event, now)
            except Exception:  # the other objects must not wait for it
                log.exception("bug: an event was not taken in", extra={
                    "fields": {"event": f"{event!r:.200}"}})
            if isinstance(event, BadObject):
                log.warning("not used: %s", event)
                bad.append(event)
        folded = Folded(
            service_changes=store.service_changes - services,
            endpoint_changes=store.endpoint_changes - slices,
            services_pending=max(of_family.pending_services for of_family in store.families.values()),
            endpoints_pending=sum(of_family.pending_slices for of_family in store.families.values()),
            bad_objects=bad,
        )
        self._observers.events_folded(folded)
        if store.node is not self._facts.node or store.service_cidrs != self._facts.service_cidrs:
            self._facts.node, self._facts.service_cidrs = store.node, store.service_cidrs
            self._node_differs = True
            if store.node is not None:
                self._observers.node_seen(store.node)
        if self._started:
            for family, sync in self._syncs.items():
                if store.families[family].changed:
                    sync.request()

    def _set_addresses(self, addresses: frozenset[Address]) -> None:
        self._facts.addresses = addresses
        self._node_differs = True

    def _damaged(self, instance: BackendInstance, family: Family, what: str) -> None:
        """Have damage to *instance*'s rules repaired, on hold once it serves again."""
        sync = self._syncs.get(family)
        if sync is None or instance is not self._instance:
            return
        if self._held:
            self._damage_on_hold[family] = what
        else:
            sync.report_damage(what)

    def _stop(self) -> None:
        self._stopped = True
