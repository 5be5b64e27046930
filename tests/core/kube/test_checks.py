"""Endpoints are checked for real, on loopback, and the slices that are passed on say which are ready."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from kproxy_conformance.builders import service_name
from kproxy_conformance.open_files import open_files
from kproxy_core.kube.checks import Checked, CheckedSource
from kproxy_core.model.address import Family, Protocol, format_address, parse_address
from kproxy_core.model.events import BadObject, Complete, Emit, Event, SliceGone, SliceSet
from kproxy_core.model.service import Check, Endpoint, EndpointSlice, SliceName, SlicePort
from tests.core.directory_rig import State
from tests.core.kube.test_directory_errors import no_descriptors_left
from tests.patience import PATIENCE

OFTEN = Check(0.1)
WEB = service_name("Forward/web")


class Given:
    """A source that delivers what a test says."""

    kinds: tuple[str, ...] = ("given",)

    def start(self, emit: Emit) -> None:
        self.emit = emit

    def stop(self) -> None:
        pass

    def problems(self) -> list[BadObject]:
        return []


class Rig(State):
    """The state behind a checked source."""

    def __init__(self) -> None:
        super().__init__()
        self.given = Given()
        self.source = CheckedSource(self.given)
        self.source.start(self.emit)

    def give(self, *events: Event) -> None:
        self.given.emit([*events])

    @property
    def ready(self) -> set[str]:
        """The ready endpoints of the Forward, as ``address:port``."""
        return {
            f"{format_address(endpoint.address)}:{piece.ports[0].port}"
            for family in Family for piece in (self.store.families[family].slices.get(WEB) or {}).values()
            for endpoint in piece.endpoints if endpoint.ready
        }

    def wait_for(self, holds: Callable[[], object]) -> None:
        """Return once *holds* does, which results of checks may cause without an event."""
        gives_up = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < gives_up, (self.ready, self.source.results())
            time.sleep(0.002)

    def result(self, endpoint: str) -> Checked:
        return {target.fields["endpoint"]: checked for target, checked in self.source.results()}[endpoint]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.source.stop()


def slice_of(*sockets: str, check: Check | None = OFTEN, forward: str = "web") -> SliceSet:
    """A slice of a Forward to *sockets*, which have the same port."""
    hosts, ports = zip(*(where.rsplit(":", 1) for where in sockets), strict=True)
    (number,) = set(map(int, ports))
    return SliceSet(EndpointSlice(
        SliceName("Forward", f"{forward}:{number}"), service_name(f"Forward/{forward}"), Family.IPV4,
        (SlicePort("", Protocol.TCP, number),),
        tuple(Endpoint(parse_address(host)) for host in hosts)), check=check)  # fmt: skip


@contextmanager
def server(answer: bytes | None = b"", at: str = "127.0.0.1:0") -> Iterator[str]:
    """A server that says *answer* to each client and closes; None: it says nothing and stays."""
    host, port = at.rsplit(":", 1)
    with socket.create_server((host, int(port)), backlog=512) as listener, ExitStack() as clients:
        def serve() -> None:
            while True:
                try:
                    client = listener.accept()[0]
                except OSError:
                    return
                clients.callback(client.close)
                with suppress(OSError):
                    if answer is not None:
                        client.sendall(answer)
                        client.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve)
        thread.start()
        yield "{}:{}".format(*listener.getsockname())
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def unused() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return "{}:{}".format(*listener.getsockname())


# --- What the checks find


def test_an_endpoint_is_left_out_while_it_does_not_listen_and_used_again_when_it_does(rig: Rig) -> None:
    with server() as one, server() as other:
        rig.give(slice_of(one), slice_of(other))
        rig.wait_for(lambda: rig.ready == {one, other} and rig.result(other).successes)
    with server(at=one):
        rig.wait_for(lambda: rig.ready == {one})
        assert rig.result(other).because == "Connection refused"
        assert rig.result(other).is_left_out
        with server(at=other):
            rig.wait_for(lambda: rig.ready == {one, other})
        rig.wait_for(lambda: rig.ready == {one})


def test_the_last_endpoint_stays_until_another_one_is_back(rig: Rig) -> None:
    one, other = unused(), unused()
    rig.give(slice_of(one), slice_of(other))
    rig.wait_for(lambda: len(rig.ready) == 1)
    (kept,), (left,) = rig.ready, {one, other} - rig.ready
    with server(at=left):
        rig.wait_for(lambda: rig.ready == {left})
    rig.wait_for(lambda: rig.result(left).failures >= 2)
    assert rig.ready == {left}
    assert rig.result(kept).is_left_out


@pytest.mark.parametrize(("answer", "because"), [
    (b"HTTP/1.1 200 OK\r\n\r\n", ""),
    (b"HTTP/1.0 302 Found\n\n", ""),
    (b"HTTP/1.1 204 \r\n\r\n", ""),
    (b"HTTP/1.1 404 Not Found\r\n\r\n", "status 404"),
    (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "status 503"),
    (b"HTTP/1.1 100 Continue\r\n\r\n", "status 100"),
    (b"SSH-2.0-OpenSSH_9.9\r\n", "the answer is not HTTP"),
    (b"x" * 5000, "the answer is not HTTP"),
    (b"HTTP/1.1 20", "the answer is not HTTP"),
    (b"", "the answer is not HTTP"),
    (None, "no answer within 0.1 s"),
], ids=lambda value: str(value)[:20])
def test_the_status_of_an_answer_counts(rig: Rig, answer: bytes | None, because: str) -> None:
    with server(answer) as where:
        rig.give(slice_of(where, check=Check(0.1, "/healthz")))
        rig.wait_for(lambda: (found := rig.result(where)).successes or found.failures)
        assert rig.result(where).because == because


def test_a_request_is_what_servers_expect(rig: Rig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = "{}:{}".format(*listener.getsockname())
        rig.give(slice_of(where, check=Check(60, "/healthz?deep=1")))
        with listener.accept()[0] as client:
            assert client.recv(4096).decode().split("\r\n") == [
                "GET /healthz?deep=1 HTTP/1.1", f"Host: {where}", "User-Agent: kproxy", "Accept: */*",
                "Connection: close", "", "",
            ]


# --- What is passed on, and when


def test_a_start_waits_for_the_first_check_of_every_endpoint(rig: Rig) -> None:
    with server() as one, server(None) as silent:
        rig.give(slice_of(one), slice_of(silent, check=Check(1, "/")))
        rig.give(Complete("given"))
        rig.wait_for(lambda: Complete("given") in rig.batches[-1])
        assert rig.ready == {one}
    assert [Complete("given") in batch for batch in rig.batches].count(True) == 1


def test_what_is_not_checked_passes_at_once(rig: Rig) -> None:
    rig.give(slice_of(where := unused(), check=None), Complete("given"))
    assert rig.ready == {where}
    assert Complete("given") in rig.batches[-1]
    assert rig.source.results() == []
    assert not any(thread.name == "kproxy-checks" for thread in threading.enumerate())


def test_checks_end_with_their_endpoint_or_their_forward(rig: Rig) -> None:
    one, other, more = unused(), unused(), unused()
    rig.give(slice_of(one), slice_of(other), slice_of(more))
    rig.wait_for(lambda: len(rig.ready) == 1)
    rig.give(SliceGone(slice_of(more).slice.name))
    assert {target.fields["endpoint"] for target, _ in rig.source.results()} == {one, other}
    rig.wait_for(lambda: len(rig.ready) == 1)
    rig.give(slice_of(one, check=None), SliceGone(slice_of(other).slice.name))
    assert rig.ready == {one}
    assert rig.source.results() == []
    rig.give(slice_of(other))
    rig.wait_for(lambda: rig.result(other).failures)
    assert rig.ready == {one, other}, "the last one that is checked stays"


def test_another_interval_counts_at_once(rig: Rig) -> None:
    with server() as where:
        rig.give(slice_of(where, check=Check(3600)))
        rig.wait_for(lambda: rig.result(where).successes)
        rig.give(slice_of(where, check=OFTEN))
        rig.wait_for(lambda: rig.result(where).successes > 2)


# --- Many of them


def test_one_thread_checks_hundreds_of_endpoints_and_leaves_no_descriptors(rig: Rig) -> None:
    before = set(open_files(os.getpid()))
    with server(at="0.0.0.0:0") as where:
        port = where.rsplit(":", 1)[1]
        hosts = [f"127.0.{i}.{j}:{port}" for i in range(1, 7) for j in range(100)]
        rig.give(slice_of(*hosts, check=Check(1)))
        rig.wait_for(lambda: all(checked.successes > 1 for _, checked in rig.source.results()))
        assert [thread.name for thread in threading.enumerate()].count("kproxy-checks") == 1
        assert len(rig.ready) == 600
        rig.source.stop()
    assert set(open_files(os.getpid())) <= before


def test_a_shortage_of_this_machine_says_nothing_about_endpoints(rig: Rig) -> None:
    with server() as one, server() as other:
        rig.give(slice_of(one), slice_of(other))
        rig.wait_for(lambda: rig.result(one).successes and rig.result(other).successes)
        with no_descriptors_left():
            failed = rig.result(one).failures
            rig.wait_for(lambda: rig.result(one).impossible > 2)
            assert rig.result(one).failures == failed
        done = rig.result(one).successes
        rig.wait_for(lambda: rig.result(one).successes > done)
        assert rig.ready == {one, other}


def test_forwards_share_the_check_of_a_server(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kproxy.checks")

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records]

    with server() as one:
        other = unused()
        for forward in ("web", "a", "b"):
            rig.give(slice_of(one, forward=forward), slice_of(other, forward=forward))
        rig.wait_for(lambda: len(rig.source.results()) == 6 and rig.result(other).is_left_out)
        checks = {checked.failures for target, checked in rig.source.results()
                  if target.fields["endpoint"] == other}
        assert len(checks) == 1
        rig.wait_for(lambda: all(
            checked.is_left_out == (target.fields["endpoint"] == other)
            for target, checked in rig.source.results()))
        assert len([text for text in said() if "left out" in text]) <= 3
        caplog.clear()
        with server(at=other):
            rig.wait_for(lambda: not any(checked.is_left_out for _, checked in rig.source.results()))
        (record,) = [each for each in caplog.records if "used again" in each.getMessage()]
        fields = vars(record)["fields"]
        assert (fields["endpoint"], fields["forwards"]) == (other, 3)
    for forward in ("web", "a", "b"):
        for where in (one, other):
            _, port = where.split(":")
            rig.give(SliceGone(SliceName("Forward", f"{forward}:{port}")))
    assert rig.source.results() == []


def test_silent_servers_delay_no_check_of_one_that_answers(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them together have half of the sockets."""
    monkeypatch.setattr("kproxy_core.kube.checks._MOST_AT_ONCE", 4)
    with server() as answers, server(answer=None, at="0.0.0.0:0") as silent:
        port = silent.rsplit(":", 1)[1]
        hosts = [f"127.0.1.{each}:{port}" for each in range(1, 31)]
        rig.give(slice_of(answers), slice_of(*hosts, check=Check(0.1, "/"), forward="silent"))
        rig.wait_for(lambda: all(rig.result(each).failures for each in hosts))
        before = rig.result(answers).successes
        rig.wait_for(lambda: all(rig.result(each).failures > 3 for each in hosts))
        assert rig.result(answers).successes - before >= 12, "four for each round of the others"


def test_a_start_waits_for_silent_servers_no_longer_than_it_must(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kproxy_core.kube.checks._MOST_AT_ONCE", 4)
    monkeypatch.setattr("kproxy_core.kube.checks._LONGEST_HOLD", 0.1)
    with server(answer=None, at="0.0.0.0:0") as silent:
        port = silent.rsplit(":", 1)[1]
        hosts = [f"127.0.1.{each}:{port}" for each in range(1, 31)]
        passed: list[Event] = []
        rig.source._emit = passed.extend
        rig.give(slice_of(*hosts, check=Check(0.5, "/")), Complete("given"))
        rig.wait_for(lambda: Complete("given") in passed)
        assert not all(rig.result(each).failures for each in hosts)


def test_another_kind_of_check_decides_anew(rig: Rig) -> None:
    with server() as one, server() as other:
        rig.give(slice_of(one), slice_of(other, check=Check(0.1, "/")))
        rig.wait_for(lambda: rig.ready == {one})
        rig.give(slice_of(other))
        rig.wait_for(lambda: rig.ready == {one, other})
