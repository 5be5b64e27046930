"""Metrics pushed to an OpenTelemetry collector: OTLP over HTTP in JSON (opentelemetry.io/docs/specs/otlp)."""

import json
import logging
import threading
import time
import urllib.request
from collections.abc import Iterable, Mapping
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

log = logging.getLogger("kproxy.run")

_CUMULATIVE = 2
"""AGGREGATION_TEMPORALITY_CUMULATIVE."""

Json = dict[str, Any]
Labels = tuple[tuple[str, str], ...]


class Target(NamedTuple):
    """A collector."""

    url: str
    headers: Mapping[str, str] = {}
    interval: float = 60.0
    """Seconds between two pushes."""
    timeout: float = 10.0
    """Seconds."""
    resource: Mapping[str, str] = {}
    """Attributes of this process."""


def read_target(environment: Mapping[str, str], resource: Mapping[str, str]) -> Target | None:
    """Return the collector that OpenTelemetry's variables name; None: no metrics are pushed.

    *resource*: attributes that the variables may override. Raises ValueError.
    """
    url = environment.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "")
    if not url and (base := environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")):
        url = f"{base.rstrip('/')}/v1/metrics"
    if not url or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if "@" in urlsplit(url).netloc:
        raise ValueError("OTEL_EXPORTER_OTLP_ENDPOINT: put credentials into OTEL_EXPORTER_OTLP_HEADERS")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"OTEL_EXPORTER_OTLP_ENDPOINT: {url!r} is no http:// or https:// URL")
    named = {**resource, **_pairs(environment.get("OTEL_RESOURCE_ATTRIBUTES", ""))}
    if name := environment.get("OTEL_SERVICE_NAME", ""):
        named["service.name"] = name
    return Target(
        url, _pairs(environment.get("OTEL_EXPORTER_OTLP_HEADERS", "")),
        _seconds(environment, "OTEL_METRIC_EXPORT_INTERVAL", 60.0),
        _seconds(environment, "OTEL_EXPORTER_OTLP_TIMEOUT", 10.0), named,
    )


class OtlpExporter:
    """Pushes the metrics of a registry at intervals, in a thread of its own."""

    def __init__(self, registry: Collector, target: Target, version: str) -> None:
        self._registry = registry
        self._target = target
        self._version = version
        self._started = time.time_ns()
        self._problem = ""
        self._stopped = threading.Event()

    def start(self) -> None:
        log.info("metrics are pushed by OTLP", extra={"fields": {"url": self._target.url}})
        threading.Thread(target=self._run, name="kproxy-otlp", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def push(self) -> None:
        """Push all metrics once. Logs a failure, unless it is that of the last push."""
        content = payload(self._registry.collect(), self._target.resource, self._version, self._started,
                          time.time_ns())
        request = urllib.request.Request(
            self._target.url, json.dumps(content).encode(),
            {**self._target.headers, "Content-Type": "application/json"})
        problem = ""
        try:
            with urllib.request.urlopen(request, timeout=self._target.timeout) as response:
                response.read()
        except (OSError, ValueError, HTTPException) as error:
            problem = str(error)
        if problem and problem != self._problem:
            log.warning("metrics could not be pushed", extra={
                "fields": {"url": self._target.url, "error": problem}})
        elif self._problem and not problem:
            log.info("metrics are pushed again", extra={"fields": {"url": self._target.url}})
        self._problem = problem

    def _run(self) -> None:
        while not self._stopped.wait(self._target.interval):
            self.push()


def payload(
    metrics: Iterable[Metric], resource: Mapping[str, str], version: str, started: int, now: int
) -> Json:
    """Return an ExportMetricsServiceRequest. *started*, *now*: nanoseconds since the epoch."""
    times = {"startTimeUnixNano": str(started), "timeUnixNano": str(now)}
    return {"resourceMetrics": [{
        "resource": {"attributes": _attributes(resource.items())},
        "scopeMetrics": [{
            "scope": {"name": "kproxy", "version": version},
            "metrics": [_metric(metric, times) for metric in metrics if metric.samples],
        }],
    }]}  # fmt: skip


def _metric(metric: Metric, times: Mapping[str, str]) -> Json:
    head = {"name": metric.name, "description": metric.documentation}
    if metric.type == "histogram":
        points = [_histogram_point(labels, samples, times) for labels, samples in _series(metric).items()]
        return head | {"histogram": {"dataPoints": points, "aggregationTemporality": _CUMULATIVE}}
    points = [
        {"attributes": _attributes(sample.labels.items()), "asDouble": sample.value, **times}
        for sample in metric.samples
    ]  # fmt: skip
    if metric.type == "counter":
        return head | {"sum": {
            "dataPoints": points, "aggregationTemporality": _CUMULATIVE, "isMonotonic": True}}
    return head | {"gauge": {"dataPoints": points}}


def _series(metric: Metric) -> dict[Labels, list[Sample]]:
    """Return the samples of each series of a histogram."""
    found: dict[Labels, list[Sample]] = {}
    for sample in metric.samples:
        labels = tuple((name, value) for name, value in sample.labels.items() if name != "le")
        found.setdefault(labels, []).append(sample)
    return found


def _histogram_point(labels: Labels, samples: Iterable[Sample], times: Mapping[str, str]) -> Json:
    point: Json = {"attributes": _attributes(labels), "explicitBounds": [], "bucketCounts": [], **times}
    before = 0  # Prometheus' buckets contain the smaller ones.
    for sample in samples:
        if sample.name.endswith("_sum"):
            point["sum"] = sample.value
        elif sample.name.endswith("_count"):
            point["count"] = str(int(sample.value))
        elif sample.name.endswith("_bucket"):
            if sample.labels["le"] != "+Inf":
                point["explicitBounds"].append(float(sample.labels["le"]))
            point["bucketCounts"].append(str(int(sample.value) - before))
            before = int(sample.value)
    return point


def _attributes(pairs: Iterable[tuple[str, str]]) -> list[Json]:
    return [{"key": name, "value": {"stringValue": value}} for name, value in pairs]


def _pairs(text: str) -> dict[str, str]:
    """Parse ``name=value,name=value``, with values in percent-encoding."""
    pairs = (part.partition("=") for part in text.split(",") if "=" in part)
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    """Return a number of milliseconds in seconds. Raises ValueError unless it is positive."""
    text = environment.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"{name}: {text!r} is no number of milliseconds")
    return int(text) / 1000
