"""Metrics of the sync loop (kube-proxy 1.36, pkg/proxy/metrics/metrics.go; ``kproxy_...`` are our own)."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kproxy_core.backend.api import Scope
from kproxy_core.model.address import Family
from kproxy_core.sync.family_plans import Step
from kproxy_core.sync.observer import Folded, Synced, SyncFailure, SyncObserver

_SYNC_BUCKETS = tuple(0.001 * 2**i for i in range(15))
_PROGRAMMING_BUCKETS = (0.25, 0.5, *range(1, 60), *range(60, 120, 5), *range(120, 301, 30))

_IP_FAMILY = ("ip_family",)
_SYNC = "kubeproxy_sync_proxy_rules"

_T = TypeVar("_T", Counter, Gauge, Histogram)


class _OfFamily(dict[Family, _T]):
    """The series of one metric by IP family, each created at its first use."""

    def __init__(self, metric: _T) -> None:
        super().__init__()
        self._metric: _T = metric

    def __missing__(self, family: Family) -> _T:
        series: _T = self._metric.labels(family.label)
        self[family] = series
        return series


class SyncMetrics(SyncObserver):
    """Counts and times syncs. As in kube-proxy, a histogram or timestamp exists from its first value on."""

    def __init__(
        self, registry: CollectorRegistry, mode: str, families: Sequence[Family], wall: Callable[[], float],
    ) -> None:
        """*wall*: seconds since the epoch."""
        self._registry = registry
        self._families = families
        self._wall = wall
        self._no_local_counts = {family: NoLocalEndpoints() for family in families}

        def histogram(
            name: str, about: str, buckets: Sequence[float] = _SYNC_BUCKETS,
        ) -> _OfFamily[Histogram]:
            return _OfFamily(Histogram(name, about, _IP_FAMILY, registry=registry, buckets=buckets))

        def timestamp(name: str, about: str) -> _OfFamily[Gauge]:
            return _OfFamily(Gauge(name, about, _IP_FAMILY, registry=registry))

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(name, about, registry=registry)

        def counter(name: str, about: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(name, about, labels, registry=registry)

        self._sync = histogram(f"{_SYNC}_duration_seconds", "Duration of a sync, failed ones included")
        self._sync_by_scope = {
            scope: histogram(f"kubeproxy_sync_{scope.value}_proxy_rules_duration_seconds",
                             f"Duration of a {scope.value} sync, failed ones included")
            for scope in (Scope.RESYNC, Scope.CHANGED)
        }
        self._last_sync = timestamp(f"{_SYNC}_last_timestamp_seconds", "Time of the last success")
        self._last_queued = timestamp(
            f"{_SYNC}_last_queued_timestamp_seconds", "Time of the last request for a sync")
        self._programming = histogram(
            "kubeproxy_network_programming_duration_seconds",
            "Time from the change of a Service or pod until it is programmed", _PROGRAMMING_BUCKETS)
        self._endpoints_pending = gauge(
            f"{_SYNC}_endpoint_changes_pending", "EndpointSlice changes that wait for a sync")
        self._endpoints_total = counter(f"{_SYNC}_endpoint_changes_total", "EndpointSlice changes seen")
        self._services_pending = gauge(
            f"{_SYNC}_service_changes_pending", "Services with changes that wait for a sync")
        self._services_total = counter(f"{_SYNC}_service_changes_total", "Service changes seen")
        no_local = Gauge(
            f"{_SYNC}_no_local_endpoints_total",
            "Service ports with a Local policy and endpoints, but none on this node",
            ("traffic_policy", "ip_family"), registry=registry)
        self._no_local = {
            family: [no_local.labels(policy, family.label) for policy in ("internal", "external")]
            for family in families
        }
        cleanup = "kubeproxy_conntrack_reconciler"
        self._cleanup = histogram(f"{cleanup}_sync_duration_seconds", "Duration of a conntrack clean-up")
        self._deleted_flows = self._counter(
            f"{cleanup}_deleted_entries_total", "Stale conntrack entries deleted")
        self._operations = self._counter(
            "kproxy_sync_operations_total", "Kernel objects written or deleted")
        self._retries = self._counter("kproxy_sync_retries_total", "Syncs that repeat a failed one")
        self._foreign = self._counter(
            "kproxy_foreign_changes_total", "Changes by other processes to programmed objects")
        self._bad_objects = counter(
            "kproxy_bad_objects_total", "Objects, or parts of one, that could not be used", ("kind",))
        self._failures: dict[str, _OfFamily[Counter]] = {}
        self.set_mode(mode)

    def set_mode(self, mode: str) -> None:
        """Count failures for *mode* from now on, under a name of its own as in kube-proxy."""
        name = mode.replace("-", "_")
        if name not in self._failures:
            self._failures[name] = self._counter(f"{_SYNC}_{name}_sync_failures_total", "Syncs that failed")
        self._mode_failures = self._failures[name]

    def events_folded(self, folded: Folded) -> None:
        if folded.service_changes:
            self._services_total.inc(folded.service_changes)
            self._services_pending.set(folded.services_pending)
        if folded.endpoint_changes:
            self._endpoints_total.inc(folded.endpoint_changes)
            self._endpoints_pending.set(folded.endpoints_pending)
        for bad in folded.bad_objects:
            self._bad_objects.labels(bad.kind).inc()

    def sync_requested(self, family: Family) -> None:
        self._last_queued[family].set(self._wall())

    def damage_found(self, family: Family) -> None:
        self._foreign[family].inc()

    def sync_started(self, family: Family, *, retry: bool) -> None:
        if retry:
            self._retries[family].inc()
        self._services_pending.set(0)
        self._endpoints_pending.set(0)

    def sync_succeeded(self, synced: Synced) -> None:
        family, now = synced.family, self._wall()
        if synced.report is not None:
            self._observe_duration(family, synced.scope, synced.seconds)
            self._last_sync[family].set(now)
            self._operations[family].inc(synced.report.operations)
        for then in synced.trigger_times:
            self._programming[family].observe(now - then)
        counts = self._no_local_counts[family]
        if counts.follow(synced.steps):
            internal, external = self._no_local[family]
            internal.set(counts.internal)
            external.set(counts.external)

    def sync_failed(self, failure: SyncFailure) -> None:
        self._observe_duration(failure.family, failure.scope, failure.seconds)
        self._mode_failures[failure.family].inc()

    def record_cleanup(self, family: Family, deleted: int, seconds: float) -> None:
        """Count a clean-up of stale flows that succeeded. Any thread may call."""
        self._cleanup[family].observe(seconds)
        self._deleted_flows[family].inc(deleted)

    def _observe_duration(self, family: Family, scope: Scope, seconds: float) -> None:
        self._sync[family].observe(seconds)
        self._sync_by_scope[scope][family].observe(seconds)

    def _counter(self, name: str, about: str) -> _OfFamily[Counter]:
        made = _OfFamily(Counter(name, about, _IP_FAMILY, registry=self._registry))
        for family in self._families:
            made[family].inc(0)
        return made


class NoLocalEndpoints:
    """Counts service ports that a Local policy leaves without endpoints on this node, though others exist."""

    def __init__(self) -> None:
        self.internal = 0
        self.external = 0

    def follow(self, steps: Iterable[Step]) -> bool:
        """Apply *steps*. Return True if a number changed."""
        before = self.internal, self.external
        for step in steps:
            for plan, sign in ((step.before, -1), (step.after, 1)):
                if plan is not None and plan.has_endpoints and not plan.local:
                    self.internal += sign * plan.internal_policy_local
                    self.external += sign * plan.external_policy_local
        return before != (self.internal, self.external)
