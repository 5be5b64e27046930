"""How talking to the API server is counted: under the names that client-go 1.36 has."""

import math
import threading

from kproxy_core.observe.instruments import Counter, Gauge, Histogram, Instrument, Told

_SECONDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)
_BYTES = (64, 256, 512, 1024, 4096, 16384, 65536, 262144, 1 << 20, 4 << 20, 16 << 20)
_HOUR = 3600
_DAY = 24 * _HOUR
_AGES = (600, 1800, _HOUR, 4 * _HOUR, *(days * _DAY for days in (1, 7, 30, 90, 180, 360, 1440)))


class ClientMetrics:
    """The families ``rest_client_*``. Any thread may record and read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        by_verb = ("verb", "host")

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"rest_client_{name}", about, by_verb, buckets)

        self._requests = Counter(
            "rest_client_requests_total", "Requests to the API server", ("code", "method", "host"))
        self._seconds = histogram(
            "request_duration_seconds", "How long answers took", _SECONDS)
        self._waited = histogram(
            "rate_limiter_duration_seconds", "How long requests were held back", _SECONDS)
        self._sent = histogram("request_size_bytes", "Size of requests' bodies", _BYTES)
        self._received = histogram("response_size_bytes", "Size of answers' bodies", _BYTES)
        transports = Counter(
            "rest_client_transport_create_calls_total", "Always 0: connections are not shared", ("result",))
        transports.set(0, "uncacheable")
        expiry = Gauge(
            "rest_client_exec_plugin_ttl_seconds", "Always +Inf: plugins' certificates are not followed")
        expiry.set(math.inf)
        self._instruments: tuple[Instrument, ...] = (
            self._requests, self._seconds, self._waited, self._sent, self._received, transports, expiry,
            Histogram("rest_client_exec_plugin_certificate_rotation_age", "Empty, as the ttl is", (), _AGES),
            Gauge("rest_client_transport_cache_entries", "Always 0: connections are not shared"),
            Counter("rest_client_transport_cert_rotation_gc_calls_total", "Always 0: nothing is cached"),
        )  # fmt: skip

    def requested(
        self, method: str, host: str, code: str, *,
        waited: float, seconds: float, sent: int = 0, received: int | None = None,
    ) -> None:
        """*host* (``host:port``) was asked, and answered with status *code*; ``<error>``: it did not.

        The request was held back for *waited* seconds before; its body has *sent* bytes. The answer,
        or a watch's beginning, took *seconds*. It has *received* bytes; None: there is none, or no end of it.
        """
        with self._lock:
            self._requests.add(1, code, method, host)
            self._waited.observe(waited, method, host)
            self._sent.observe(sent, method, host)
            self._seconds.observe(seconds, method, host)
            if received is not None:
                self._received.observe(received, method, host)

    def told(self) -> list[Told]:
        """All of them."""
        with self._lock:
            return [(i.name, i.about, i.kind, list(i.samples())) for i in self._instruments]
