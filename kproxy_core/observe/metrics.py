"""Metrics of the process, its API requests, its syncs and the traffic of Services (kube-proxy 1.36,
pkg/proxy/metrics).
"""

import math
import os
import re
import resource
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, repeat
from operator import sub
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Metric,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kproxy_core.contract.values import Failure, Handshake, Measurement, Scope
from kproxy_core.model.address import Family, format_socket
from kproxy_core.model.service import Destination, ServicePortKey
from kproxy_core.observe.traffic import EndpointTotal, Total, TrafficRecorder
from kproxy_core.sync.observer import Folded, Synced, SyncFailure, SyncObserver

if TYPE_CHECKING:
    from kproxy_core.kube.requests import ApiRequest

# The registry of all metrics, and those of the process as a whole (kube-proxy 1.36, pkg/proxy/metrics).

disable_created_metrics()  # type: ignore[no-untyped-call]  # kube-proxy has no ..._created series

_WHOLE_VALUE = re.compile(rb"^([^#].* -?\d+)\.0$", re.MULTILINE)
"""A sample with a whole number. Scripts made for kube-proxy expect it without ``.0``, as Go writes it."""
_WHOLE_BOUND = re.compile(rb'([{,]le="\d+)\.0"')
"""The bound of a bucket, likewise: a recording rule or dashboard may select the bucket by this label."""


