"""Profiles and verbosity, over real sockets."""

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from kproxy_conformance.network.patience import patience
from kproxy_core.kube.protobuf import message_classes
from kproxy_core.observe.pages import Debug, dispatch
from kproxy_core.observe.server import HttpServer
from tests.core.observe.http_clients import (
    LOOPBACK,
    connect,
    eventually,
    get,
    port_of,
    received,
    serving,
    settle,
)


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with serving() as running:
        yield running


@pytest.fixture
def verbosities() -> list[int]:
    return []


@pytest.fixture
def port(server: HttpServer, verbosities: list[int]) -> int:
    handlers = Debug(verbosities.append).handlers
    listener = server.listen("debug", [(LOOPBACK[0], 0)], partial(dispatch, handlers))
    settle(server)
    return port_of(listener)


@contextmanager
def thread(name: str, work: Callable[[], object]) -> Iterator[None]:
    """A thread that does *work* again and again."""
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            work()

    running = threading.Thread(target=run, name=name)
    running.start()
    try:
        yield
    finally:
        done.set()
        running.join()


def burn_processor_time() -> None:
    for _ in range(10_000):
        pass


def test_the_index_links_all_profiles(port: int) -> None:
    moved = get(port, "/debug/pprof")
    assert (moved.status, moved.headers["Location"]) == (302, "/debug/pprof/")
    index = get(port, "/debug/pprof/")
    assert index.headers["Content-Type"] == "text/html; charset=utf-8"
    for name in (b"cmdline", b"goroutine", b"heap", b"profile"):
        assert b'<a href="/debug/pprof/%s">' % name in index.body
    assert get(port, "/debug/pprof/mutex").status == 404


def test_the_command_line(port: int) -> None:
    with open("/proc/self/cmdline", "rb") as file:
        assert get(port, "/debug/pprof/cmdline").body + b"\0" == file.read()


def stacks(port: int) -> str:
    return get(port, "/debug/pprof/goroutine?debug=2").body.decode()


def test_every_thread_shows_its_stack(port: int) -> None:
    with thread("sleeper", lambda: time.sleep(0.01)):
        assert eventually(lambda: "time.sleep(0.01)" in stacks(port))
        dump = stacks(port)
    assert "[sleeper]:\n" in dump
    assert "[MainThread]:\n" in dump


def test_folded_stacks_show_the_busy_function(port: int) -> None:
    with thread("burner", burn_processor_time), thread("sleeper", lambda: time.sleep(0.01)):
        lines = get(port, "/debug/pprof/profile?seconds=0.5&debug=1").body.decode().splitlines()
    stack, _, microseconds = lines[0].rpartition(" ")
    assert stack.startswith("burner;")
    assert "burn_processor_time (" in stack
    assert int(microseconds) > 0


PROFILE_PROTO = message_classes({
    "Profile": "sample_type=1 repeated ValueType, sample=2 repeated Sample, location=4 repeated Location, "
               "function=5 repeated Function, string_table=6 repeated string, duration_nanos=10 int64, "
               "period_type=11 ValueType, period=12 int64",
    "ValueType": "type=1 int64, unit=2 int64",
    "Sample": "location_id=1 repeated uint64, value=2 repeated int64, label=3 repeated Label",
    "Label": "key=1 int64, str=2 int64",
    "Location": "id=1 uint64, line=4 repeated Line",
    "Line": "function_id=1 uint64, line=2 int64",
    "Function": "id=1 uint64, name=2 int64, filename=4 int64",
})
"""What is asserted of github.com/google/pprof/proto/profile.proto."""


def test_a_profile_is_in_the_format_of_pprof(port: int) -> None:
    with thread("burner", burn_processor_time):
        reply = get(port, "/debug/pprof/profile?seconds=0.5")
    assert reply.headers["Content-Type"] == "application/octet-stream"
    profile = PROFILE_PROTO("Profile").FromString(gzip.decompress(reply.body))
    strings = profile.string_table
    assert strings[0] == ""
    kinds = [*profile.sample_type, profile.period_type]
    assert [(strings[kind.type], strings[kind.unit]) for kind in kinds] == [
        ("samples", "count"), ("cpu", "nanoseconds"), ("cpu", "nanoseconds")]
    assert profile.period == 10_000_000
    assert profile.duration_nanos >= 500_000_000
    functions = {each.id: (strings[each.name], strings[each.filename]) for each in profile.function}
    called = {each.id: functions[each.line[0].function_id] for each in profile.location}
    innermost = set()
    for sample in profile.sample:
        count, nanoseconds = sample.value
        assert count > 0
        assert nanoseconds > 0
        (label,) = sample.label
        assert strings[label.key] == "thread"
        innermost.add((strings[label.str], called[sample.location_id[0]]))
    assert ("burner", ("burn_processor_time", __file__)) in innermost


def test_kept_memory_is_shown_by_line(port: int) -> None:
    kept: list[bytearray] = []

    def allocate() -> None:
        kept.append(bytearray(10_000))
        time.sleep(0.01)

    with thread("keeper", allocate):
        report = get(port, "/debug/pprof/heap?seconds=0.3").body.decode()
    assert "kept.append(bytearray(10_000))" in report


def test_others_are_served_while_a_profile_is_taken(port: int) -> None:
    with connect(port) as client:
        client.sendall(f"GET /debug/pprof/profile?seconds={patience()} HTTP/1.0\r\n\r\n".encode())
        assert get(port, "/debug/pprof/cmdline").status == 200
        assert get(port, "/debug/pprof/heap?seconds=1").status == 409
        assert received(client).startswith(b"HTTP/1.1 200 OK\r\n")
    assert get(port, "/debug/pprof/heap?seconds=0.01").status == 200


def test_a_client_that_disconnects_early_affects_no_other(port: int) -> None:
    with connect(port) as client:
        client.sendall(b"GET /debug/pprof/profile?seconds=0.2 HTTP/1.0\r\n\r\n")
    while get(port, "/debug/pprof/heap?seconds=0.01").status == 409:
        time.sleep(0.01)
    assert get(port, "/debug/pprof/cmdline").status == 200


@pytest.mark.parametrize("seconds", ["0", "-1", "301", "nan", "inf", "x", "1e9"])
def test_an_invalid_duration_is_refused(port: int, seconds: str) -> None:
    assert get(port, f"/debug/pprof/profile?seconds={seconds}").status == 400


def test_the_verbosity_is_put(port: int, verbosities: list[int]) -> None:
    assert b'<a href="/debug/flags/v">' in get(port, "/debug/flags").body
    reply = get(port, "/debug/flags/v", method="PUT", body=b"4")
    assert (reply.status, reply.body) == (200, b"successfully set klog.logging.verbosity to 4")
    assert verbosities == [4]


@pytest.mark.parametrize(
    ("method", "body", "status"),
    [("GET", None, 406), ("POST", b"4", 406), ("PUT", b"", 400), ("PUT", b"-1", 400), ("PUT", b"9" * 99, 400),
     ("PUT", "\u0664".encode(), 400)],
)  # fmt: skip
def test_nothing_else_changes_the_verbosity(
    port: int, verbosities: list[int], method: str, body: bytes | None, status: int
) -> None:
    assert get(port, "/debug/flags/v", method=method, body=body).status == status
    assert verbosities == []
