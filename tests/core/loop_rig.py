"""A loop that runs step by step, with an injected clock and a recording backend."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import pluggy

from kproxy_core.contract import hooks
from kproxy_core.contract.backend import Backend
from kproxy_core.contract.calls import BackendInstance, CoreSync, HookCalls
from kproxy_core.contract.values import BackendSettings, Damage, Scope, SyncReport, Update
from kproxy_core.kube.store import Store
from kproxy_core.model.address import Address, Family
from kproxy_core.model.events import Complete, Event
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServiceName, ServicePortKey
from kproxy_core.observe.health import ProxyHealth, ServiceHealth
from kproxy_core.observe.history import ChangeLog
from kproxy_core.observe.last_resort import LastResortReports
from kproxy_core.observe.metrics import Metrics, SyncMetrics
from kproxy_core.observe.server import HttpServer
from kproxy_core.plan.health_checks import HealthCheck
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_core.sync.flows import CleanupResult, Deletion, StaleFlowObserver
from kproxy_core.sync.loop import Loop
from kproxy_core.sync.node_facts import NodeFacts, NodeSettings
from kproxy_core.sync.observer import Synced, SyncObserver
from kproxy_core.sync.pacing import Pacing
from tests.core.metric_values import values

V4, V6 = Family.IPV4, Family.IPV6
WALL = 1_000_000.0
"""Wall clock time, in seconds, when the clock shows 0."""


class Clock:
    """A clock that shows `now`, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class RecordingBackend(Backend):
    """A backend that holds plans as a kernel would, and fails on demand.

    `problems` are raised by the next syncs, one each; `unserved` can't be served, `degraded` is
    reported; a sync takes `seconds`.
    """

    def __init__(self, clock: Clock) -> None:
        self.held: dict[Family, dict[ServicePortKey, ServicePlan]] = {V4: {}, V6: {}}
        self.nodes: dict[Family, NodeView] = {}
        self.updates: list[Update] = []
        self.problems: list[Exception | None] = []
        self.refuse: Callable[[Update], None] = lambda update: None
        """Raises for what cannot be programmed."""
        self.unserved: dict[ServicePortKey, str] = {}
        self.unfinished: frozenset[ServicePortKey] = frozenset()
        """Reported by each sync that has one of them."""
        self.degraded = ""
        self.damaged: Damage | None = None
        self.watches = True
        """It notices foreign changes."""
        self.operations: int | None = None
        """Reported; None: the number of changed service ports."""
        self.seconds = 0.0
        self._clock = clock

    def sync(self, update: Update) -> SyncReport:
        self._clock.now += self.seconds
        problem = self.problems.pop(0) if self.problems else None
        copy = Update(
            update.family, update.scope, update.node, dict(update.changed), dict(update.plans),
            update.node_changed, update.addresses,
        )
        self.updates.append(copy)
        if problem is not None:
            raise problem
        self.refuse(copy)
        held = self.held[update.family]
        if update.scope is Scope.RESYNC:
            held.clear()
            held.update(update.plans)
        for key, plan in update.changed.items():
            if plan is None:
                held.pop(key, None)
            else:
                held[key] = plan
        self.nodes[update.family] = update.node
        told = update.plans if update.scope is Scope.RESYNC else update.changed
        operations = len(update.changed) if self.operations is None else self.operations
        return SyncReport(
            operations=operations, unserved=dict(self.unserved), degraded=self.degraded,
            unfinished=self.unfinished & told.keys())

    def watch(self, damaged: Damage) -> bool:
        assert self.damaged is None, "watched twice"
        self.damaged = damaged
        return self.watches

    def take(self) -> list[Update]:
        """Return the updates since the last call."""
        taken, self.updates = self.updates, []
        return taken


_UNUSED = HttpServer()
"""One for all: each holds descriptors, and tests make hundreds of rigs."""


class RecordingServiceHealth(ServiceHealth):
    """Records instead of listening."""

    def __init__(self, family: Family) -> None:
        super().__init__(family, _UNUSED, lambda: True)
        self.told: dict[ServiceName, HealthCheck] = {}

    def apply(self, changes: Mapping[ServiceName, HealthCheck | None]) -> None:
        for name, told in changes.items():
            self.told.pop(name, None)
            if told is not None:
                self.told[name] = told


class SuccessRecorder(SyncObserver):
    def __init__(self) -> None:
        self.successes: list[Synced] = []

    def sync_succeeded(self, synced: Synced) -> None:
        self.successes.append(synced)


