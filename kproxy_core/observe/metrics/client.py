"""Metrics of requests to the API server, under the names that client-go 1.36 has."""

import math
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from kproxy_core.apiclient.requests import ApiRequest

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
