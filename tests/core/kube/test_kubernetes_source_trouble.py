"""A server that refuses, sends nonsense or vanishes: the state is kept, and followed again."""

import gzip
import itertools
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace

import pytest

from kproxy_conformance.builders import cidrs
from kproxy_conformance.network.patience import patience
from kproxy_core.kube.access import Access, CurrentAccess
from kproxy_core.kube.reflector import RELIST_SPREAD, KubernetesSource
from kproxy_core.kube.transport import (
    JSON,
    LIMITS,
    MAX_LINE,
    PROTOBUF,
    PROTOBUF_OR_JSON,
    AbortableSocket,
    Limits,
    Transport,
    without_managed_fields,
)
from kproxy_core.model.events import BadObject, Event
from kproxy_core.model.timing import Backoff
from tests.core.api_servers import (
    Exchange,
    ScriptedServer,
    Step,
    bookmark,
    event,
    initial_events_end,
    listed,
    refuse,
    service,
    watched,
)
from tests.core.kube.observed_events import Observed, following
from tests.core.namespaces import own_network

__all__ = ["own_network"]

ScriptedRun = Callable[..., tuple[ScriptedServer, Observed]]
OLD_SERVER = refuse(422, reason="Invalid")
"""The answer of a server without watch-list."""
SERVICE_CIDR = {"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/16"]}}


@pytest.fixture(params=[False, True], ids=["json", "protobuf"])
def follow(request: pytest.FixtureRequest) -> Iterator[ScriptedRun]:
    """A source that follows a server which answers requests for Services with the steps given."""
    with ExitStack() as stack:
        def follow(
            *steps: Step, limits: Limits = LIMITS, backoff: type[Backoff] = Backoff, **other: list[Step]
        ) -> tuple[ScriptedServer, Observed]:
            server = ScriptedServer({"services": steps, **other}, speaks_protobuf=request.param)
            stack.callback(server.close)
            source = KubernetesSource(
                CurrentAccess(server.url, None), "n", accept=PROTOBUF_OR_JSON, chance=lambda: 0.0,
                limits=limits, backoff=backoff)
            return server, stack.enter_context(following(source))
        yield follow


def present(*names: str, version: int = 10) -> list[dict[str, object]]:
    """The lines of a watch-list."""
    return [*(event("ADDED", service(name), version) for name in names), initial_events_end(version)]


def queries(server: ScriptedServer, key: str) -> list[str | None]:
    return [query.get(key) for query in server.asked("services")]


# -- a parameter of the Accept header

def test_a_server_that_accepts_no_parameter_is_asked_without(follow: ScriptedRun) -> None:
    server, observed = follow(
        refuse(406, reason="NotAcceptable"), watched(*present("a"), hold=False),
        watched(event("ADDED", service("b"), 11)))  # fmt: skip
    observed.wait_for(lambda o: o.names == {"a", "b"})
    accepted = [request.headers["accept"] for request in server.requests if request.resource == "services"]
    assert accepted == [without_managed_fields(PROTOBUF_OR_JSON), PROTOBUF_OR_JSON, PROTOBUF_OR_JSON]


def test_a_server_that_refuses_protobuf_is_asked_for_json(follow: ScriptedRun) -> None:
    server, observed = follow(
        *[refuse(406, reason="NotAcceptable")] * 2, watched(*present("a"), hold=False),
        watched(event("ADDED", service("b"), 11)))  # fmt: skip
    observed.wait_for(lambda o: o.names == {"a", "b"})
    accepted = [request.headers["accept"] for request in server.requests if request.resource == "services"]
    assert accepted == [without_managed_fields(PROTOBUF_OR_JSON), PROTOBUF_OR_JSON, JSON, JSON]


def test_a_server_that_accepts_nothing_is_asked_again_later(follow: ScriptedRun) -> None:
    server, observed = follow(*[refuse(406, reason="NotAcceptable")] * 4, watched(*present("a")))
    observed.wait_for(lambda o: len(server.asked("services")) >= 5)
    accepted = [request.headers["accept"] for request in server.requests if request.resource == "services"]
    assert accepted[2:] == [JSON] * (len(accepted) - 2)


# -- resuming a watch

