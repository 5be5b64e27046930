"""Cluster events: their content, their rate, and that nothing waits for them."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kproxy_core.app.assembly import make_events
from kproxy_core.config.flags import Flags
from kproxy_core.config.settings import resolve
from kproxy_core.kube.access import CurrentAccess
from kproxy_core.model.service import ServiceName
from kproxy_core.observe import events as recorder_module
from kproxy_core.observe.events import SAME_AGAIN, ClusterEvent, EventRecorder, NotWritten
from tests.core.namespaces import namespace

PATIENT = """
from kproxy_core.contract.hooks import hookimpl
from kproxy_core.observe import events

events._AT_THE_END = 60.0

@hookimpl(wrapper=True)
def kproxy_sync(update):
    return (yield)
"""
"""A plugin that has the end wait for the events on a busy machine, too."""


class Taker(ThreadingHTTPServer):
    """An API server that keeps what is posted, and answers with `statuses`, then 201."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Taking)
        self.posted: list[tuple[str, dict[str, str], Any]] = []
        self.statuses: list[int] = []
        self.taken = threading.Semaphore(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Taking(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Taker)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.posted.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        self.send_response(server.statuses.pop(0) if server.statuses else 201)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
        server.taken.release()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Taker]:
    monkeypatch.setattr(recorder_module, "_AT_THE_END", 60.0)  # A busy machine is not quick.
    with Taker() as taker:
        thread = threading.Thread(target=taker.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield taker
        finally:
            taker.shutdown()
            thread.join()


def recorder(master: str, node: str) -> EventRecorder:
    config = resolve(Flags(master=master), None)
    return make_events(config, node, CurrentAccess(master, None), lambda _: None)


def events_to(server: Taker) -> EventRecorder:
    return recorder(server.url, "node1")


def test_the_starting_event_is_about_the_node(server: Taker) -> None:
    events = events_to(server)
    events.report_node("Normal", "Starting")
    events.start()
    assert server.taken.acquire(timeout=120)
    events.close()
    ((path, headers, event),) = server.posted
    assert path == "/apis/events.k8s.io/v1/namespaces/default/events"
    assert headers["content-type"] == "application/json"
    assert headers["user-agent"].startswith("kproxy/")
    assert (event["apiVersion"], event["kind"]) == ("events.k8s.io/v1", "Event")
    assert (event["type"], event["reason"], event["action"]) == ("Normal", "Starting", "StartKubeProxy")
    assert event["regarding"] == {"kind": "Node", "name": "node1", "uid": "node1"}
    assert event["reportingController"] == "kube-proxy"
    assert event["reportingInstance"].startswith("kube-proxy-")
    assert event["metadata"]["namespace"] == "default"
    assert event["metadata"]["name"].startswith("node1.")
    assert len(event["eventTime"]) == len("2026-01-02T03:04:05.678901Z")


def test_an_event_about_a_service_is_in_its_namespace(server: Taker) -> None:
    events = events_to(server)
    events.report_service("FailedToStartServiceHealthcheck", ServiceName("shop", "web"),
                          "port 30000 can't be opened: in use")
    events.close()
    ((path, _, event),) = server.posted
    assert path == "/apis/events.k8s.io/v1/namespaces/shop/events"
    assert event["regarding"] == {"kind": "Service", "namespace": "shop", "name": "web", "uid": "shop/web"}
    assert (event["type"], event["action"], event["note"]) == (
        "Warning", "Listen", "port 30000 can't be opened: in use")


def test_a_note_too_long_for_the_api_server_is_cut(server: Taker) -> None:
    node = "n" * 200 + "." + "d" * 52
    events = recorder(server.url, node)
    events.report_node("Warning", "ModeFallback", "\N{SNOWMAN}" * 400)
    events.close()
    ((_, _, event),) = server.posted
    assert event["note"] == "\N{SNOWMAN}" * 341
    assert event["regarding"]["name"] == node
    assert len(event["metadata"]["name"]) <= 253
    assert event["metadata"]["name"].startswith(node[:230])


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--healthz-bind-address", "FailedToStartProxierHealthcheck"),
        ("--metrics-bind-address", "FailedToStartMetricServer"),
    ],
)
def test_events_that_wait_are_delivered_at_the_end(
    flag: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "patient.py").write_text(PATIENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with namespace() as node, node.inside(Taker) as taker:
        thread = threading.Thread(target=taker.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            done = subprocess.run(
                ["ip", "netns", "exec", node.name, Path(sys.executable).with_name("kproxy"),
                 "--mode=nftables", f"--master={taker.url}", "--hostname-override=node1",
                 "--bind-address-hard-fail", f"{flag}=192.0.2.1:9999", "-p", "patient"],
                capture_output=True, text=True, check=False, timeout=120,
            )
        finally:
            taker.shutdown()
            thread.join()
    assert done.returncode == 1, done.stderr
    told = {body["reason"]: (body["type"], body["note"]) for _, _, body in taker.posted}
    assert set(told) == {"Starting", reason}
    assert told[reason][0] == "Warning"
    assert "can't listen on 192.0.2.1:9999" in told[reason][1]


def test_a_server_error_is_retried_and_a_refusal_is_not(server: Taker) -> None:
    server.statuses = [503, 201, 403]
    events = events_to(server)
    events.report_node("Normal", "Starting")
    events.report_node("Warning", "Other")
    events.start()
    for _ in range(3):
        assert server.taken.acquire(timeout=120)
    events.close()
    assert [body["reason"] for _, _, body in server.posted] == ["Starting", "Starting", "Other"]


def test_without_a_server_the_end_is_not_delayed() -> None:
    events = recorder("http://127.0.0.1:1", "node1")
    events.report_node("Normal", "Starting")
    events.start()
    closing = threading.Thread(target=events.close)
    closing.start()
    closing.join(120)
    assert not closing.is_alive()


def test_without_an_api_server_events_are_dropped(tmp_path: Path) -> None:
    before = threading.enumerate()
    events = make_events(
        resolve(Flags(manifests=str(tmp_path)), None), "node1", CurrentAccess(None, None), lambda _: None)
    events.report_node("Normal", "Starting")
    events.start()
    events.close()
    assert not set(threading.enumerate()) - set(before)


class Recorded:
    """Events that are written into a list, with a clock to set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.written: list[ClusterEvent] = []
        self.events = EventRecorder(
            "node1", lambda event, _: self.written.append(event), clock=lambda: self.now)

    def end(self) -> list[str]:
        self.events.close()
        return [event.reason for event in self.written]


def test_a_repeated_event_is_sent_only_after_a_while() -> None:
    recorded = Recorded()
    for recorded.now in (0.0, 1.0, SAME_AGAIN - 1, SAME_AGAIN + 1):
        recorded.events.report_node("Warning", "Same")
    assert recorded.end() == ["Same", "Same"]


def test_a_flood_of_events_is_limited() -> None:
    recorded = Recorded()
    for number in range(100):
        recorded.events.report_service("Flood", ServiceName("shop", f"web{number}"), "")
    recorded.now = 60.0
    for number in range(100):
        recorded.events.report_service("Later", ServiceName("shop", f"late{number}"), "")
    assert recorded.end() == ["Flood"] * 25 + ["Later"] * 5


def test_an_event_that_can_not_be_written_affects_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def write(event: ClusterEvent, _: int) -> None:
        if event.reason == "Bad":
            raise ValueError("a mistake")
        if event.reason == "Refused":
            raise NotWritten("no", again=False)
        written.append(event.reason)

    written: list[str] = []
    events = EventRecorder("node1", write)
    for reason in ("Bad", "Refused", "Good"):
        events.report_node("Normal", reason)
    events.close()
    assert written == ["Good"]
    assert [record.getMessage() for record in caplog.records] == ["bug: event not written"]
    caplog.clear()