class Metrics:
    """Every metric of one process. Any thread may record and scrape."""

    def __init__(self, mode: str, version: str) -> None:
        self.registry = CollectorRegistry()
        self.client = ClientMetrics(self.registry)
        for collector in (GCCollector, PlatformCollector, ProcessCollector):
            collector(registry=self.registry)
        self.add_collector(lambda: [tuple(measure_process(version))])
        self._version = version
        self._build = Gauge("kproxy_build_info", "Always 1", ("version", "mode"), registry=self.registry)
        self._fallback = Gauge(
            "kproxy_mode_fallback", "1: a fallback mode serves", ("wanted", "serving"),
            registry=self.registry)
        self.set_mode(mode)
        self._gates = Gauge(
            "kubernetes_feature_enabled", "1: the feature gate is on", ("name", "stage"),
            registry=self.registry)
        self._health_answers = {
            check: Counter(f"kubeproxy_proxy_{check}_total", f"Answers to /{check} by status", ("code",),
                           registry=self.registry)
            for check in ("healthz", "livez")
        }
        Counter("disabled_metrics_total", "Always 0: no metric can be disabled", registry=self.registry)
        Counter("hidden_metrics_total", "Always 0: no metric is hidden", registry=self.registry)

    def set_mode(self, mode: str) -> None:
        self._fallback.clear()
        self._build.clear()
        self._build.labels(self._version, mode).set(1)

    def set_fallback(self, wanted: str, serving: str) -> None:
        """Report that *serving* serves because *wanted* does not work here, until another mode is set."""
        self._fallback.labels(wanted, serving).set(1)

    def set_gate(self, name: str, stage: str, enabled: bool) -> None:
        """Set the feature gate *name*. *stage*: ALPHA, BETA, or "" for general availability."""
        self._gates.labels(name, stage).set(enabled)

    def record_health_answer(self, check: str, status: int) -> None:
        """Count an answer with *status* to *check* (``healthz`` or ``livez``)."""
        self._health_answers[check].labels(str(status)).inc()

    def add_collector(self, collect: Callable[[], Iterable[Sequence[Measurement]]]) -> None:
        """Add a collector that is called at every scrape."""
        self.registry.register(_Made(lambda: _families(chain(*collect()))))

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics in the format that *accept*, a header, prefers, and its content type."""
        return exposition(_Made(lambda: _counted(self.registry)), accept)


def content_type(accept: str) -> str:
    """Return the content type of the format that *accept*, a header, prefers."""
    return choose_encoder(accept)[1]


def exposition(registry: Collector, accept: str) -> tuple[bytes, str]:
    """Return the metrics of *registry* in Prometheus' text format, or in OpenMetrics if *accept* prefers it.

    Also returns the content type.
    """
    encode, kind = choose_encoder(accept)
    if kind.startswith("application/openmetrics-text"):
        return encode(registry), kind
    return _WHOLE_VALUE.sub(rb"\1", _WHOLE_BOUND.sub(rb'\1"', encode(registry))), kind


class _Made(Collector):
    """The metrics that a function returns."""

    def __init__(self, make: Callable[[], Iterable[Metric]]) -> None:
        self._make = make

    def collect(self) -> Iterable[Metric]:
        return self._make()


def _families(measurements: Iterable[Measurement]) -> Iterable[Metric]:
    families: dict[str, Metric] = {}
    for name, about, kind, value, labels in measurements:
        if name not in families:
            stem = name.removesuffix("_total") if kind == "counter" else name
            families[name] = Metric(stem, about, kind)
        families[name].add_sample(name, dict(labels), value)
    return families.values()


def _counted(registry: Collector) -> Iterator[Metric]:
    """Yield the metrics of *registry*, and ``registered_metrics_total``, which counts those of kube-proxy."""
    count = 0
    for metric in registry.collect():
        count += metric.name.startswith("kubeproxy_")
        yield metric
    registered = Metric("registered_metrics", "Metrics by stability", "counter")
    registered.add_sample(
        "registered_metrics_total", {"stability_level": "ALPHA", "deprecated_version": ""}, count)
    yield registered


# Metrics of this process beyond those of prometheus_client, from the kernel.

_UNLIMITED = float(2**64)

_PLATFORMS = {"x86_64": "amd64", "aarch64": "arm64", "i686": "386", "armv7l": "arm"}

KUBERNETES = "1.36"
"""Version of Kubernetes whose kube-proxy this process replaces."""


def _build_info(version: str) -> Measurement:
    """Return ``kubernetes_build_info``. Alerts on version skew in a cluster compare its ``git_version``."""
    major, minor = KUBERNETES.split(".")
    machine = os.uname().machine
    return Measurement(
        "kubernetes_build_info", "Always 1; the Kubernetes whose kube-proxy this replaces", "gauge", 1,
        {
            "major": major, "minor": minor, "git_version": f"v{KUBERNETES}.0+kproxy-{version}",
            "git_commit": "", "git_tree_state": "", "build_date": "", "compiler": sys.implementation.name,
            "go_version": "", "platform": f"linux/{_PLATFORMS.get(machine, machine)}",
        },
    )  # fmt: skip


def measure_process(version: str) -> Iterator[Measurement]:
    """Yield the metrics that are read at each scrape. A value that cannot be read is left out."""
    yield _build_info(version)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    yield Measurement(
        "process_virtual_memory_max_bytes", "Limit of this process's virtual memory", "gauge",
        _UNLIMITED if limit == resource.RLIM_INFINITY else limit,
    )  # fmt: skip
    received, sent = _network_bytes()
    about = "Bytes {} in this process's network namespace, by IPv4"
    if received is not None and sent is not None:
        yield Measurement(
            "process_network_receive_bytes_total", about.format("received"), "counter", received)
        yield Measurement("process_network_transmit_bytes_total", about.format("sent"), "counter", sent)
    threads = threading.active_count()
    yield Measurement("go_threads", "Threads, under the name that dashboards expect", "gauge", threads)
    yield Measurement("go_goroutines", "Threads, under the name that dashboards expect", "gauge", threads)


def _network_bytes() -> tuple[int | None, int | None]:
    """Return the bytes received and sent, from the names and values in /proc/self/net/netstat."""
    try:
        with open("/proc/self/net/netstat", encoding="ascii") as file:
            lines = [line.split() for line in file if line.startswith("IpExt:")]
        values = dict(zip(*lines, strict=True))
        return int(values["InOctets"]), int(values["OutOctets"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, None


# Metrics of requests to the API server, under the names that client-go 1.36 has.

_SECONDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)
_BYTES = (64, 256, 512, 1024, 4096, 16384, 65536, 262144, 1 << 20, 4 << 20, 16 << 20)
_HOUR = 3600
_DAY = 24 * _HOUR
_AGES = (600, 1800, _HOUR, 4 * _HOUR, *(days * _DAY for days in (1, 7, 30, 90, 180, 360, 1440)))


class ClientMetrics:
    """The families ``rest_client_*``. Any thread may record."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, namespace="rest_client", registry=registry)
        gauge = partial(Gauge, namespace="rest_client", registry=registry)
        histogram = partial(Histogram, namespace="rest_client", registry=registry)
        seconds = partial(histogram, labelnames=("verb", "host"), buckets=_SECONDS)
        size = partial(histogram, labelnames=("verb", "host"), buckets=_BYTES)
        self._requests = counter("requests_total", "Requests to the API server", ("code", "method", "host"))
        self._seconds = seconds("request_duration_seconds", "Duration of requests")
        self._waited = seconds("rate_limiter_duration_seconds", "Time that requests were held back")
        self._sent = size("request_size_bytes", "Size of request bodies")
        self._received = size("response_size_bytes", "Size of response bodies")
        counter("transport_create_calls_total", "Always 0: connections are not shared", ("result",)).labels(
            "uncacheable")
        counter("transport_cert_rotation_gc_calls_total", "Always 0: nothing is cached")
        gauge("transport_cache_entries", "Always 0: connections are not shared")
        gauge("exec_plugin_ttl_seconds", "Always +Inf: plugins' certificates are not tracked").set(math.inf)
        histogram("exec_plugin_certificate_rotation_age", "Always empty, see the ttl", buckets=_AGES)

    def record(self, request: "ApiRequest") -> None:
        where = request.method, request.host
        self._requests.labels(request.code, *where).inc()
        self._waited.labels(*where).observe(request.waited)
        self._sent.labels(*where).observe(request.sent)
        self._seconds.labels(*where).observe(request.seconds)
        if request.received is not None:
            self._received.labels(*where).observe(request.received)


