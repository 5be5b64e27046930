"""The syncs of one IP family: when they run, and what follows from success and failure."""

import errno
import logging
from collections.abc import Callable, Collection, Mapping

from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.errors import PluginFailed, SyncFailed, TrustLost, Unsupported, one_line
from kproxy_core.contract.values import Scope, SyncReport
from kproxy_core.kube.store import Store
from kproxy_core.linux.errors import HostError
from kproxy_core.model.address import Address, Family
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServiceName, ServicePortKey
from kproxy_core.model.timing import Repeats
from kproxy_core.plan.budget import GIANT
from kproxy_core.plan.quarantine import Quarantined
from kproxy_core.sync.isolation import Isolation
from kproxy_core.sync.observer import Observers, Synced, SyncFailure
from kproxy_core.sync.pacing import Pacing
from kproxy_core.sync.plans import FamilyPlans

log = logging.getLogger("kproxy.run")

_ESCALATE_AFTER = 2
"""Consecutive failures after which a full sync is requested, or service ports are suspected."""

_SUSPECT_ALL_AFTER = 6
"""Consecutive failures after which all service ports are suspected, not only those that differ."""

_OF_MACHINE = frozenset({errno.EPERM, errno.EACCES, errno.EMFILE, errno.ENFILE, errno.EINTR})
"""Errors that no service port causes. EINTR: what was read changed meanwhile.

ENOBUFS is none of them: one service port may make a transaction that the kernel has no room for.
"""

_LONGEST_LEFT_OUT = 300.0
"""Upper bound in seconds of the delay until service ports that could not be programmed are tried again."""

_REMEMBERED_TRIGGERS = 10_000
"""Bound on changes whose latency is recorded after a series of failed syncs. The oldest are dropped."""

_BACKLOG_REST_SHARE = 4
"""Rest after syncs for giants and for what was postponed, as a multiple of their CPU time.

Other Services are not delayed.
"""

_SMALLEST_PART = 2_000
_LARGEST_PART = 20_000
"""Elements of a sync, beyond which changes are postponed."""

_PART_SECONDS = 0.2
"""CPU seconds that such a sync should take. Changes that arrive meanwhile wait for it."""


