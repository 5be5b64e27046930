"""What the health and the metrics server answer to which path."""

from kproxy_core.run.health import ProxyHealth
from kproxy_core.run.http import Handler
from kproxy_core.run.metrics import Metrics


def health_routes(health: ProxyHealth, metrics: Metrics) -> Handler:
    """``/healthz`` and ``/livez`` (port 10256)."""
    raise NotImplementedError


def metrics_routes(metrics: Metrics, mode: str) -> Handler:
    """``/metrics``, ``/proxyMode`` and ``/healthz`` (port 10249)."""
    raise NotImplementedError