def test_a_watch_is_resumed_after_the_last_event_when_the_connection_breaks(follow: ScriptedRun) -> None:
    def breaks_inside_a_chunk(exchange: Exchange) -> None:
        exchange.begin_watch()
        whole = exchange.events([*present("a"), event("ADDED", service("b"), 12)])
        exchange.send(b"5000\r\n" + whole + exchange.event(event("ADDED", service("x"), 13))[:20])
        exchange.leave()

    server, observed = follow(breaks_inside_a_chunk, watched(event("ADDED", service("c"), 13)))
    observed.wait_for(lambda o: o.names == {"a", "b", "c"})
    assert queries(server, "resourceVersion") == [None, "12"]
    assert not observed.gone
    assert not observed.bad


def test_a_watch_is_resumed_after_a_bookmark(follow: ScriptedRun) -> None:
    server, observed = follow(watched(*present("a"), bookmark(77), hold=False),
                              watched(event("DELETED", service("a"), 78)))
    observed.wait_for(lambda o: "services" in o.complete and not o.names)
    assert queries(server, "resourceVersion") == [None, "77"]


@pytest.mark.parametrize("expired", [
    refuse(410, reason="Expired"),
    watched({"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}}),
    watched(event("ADDED", service("x"), 3)),
], ids=["status", "event", "version went back"])
@pytest.mark.parametrize("by_list", [False, True], ids=["watch-list", "list"])
def test_objects_deleted_while_the_history_expired_are_reported_as_gone(
    follow: ScriptedRun, expired: Step, by_list: bool,
) -> None:
    if by_list:
        steps = [OLD_SERVER, listed(service("a"), service("b"), version=10), expired, OLD_SERVER,
                 listed(service("b"), service("c"), version=20), watched()]
    else:
        steps = [watched(*present("a", "b"), hold=False), expired,
                 watched(*present("b", "c", version=20))]
    _, observed = follow(*steps)
    observed.wait_for(lambda o: o.names >= {"b", "c"} and "a" not in o.names)
    assert [name.name for name in observed.gone] == ["a"]
    assert observed.complete.count("services") == 1


def test_history_may_expire_in_the_middle_of_a_watch(follow: ScriptedRun) -> None:
    expired = {"type": "ERROR", "object": {"code": 410, "reason": "Expired"}}
    server, observed = follow(watched(*present("a", "b"), expired), watched(*present("b", "c", version=20)))
    observed.wait_for(lambda o: o.names == {"b", "c"})
    assert queries(server, "sendInitialEvents") == ["true", "true"]


def test_a_server_that_came_back_without_the_history_is_listed_at_once(follow: ScriptedRun) -> None:
    delays = iter([0.0, 3600.0])

    class Grown(Backoff):
        """Delays that have grown while the server was away."""

        def delay(self, lasted: float = 0.0, asked: float = 0.0) -> float:
            return next(delays)

    _, observed = follow(watched(*present("a"), hold=False), refuse(410), watched(*present("b", version=20)),
                         backoff=Grown)
    observed.wait_for(lambda o: o.names == {"b"})


def test_nodes_list_again_at_different_times_when_their_server_lost_the_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float | None] = []

    class Noted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            return super().wait(0.0)

    steps = [watched(*present("a"), hold=False), refuse(410), watched(*present("b", version=20))]
    server = ScriptedServer({"services": steps})
    source = KubernetesSource(CurrentAccess(server.url, None), "n", chance=lambda: 0.25)
    try:
        noting = SimpleNamespace(**vars(threading) | {"Event": Noted})
        monkeypatch.setattr("kproxy_core.kube.reflector.threading", noting)
        with following(source) as observed:
            observed.wait_for(lambda o: o.names == {"b"})
    finally:
        server.close()
    assert RELIST_SPREAD / 4 in waits


def test_a_broken_watch_list_deletes_nothing(follow: ScriptedRun) -> None:
    def broken(exchange: Exchange) -> None:
        exchange.begin_watch()
        exchange.send(b"fff\r\n" + exchange.event(event("ADDED", service("b"), 20)))
        exchange.leave()

    _, observed = follow(watched(*present("a", "b"), hold=False), refuse(410), broken,
                         watched(*present("a", "b", "c", version=21)))
    observed.wait_for(lambda o: "c" in o.names)
    assert observed.names == {"a", "b", "c"}
    assert not observed.gone


# -- lists

@pytest.mark.parametrize("status", [400, 422])
def test_a_server_without_watch_list_is_listed_in_pages(follow: ScriptedRun, status: int) -> None:
    server, observed = follow(refuse(status), listed(service("a"), version=10, rest="page 2&"),
                              listed(service("b"), version=10), watched(event("ADDED", service("c"), 11)))
    observed.wait_for(lambda o: o.names == {"a", "b", "c"})
    assert queries(server, "watch") == ["1", None, None, "1"]
    assert queries(server, "continue") == [None, None, "page 2&", None]
    assert queries(server, "resourceVersion")[-1] == "10"
    assert queries(server, "sendInitialEvents") == ["true", None, None, None]
    assert {query["fieldSelector"] for query in server.asked("services")} == {"spec.clusterIP!=None"}


def test_a_list_that_expires_between_pages_is_started_again(follow: ScriptedRun) -> None:
    server, observed = follow(OLD_SERVER, listed(service("a"), version=10, rest="next"), refuse(410),
                              listed(service("b"), version=20))
    observed.wait_for(lambda o: "services" in o.complete)
    assert observed.names == {"b"}, "what only the first page had is gone"
    assert queries(server, "continue")[:4] == [None, None, "next", None]


def test_a_watch_list_without_its_final_bookmark_is_followed_by_a_list(follow: ScriptedRun) -> None:
    def ends(exchange: Exchange) -> None:
        exchange.begin_watch()
        exchange.end_watch()

    server, observed = follow(ends, listed(service("a"), version=10))
    observed.wait_for(lambda o: "services" in o.complete)
    assert observed.names == {"a"}
    assert queries(server, "watch")[:2] == ["1", None]


def test_a_watch_list_is_tried_again_at_the_next_relist(follow: ScriptedRun) -> None:
    server, observed = follow(refuse(500), listed(service("a"), version=10), refuse(410),
                              watched(*present("b", version=20)))
    observed.wait_for(lambda o: o.names == {"b"})
    assert queries(server, "sendInitialEvents") == ["true", None, None, "true"]


# -- refusals

@pytest.mark.parametrize("status", [403, 404])
def test_a_server_that_does_not_know_roles_or_kinds_yet_is_not_listed_again(
    follow: ScriptedRun, status: int,
) -> None:
    server, observed = follow(watched(*present("a"), hold=False), refuse(status),
                              watched(event("ADDED", service("b"), 11)))
    observed.wait_for(lambda o: o.names == {"a", "b"})
    assert queries(server, "resourceVersion") == [None, "10", "10"]


@pytest.mark.parametrize("refusal", [
    refuse(429, "Retry-After: 1"),
    refuse(503, "Retry-After: 1"),
    # The server's clock is wrong, and no matter.
    refuse(503, "Date: Thu, 01 Jan 1970 00:00:59 GMT", "Retry-After: Thu, 01 Jan 1970 00:01:00 GMT"),
    refuse(429, "Retry-After: soon", details={"retryAfterSeconds": 1}),
    watched({"type": "ERROR", "object": {"code": 429, "reason": "Refused", "message": "Refused",
                                         "details": {"retryAfterSeconds": 1}}}),
], ids=["429", "503", "date", "details", "event"])
def test_retry_after_is_respected(
    follow: ScriptedRun, caplog: pytest.LogCaptureFixture, refusal: Step,
) -> None:
    caplog.set_level(logging.INFO)
    _, observed = follow(refusal, watched(*present("a")))
    observed.wait_for(lambda o: o.names == {"a"})
    said, again = (record for record in caplog.records if record.name == "kproxy.sources")
    assert said.fields["resource"] == "services"  # type: ignore[attr-defined]
    assert said.fields["problem"].endswith(" Refused: Refused")  # type: ignore[attr-defined]
    assert said.fields["retry_in"] == 1.0  # type: ignore[attr-defined]
    assert again.getMessage() == "following the API server again"


@pytest.mark.parametrize("header", ["Retry-After: Thu, 01 Jan 1970 00:01:00 GMT", "Retry-After: -1",
                                    "Retry-After: \u00b2", "Retry-After: Thu, 99 Foo 1970"])
def test_an_invalid_retry_after_is_ignored(follow: ScriptedRun, header: str) -> None:
    _, observed = follow(refuse(503, header), watched(*present("a")))
    observed.wait_for(lambda o: o.names == {"a"})


@pytest.mark.parametrize("answer", [
    refuse(500), refuse(401), refuse(403), refuse(302), refuse(404),
    lambda e: e.send(b"SSH-2.0-OpenSSH\r\n\r\n"),
    lambda e: e.send(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000),
    lambda e: e.answer(200, b"<html>please log in</html>\n"),
    lambda e: e.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"),
    lambda e: e.answer(200, {"metadata": {}, "items": []}),
    lambda e: e.answer(200, b"[" * 100_000),
    lambda e: e.answer(200, b"not gzip", "Content-Encoding: gzip"),
    lambda e: e.answer(200, gzip.compress(b'{"metadata": {"resourceVersion": "1"}, "items": []}')[:-20],
                       "Content-Encoding: gzip"),
    lambda e: e.answer(200, b"", "Content-Encoding: br"),
], ids=["500", "401", "403", "302", "404", "not http", "endless head", "html", "cut", "no version", "deep",
        "not gzip", "cut gzip", "unknown coding"])
def test_an_unusable_answer_is_retried(follow: ScriptedRun, answer: Step) -> None:
    def answer_and_leave(exchange: Exchange) -> None:
        answer(exchange)
        exchange.leave()

    _, observed = follow(OLD_SERVER, answer_and_leave, listed(service("a"), version=10))
    observed.wait_for(lambda o: "services" in o.complete)
    assert observed.names == {"a"}


@pytest.mark.parametrize("status", [403, 404])
def test_unreadable_service_cidrs_block_nothing(follow: ScriptedRun, status: int) -> None:
    _, observed = follow(watched(*present("a")), servicecidrs=[refuse(status)] * 3)
    observed.wait_for(lambda o: len(o.complete) == 4)
    assert observed.names == {"a"}


def test_the_backoff_is_shortened_when_the_server_answers_again(follow: ScriptedRun) -> None:
    delays: list[float] = []

    class Noted(Backoff):
        def delay(self, lasted: float = 0.0, asked: float = 0.0) -> float:
            delays.append(super().delay(lasted, asked))
            return 0.0

    _, observed = follow(*[Exchange.leave] * 6, refuse(403), refuse(403), watched(*present("a")),
                         backoff=Noted)
    observed.wait_for(lambda o: o.names == {"a"})
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 1.0, 2.0]