# Metrics of the sync loop (kube-proxy 1.36, pkg/proxy/metrics/metrics.go; ``kproxy_...`` are our own).

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


# Metrics of the traffic of Services, with a limited number of series.

_SERVICE = ("namespace", "service", "port", "protocol")
_ENDPOINT = (*_SERVICE, "endpoint")

OTHER = "other"
"""Value of the label ``service`` of the series that sums up all those beyond the limit."""

_BOUNDS = tuple(one.value for one in Handshake if one is not Handshake.MICROSECONDS)
_SERIES_OF_HISTOGRAM = len(_BOUNDS) + 2


@dataclass(frozen=True, slots=True, eq=False)
class _Series:
    """A series that rows have."""

    metric: str
    last: str
    """Value of the metric's last label if it is an outcome, a reason or a direction."""
    numbers: slice
    """Of a row's values: one number of a counter; of a histogram one for each `Handshake`."""
    exists_with: tuple[int, ...]
    """Places of values: the series exists while one of them is not 0. Empty: as long as the row."""


class Chosen(NamedTuple):
    metric: str
    labels: tuple[str, ...]
    values: tuple[int, ...]


Rows = dict[Destination | None, tuple[int, ...]]
"""The numbers of one service port's endpoints and, with None, its own."""


@dataclass(slots=True)
class _State:
    """One row over time."""

    values: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    """Empty until a series is listed."""
    filled: tuple[bool, ...] = ()
    """The values that were not 0 when series were listed last."""
    listed: tuple[_Series, ...] = ()
    others: tuple[_Series, ...] = ()
    summed: tuple[int, ...] = ()
    """The values that the sums contain: 0 for those of listed series. Empty: none."""


class _Sums:
    """The sums over the series that are not listed, of all rows that have the same series."""

    def __init__(self, series: Sequence[_Series]) -> None:
        self.series = series
        self.rows: list[tuple[int, ...]] = []
        """Values to be added up: the earlier sums first."""

    def add_up(self) -> tuple[int, ...]:
        if len(self.rows) > 1:
            self.rows = [tuple(map(sum, zip(*self.rows, strict=True)))]
        return self.rows[0]


