"""Metrics of requests to the API server, under the names that client-go 1.36 has."""

import math
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
        by_verb = ("verb", "host")

        def counter(name: str, about: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"rest_client_{name}", about, labels, registry=registry)

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(f"rest_client_{name}", about, registry=registry)

        def histogram(
            name: str, about: str, buckets: tuple[float, ...], labels: tuple[str, ...] = by_verb,
        ) -> Histogram:
            return Histogram(f"rest_client_{name}", about, labels, registry=registry, buckets=buckets)

        self._requests = counter("requests_total", "Requests to the API server", ("code", "method", "host"))
        self._seconds = histogram("request_duration_seconds", "Duration of requests", _SECONDS)
        self._waited = histogram(
            "rate_limiter_duration_seconds", "Time that requests were held back", _SECONDS)
        self._sent = histogram("request_size_bytes", "Size of request bodies", _BYTES)
        self._received = histogram("response_size_bytes", "Size of response bodies", _BYTES)
        counter("transport_create_calls_total", "Always 0: connections are not shared", ("result",)).labels(
            "uncacheable")
        counter("transport_cert_rotation_gc_calls_total", "Always 0: nothing is cached")
        gauge("transport_cache_entries", "Always 0: connections are not shared")
        gauge("exec_plugin_ttl_seconds", "Always +Inf: plugins' certificates are not tracked").set(math.inf)
        histogram("exec_plugin_certificate_rotation_age", "Always empty, see the ttl", _AGES, ())

    def record(self, request: "ApiRequest") -> None:
        where = request.method, request.host
        self._requests.labels(request.code, *where).inc()
        self._waited.labels(*where).observe(request.waited)
        self._sent.labels(*where).observe(request.sent)
        self._seconds.labels(*where).observe(request.seconds)
        if request.received is not None:
            self._received.labels(*where).observe(request.received)