def test_service_cidrs_that_become_unreadable_are_kept_and_logged(
    follow: ScriptedRun, caplog: pytest.LogCaptureFixture,
) -> None:
    # A server that just started knows no roles yet.
    known = watched(event("ADDED", SERVICE_CIDR, 4), initial_events_end(5), hold=False)
    server, observed = follow(servicecidrs=[known, refuse(403), refuse(403)])
    observed.wait_for(lambda o: len(server.asked("servicecidrs")) == 4)
    assert [query.get("resourceVersion") for query in server.asked("servicecidrs")] == [None, "5", "5", "5"]
    assert observed.cidrs == cidrs("10.96.0.0/16")
    assert [record.getMessage() for record in caplog.records] == ["cannot follow the API server"]


# -- the content of a watch

def test_an_event_that_does_not_decode_is_reported_and_the_next_one_used(follow: ScriptedRun) -> None:
    _, observed = follow(watched(*present("a"), b"{garbage", b'{"type":"ADDED"}', b"\xff\xfe",
                                 event("ADDED", service("b"), 11)))
    observed.wait_for(lambda o: "b" in o.names)
    assert observed.names == {"a", "b"}
    assert [(bad.kind, bad.name) for bad in observed.bad] == [("Service", "(in a watch)")] * 3


def test_an_object_that_does_not_decode_is_reported_and_no_longer_served(follow: ScriptedRun) -> None:
    broken = service("a")
    broken["spec"]["ports"][0]["port"] = "eighty"
    _, observed = follow(watched(*present("a", "b"), event("MODIFIED", broken, 11),
                                 event("ADDED", service("c"), 12)))
    observed.wait_for(lambda o: "c" in o.names)
    assert observed.names == {"b", "c"}
    bad, = observed.bad
    assert isinstance(bad, BadObject)
    assert (bad.kind, bad.name) == ("Service", "default/a")
    assert bad.field == "spec.ports[0].port" or bad.problem == "is not a valid protobuf message"


