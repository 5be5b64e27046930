"""Metrics pushed to a stand-in for an OpenTelemetry collector on loopback."""

import logging
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kproxy_core.app.assembly import make_exporter
from kproxy_core.observe.metrics import Metrics
from kproxy_core.observe.otlp import OtlpExporter
from kproxy_core.testing.network.patience import patience
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
        body = self.rfile.read(int(self.headers["Content-Length"]))
        content = MessageToDict(ExportMetricsServiceRequest.FromString(body))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.put((self.path, headers, content))
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


def attributes(content: Any) -> dict[str, str]:
    """Return the attributes of the process."""
    (resource,) = content["resourceMetrics"]
    return {one["key"]: one["value"]["stringValue"] for one in resource["resource"]["attributes"]}


def values(content: Any) -> dict[str, Any]:
    """Return kind and first data point by metric."""
    (resource,) = content["resourceMetrics"]
    (scope,) = resource["scopeMetrics"]
    return {
        metric["name"]: (kind, metric[kind]["dataPoints"][0])
        for metric in scope["metrics"] for kind in ("sum", "gauge", "histogram") if kind in metric
    }  # fmt: skip


def test_every_kind_of_metric_arrives_as_its_counterpart(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry()
    Counter("made", "Made", ["service"], registry=registry).labels("web").inc(3)
    Gauge("held", "Held", registry=registry).set(-1.5)
    histogram = Histogram("took", "Took", buckets=(1, 2, 5), registry=registry)
    for value in (0.5, 1.5, 1.7, 9):
        histogram.observe(value)
    monkeypatch.setenv(BASE, collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "zone=here")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "proxy")
    OtlpExporter(registry, {"service.name": "k", "a": "b"}, "1.0").push()
    path, headers, content = collector.requests.get(timeout=10)
    assert (path, headers["authorization"], headers["content-type"]) == (
        "/v1/metrics", "Bearer x", "application/x-protobuf")
    assert attributes(content) == {"service.name": "proxy", "a": "b", "zone": "here"}
    assert content["resourceMetrics"][0]["scopeMetrics"][0]["scope"] == {"name": "kproxy", "version": "1.0"}
    found = values(content)
    kind, point = found["made"]
    assert (kind, point["asDouble"]) == ("sum", 3)
    assert point["attributes"] == [{"key": "service", "value": {"stringValue": "web"}}]
    assert int(point["startTimeUnixNano"]) < int(point["timeUnixNano"])
    assert (found["held"][0], found["held"][1]["asDouble"]) == ("gauge", -1.5)
    kind, point = found["took"]
    assert (kind, point["explicitBounds"], point["bucketCounts"], point["count"], point["sum"]) == (
        "histogram", [1, 2, 5], ["1", "2", "0", "1"], "4", 12.7)
    assert not point.keys() & {"min", "max"}


@pytest.mark.parametrize("wrong", [500, 404])
def test_a_collector_that_fails_is_logged_once_until_it_works(
    collector: Collector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    monkeypatch.setenv(BASE, collector.url)
    exporter = OtlpExporter(CollectorRegistry(), {}, "1.0")
    logging.getLogger("kproxy").propagate = True
    with caplog.at_level(logging.INFO, "kproxy.run"):
        for collector.status in (wrong, wrong, 200, 200):
            exporter.push()
    records = [record for record in caplog.records if record.name == "kproxy.run"]
    assert [record.getMessage() for record in records] == [
        "metrics could not be pushed", "metrics are pushed again"]
    assert str(wrong) in records[0].__dict__["fields"]["error"]


def test_an_answer_that_is_no_http_is_a_failure_like_any_other(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", f"{500 * patience():.0f}")
    with socket.create_server(("127.0.0.1", 0)) as server, caplog.at_level(logging.INFO, "kproxy.run"):
        logging.getLogger("kproxy").propagate = True

        def answer() -> None:
            for _ in range(2):  # The package tries again at once.
                with server.accept()[0] as connection:
                    connection.recv(65536)
                    connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        monkeypatch.setenv(BASE, f"http://127.0.0.1:{server.getsockname()[1]}")
        OtlpExporter(CollectorRegistry(), {}, "1").push()
        thread.join()
    (record,) = (record for record in caplog.records if record.name == "kproxy.run")
    assert record.getMessage() == "metrics could not be pushed"


def made(monkeypatch: pytest.MonkeyPatch, **variables: str) -> OtlpExporter | None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return make_exporter(Metrics("nftables", "0"), "here")


def test_nothing_is_pushed_without_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(monkeypatch, OTEL_EXPORTER_OTLP_HEADERS="a=b") is None
    assert made(monkeypatch, OTEL_EXPORTER_OTLP_ENDPOINT="http://c", OTEL_SDK_DISABLED="true") is None


@pytest.mark.parametrize("variable", ["OTEL_METRIC_EXPORT_INTERVAL", "OTEL_EXPORTER_OTLP_TIMEOUT"])
@pytest.mark.parametrize("wrong", ["0", "soon"])
def test_a_wrong_number_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str, wrong: str
) -> None:
    logging.getLogger("kproxy").propagate = True
    with caplog.at_level(logging.ERROR, "kproxy.run"):
        assert made(monkeypatch, **{BASE: "http://c", variable: wrong}) is None
    assert caplog.records[0].__dict__["fields"]["because"].startswith(f"{variable}: {wrong!r}")


@pytest.mark.parametrize("variable", [BASE, "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"])
def test_a_missing_package_is_named_with_the_variable_that_needs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.metric_exporter", None)
    monkeypatch.delitem(sys.modules, "kproxy_core.observe.otlp")
    logging.getLogger("kproxy").propagate = True
    with caplog.at_level(logging.ERROR, "kproxy.run"):
        assert made(monkeypatch, **{variable: "http://c"}) is None
    because = caplog.records[0].__dict__["fields"]["because"]
    assert because.startswith(f"{variable} is set")
    assert "pip install 'kproxy[otlp]'" in because


def test_a_running_proxy_pushes_its_metrics(tmp_path: Path) -> None:
    with namespace() as node, serving(node.inside(Collector)) as collector:
        command = [
            "ip", "netns", "exec", node.name, "env", f"{BASE}={collector.url}",
            "OTEL_METRIC_EXPORT_INTERVAL=100", KPROXY, "--mode=nftables", f"--manifests={tmp_path}",
            "--hostname-override=here",
        ]  # fmt: skip
        with started(node, command):
            content = collector.requests.get(timeout=PATIENCE)[2]
    assert attributes(content)["service.name"] == "kproxy"
    assert attributes(content)["k8s.node.name"] == "here"
    assert values(content)["kproxy_build_info"][0] == "gauge"
