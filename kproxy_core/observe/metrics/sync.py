"""Metrics of the sync loop (kube-proxy 1.36, pkg/proxy/metrics/metrics.go; ``kproxy_...`` are our own)."""

from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kproxy_core.backend.api import Scope
from kproxy_core.model.address import Family
from kproxy_core.sync.observer import Folded, Synced, SyncFailure, SyncObserver

_SYNC_BUCKETS = tuple(0.001 * 2**i for i in range(15))
_PROGRAMMING_BUCKETS = (0.25, 0.5, *range(1, 60), *range(60, 120, 5), *range(120, 301, 30))

_IP_FAMILY = ("ip_family",)
_SYNC = "kubeproxy_sync_proxy_rules"


class SyncMetrics(SyncObserver):
    """Counts and times syncs. As in kube-proxy, a histogram or timestamp exists from its first value on."""

    def __init__(
        self, registry: CollectorRegistry, mode: str, families: Sequence[Family], wall: Callable[[], float],
    ) -> None:
        """*wall*: seconds since the epoch."""
        self._registry = registry
        self._families = families
        self._wall = wall
        histogram = partial(Histogram, labelnames=_IP_FAMILY, registry=registry, buckets=_SYNC_BUCKETS)
        timestamp = partial(Gauge, labelnames=_IP_FAMILY, registry=registry)
        gauge, counter = partial(Gauge, registry=registry), partial(Counter, registry=registry)
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
            "Time from the change of a Service or pod until it is programmed",
            buckets=_PROGRAMMING_BUCKETS)
        self._endpoints_pending = gauge(
            f"{_SYNC}_endpoint_changes_pending", "EndpointSlice changes that wait for a sync")
        self._endpoints_total = counter(f"{_SYNC}_endpoint_changes_total", "EndpointSlice changes seen")
        self._services_pending = gauge(
            f"{_SYNC}_service_changes_pending", "Services with changes that wait for a sync")
        self._services_total = counter(f"{_SYNC}_service_changes_total", "Service changes seen")
        no_local = gauge(
            f"{_SYNC}_no_local_endpoints_total",
            "Service ports with a Local policy and endpoints, but none on this node",
            ("traffic_policy", "ip_family"))
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
        self._failures: dict[str, Counter] = {}
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
        self._last_queued.labels(family.label).set(self._wall())

    def damage_found(self, family: Family) -> None:
        self._foreign.labels(family.label).inc()

    def sync_started(self, family: Family, *, retry: bool) -> None:
        if retry:
            self._retries.labels(family.label).inc()
        self._services_pending.set(0)
        self._endpoints_pending.set(0)

    def sync_succeeded(self, synced: Synced) -> None:
        family, now = synced.family.label, self._wall()
        if synced.report is not None:
            self._observe_duration(synced.family, synced.scope, synced.seconds)
            self._last_sync.labels(family).set(now)
            self._operations.labels(family).inc(synced.report.operations)
        if synced.trigger_times:
            programming = self._programming.labels(family)
            for then in synced.trigger_times:
                programming.observe(now - then)
        without = [
            (plan, sign) for step in synced.steps for plan, sign in ((step.before, -1), (step.after, 1))
            if plan is not None and (plan.internal_policy_local or plan.external_policy_local)
            and plan.has_endpoints and not plan.local
        ]
        internal, external = self._no_local[synced.family]
        internal.inc(sum(sign * plan.internal_policy_local for plan, sign in without))
        external.inc(sum(sign * plan.external_policy_local for plan, sign in without))

    def sync_failed(self, failure: SyncFailure) -> None:
        self._observe_duration(failure.family, failure.scope, failure.seconds)
        self._mode_failures.labels(failure.family.label).inc()

    def record_cleanup(self, family: Family, deleted: int, seconds: float) -> None:
        """Count a clean-up of stale flows that succeeded. Any thread may call."""
        self._cleanup.labels(family.label).observe(seconds)
        self._deleted_flows.labels(family.label).inc(deleted)

    def _observe_duration(self, family: Family, scope: Scope, seconds: float) -> None:
        self._sync.labels(family.label).observe(seconds)
        self._sync_by_scope[scope].labels(family.label).observe(seconds)

    def _counter(self, name: str, about: str) -> Counter:
        """Return a counter by IP family, with a series for each that is served."""
        made = Counter(name, about, _IP_FAMILY, registry=self._registry)
        for family in self._families:
            made.labels(family.label)
        return made