class LimitedSeries:
    """The listed series, and the sums of all others. No sum ever falls."""

    def __init__(self, limit: int, service: Sequence[_Series], endpoint: Sequence[_Series]) -> None:
        """*service* and *endpoint*: the series of each service port, and of each endpoint."""
        self._limit = limit
        self._listed = 0
        self.summed = 0
        """Series that are not listed now."""
        self._states: dict[ServicePortKey, dict[Destination | None, _State]] = {}
        self._service, self._endpoint = _Sums(service), _Sums(endpoint)
        self._with_sum: set[_Series] = set()
        """Series that some row had while they were not listed."""

    def update(self, key: ServicePortKey, rows: Rows) -> None:
        """Replace the rows of *key*. A series is listed if there was room at first."""
        states = self._states.setdefault(key, {})
        for endpoint in states.keys() - rows.keys():
            gone = states.pop(endpoint)
            self._listed -= len(gone.listed)
            self.summed -= len(gone.others)
        for endpoint, values in rows.items():
            state = states.get(endpoint)
            if state is None:
                state = states[endpoint] = _State()
            elif state.values == values:
                continue
            state.values = values
            sums = self._service if endpoint is None else self._endpoint
            filled = tuple(map(bool, values))
            if filled != state.filled:
                state.filled = filled
                self._list(state, sums.series, key, endpoint)
            if not state.others and not state.summed:
                continue
            if state.listed:
                hidden = [0] * len(values)
                for one in state.others:
                    hidden[one.numbers] = values[one.numbers]
                values = tuple(hidden)
            grown = tuple(map(sub, values, state.summed or repeat(0)))
            if min(grown) < 0:  # A forgotten endpoint is counted from 0 again.
                grown = tuple([now if more < 0 else more for now, more in zip(values, grown, strict=True)])
            sums.rows.append(grown)
            state.summed = values
        if not rows:
            del self._states[key]

    def chosen(self) -> Iterator[Chosen]:
        """Yield the listed series, then the sums."""
        for states in self._states.values():
            for state in states.values():
                for one in state.listed:
                    yield Chosen(one.metric, (*state.labels, one.last) if one.last else state.labels,
                                 state.values[one.numbers])
        for sums in (self._service, self._endpoint):
            for one in sums.series:
                if one in self._with_sum:
                    empty = [""] * (len(_METRICS[one.metric][1]) - 2 - bool(one.last))
                    yield Chosen(one.metric, ("", OTHER, *empty, *filter(None, (one.last,))),
                                 sums.add_up()[one.numbers])

    def _list(
        self, state: _State, series: Sequence[_Series], key: ServicePortKey, endpoint: Destination | None
    ) -> None:
        """List the series of a row that did not exist before, as far as there is room."""
        values = state.values
        existing = [one for one in series if not one.exists_with or any(values[at] for at in one.exists_with)]
        listed = [one for one in state.listed if one in existing]
        self._listed -= len(state.listed) - len(listed)
        new = [one for one in existing if one not in listed and one not in state.others]
        fitting = new[:max(0, self._limit - self._listed)]
        self._listed += len(fitting)
        listed += fitting
        others = [one for one in existing if one not in listed]
        self._with_sum.update(others)
        self.summed += len(others) - len(state.others)
        state.listed, state.others = tuple(listed), tuple(others)
        if listed and not state.labels:
            where = () if endpoint is None else (format_socket(*endpoint),)
            state.labels = key.namespace, key.name, key.port_name, key.protocol.name, *where


_METRICS = {
    "kproxy_service_connections": (
        "New connections to Services, or flows of UDP, by outcome", (*_SERVICE, "outcome")),
    "kproxy_service_failures": ("Forwarded TCP connections that failed, by reason", (*_SERVICE, "reason")),
    "kproxy_endpoint_connections": ("New connections, or flows of UDP, forwarded to endpoints", _ENDPOINT),
    "kproxy_endpoint_failures": (
        "TCP connections to endpoints that failed, by reason", (*_ENDPOINT, "reason")),
    "kproxy_service_bytes": ("Bytes between clients and Services, by direction", (*_SERVICE, "direction")),
    "kproxy_service_packets": (
        "Packets between clients and Services, by direction", (*_SERVICE, "direction")),
    "kproxy_endpoint_bytes": (
        "Bytes between clients and endpoints, by direction", (*_ENDPOINT, "direction")),
    "kproxy_endpoint_packets": (
        "Packets between clients and endpoints, by direction", (*_ENDPOINT, "direction")),
    "kproxy_service_handshake_duration_seconds": (
        "Duration of TCP handshakes with endpoints of Services", _SERVICE),
    "kproxy_endpoint_handshake_duration_seconds": ("Duration of TCP handshakes with endpoints", _ENDPOINT),
}  # fmt: skip


def _counters_of(row: str, *outcomes: str) -> tuple[_Series, ...]:
    """Return the series of connections, of each `Failure`, and of a `Volume` of packets and bytes."""
    volume = f"{row}_packets", f"{row}_bytes"
    names = [
        *((f"{row}_connections", outcome) for outcome in outcomes),
        *((f"{row}_failures", failure.value) for failure in Failure),
        *((metric, direction) for direction in ("to_endpoint", "from_endpoint") for metric in volume),
    ]
    return tuple(
        _Series(metric, last, slice(at, at + 1), () if not last else tuple(
            other for other, name in enumerate(names) if metric in volume and name[0] == metric) or (at,))
        for at, (metric, last) in enumerate(names)
    )  # fmt: skip