class FamilySync:
    """Syncs one family when that is due. All methods belong to the loop's thread."""

    def __init__(
        self, family: Family, store: Store, instance: BackendInstance, pacing: Pacing,
        observers: Observers, clock: Callable[[], float], cpu: Callable[[], float],
    ) -> None:
        """*clock*: monotonic seconds. *cpu*: CPU seconds of the loop's thread and its children."""
        self.plans = FamilyPlans(family, store)
        self.instance = instance
        self.family = family
        self.is_synced = False
        """A sync has succeeded, with all service ports but those that the backend fails to program."""
        self.pacing = pacing
        self._objects = store.families[family]
        self._observers = observers
        self._clock = clock
        self._cpu = cpu
        self._cpu_before = 0.0
        self._is_for_backlog = False
        """The sync under way is for a giant or what was postponed. It delays no later one for others."""
        self._backlog_rest_until = 0.0
        self._backlog_cost = 0.0
        """CPU seconds of the syncs since that rest."""
        self._part = GIANT
        """Elements of a sync, beyond which changes are postponed, learned from the time that syncs take."""
        self._elements = 0
        """Those of the sync under way; 0: unknown."""
        self._trigger_times: list[float] = []
        self._failures = 0
        self._repeats = Repeats()
        self._told_search = False
        """This row of failures has been told to be searched for its cause."""
        self._isolation = Isolation(longest=_LONGEST_LEFT_OUT)
        self._suspect_at = self._suspect_all_at = 0
        """Consecutive failures after which the service ports that differ, or all, are suspected."""
        self._trusts_backend = True
        """It has not raised an unexpected error since its last full sync."""
        self._degraded = ""
        """`SyncReport.degraded` of the last sync."""
        self._end_failures()
        self._damage = ""
        self._damages = 0
        self._is_damaged = False
        """Another process has changed rules since the last full sync, those of an earlier mode included."""

    def request(self, scope: Scope = Scope.CHANGED) -> None:
        self.pacing.request(self._clock(), scope)
        self._observers.sync_requested(self.family)

    def pause(self) -> None:
        """Prepare for rules of another instance. The caller makes no turn until `serve_with`."""
        self._observers.plans_changed(self.family, None)

    def serve_with(self, instance: BackendInstance, pacing: Pacing) -> None:
        self.instance = instance
        self.pacing = pacing
        self._end_failures()
        self._isolation.forget()
        self.plans.difference.withhold(self._isolation.withheld)
        self._trusts_backend = True
        self._degraded = ""
        self._damages = 0

    def set_node(self, node: NodeView, addresses: frozenset[Address]) -> None:
        self._observers.node_changed(node)
        if self.plans.set_node(node, addresses):
            self.request()

    def set_quarantined(self, endpoints: Quarantined, services: Collection[ServiceName]) -> None:
        """See `FamilyPlans.set_quarantined`."""
        self.plans.set_quarantined(endpoints, services)
        self.request()

    def report_damage(self, what: str) -> None:
        """Have a change by another process, described by *what*, repaired."""
        if not self._damages:
            self._damage = what
        self._damages += 1
        self._is_damaged = True
        self.pacing.request_repair()
        self._observers.damage_found(self.family)

    def next_wakeup(self, now: float) -> float | None:
        """Return the time, not before *now*, at which `turn` has work without a further request."""
        if self._isolation.trial:
            return now
        times = [self.pacing.next_wakeup(now), self.plans.next_time]
        if not self._failures:
            times.append(self._isolation.retry_at)
            if self.plans.waiting or self.plans.difference.postponed:
                times.append(self._backlog_rest_until)
        return min((max(now, at) for at in times if at is not None), default=None)

    def turn(self) -> None:
        """Sync if that is due. Raises Unsupported if the backend cannot work here.

        The largest changes wait for all others: giants are planned one by one, and what takes more than a
        moment is written in parts, the smallest first.
        """
        now = self._clock()
        if self.plans.set_time(now):
            self.request()
        scope = self.pacing.due(now)
        if not self._failures:
            self._isolation.retry(now)
        if self._isolation.trial or (self._isolation.trial is not None and scope is not None):
            must_resync = scope is Scope.RESYNC or self._isolation.must_resync or not self._trusts_backend
            scope = Scope.RESYNC if must_resync else Scope.CHANGED
        self._is_for_backlog = False
        if scope is None:
            has_backlog = self.plans.waiting or self.plans.difference.postponed
            if not has_backlog or self._failures or now < self._backlog_rest_until:
                return
            scope, self._is_for_backlog = Scope.CHANGED, True
        is_for_giant = self._is_for_backlog and not self.plans.difference.postponed
        started, self._cpu_before = self._clock(), self._cpu()
        self._observers.sync_started(self.family, retry=bool(self._failures) or self._is_incomplete)
        for conflict in self.plans.plan(int(is_for_giant) if self.is_synced else None):
            log.warning("frontend conflict", extra={"fields": {"conflict": str(conflict)}})
        self._withhold(now, scope)
        self._log_left_out()
        self._trigger_times += self._objects.take_trigger_times(self.plans.delayed)
        is_told = self._isolation.unserved.keys() | self.plans.unplanned.keys() <= self.plans.unserved.keys()
        if scope is Scope.CHANGED and is_told and not self.plans.differs and not self._degraded:
            self._succeeded(started, scope, None)
            return
        if udp_frontends := self.plans.pending_udp_frontends():
            self._observers.plans_changed(self.family, udp_frontends)
        self._observers.sync_planned(self.plans)
        before = self._cpu()
        try:
            report = self._observers.update(self.instance, self.plans.update(scope))
        except Unsupported:
            raise
        except Exception as error:  # noqa: BLE001 - a plugin's, and the other family must continue
            self._failed(started, scope, error)
        else:
            self._learn_part(self._cpu() - before)
            self._succeeded(started, scope, report)

    def _learn_part(self, seconds: float) -> None:
        """Adapt the size of parts to the CPU time of the last sync, which some modes spend in programs."""
        if self._elements <= self._part / 2:
            return
        if seconds > _PART_SECONDS:
            self._part = max(_SMALLEST_PART, self._part // 2)
        elif seconds < _PART_SECONDS / 2:
            self._part = min(_LARGEST_PART, 2 * self._part)

    def _log_left_out(self) -> None:
        """Log which Services are not served in full, where that changes."""
        for service in self.plans.budget.take_left_out():
            fields = {"ip_family": self.family.label, "service": str(service)}
            if problem := self.plans.budget.describe(service):
                log.error("service exceeds the limits", extra={"fields": {**fields, "left_out": problem}})
            else:
                log.info("service is served in full again", extra={"fields": fields})

    def _describe_left_out(self) -> str:
        """Return the Services that exceed their limits, for people."""
        if not (left_out := self.plans.budget.left_out):
            return ""
        service = next(iter(left_out))
        others = f", and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        return f"beyond the limits: {service}: {self.plans.budget.describe(service)}{others}"

    def _withhold(self, now: float, scope: Scope) -> None:
        """Keep service ports that the backend fails to program, or may fail to, out of the next update.

        And those that must wait for others.
        """
        isolation = self._isolation
        difference = self.plans.difference
        isolation.add([key for key in difference.take_reconsidered() if key in isolation.left_out], now)
        if (trial := isolation.trial) is not None:
            isolation.add(difference.keys - isolation.withheld - frozenset(trial), now)
        is_whole = scope is Scope.RESYNC or trial is not None
        self._elements = difference.postpone(
            None if is_whole else self._part, isolation.withheld, again=self._is_for_backlog)
        difference.withhold(frozenset(isolation.withheld))

    def _succeeded(self, started: float, scope: Scope, report: SyncReport | None) -> None:
        ended = self._clock()
        if self._failures:
            log.info("sync works again", extra={"fields": {
                "ip_family": self.family.label, "failures": self._failures}})
        self._end_failures()
        self._trusts_backend = self._trusts_backend or scope is Scope.RESYNC
        self._isolation.succeeded(ended, wrote=report is not None and report.operations > 0)
        steps = []
        is_first, rules_were_missing = not self.is_synced, False
        if scope is Scope.RESYNC:
            rules_were_missing = self._is_damaged or (report is not None and report.operations > 0)
            self._is_damaged = False
        exceeded = self._describe_left_out()
        if report is None:
            problem = "; ".join(filter(None, (self._log_unserved(self.plans.unserved), exceeded)))
        else:
            self._log_sync(scope, report, ended - started)
            unserved = {**report.unserved, **self._isolation.unserved, **self.plans.unplanned}
            problem = "; ".join(filter(None, (self._log_unserved(unserved), report.degraded, exceeded)))
            self._degraded = report.degraded
            self.plans.difference.postpone_unfinished(report.unfinished)
            steps = self.plans.acknowledge(unserved)
            self.is_synced = self.is_synced or self._isolation.trial is None
        self.pacing.ran(started, ended, scope, True, cost=self._cost(), incomplete=self._is_incomplete)
        trigger_times, self._trigger_times = self._trigger_times, []
        synced = Synced(
            plans=self.plans, instance=self.instance, scope=scope, seconds=ended - started, report=report,
            steps=steps, follow_ups=self.plans.take_follow_ups(), trigger_times=trigger_times,
            named=self._objects.take_named(), problem=problem, is_first=is_first,
            rules_were_missing=rules_were_missing,
        )
        self._observers.sync_succeeded(synced)

    def _failed(self, started: float, scope: Scope, error: Exception) -> None:
        """Keep everything for the retry."""
        ended = self._clock()
        expected, told = isinstance(error, SyncFailed), isinstance(error, (SyncFailed, PluginFailed))
        self._trusts_backend = self._trusts_backend and expected and not isinstance(error, TrustLost)
        trial = self._isolation.trial
        if self._isolation.failed(_reason(error), ended):
            self._observers.sync_failed(SyncFailure(
                family=self.family, scope=scope, seconds=ended - started, error=error))
            if self._isolation.trial is None:  # The next sync succeeds, and says what was left out.
                self.pacing.request(ended, Scope.CHANGED if self._trusts_backend else Scope.RESYNC)
            return
        self._failures += 1
        if trial is not None and trial:
            self._suspect_all_at = 2 * self._failures
        elif trial is not None:
            self._suspect_at = self._failures + 1
        del self._trigger_times[:-_REMEMBERED_TRIGGERS]
        self.pacing.ran(started, ended, scope, False, cost=self._cost())
        if scope is Scope.CHANGED:
            if isinstance(error, TrustLost) or not expected:
                self.pacing.request_repair()
            elif self._failures == _ESCALATE_AFTER:
                self.pacing.request(started, Scope.RESYNC)
        self._suspect(error, ended)
        self._observers.sync_failed(SyncFailure(
            family=self.family, scope=scope, seconds=ended - started, error=error))
        if self._repeats.count(_reason(error)):
            log.error(
                "sync failed",
                extra={"fields": {
                    "ip_family": self.family.label, "scope": scope.value, "failures": self._failures,
                    "error": str(error) if told else repr(error),
                }},
                exc_info=None if told else error,
            )

    def _suspect(self, error: Exception, now: float) -> None:
        """Leave out the service ports because of which the backend fails, or begin to search for them.

        A search among all deletes the rules of those that wait for their trial: those that an earlier process
        has written, or that the last success has. So it waits for an error that repeats itself, or for one in
        the backend. A search that finds no cause is made again when more syncs have failed.
        """
        isolation, plans = self._isolation, self.plans
        named = error.service_ports if isinstance(error, SyncFailed) else frozenset()
        if known := (named & (plans.plans.keys() | plans.difference.keys)) - isolation.left_out.keys():
            isolation.leave_out(known, _reason(error), now)
            self.pacing.request(now)
            return
        if _is_of_machine(error):
            return
        differing = plans.difference.keys - isolation.withheld - plans.difference.postponed
        first = 0 if isinstance(error, PluginFailed) else _SUSPECT_ALL_AFTER
        if self.is_synced and differing and self._failures >= self._suspect_at:
            isolation.search(differing, now, first_without=True)
        elif self._failures >= max(first, self._suspect_all_at):
            suspects = [key for key in plans.plans if key not in isolation.withheld]
            isolation.search(suspects, now, first_without=False)
        else:
            return
        if not self._told_search:
            self._told_search = True
            log.warning("looking for the service ports that cannot be programmed", extra={"fields": {
                "ip_family": self.family.label, "error": _reason(error)}})

    def _end_failures(self) -> None:
        self._failures = 0
        self._repeats.end()
        self._told_search = False
        self._suspect_at = self._suspect_all_at = _ESCALATE_AFTER

    @property
    def _is_incomplete(self) -> bool:
        """The last sync succeeded but must be repeated."""
        left_out, unplanned = self._isolation.withheld, self.plans.unplanned
        return bool(self._degraded) or any(
            key not in left_out and key not in unplanned for key in self.plans.unserved)

    def _cost(self) -> float:
        """Return the CPU seconds of the sync so far that later syncs wait for.

        A busy machine makes it longer, but not costlier.
        """
        cost = self._cpu() - self._cpu_before
        if self._is_for_backlog:
            self._backlog_cost += cost
            if not self.plans.difference.postponed:
                self._backlog_rest_until = self._clock() + _BACKLOG_REST_SHARE * self._backlog_cost
                self._backlog_cost = 0.0
            return 0.0
        return cost

    def _log_unserved(self, unserved: Mapping[ServicePortKey, str]) -> str:
        """Return the service ports that are not served, for people. Log when they change."""
        problem = ""
        if unserved:
            key, reason = next(iter(unserved.items()))
            others = f", and {len(unserved) - 1} more" if len(unserved) > 1 else ""
            problem = f"not served: {key}: {reason}{others}"
        if unserved != self.plans.unserved:
            log.log(
                logging.ERROR if unserved else logging.INFO,
                "service ports are not served" if unserved else "all service ports are served again",
                extra={"fields": {
                    "ip_family": self.family.label, "service_ports": len(unserved), "problem": problem,
                }},
            )
        return problem

    def _log_sync(self, scope: Scope, report: SyncReport, seconds: float) -> None:
        """Log a sync, at a level above debug only if an operator would want to know."""
        level, message = logging.DEBUG, "synced"
        fields: dict[str, object] = {}
        if scope is Scope.RESYNC:
            if not self.is_synced:
                level, message = logging.INFO, "first sync"
            elif self._damages:
                level, message = logging.WARNING, "repaired foreign changes"
                fields = {"what": self._damage, "changes": self._damages}
                self._damages = 0
            elif report.operations:
                level, message = logging.INFO, "full sync found differences"
        if log.isEnabledFor(level):
            fields |= {
                "ip_family": self.family.label, "scope": scope.value, "operations": report.operations,
                "service_ports": len(self.plans.plans), "seconds": round(seconds, 6), **report.detail,
            }
            log.log(level, message, extra={"fields": fields})


def _is_of_machine(error: BaseException | None) -> bool:
    """Return whether *error* follows from one that no service port causes."""
    while error is not None:
        if isinstance(error, (OSError, HostError)) and error.errno in _OF_MACHINE:
            return True
        error = error.__cause__
    return False


def _reason(error: Exception) -> str:
    return one_line(error) or type(error).__name__
