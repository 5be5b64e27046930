"""What is counted, under kube-proxy's names (kube-proxy 1.36, pkg/proxy/metrics/metrics.go).

Recording is a few dictionary operations. prometheus_client is imported at the first scrape: it
costs more memory and start-up time than everything that is counted here.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from kproxy_core.backend.api import Measurement, Scope
from kproxy_core.model.address import Family
from kproxy_core.observe.client_metrics import ClientMetrics
from kproxy_core.observe.instruments import (
    Counter,
    Gauge,
    Histogram,
    Instrument,
    Sample,
    Told,
    exposition,
    spelled,
)
from kproxy_core.observe.process_metrics import build_info, measure_process

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_SYNC_BUCKETS = tuple(0.001 * 2**i for i in range(15))
_PROGRAMMING_BUCKETS = (0.25, 0.5, *range(1, 60), *range(60, 120, 5), *range(120, 301, 30))

_IP_FAMILY = ("ip_family",)


class Metrics:
    """Every metric of one process. Any thread may record and scrape.

    Durations are in seconds, times of events in wall clock seconds since the epoch.
    """

    def __init__(self, mode: str, version: str) -> None:
        self.client = ClientMetrics()
        """For who talks to the API server."""
        self._lock = threading.Lock()
        self._instruments: list[Instrument] = []
        self._registry: CollectorRegistry | None = None
        """Of the process, not of ours."""
        self._measure: Callable[[], Iterable[Sequence[Measurement]]] = tuple

        def counter(name: str, about: str, labels: tuple[str, ...] = ()) -> Counter:
            self._instruments.append(made := Counter(name, about, labels))
            return made

        def gauge(name: str, about: str, labels: tuple[str, ...] = ()) -> Gauge:
            self._instruments.append(made := Gauge(name, about, labels))
            return made

        def histogram(name: str, about: str, buckets: tuple[float, ...] = _SYNC_BUCKETS) -> Histogram:
            self._instruments.append(made := Histogram(name, about, _IP_FAMILY, buckets))
            return made

        sync = "kubeproxy_sync_proxy_rules"
        self._sync = histogram(f"{sync}_duration_seconds", "Duration of a sync, also of a failed one")
        self._sync_by_scope = {
            scope: histogram(f"kubeproxy_sync_{scope.value}_proxy_rules_duration_seconds",
                             f"Duration of a {scope.value} sync, also of a failed one")
            for scope in (Scope.RESYNC, Scope.CHANGED)
        }
        self._last_sync = gauge(f"{sync}_last_timestamp_seconds", "When a sync last succeeded", _IP_FAMILY)
        self._last_queued = gauge(
            f"{sync}_last_queued_timestamp_seconds", "When a sync was last requested", _IP_FAMILY)
        self._programming = histogram(
            "kubeproxy_network_programming_duration_seconds",
            "From the change of a Service or pod to its being programmed", _PROGRAMMING_BUCKETS)
        self._endpoints_pending = gauge(
            f"{sync}_endpoint_changes_pending", "EndpointSlice changes that wait for a sync")
        self._endpoints_total = counter(f"{sync}_endpoint_changes_total", "EndpointSlice changes seen")
        self._services_pending = gauge(
            f"{sync}_service_changes_pending", "Services with changes that wait for a sync")
        self._services_total = counter(f"{sync}_service_changes_total", "Service changes seen")
        self._no_local = gauge(
            f"{sync}_no_local_endpoints_total",
            "Service ports with a Local policy and endpoints, but none on this node",
            ("traffic_policy", "ip_family"))
        self._sync_failures = self._failures_in(mode)
        self._health_answers = {
            check: counter(f"kubeproxy_proxy_{check}_total", f"Answers to /{check} by status", ("code",))
            for check in ("healthz", "livez")
        }
        reconciler = "kubeproxy_conntrack_reconciler"
        self._flows = histogram(f"{reconciler}_sync_duration_seconds", "Duration of a conntrack clean-up")
        self._flows_deleted = counter(
            f"{reconciler}_deleted_entries_total", "Stale conntrack entries deleted", _IP_FAMILY)

        self._operations = counter(
            "kproxy_sync_operations_total", "Kernel objects written or deleted", _IP_FAMILY)
        self._retries = counter("kproxy_sync_retries_total", "Syncs that repeat what had failed", _IP_FAMILY)
        self._foreign = counter(
            "kproxy_foreign_changes_total", "Changes by others to what was programmed", _IP_FAMILY)
        self._bad_objects = counter(
            "kproxy_bad_objects_total", "Objects, or parts of one, that could not be used", ("kind",))
        self._build = gauge("kproxy_build_info", "Always 1", ("version", "mode"))
        self._build.set(1, version, mode)
        self._version = version
        self._fallback = gauge(
            "kproxy_mode_fallback", "1: another mode serves than the one asked for", ("wanted", "serving"))

        build = build_info(version)
        gauge(build.name, build.about, tuple(build.labels)).set(1, *build.labels.values())
        self._gates = gauge(
            "kubernetes_feature_enabled", "Whether a feature gate is on", ("name", "stage"))
        counter("disabled_metrics_total", "Always 0: no metric can be disabled")
        counter("hidden_metrics_total", "Always 0: no metric is hidden")
        registered = counter(
            "registered_metrics_total", "Metrics there are", ("stability_level", "deprecated_version"))
        registered.add(sum(i.name.startswith("kubeproxy_") for i in self._instruments), "ALPHA", "")

    def mode_is(self, mode: str) -> None:
        """Another *mode* serves: its failures are counted by themselves, as kube-proxy's are."""
        with self._lock:
            self._fallback.clear()
            self._build.clear()
            self._build.set(1, self._version, mode)
            self._sync_failures = self._failures_in(mode)

    def _failures_in(self, mode: str) -> Counter:
        name = f"kubeproxy_sync_proxy_rules_{mode.replace('-', '_')}_sync_failures_total"
        known = next((i for i in self._instruments if i.name == name), None)
        if not isinstance(known, Counter):
            known = Counter(name, "Syncs that failed", _IP_FAMILY)
            self._instruments.append(known)
        return known

    def fell_back(self, wanted: str, serving: str) -> None:
        """The mode *wanted* does not work here; until another is switched to, *serving* serves."""
        with self._lock:
            self._fallback.set(1, wanted, serving)

    # What the sync loop tells.

    def service_events(self, count: int, pending: int) -> None:
        """*count* Service events were folded in (dual stack: each counts twice, as in kube-proxy);
        *pending* Services now wait for the next sync."""
        with self._lock:
            self._services_total.add(count)
            self._services_pending.set(pending)

    def endpoint_events(self, count: int, pending: int) -> None:
        """*count* EndpointSlice events were folded in; *pending* that changed something wait."""
        with self._lock:
            self._endpoints_total.add(count)
            self._endpoints_pending.set(pending)

    def changes_taken(self) -> None:
        """The pending changes went into a sync: both pending gauges return to 0."""
        with self._lock:
            self._services_pending.set(0)
            self._endpoints_pending.set(0)

    def sync_requested(self, family: Family, at: float) -> None:
        """A sync was requested, or the loop began, *at* this time."""
        with self._lock:
            self._last_queued.set(at, family.label)

    def sync_ended(
        self, family: Family, scope: Scope, seconds: float, at: float, operations: int | None
    ) -> None:
        """A sync took *seconds* until *at*; *operations*: kernel objects written, None: it failed."""
        label = family.label
        with self._lock:
            self._sync.observe(seconds, label)
            self._sync_by_scope[scope].observe(seconds, label)
            if operations is None:
                self._sync_failures.add(1, label)
            else:
                self._last_sync.set(at, label)
                self._operations.add(operations, label)

    def sync_retried(self, family: Family) -> None:
        """A failed sync is tried again."""
        with self._lock:
            self._retries.add(1, family.label)

    def programmed(self, family: Family, delays: Iterable[float]) -> None:
        """Seconds from each trigger time that a successful sync covered to its end."""
        with self._lock:
            for delay in delays:
                self._programming.observe(delay, family.label)

    def no_local_endpoints(self, family: Family, internal: int, external: int) -> None:
        """Service ports with a Local policy, endpoints, and none of them local, after a success."""
        with self._lock:
            self._no_local.set(internal, "internal", family.label)
            self._no_local.set(external, "external", family.label)

    def foreign_change(self, family: Family) -> None:
        """Somebody else changed what this proxy programmed."""
        with self._lock:
            self._foreign.add(1, family.label)

    def bad_object(self, kind: str) -> None:
        """An object of *kind*, or a part of it, could not be used."""
        with self._lock:
            self._bad_objects.add(1, kind)

    def stale_flows(self, family: Family, seconds: float, deleted: int) -> None:
        """A conntrack clean-up took *seconds* and deleted *deleted* entries."""
        with self._lock:
            self._flows.observe(seconds, family.label)
            self._flows_deleted.add(deleted, family.label)

    # What the HTTP server tells and asks.

    def health_answered(self, check: str, status: int) -> None:
        """*check* (``healthz`` or ``livez``) was answered with *status*."""
        with self._lock:
            self._health_answers[check].add(1, str(status))

    def gate(self, name: str, stage: str, enabled: bool) -> None:
        """The feature gate *name* is on or off; *stage*: ALPHA, BETA, or "" once it is for all."""
        with self._lock:
            self._gates.set(enabled, name, stage)

    def also(self, measure: Callable[[], Iterable[Sequence[Measurement]]]) -> None:
        """Tell what *measure* returns, too, each time it is asked for."""
        self._measure = measure

    def values(self) -> dict[str, float]:
        """What was recorded, by name and labels as `exposition` spells them; without buckets."""
        return {
            name + suffix + spelled(labels): value
            for name, _, _, samples in self._told()
            for suffix, labels, value in samples if suffix != "_bucket"
        }

    def exposition(self) -> bytes:
        """Everything, with what prometheus_client says of the process, in the text format 0.0.4."""
        return exposition([*self._told(), *self._of_process()])

    def _told(self) -> list[Told]:
        """Everything of our own."""
        measured: dict[str, tuple[str, str, str, list[Sample]]] = {}
        for measurement in chain(measure_process(), *self._measure()):
            name, about, kind, value, labels = measurement
            measured.setdefault(name, (name, about, kind, []))[3].append(("", dict(labels), value))
        with self._lock:
            recorded = [(i.name, i.about, i.kind, list(i.samples())) for i in self._instruments]
        return [*recorded, *self.client.told(), *measured.values()]

    def _of_process(self) -> Iterator[Told]:
        from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

        if self._registry is None:
            self._registry = CollectorRegistry()
            for collector in (GCCollector, PlatformCollector, ProcessCollector):
                collector(registry=self._registry)
        for metric in self._registry.collect():
            name = f"{metric.name}_total" if metric.type == "counter" else metric.name
            yield name, metric.documentation, metric.type, [("", s.labels, s.value) for s in metric.samples]
