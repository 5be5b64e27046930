"""The registry of all metrics, and those of the process as a whole (kube-proxy 1.36, pkg/proxy/metrics)."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Metric,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kproxy_core.backend.api import Measurement
from kproxy_core.observe.metrics.client import ClientMetrics
from kproxy_core.observe.metrics.process import measure_process

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
