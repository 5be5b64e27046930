"""Metrics pushed to a stand-in for an OpenTelemetry collector on loopback."""

import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kproxy_core.observe.metrics.otlp import OtlpExporter, Target, read_target
from tests.core.namespaces import namespace
from tests.core.processes import KPROXY, PATIENCE, started

BASE = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Collector(HTTPServer):
    """Keeps the requests that it receives."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: Queue[tuple[str, dict[str, str], Any]] = Queue()
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.status = 200


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.put((self.path, dict(self.headers), content))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(made: Collector) -> Iterator[Collector]:
    with made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with serving(Collector()) as made:
        yield made


def values(content: Any) -> dict[str, Any]:
    """Return kind and first data point by metric."""
    (resource,) = content["resourceMetrics"]
    (scope,) = resource["scopeMetrics"]
    return {
        metric["name"]: (kind, metric[kind]["dataPoints"][0])
        for metric in scope["metrics"] for kind in ("sum", "gauge", "histogram") if kind in metric
    }  # fmt: skip


def test_every_kind_of_metric_arrives_as_its_counterpart(collector: Collector) -> None:
    registry = CollectorRegistry()
    Counter("made", "Made", ["service"], registry=registry).labels("web").inc(3)
    Gauge("held", "Held", registry=registry).set(-1.5)
    histogram = Histogram("took", "Took", buckets=(1, 2, 5), registry=registry)
    for value in (0.5, 1.5, 1.7, 9):
        histogram.observe(value)
    target = Target(
        f"{collector.url}/v1/metrics", {"Authorization": "Bearer x"}, resource={"service.name": "k"})
    OtlpExporter(registry, target, "1.0").push()
    path, headers, content = collector.requests.get(timeout=10)
    assert (path, headers["Authorization"], headers["Content-Type"]) == (
        "/v1/metrics", "Bearer x", "application/json")
    assert content["resourceMetrics"][0]["resource"] == {
        "attributes": [{"key": "service.name", "value": {"stringValue": "k"}}]}
    found = values(content)
    kind, point = found["made"]
    assert (kind, point["asDouble"]) == ("sum", 3)
    assert point["attributes"] == [{"key": "service", "value": {"stringValue": "web"}}]
    assert int(point["startTimeUnixNano"]) < int(point["timeUnixNano"])
    assert (found["held"][0], found["held"][1]["asDouble"]) == ("gauge", -1.5)
    kind, point = found["took"]
    assert (kind, point["explicitBounds"], point["bucketCounts"], point["count"], point["sum"]) == (
        "histogram", [1, 2, 5], ["1", "2", "0", "1"], "4", 12.7)


def test_a_collector_that_fails_is_logged_once_until_it_works(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = OtlpExporter(CollectorRegistry(), Target(collector.url), "1.0")
    logging.getLogger("kproxy").propagate = True
    with caplog.at_level(logging.INFO, "kproxy.run"):
        for collector.status in (503, 503, 200, 200):
            exporter.push()
    assert [record.getMessage() for record in caplog.records] == [
        "metrics could not be pushed", "metrics are pushed again"]


def test_the_variables_are_those_of_opentelemetry() -> None:
    assert read_target({}, {}) is None
    assert read_target({BASE: "http://c:4318", "OTEL_SDK_DISABLED": "true"}, {}) is None
    assert read_target({BASE: "http://c:4318/"}, {"a": "b"}) == Target(
        "http://c:4318/v1/metrics", resource={"a": "b"})
    assert read_target({
        BASE: "http://c:4318", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "https://m/push",
        "OTEL_EXPORTER_OTLP_HEADERS": "key=a%20b, other=c", "OTEL_METRIC_EXPORT_INTERVAL": "1500",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "500", "OTEL_RESOURCE_ATTRIBUTES": "a=c,zone=x",
        "OTEL_SERVICE_NAME": "proxy",
    }, {"a": "b"}) == Target(
        "https://m/push", {"key": "a b", "other": "c"}, 1.5, 0.5,
        {"a": "c", "zone": "x", "service.name": "proxy"})  # fmt: skip


@pytest.mark.parametrize("wrong", [
    {BASE: "file:///etc/passwd"}, {BASE: "collector:4317"}, {BASE: "http://me:secret@collector:4318"},
    {BASE: "http://c", "OTEL_METRIC_EXPORT_INTERVAL": "0"},
    {BASE: "http://c", "OTEL_EXPORTER_OTLP_TIMEOUT": "soon"},
])  # fmt: skip
def test_wrong_variables_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="OTEL_") as raised:
        read_target(wrong, {})
    assert "secret" not in str(raised.value)


def test_an_answer_that_is_no_http_is_a_failure_like_any_other(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, caplog.at_level(logging.INFO, "kproxy.run"):
        logging.getLogger("kproxy").propagate = True

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(65536)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        OtlpExporter(CollectorRegistry(), Target(f"http://127.0.0.1:{server.getsockname()[1]}"), "1").push()
        thread.join()
    assert [record.getMessage() for record in caplog.records] == ["metrics could not be pushed"]


def test_a_running_proxy_pushes_its_metrics(tmp_path: Path) -> None:
    with namespace() as node, serving(node.inside(Collector)) as collector:
        command = [
            "ip", "netns", "exec", node.name, "env", f"{BASE}={collector.url}",
            "OTEL_METRIC_EXPORT_INTERVAL=100", KPROXY, "--mode=nftables", f"--manifests={tmp_path}",
            "--hostname-override=here",
        ]  # fmt: skip
        with started(node, command):
            content = collector.requests.get(timeout=PATIENCE)[2]
    attributes = {one["key"]: one["value"]["stringValue"]
                  for one in content["resourceMetrics"][0]["resource"]["attributes"]}
    assert (attributes["service.name"], attributes["k8s.node.name"]) == ("kproxy", "here")
    assert values(content)["kproxy_build_info"][0] == "gauge"