def test_a_bad_object_in_a_list_affects_no_other(follow: ScriptedRun) -> None:
    broken = service("a")
    broken["spec"] = []
    _, observed = follow(OLD_SERVER, listed(broken, service("b"), version=10))
    observed.wait_for(lambda o: "services" in o.complete)
    assert observed.names == {"b"}
    assert [bad.name for bad in observed.bad] == ["default/a"]


def test_an_event_that_is_too_long_is_skipped(follow: ScriptedRun) -> None:
    def step(exchange: Exchange) -> None:
        exchange.begin_watch()
        exchange.chunk(exchange.events(present("a")))
        endless = exchange.event(b"x" * (MAX_LINE + (1 << 20)))
        for start in range(0, len(endless), 1 << 20):
            exchange.chunk(endless[start:start + (1 << 20)])
        exchange.chunk(exchange.event(event("ADDED", service("b"), 11)))
        exchange.until_closed()

    _, observed = follow(step)
    observed.wait_for(lambda o: "b" in o.names)
    assert [bad.problem for bad in observed.bad] == [f"longer than {MAX_LINE} bytes"]


def test_a_page_that_is_too_large_is_logged_and_asked_for_in_smaller_pages(
    follow: ScriptedRun, caplog: pytest.LogCaptureFixture,
) -> None:
    limits = Limits(largest_page=1000)
    large = [service(f"s{number}") for number in range(20)]
    server, observed = follow(OLD_SERVER, listed(*large, version=10), listed(service("a"), version=10),
                              limits=limits)
    observed.wait_for(lambda o: "services" in o.complete)
    assert observed.names == {"a"}
    assert queries(server, "limit")[:3] == [None, "500", "62"]
    problem, = (record.fields["problem"] for record in caplog.records)  # type: ignore[attr-defined]
    assert problem == "answer exceeds 1000 bytes"


