"""Metrics of the process, its API requests, its syncs and the traffic of Services (kube-proxy 1.36,
pkg/proxy/metrics).
"""

import math
import os
import re
import resource
import sys
import threading
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

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
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kproxy_core.contract.values import Measurement, Scope
from kproxy_core.model.address import Family
from kproxy_core.netlink.sockets import failures
from kproxy_core.sync.observer import Folded, Synced, SyncFailure, SyncObserver
from kproxy_core.sync.resets import ResetResult

if TYPE_CHECKING:
    from kproxy_core.kube.checks import Checked, Target
    from kproxy_core.kube.requests import ApiRequest
    from kproxy_core.observe.health import Problem

disable_created_metrics()  # type: ignore[no-untyped-call]  # kube-proxy has no ..._created series

_WHOLE_VALUE = re.compile(rb"^([^#].* -?\d+)\.0$", re.MULTILINE)
"""A sample with a whole number. Scripts made for kube-proxy expect it without ``.0``, as Go writes it."""
_WHOLE_BOUND = re.compile(rb'([{,]le="\d+)\.0"')
"""The bound of a bucket, likewise: a recording rule or dashboard may select the bucket by this label."""

KUBERNETES = "1.36"
"""Version of Kubernetes whose kube-proxy this process replaces."""

OTHER = "other"
"""Value of the label ``service`` of the series that sums up all those beyond the limit."""


# The registry.

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
        """Report that *serving* replaces *wanted*, which does not work here, until another mode is set."""
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


# The process.

_UNLIMITED = float(2**64)

_PLATFORMS = {"x86_64": "amd64", "aarch64": "arm64", "i686": "386", "armv7l": "arm"}


def _build_info(version: str) -> Measurement:
    """Return ``kubernetes_build_info``. Alerts on version skew in a cluster compare its ``git_version``."""
    major, minor = KUBERNETES.split(".")
    build = f"kproxy-{version}".replace("+", ".")  # semantic versions have one plus
    machine = os.uname().machine
    return Measurement(
        "kubernetes_build_info", "Always 1; the Kubernetes whose kube-proxy this replaces", "gauge", 1,
        {
            "major": major, "minor": minor, "git_version": f"v{KUBERNETES}.0+{build}",
            "git_commit": "", "git_tree_state": "", "build_date": "", "compiler": sys.implementation.name,
            "go_version": "", "platform": f"linux/{_PLATFORMS.get(machine, machine)}",
        },
    )  # fmt: skip


def measure_process(version: str) -> Iterator[Measurement]:
    """Yield the metrics of this process that prometheus_client lacks. Omits a value that cannot be read."""
    yield _build_info(version)
    with suppress(OSError):
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
    for name in ("go_threads", "go_goroutines"):
        yield Measurement(name, "Threads, under the name in dashboards of Go programs", "gauge", threads)
    for thread, times in sorted(dict(failures).items()):
        yield Measurement(
            "kproxy_notification_failures_total", "Notifications of the kernel that could not be processed",
            "counter", times, {"thread": thread})


def _network_bytes() -> tuple[int | None, int | None]:
    """Return the bytes received and sent, from the names and values in /proc/self/net/netstat."""
    try:
        with open("/proc/self/net/netstat", encoding="ascii") as file:
            lines = [line.split() for line in file if line.startswith("IpExt:")]
        values = dict(zip(*lines, strict=True))
        return int(values["InOctets"]), int(values["OutOctets"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, None


# Checks of endpoints.

def measure_problems(problems: Iterable["Problem"]) -> Iterator[Measurement]:
    for about, number in Tally(problem.about for problem in problems).items():
        yield Measurement(
            "kproxy_problems", "Problems that kproxy status shows", "gauge", number, {"about": about})


def measure_checks(targets: Iterable[tuple["Target", "Checked"]]) -> Iterator[Measurement]:
    for target, checked in targets:
        results = (("success", checked.successes), ("failure", checked.failures),
                   ("impossible", checked.impossible))  # fmt: skip
        for result, number in results:
            yield Measurement(
                "kproxy_forward_checks_total", "Checks of Forwards' endpoints", "counter", number,
                {**target.fields, "result": result})  # fmt: skip
        yield Measurement(
            "kproxy_forward_endpoint_left_out", "1: the check fails, so the endpoint is not used", "gauge",
            checked.is_left_out, target.fields)  # fmt: skip


# Requests to the API server.

_SECONDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)
_BYTES = (64, 256, 512, 1024, 4096, 16384, 65536, 262144, 1 << 20, 4 << 20, 16 << 20)
_HOUR = 3600
_DAY = 24 * _HOUR
_AGES = (600, 1800, _HOUR, 4 * _HOUR, *(days * _DAY for days in (1, 7, 30, 90, 180, 360, 1440)))


class ClientMetrics:
    """The metrics ``rest_client_*`` of client-go 1.36. Any thread may record."""

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


# Syncs. ``kproxy_...`` are our own metrics, all others kube-proxy's.

_SYNC_BUCKETS = tuple(0.001 * 2**i for i in range(15))
_PROGRAMMING_BUCKETS = (0.25, 0.5, *range(1, 60), *range(60, 120, 5), *range(120, 301, 30))

_IP_FAMILY = ("ip_family",)
_SYNC = "kubeproxy_sync_proxy_rules"


class SyncMetrics(SyncObserver):
    """Counts and times syncs. As in kube-proxy, a histogram or timestamp appears with its first value."""

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
        self._reset_pairs = gauge(
            "kproxy_removed_endpoints", "Frontends times removed endpoints whose connections are reset",
            _IP_FAMILY)
        self._reset_failures = self._counter(
            "kproxy_removed_endpoint_failures_total", "Failures to reset connections to removed endpoints")
        for family in families:
            self._reset_pairs.labels(family.label)
        self._operations = self._counter(
            "kproxy_sync_operations_total", "Kernel objects written or deleted")
        self._retries = self._counter("kproxy_sync_retries_total", "Syncs that repeat a failed one")
        self._foreign = self._counter(
            "kproxy_foreign_changes_total", "Changes by other processes to programmed objects")
        self._last_resorts = self._counter(
            "kproxy_last_resorts_total", "Times that a Service began to use its last resort")
        in_use = gauge(
            "kproxy_last_resort_services", "Services that use their last resort now", _IP_FAMILY)
        self._last_resort_services = {family: in_use.labels(family.label) for family in families}
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
        if synced.follow_ups.last_resorts:
            self._last_resorts.labels(family).inc(sum(step.begins for step in synced.follow_ups.last_resorts))
            self._last_resort_services[synced.family].set(len(synced.plans.last_resorts))
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

    def record_resets(self, result: ResetResult) -> None:
        """Record a search for connections to removed endpoints. Any thread may call."""
        self._reset_pairs.labels(result.family.label).set(result.pairs)
        self._reset_failures.labels(result.family.label).inc(bool(result.problem))

    def _observe_duration(self, family: Family, scope: Scope, seconds: float) -> None:
        self._sync.labels(family.label).observe(seconds)
        self._sync_by_scope[scope].labels(family.label).observe(seconds)

    def _counter(self, name: str, about: str) -> Counter:
        """Return a counter by IP family, with a series for each that is served."""
        made = Counter(name, about, _IP_FAMILY, registry=self._registry)
        for family in self._families:
            made.labels(family.label)
        return made
