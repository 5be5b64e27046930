"""Brings one IP family of the kernel to its plans, and again after whatever goes wrong."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kproxy_core.backend.api import Scope, SyncReport
from kproxy_core.backend.errors import SyncFailed, TrustLost, Unsupported
from kproxy_core.backend.instance import BackendInstance
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServicePortKey
from kproxy_core.observe.health import ProxyHealth
from kproxy_core.observe.metrics import Metrics
from kproxy_core.observe.service_health import ServiceHealth
from kproxy_core.plan.stale_flows import StaleFlowTracker, relay
from kproxy_core.sync.family_plans import FamilyPlans, NoLocalEndpoints, Step
from kproxy_core.sync.flow_cleaner import Cleaned, Cleaner
from kproxy_core.timing.pacing import Pacing

log = logging.getLogger("kproxy.run")

_ESCALATE_AFTER = 2
"""Failures in a row after which nothing that the backend remembers is believed any more."""

_REMEMBERED_TRIGGERS = 10_000
"""Changes whose latency is told after the first success in a long row of failures: the latest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the families of one process have in common."""

    health: ProxyHealth
    metrics: Metrics
    cleaner: Cleaner
    clock: Callable[[], float]
    """Monotonic, in seconds."""
    wall: Callable[[], float]
    """Seconds since the epoch."""


class FamilySync:
    """One family's turns. Knows when the next is due; all methods belong to the loop's thread."""

    def __init__(
        self, plans: FamilyPlans, instance: BackendInstance, pacing: Pacing, service_health: ServiceHealth,
        shared: Shared,
    ) -> None:
        self.plans = plans
        self.instance = instance
        """Who programs the kernel."""
        self.family = plans.family
        self.synced = False
        """A sync has succeeded."""
        self._shared = shared
        self._pacing = pacing
        self._service_health = service_health
        self._no_local = NoLocalEndpoints()
        self._flows = StaleFlowTracker()
        self._flows_busy = False
        self._trigger_times: list[float] = []
        self._failures = 0
        self._unserved: Mapping[ServicePortKey, str] = {}
        self._damage = ""
        self._damages = 0

    def request(self, scope: Scope = Scope.CHANGED) -> None:
        """There is something to sync."""
        self._pacing.request(self._shared.clock(), scope)
        self._shared.health.queued(self.family)
        self._shared.metrics.sync_requested(self.family, self._shared.wall())

    def look_often(self) -> None:
        """Nobody tells what others change: have full syncs look for it, as often as the operator wants."""
        self._pacing.look_often()

    def serve_with(self, instance: BackendInstance, pacing: Pacing) -> None:
        """From now on *instance* has the work."""
        self.instance = instance
        self._pacing = pacing
        self._failures = 0
        self._damages = 0

    def node_is(self, node: NodeView) -> None:
        """The node looks like this now."""
        self._service_health.place(node)
        if self.plans.node_is(node):
            self.request()

    def damaged(self, what: str) -> None:
        """Somebody else changed what was programmed."""
        if not self._damages:
            self._damage = what
        self._damages += 1
        self._pacing.request_repair()
        self._shared.metrics.foreign_change(self.family)
        self._shared.health.queued(self.family)

    def next_wakeup(self, now: float) -> float | None:
        """When `turn` will have something to do; None: not before something happens."""
        return self._pacing.next_wakeup(now)

    def turn(self) -> None:
        """Sync if that is due. Raises Unsupported if the backend can't work here."""
        scope = self._pacing.due(self._shared.clock())
        if scope is not None:
            self._sync(scope)

    def cleaned(self, cleaned: Cleaned) -> None:
        """The stale flows that were under way are dealt with."""
        self._flows_busy = False
        if cleaned.deleted is None:
            self._flows.give_back(cleaned.stale)
        else:
            self._shared.metrics.stale_flows(self.family, cleaned.seconds, cleaned.deleted)
            self._clean_flows()

    def _sync(self, scope: Scope) -> None:
        shared = self._shared
        started = shared.clock()
        if self._failures or self._unserved:
            shared.metrics.sync_retried(self.family)
        for conflict in self.plans.plan():
            log.warning("a frontend is wanted twice", extra={"fields": {"conflict": str(conflict)}})
        self._trigger_times += self.plans.take_trigger_times()
        shared.metrics.changes_taken()
        if scope is Scope.CHANGED and not self.plans.differs:
            self._pacing.ran(started, shared.clock(), scope, True)
            self._failures = 0
            self._follow([])
            return
        try:
            report: SyncReport = self.instance.sync(self.plans.update(scope))
        except Unsupported:
            raise
        except Exception as error:  # noqa: BLE001 - a plugin's, and the other family must go on
            self._failed(started, scope, error)
            return
        ended = shared.clock()
        self._pacing.ran(started, ended, scope, True, unserved=bool(report.unserved))
        shared.metrics.sync_ended(self.family, scope, ended - started, shared.wall(), report.operations)
        self._log(scope, report, ended - started)
        self._failures = 0
        self.synced = True
        self._follow(self.plans.acknowledged(report.unserved))
        self._tell_unserved(report.unserved)

    def _tell_unserved(self, unserved: Mapping[ServicePortKey, str]) -> None:
        """In the health answer, and when it changes in the log."""
        told = ""
        if unserved:
            key, problem = next(iter(unserved.items()))
            others = f", and {len(unserved) - 1} more" if len(unserved) > 1 else ""
            told = f"not served: {key}: {problem}{others}"
            self._shared.health.failed(self.family, told)
        if unserved != self._unserved:
            log.log(
                logging.ERROR if unserved else logging.INFO,
                "service ports are not served" if unserved else "all service ports are served again",
                extra={"fields": {
                    "ip_family": self.family.label, "service_ports": len(unserved), "problem": told,
                }},
            )
        self._unserved = unserved

    def _failed(self, started: float, scope: Scope, error: Exception) -> None:
        """Keep everything for the next try; when that is depends on what went wrong."""
        shared = self._shared
        ended = shared.clock()
        expected = isinstance(error, SyncFailed)
        self._failures += 1
        del self._trigger_times[:-_REMEMBERED_TRIGGERS]
        self._pacing.ran(started, ended, scope, False)
        if scope is Scope.CHANGED and (isinstance(error, TrustLost) or not expected):
            self._pacing.request_repair()
        elif scope is Scope.CHANGED and self._failures == _ESCALATE_AFTER:
            self._pacing.request(started, Scope.RESYNC)
        shared.metrics.sync_ended(self.family, scope, ended - started, shared.wall(), None)
        shared.health.failed(self.family, str(error))
        log.error(
            "sync failed",
            extra={"fields": {
                "ip_family": self.family.label, "scope": scope.value, "failures": self._failures,
                "error": str(error) if expected else repr(error),
            }},
            exc_info=None if expected else error,
        )

    def _log(self, scope: Scope, report: SyncReport, seconds: float) -> None:
        """A line for what an operator would want to hear of; others are for debugging."""
        level, message = logging.DEBUG, "synced"
        fields: dict[str, object] = {}
        if scope is Scope.RESYNC:
            if not self.synced:
                level, message = logging.INFO, "first sync"
            elif self._damages:
                level, message = logging.WARNING, "repaired what somebody else changed"
                fields = {"what": self._damage, "changes": self._damages}
                self._damages = 0
            elif report.operations:
                level, message = logging.INFO, "a full sync had something to write"
        if log.isEnabledFor(level):
            fields |= {
                "ip_family": self.family.label, "scope": scope.value, "operations": report.operations,
                "service_ports": len(self.plans.plans), "seconds": round(seconds, 6), **report.detail,
            }
            log.log(level, message, extra={"fields": fields})

    def _follow(self, steps: list[Step]) -> None:
        """The kernel agrees with the plans: let the readers follow."""
        shared = self._shared
        shared.health.synced(self.family)
        if steps:
            self._no_local.follow(steps)
            checked = self.plans.health_checked(steps)
            if checked:
                self._service_health.apply(checked)
        shared.metrics.no_local_endpoints(self.family, self._no_local.internal, self._no_local.external)
        if self._trigger_times:
            now = shared.wall()
            shared.metrics.programmed(self.family, [now - then for then in self._trigger_times])
            self._trigger_times = []
        for key in self.plans.take_flows():
            relays = {relay(self.family, port) for port in self.instance.relays(self.family, key)}
            self._flows.put(key, self.plans.plans.get(key), self.plans.serving(key) | relays)
        self._clean_flows()

    def _clean_flows(self) -> None:
        """Have the stale flows deleted, unless that is under way: then the rest waits for its end."""
        if self._flows_busy:
            return
        stale = self._flows.take(frozenset(self.plans.node.node_port_addresses))
        if stale:
            self._flows_busy = True
            self._shared.cleaner.clean(self.family, stale)