def test_a_dripping_watch_list_is_followed_by_a_list(follow: ScriptedRun) -> None:
    limits = Limits(allowance=0.3 * patience())
    pause = threading.Event()

    def drip(exchange: Exchange) -> None:
        exchange.begin_watch()
        while not pause.wait(0.02):
            exchange.chunk(b" ")

    server, observed = follow(drip, listed(service("a"), version=10), limits=limits)
    observed.wait_for(lambda o: "services" in o.complete)
    assert observed.names == {"a"}
    assert queries(server, "watch")[:2] == ["1", None]


def test_a_watch_may_last_longer_than_a_list(follow: ScriptedRun) -> None:
    limits = Limits(allowance=0.2 * patience())
    pause = threading.Event()

    def slow(exchange: Exchange) -> None:
        exchange.begin_watch()
        exchange.chunk(exchange.events(present("a")))
        pause.wait(0.5 * patience())
        exchange.chunk(exchange.event(event("ADDED", service("b"), 11)))
        exchange.until_closed()

    server, observed = follow(slow, limits=limits)
    observed.wait_for(lambda o: o.names == {"a", "b"})
    assert len(server.asked("services")) == 1


def test_an_endless_list_ends(follow: ScriptedRun) -> None:
    limits = Limits(largest_list=1000)
    pages = [listed(service(f"s{number}"), version=1, rest="more") for number in range(20)]
    server, observed = follow(OLD_SERVER, *pages, limits=limits)
    observed.wait_for(lambda _: queries(server, "limit").count("500") > 1)
    assert "services" not in observed.complete


def endlessly(version: int, next_name: Callable[[], str], *first: dict[str, object]) -> Step:
    """A watch of *first* and then of Services with ever new names, until the client closes the connection."""
    def step(exchange: Exchange) -> None:
        exchange.begin_watch()
        exchange.chunk(exchange.events(first)) if first else None
        with suppress(OSError):
            while True:
                exchange.chunk(exchange.event(event("ADDED", service(next_name()), version)))
        exchange.leave()
    return step


def test_an_endless_watch_list_ends(
    follow: ScriptedRun, caplog: pytest.LogCaptureFixture,
) -> None:
    limits = Limits(largest_list=100_000)
    names = itertools.repeat("a")
    endless = endlessly(1, names.__next__)
    _, observed = follow(endless, endless, watched(*present("b")), limits=limits)
    observed.wait_for(lambda o: "services" in o.complete)
    assert observed.names == {"b"}
    assert [record.fields["problem"] for record in caplog.records] == [  # type: ignore[attr-defined]
        "a list of more than 100000 bytes"]


