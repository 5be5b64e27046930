"""Events of the sync loop, and the interface of its observers."""

import logging
from collections.abc import Iterable, Sequence

from msgspec import Struct

from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.errors import one_line
from kproxy_core.contract.values import Scope, SyncReport, Update
from kproxy_core.model.address import Family
from kproxy_core.model.events import BadObject
from kproxy_core.model.node import NodeObject, NodeView
from kproxy_core.plan.service_plan import Frontend
from kproxy_core.sync.difference import Step
from kproxy_core.sync.plans import FamilyPlans, FollowUps

log = logging.getLogger("kproxy.run")


class Folded(Struct, frozen=True, kw_only=True):
    """A batch of source events, taken into the store."""

    service_changes: int
    """Service events in the batch, once for each family."""
    endpoint_changes: int
    """EndpointSlice events in the batch, whether or not they changed anything."""
    services_pending: int
    """Services with changes that wait for a sync."""
    endpoints_pending: int
    """EndpointSlice changes that wait for a sync."""
    bad_objects: Sequence[BadObject]


class Synced(Struct, frozen=True, kw_only=True):
    """A successful sync of one family: the kernel agrees with `plans`."""

    plans: FamilyPlans
    """Valid during the call only, but for `FamilyPlans.owner`."""
    instance: BackendInstance
    scope: Scope
    seconds: float
    report: SyncReport | None = None
    """None: nothing differed, and the backend was not called."""
    steps: Sequence[Step] = ()
    follow_ups: FollowUps = FollowUps()
    trigger_times: Sequence[float] = ()
    """Times of the endpoint changes that were programmed, in seconds since the epoch."""
    named: Sequence[str] = ()
    """The first API objects whose changes were programmed, with their resource versions."""
    problem: str = ""
    """What the backend could not serve, or not as its mode should, for people; "": nothing."""
    is_first: bool = False
    """The first success of this family in this process."""
    rules_were_missing: bool = False
    """A full sync had to write rules, or another process had changed them since the last one."""

    @property
    def family(self) -> Family:
        return self.plans.family


class SyncFailure(Struct, frozen=True, kw_only=True):
    family: Family
    scope: Scope
    seconds: float
    error: Exception


class SyncObserver:
    """Follows the syncs of all families. A subclass overrides the events that it needs.

    The events are declared in the order of a sync. For each, observers are called one after the other, in the
    order in which `kproxy_core.app.assembly` lists them, on the loop's thread; they return quickly.
    """

    def events_folded(self, folded: Folded) -> None:
        """Source events were taken into the store."""

    def node_seen(self, node: NodeObject) -> None:
        """The Node object was added or changed. (A deletion changes nothing.)"""

    def node_changed(self, node: NodeView) -> None:
        """One family's view of the node may have changed."""

    def sync_requested(self, family: Family) -> None:
        """A sync was requested."""

    def damage_found(self, family: Family) -> None:
        """Another process changed the backend's objects."""

    def sync_started(self, family: Family, *, retry: bool) -> None:
        """A sync starts and takes all pending changes. *retry*: the last one did not do everything."""

    def plans_changed(self, family: Family, udp_frontends: frozenset[Frontend] | None) -> None:
        """Plans have changed, and the backend is called next. *udp_frontends*: of UDP, before and after.

        None: until the next success another instance may write any rules, which packets meet at once.
        """

    def sync_planned(self, plans: FamilyPlans) -> None:
        """The backend is called next, to bring the kernel to *plans*."""

    def update_started(self, instance: BackendInstance, update: Update) -> None:
        """Any backend is called, also one that is only tried. Hooks around `kproxy_sync` are called next."""

    def update_succeeded(self, instance: BackendInstance, update: Update) -> None:
        """That backend, and the hooks around it, have returned."""

    def sync_succeeded(self, synced: Synced) -> None:
        """The kernel agrees with the plans."""

    def sync_failed(self, failure: SyncFailure) -> None:
        """A sync failed."""

    def all_synced(self) -> None:
        """Every family has synced, for the first time."""


_EVENTS = tuple(name for name in vars(SyncObserver) if not name.startswith("_"))


class Observers(SyncObserver):
    """Tells several observers. One that raises an exception, which only a bug explains, stops no other."""

    def __init__(self) -> None:
        self._told: dict[str, list[SyncObserver]] = {event: [] for event in _EVENTS}
        """The observers that override an event."""
        self._failing: dict[tuple[SyncObserver, str], str] = {}
        """Problems that were logged, until the observer works again."""

    def add(self, observers: Iterable[SyncObserver]) -> None:
        """Tell *observers*, too, after all earlier ones."""
        for each in observers:
            for event, told in self._told.items():
                if getattr(type(each), event) is not getattr(SyncObserver, event):
                    told.append(each)

    def update(self, instance: BackendInstance, update: Update) -> SyncReport:
        """Have *instance* bring the kernel to *update*. Raises whatever the backend raises."""
        self.update_started(instance, update)
        report = instance.sync(update)
        self.update_succeeded(instance, update)
        return report

    def events_folded(self, folded: Folded) -> None:
        self._tell("events_folded", folded)

    def node_seen(self, node: NodeObject) -> None:
        self._tell("node_seen", node)

    def node_changed(self, node: NodeView) -> None:
        self._tell("node_changed", node)

    def sync_requested(self, family: Family) -> None:
        self._tell("sync_requested", family)

    def damage_found(self, family: Family) -> None:
        self._tell("damage_found", family)

    def sync_started(self, family: Family, *, retry: bool) -> None:
        self._tell("sync_started", family, retry=retry)

    def plans_changed(self, family: Family, udp_frontends: frozenset[Frontend] | None) -> None:
        self._tell("plans_changed", family, udp_frontends)

    def sync_planned(self, plans: FamilyPlans) -> None:
        self._tell("sync_planned", plans)

    def update_started(self, instance: BackendInstance, update: Update) -> None:
        self._tell("update_started", instance, update)

    def update_succeeded(self, instance: BackendInstance, update: Update) -> None:
        self._tell("update_succeeded", instance, update)

    def sync_succeeded(self, synced: Synced) -> None:
        self._tell("sync_succeeded", synced)

    def sync_failed(self, failure: SyncFailure) -> None:
        self._tell("sync_failed", failure)

    def all_synced(self) -> None:
        """Tell all. An exception ends the process, whose start could not be finished."""
        for observer in self._told["all_synced"]:
            observer.all_synced()

    def _tell(self, event: str, *arguments: object, **named: object) -> None:
        for observer in self._told[event]:
            try:
                getattr(observer, event)(*arguments, **named)
            except Exception as error:
                problem = f"{type(error).__name__}: {one_line(error)}"
                if self._failing.get((observer, event)) != problem:
                    self._failing[observer, event] = problem
                    log.error("bug: an observer failed", exc_info=error, extra={"fields": {
                        "observer": type(observer).__name__, "event": event, "problem": problem}})
            else:
                if self._failing:
                    self._failing.pop((observer, event), None)