def _histogram_of(row: str) -> tuple[_Series, ...]:
    return (_Series(f"{row}_handshake_duration_seconds", "", slice(None), ()),)


SERVICE_COUNTERS = _counters_of("kproxy_service", "forwarded", "rejected")
_ENDPOINT_COUNTERS = _counters_of("kproxy_endpoint", "")
SERVICE_HISTOGRAM = _histogram_of("kproxy_service")
_ENDPOINT_HISTOGRAM = _histogram_of("kproxy_endpoint")
_NO_FAILURES = (0,) * len(Failure)


class TrafficCollector(Collector):
    """Connections by service port, and with *endpoints* by endpoint."""

    def __init__(self, recorder: TrafficRecorder, *, endpoints: bool, limit: int) -> None:
        self._recorder = recorder
        self._endpoints = endpoints
        self._counters = LimitedSeries(limit, SERVICE_COUNTERS, _ENDPOINT_COUNTERS)
        self._histograms = LimitedSeries(
            max(1, limit // (4 * _SERIES_OF_HISTOGRAM)), SERVICE_HISTOGRAM, _ENDPOINT_HISTOGRAM)
        """A quarter as many series, of their own: each would displace ten counters."""
        self._seen: dict[ServicePortKey, tuple[Total, int]] = {}
        """Each total, and `Total.changes` as of the last scrape."""
        self._lock = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            return list(self._collect())

    def _collect(self) -> Iterator[Metric]:
        self._update(self._recorder.read())
        counters, histograms = {}, {}
        for name, (about, labels) in _METRICS.items():
            if self._endpoints or name.startswith("kproxy_service_"):
                if name.endswith("_seconds"):
                    histograms[name] = HistogramMetricFamily(name, about, labels=labels)
                else:
                    counters[name] = CounterMetricFamily(name, about, labels=labels)
        for metric, labels, (value,) in self._counters.chosen():
            counters[metric].add_metric(labels, value)
        for metric, labels, (*counts, microseconds) in self._histograms.chosen():
            buckets = list(zip(_BOUNDS, accumulate(counts), strict=True))
            histograms[metric].add_metric(labels, buckets, microseconds / 1_000_000)
        yield from (*counters.values(), *histograms.values())
        yield CounterMetricFamily(
            "kproxy_conntrack_events_lost", "Times that events of connection tracking were lost",
            self._recorder.failures.lost)
        yield GaugeMetricFamily(
            "kproxy_traffic_series_summed", "Series beyond maxSeries, summed in 'other'",
            self._counters.summed + self._histograms.summed * _SERIES_OF_HISTOGRAM)

    def _update(self, totals: Mapping[ServicePortKey, Total]) -> None:
        """Bring the rows to *totals*. Those that have not changed cost little."""
        for key in self._seen.keys() - totals.keys():
            del self._seen[key]
            for series in (self._counters, self._histograms):
                series.update(key, {})
        for key, total in totals.items():
            seen = self._seen.get(key)
            if seen is None or seen[0] is not total or seen[1] != total.changes:
                self._seen[key] = total, total.changes
                endpoints = list(total.endpoints.items()) if self._endpoints else []
                self._counters.update(key, _counters(total, endpoints))
                self._histograms.update(key, _histograms(total, endpoints))


def _counters(total: Total, endpoints: Iterable[tuple[Destination, EndpointTotal]]) -> Rows:
    rows: Rows = {None: (total.forwarded, total.rejected, *_failed(total), *total.volume)}
    for where, to in endpoints:
        rows[where] = to.forwarded, *_failed(to), *to.volume
    return rows


def _failed(total: Total | EndpointTotal) -> Iterable[int]:
    return [total.failed.get(failure, 0) for failure in Failure] if total.failed else _NO_FAILURES


def _histograms(total: Total, endpoints: Iterable[tuple[Destination, EndpointTotal]]) -> Rows:
    rows: Rows = {None: total.handshakes} if total.handshakes else {}
    for where, to in endpoints:
        if to.handshakes:
            rows[where] = to.handshakes
    return rows