@pytest.mark.parametrize("first", [[], present("a")], ids=["at the start", "after it"])
def test_a_watch_of_endless_objects_fills_no_memory(
    follow: ScriptedRun, caplog: pytest.LogCaptureFixture,
    first: list[dict[str, object]],
) -> None:
    """Neither one that is without end, nor all of them, each with other names."""
    limits = Limits(most_held=100_000)
    numbers = itertools.count()
    endless = [endlessly(11, lambda: f"s{next(numbers)}", *(first if number == 0 else ()))
               for number in range(4)]
    lost = [refuse(410)] if first else []
    _, observed = follow(*endless, *lost, watched(*present("b", version=20)), limits=limits)
    observed.wait_for(lambda o: o.names == {"b"})
    # Each counts for a kibibyte and its encoding. Those of a list without end are not kept.
    most = 100 if first else 100 * len(endless)
    assert most / 5 < len(set(observed.gone)) < most
    assert "objects of more than 100000 bytes" in {
        record.fields.get("problem") for record in caplog.records}  # type: ignore[attr-defined]


def test_complaints_about_one_answer_are_limited_and_counted(follow: ScriptedRun) -> None:
    broken = [service(f"s{number}") | {"spec": []} for number in range(250)]
    _, observed = follow(OLD_SERVER, listed(*broken, service("a"), version=10))
    observed.wait_for(lambda o: "services" in o.complete)
    assert observed.names == {"a"}
    assert len(observed.bad) == 101
    assert str(observed.bad[-1]) == "Service (from the API server): 150 more problems"


def test_bytes_may_arrive_one_by_one(follow: ScriptedRun) -> None:
    def step(exchange: Exchange) -> None:
        lines = exchange.events([*present("a", "b"), event("DELETED", service("a"), 11)])
        kind = PROTOBUF if exchange.is_protobuf else JSON
        wire = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        for start in range(0, len(lines), 7):
            piece = lines[start:start + 7]
            wire += b"%x;ext\r\n%s\r\n" % (len(piece), piece)
        for byte in wire:
            exchange.send(bytes([byte]))
        exchange.until_closed()

    _, observed = follow(step)
    observed.wait_for(lambda o: o.gone and o.names == {"b"})
    assert not observed.bad


def test_events_that_arrive_together_are_one_batch(follow: ScriptedRun) -> None:
    batches: list[int] = []
    server = ScriptedServer({"services": [watched(*present(*(f"s{i}" for i in range(50))))]})
    source = KubernetesSource(CurrentAccess(server.url, None), "n")
    observed = Observed()

    def emit(events: list[Event]) -> None:
        batches.append(len(events))
        observed(events)

    source.start(emit)
    try:
        observed.wait_for(lambda o: len(o.complete) == 4)
    finally:
        source.stop()
        server.close()
    assert sorted(batches) == [1, 1, 1, 51]


# -- connections

def test_each_kind_keeps_one_connection(follow: ScriptedRun) -> None:
    server, observed = follow(OLD_SERVER, listed(service("a"), version=10, rest="x"),
                              listed(service("b"), version=10), watched(event("ADDED", service("c"), 11)))
    observed.wait_for(lambda o: len(o.complete) == 4 and "c" in o.names)
    assert len({request.connection for request in server.requests}) == 4


def test_a_kept_connection_that_the_server_closed_is_no_failure(
    follow: ScriptedRun, caplog: pytest.LogCaptureFixture,
) -> None:
    def list_and_leave(exchange: Exchange) -> None:
        listed(service("a"), version=10)(exchange)
        exchange.leave()

    _, observed = follow(OLD_SERVER, list_and_leave, watched(event("ADDED", service("b"), 11)))
    observed.wait_for(lambda o: o.names == {"a", "b"})
    assert not caplog.records


def test_a_silent_watch_is_resumed_on_a_new_connection(follow: ScriptedRun) -> None:
    # The server's kernel, or a load balancer, keeps the connection open although the server is gone.
    limits = Limits(watch_silence=0.3 * patience())
    server, observed = follow(watched(*present("a")), watched(event("ADDED", service("b"), 11)),
                              limits=limits)
    observed.wait_for(lambda o: "b" in o.names)
    assert queries(server, "resourceVersion")[:2] == [None, "10"]
    assert [query["watch"] for query in server.asked("services")][:2] == ["1", "1"]
    assert not observed.gone


