"""What the health and the metrics server answer to which path."""

import pytest

from kproxy_core.model.address import Family
from kproxy_core.run.health import ProxyHealth
from kproxy_core.run.http_messages import Request
from kproxy_core.run.metrics import Metrics
from kproxy_core.run.routes import health_routes, metrics_routes


def request(target: str) -> Request:
    path, _, query = target.partition("?")
    return Request("GET", path, query)


@pytest.mark.parametrize(
    ("target", "status", "body"),
    [
        ("/healthz", 200, "ok"),
        ("/healthz/ping", 200, "ok"),
        ("/healthz?verbose", 200, "[+]ping ok\nhealthz check passed\n"),
        ("/healthz?verbose=true", 200, "[+]ping ok\nhealthz check passed\n"),
        ("/healthz?exclude=ping", 200, "ok"),
        ("/healthz?verbose&exclude=ping", 200, "[+]ping excluded: ok\nhealthz check passed\n"),
        ("/proxyMode", 200, "some-mode"),
        ("/readyz", 404, "404 page not found\n"),
        ("/", 404, "404 page not found\n"),
        ("/metrics/", 404, "404 page not found\n"),
    ],
)
def test_the_metrics_server(target: str, status: int, body: str) -> None:
    answer = metrics_routes(Metrics("some-mode", "0"), "some-mode")(request(target))
    assert (answer.status, answer.body.decode()) == (status, body)
    assert answer.content_type == "text/plain; charset=utf-8"


def test_metrics_are_in_the_text_format() -> None:
    answer = metrics_routes(Metrics("some-mode", "0"), "some-mode")(request("/metrics"))
    assert answer.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert b"# TYPE kubeproxy_sync_proxy_rules_duration_seconds histogram\n" in answer.body
    assert b'kproxy_build_info{mode="some-mode",version="0"} 1.0\n' in answer.body


def test_the_health_server_answers_and_counts() -> None:
    health = ProxyHealth((Family.IPV4,), timeout=60, node_required=False)
    metrics = Metrics("x", "0")
    routes = health_routes(health, metrics)
    statuses = [routes(request(path)).status for path in ("/healthz", "/livez", "/readyz", "/", "/metrics")]
    assert statuses == [503, 200, 404, 404, 404]
    health.synced(Family.IPV4)
    answer = routes(request("/healthz?verbose"))
    assert (answer.status, answer.content_type) == (200, "application/json")
    assert answer.body.startswith(b'{"lastUpdated":"')
    values = metrics.values()
    assert values['kubeproxy_proxy_healthz_total{code="503"}'] == 1
    assert values['kubeproxy_proxy_healthz_total{code="200"}'] == 1
    assert values['kubeproxy_proxy_livez_total{code="200"}'] == 1