class Settled(SyncObserver):
    def __init__(self, told: Callable[[], None]) -> None:
        self._told = told

    def all_synced(self) -> None:
        self._told()


class RecordingCleaner:
    """Records the flows to delete."""

    def __init__(self) -> None:
        self.under_way: list[tuple[Family, Deletion]] = []

    def clean(self, family: Family, deletion: Deletion) -> None:
        self.under_way.append((family, deletion))


def instance_of(backend: Backend, families: Sequence[Family]) -> BackendInstance:
    """Return the core's handle of *backend*."""
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    manager.register(CoreSync())
    settings = BackendSettings(tuple(families))
    return BackendInstance("test", settings, {"test": backend}, manager.hook, HookCalls())


class Rig:
    """A loop with all its parts."""

    def __init__(
        self,
        *,
        families: Sequence[Family] = (V4, V6),
        min_interval: float = 0.0,
        settings: NodeSettings | None = None,
        addresses: Iterable[Address] = (),
        all_synced: Callable[[], None] = lambda: None,
        backend: Backend | None = None,
        instance: BackendInstance | None = None,
        observers: Callable[[Clock], Sequence[SyncObserver]] = lambda _: (),
    ) -> None:
        """*backend*, or the one of *instance*, replaces the recording one. *observers* are further ones."""
        self.clock = Clock()
        self.backend = RecordingBackend(self.clock)
        instance = instance or instance_of(backend or self.backend, families)
        self.metrics = Metrics("test", "0")
        self.health = ProxyHealth(
            families, timeout=60.0, node_required=False,
            wall_ns=lambda: int((WALL + self.clock()) * 1e9), monotonic=self.clock,
        )
        self.cleaner = RecordingCleaner()
        self.recorder = SuccessRecorder()
        self.reports: list[tuple[ServiceName, str]] = []
        """The events about Services."""
        self.service_health = [RecordingServiceHealth(family) for family in families]
        self.store = Store(families, kinds=["test"], started=WALL)
        self.flows = StaleFlowObserver(families, self.cleaner.clean)
        all_observers = [
            *observers(self.clock), self.health, *self.service_health,
            SyncMetrics(self.metrics.registry, "test", families, lambda: WALL + self.clock()), self.flows,
            LastResortReports(lambda *report: self.reports.append(report)), ChangeLog(), self.recorder,
            Settled(all_synced),
        ]
        facts = NodeFacts(settings or NodeSettings(name="node1"), frozenset(addresses))
        self._families = families
        self._pacing = lambda: Pacing(min_interval=min_interval, retry_cap=30.0, shortest_rest=0.0)
        self.loop = Loop(
            families, self.store, facts, instance, pacing=self._pacing, clock=self.clock, cpu=self.clock)
        self.loop.observe(all_observers)

    def start(self, *events: Event) -> list[Update]:
        """Deliver *events* as all that exist. Return the first updates."""
        return self.say(*events, Complete("test"))

    def say(self, *events: Event) -> list[Update]:
        """Deliver *events* in one batch and run a turn. Return its updates."""
        self.loop.emit(list(events))
        return self.turn()

    def turn(self) -> list[Update]:
        """Run one turn. Return its updates."""
        self.loop.turn()
        return self.backend.take()

    def settle(self, limit: int = 50) -> list[Update]:
        """Run turns and move the clock until nothing is due within a minute. Return the updates."""
        updates = self.turn()
        for _ in range(limit):
            at = self.loop.next_wakeup()
            if at is None or at > self.clock.now + 60:
                return updates
            self.clock.now = max(self.clock.now, at)
            updates += self.turn()
        raise AssertionError("the loop does not come to rest")

    def serve_with(self, backend: Backend, settings: NodeSettings) -> None:
        """Hand over to *backend*, as a switch of modes does, and run a turn."""
        self.loop.hold()
        self.loop.serve_with(
            instance_of(backend, self._families), settings, self._pacing, Scope.RESYNC)
        self.loop.turn()

    def flows_deleted(self, deleted: int | None = 0) -> None:
        """Finish the deletion of all flows; None: it fails."""
        under_way, self.cleaner.under_way = self.cleaner.under_way, []
        for family, deletion in under_way:
            self.loop.post(partial(self.flows.finish, CleanupResult(family, deletion, deleted, 0.01)))
        self.loop.turn()

    def value(self, sample: str) -> float:
        """Return one sample of the metrics by name and labels."""
        return values(self.metrics)[sample]