def test_an_older_history_is_noticed_by_its_silence(follow: ScriptedRun) -> None:
    # etcd was restored from a backup: there is no news since version 101, and for long there will be none.
    limits = Limits(watch_silence=0.3 * patience())
    server, observed = follow(watched(*present("a", version=100), bookmark(101)), watched(), watched(),
                              watched(*present("b", version=7)), limits=limits)
    observed.wait_for(lambda o: o.names == {"b"})
    assert queries(server, "resourceVersion")[:4] == [None, "101", "101", None]


def test_a_server_that_never_sends_bookmarks_is_not_listed_again(follow: ScriptedRun) -> None:
    limits = Limits(watch_silence=0.2 * patience())
    server, observed = follow(watched(*present("a")), watched(), watched(), watched(),
                              watched(event("ADDED", service("b"), 11)), limits=limits)
    observed.wait_for(lambda o: "b" in o.names)
    assert queries(server, "resourceVersion")[:5] == [None, "10", "10", "10", "10"]


def test_bookmarks_that_repeat_the_version_of_an_object_promise_no_others(follow: ScriptedRun) -> None:
    # With etcd 3.4, a watch that is resumed from the version of the last object gets no bookmark.
    limits = Limits(watch_silence=0.2 * patience())
    server, observed = follow(
        watched(*present("a"), event("ADDED", service("b"), 11), bookmark(11), hold=False),
        watched(), watched(), watched(), watched(event("ADDED", service("c"), 12)), limits=limits)
    observed.wait_for(lambda o: "c" in o.names)
    assert queries(server, "resourceVersion")[:5] == [None, "11", "11", "11", "11"]


@pytest.mark.usefixtures("own_network")
def test_a_server_that_starts_late_is_found(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with following(KubernetesSource(CurrentAccess(f"http://127.0.0.1:{port}", None), "n")) as observed:
        server = ScriptedServer({"services": [watched(*present("a"))]}, port=port)
        try:
            observed.wait_for(lambda o: len(o.complete) == 4)
        finally:
            server.close()
    assert observed.names == {"a"}


@pytest.mark.parametrize("accepting", [True, False], ids=["silent", "unreachable"])
def test_stopping_waits_for_no_server(accepting: bool) -> None:
    with _deaf_server(accepting) as port:
        with following(KubernetesSource(CurrentAccess(f"http://127.0.0.1:{port}", None), "n")) as observed:
            pass
        assert observed.events == 0


def test_no_connection_is_opened_after_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = AbortableSocket._connect

    def stopped(wire: AbortableSocket, plain: socket.socket, address: object) -> None:
        wire.abort()
        connect(wire, plain, address)

    monkeypatch.setattr(AbortableSocket, "_connect", stopped)
    with _deaf_server(accepting=False) as port, pytest.raises(OSError, match="closed from this side"):
        Transport(Access(server=f"http://127.0.0.1:{port}")).get("/", 1.0)


@contextmanager
def _deaf_server(accepting: bool) -> Iterator[int]:
    """A port where connections are taken by the kernel and never answered, or not even taken."""
    with ExitStack() as stack:
        listener = socket.create_server(("127.0.0.1", 0), backlog=128 if accepting else 0)
        stack.enter_context(listener)
        port: int = listener.getsockname()[1]
        while not accepting:
            filler = stack.enter_context(socket.socket())
            filler.settimeout(0.1)
            try:
                filler.connect(("127.0.0.1", port))
            except TimeoutError:
                break
        yield port


# -- requests

def test_the_selectors_are_those_of_kube_proxy_but_for_slices_of_no_service(follow: ScriptedRun) -> None:
    # kube-proxy 1.36, cmd/kube-proxy/app/server.go.
    server, observed = follow()
    observed.wait_for(lambda o: len(o.complete) == 4)
    selectors = {
        request.resource: {name: value for name, value in request.query.items() if "Selector" in name}
        for request in server.requests
    }
    assert selectors == {
        "services": {"labelSelector": "!service.kubernetes.io/service-proxy-name",
                     "fieldSelector": "spec.clusterIP!=None"},
        "endpointslices": {
            "labelSelector": "!service.kubernetes.io/headless,kubernetes.io/service-name"},
        "nodes": {"fieldSelector": "metadata.name=n"},
        "servicecidrs": {},
    }
