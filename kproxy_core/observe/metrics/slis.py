"""``/metrics/slis``: results of the metrics server's own health checks (component-base 1.36)."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from kproxy_core.observe.metrics.registry import exposition


class HealthcheckSlis:
    """The only check, ``ping``, succeeds whenever it is made. Any thread may call."""

    def __init__(self, started: float) -> None:
        """*started*: start of the process, in seconds since the epoch."""
        self._registry = CollectorRegistry()
        self._result = Gauge(
            "kubernetes_healthcheck", "Result of the last check", ("name", "type"), registry=self._registry)
        self._checks = Counter(
            "kubernetes_healthchecks_total", "Checks by result", ("name", "type", "status"),
            registry=self._registry)
        Gauge("process_start_time_seconds", "Start of this process, in seconds since the epoch",
              registry=self._registry).set(started)

    def record_check(self) -> None:
        self._result.labels("ping", "healthz").set(1)
        self._checks.labels("ping", "healthz", "success").inc()

    def reset(self) -> None:
        self._result.clear()
        self._checks.clear()

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return the metrics in the format that *accept*, a header, prefers, and its content type."""
        return exposition(self._registry, accept)
