"""Metrics pushed to an OpenTelemetry collector by OpenTelemetry's exporter, which its variables configure."""

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import export as sdk
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

log = logging.getLogger("kproxy.run")

_CUMULATIVE = sdk.AggregationTemporality.CUMULATIVE

Labels = tuple[tuple[str, str], ...]
Times = tuple[int, int]
"""Start of counting and present, in nanoseconds since the epoch."""


class OtlpExporter:
    """Pushes the metrics of a registry at intervals, in a thread of its own."""

    def __init__(self, registry: Collector, attributes: Mapping[str, str], version: str) -> None:
        """*attributes* of this process may be overridden by variables.

        Raises ValueError naming a variable with a wrong value.
        """
        self._registry = registry
        self._interval = _seconds("OTEL_METRIC_EXPORT_INTERVAL", 60.0)
        timeout = _seconds("OTEL_EXPORTER_OTLP_TIMEOUT", 10.0)
        self._messages = _Messages()
        # The package takes the number in the variable for seconds, against the specification.
        self._exporter = OTLPMetricExporter(timeout=_seconds("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", timeout))
        self._resource = Resource(dict(attributes)).merge(OTELResourceDetector().detect())
        self._scope = InstrumentationScope("kproxy", version)
        self._started = time.time_ns()
        self._problem = ""
        self._stopped = threading.Event()

    def start(self) -> None:
        log.info("metrics are pushed by OTLP", extra={"fields": {"seconds": self._interval}})
        threading.Thread(target=self._run, name="kproxy-otlp", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        self._exporter.shutdown()

    def push(self) -> None:
        """Push all metrics once. Logs a failure, unless the last push failed, too."""
        times = self._started, time.time_ns()
        metrics = [_metric(metric, times) for metric in self._registry.collect() if metric.samples]
        scope = sdk.ScopeMetrics(self._scope, metrics, "")
        self._messages.first = ""
        result = self._exporter.export(sdk.MetricsData([sdk.ResourceMetrics(self._resource, [scope], "")]))
        problem = "" if result is sdk.MetricExportResult.SUCCESS else self._messages.first
        if problem and not self._problem:
            log.warning("metrics could not be pushed", extra={"fields": {"error": problem}})
        elif self._problem and not problem:
            log.info("metrics are pushed again")
        self._problem = problem

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            self.push()


class _Messages(logging.Handler):
    """Keeps the first message of OpenTelemetry's packages, which log each attempt of a push."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.first = ""
        logger = logging.getLogger("opentelemetry")
        logger.propagate = False
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.first = self.first or record.getMessage()


def _metric(metric: Metric, times: Times) -> sdk.Metric:
    data: sdk.Histogram | sdk.Sum | sdk.Gauge
    if metric.type == "histogram":
        points = [_histogram_point(labels, samples, times) for labels, samples in _series(metric).items()]
        data = sdk.Histogram(points, _CUMULATIVE)
    else:
        numbers = [sdk.NumberDataPoint(sample.labels, *times, sample.value) for sample in metric.samples]
        is_counter = metric.type == "counter"
        data = sdk.Sum(numbers, _CUMULATIVE, is_monotonic=True) if is_counter else sdk.Gauge(numbers)
    return sdk.Metric(metric.name, metric.documentation, metric.unit, data)


def _series(metric: Metric) -> dict[Labels, list[Sample]]:
    """Return the samples of each series of a histogram."""
    found: dict[Labels, list[Sample]] = {}
    for sample in metric.samples:
        labels = tuple((name, value) for name, value in sample.labels.items() if name != "le")
        found.setdefault(labels, []).append(sample)
    return found


def _histogram_point(labels: Labels, samples: Sequence[Sample], times: Times) -> sdk.HistogramDataPoint:
    total = {sample.name.rpartition("_")[2]: sample.value for sample in samples}
    buckets = [sample for sample in samples if sample.name.endswith("_bucket")]
    values = [int(sample.value) for sample in buckets]
    # Prometheus' buckets contain the smaller ones. It knows neither minimum nor maximum.
    each = [value - before for value, before in zip(values, [0, *values], strict=False)]
    bounds = [float(sample.labels["le"]) for sample in buckets if sample.labels["le"] != "+Inf"]
    return sdk.HistogramDataPoint(
        dict(labels), *times, int(total["count"]), total["sum"], each, bounds, None, None)  # type: ignore[arg-type]


def _seconds(variable: str, default: float) -> float:
    """Return a variable's number of milliseconds in seconds. Raises ValueError."""
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"{variable}: {text!r} is no number of milliseconds")
    return int(text) / 1000
