"""Slow answers over real sockets: few threads, none for clients that have gone, and a rest after each."""

import threading
from collections.abc import Iterator
from functools import partial
from socket import socket

import pytest

from kproxy_core.observe.messages import Answer, Request, Slow, Turn
from kproxy_core.observe.pages import Debug, dispatch
from kproxy_core.observe.server import HttpServer, SlowAnswers
from tests.core.namespaces import own_network
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

__all__ = ["own_network"]

pytestmark = pytest.mark.usefixtures("own_network")

_PAGE = Request("GET", "/page", "")


def slow(turn: Turn = Turn.IN_ORDER, same: object = None) -> Slow:
    return Slow(lambda abandoned: Answer(200, b""), 10.0, turn, same)


class Work:
    """Makes slow answers, one by one if `step` is used, and records them."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.abandoned = 0
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()
        self._steps = threading.Semaphore(0)

    def __call__(self, request: Request) -> Slow:
        turn = Turn.FIRST if request.path == "/first" else Turn.IN_ORDER
        return Slow(lambda abandoned: self._make(request, abandoned), 30.0, turn, same=request[:3])

    def _make(self, request: Request, abandoned: threading.Event) -> Answer:
        with self._lock:
            self.begun.append(f"{request.path}?{request.query}")
            self._now += 1
            self.most = max(self.most, self._now)
        self._steps.acquire()
        with self._lock:
            self._now -= 1
            self.abandoned += abandoned.is_set()
        return Answer(200, request.query.encode())

    def step(self, number: int = 1) -> None:
        self._steps.release(number)

    def await_begun(self, number: int) -> None:
        assert eventually(lambda: len(self.begun) >= number), self.begun


@pytest.fixture
def work() -> Iterator[Work]:
    made = Work()
    yield made
    made.step(1000)


@pytest.fixture
def server(own_network: None) -> Iterator[HttpServer]:
    with serving() as running:
        yield running


@pytest.fixture
def port(server: HttpServer, work: Work) -> int:
    listener = server.listen("slow", [(LOOPBACK[0], 0)], work)
    settle(server)
    return port_of(listener)


def ask(port: int, target: str) -> socket:
    client = connect(port)
    client.sendall(f"GET {target} HTTP/1.0\r\n\r\n".encode())
    return client


def body(client: socket) -> bytes:
    with client:
        return received(client).partition(b"\r\n\r\n")[2]


def waiting(server: HttpServer) -> int:
    """Return the number of clients for which an answer is made or will be."""
    settle(server)
    return len(server._slow._of)


def test_no_answer_is_made_for_clients_that_have_gone(server: HttpServer, port: int, work: Work) -> None:
    first = ask(port, "/page?first")
    work.await_begun(1)
    for number in range(200):
        ask(port, f"/page?{number}").close()
    assert eventually(lambda: waiting(server) == 1)
    work.step(2)
    assert body(first) == b"first"
    last = ask(port, "/page?last")
    assert body(last) == b"last"
    assert work.begun == ["/page?first", "/page?last"]
    assert work.most == 1


def test_clients_with_the_same_question_get_one_answer(server: HttpServer, port: int, work: Work) -> None:
    first = ask(port, "/page?a")
    work.await_begun(1)
    others = [ask(port, "/page?a") for _ in range(50)]
    assert eventually(lambda: waiting(server) == 51)
    work.step(2)
    assert [body(client) for client in (first, *others)] == [b"a"] * 51
    assert work.begun == ["/page?a"] * 2


def test_further_clients_are_refused(server: HttpServer, port: int, work: Work) -> None:
    clients = [ask(port, "/page?0")]
    work.await_begun(1)
    clients += [ask(port, f"/page?{number}") for number in range(1, 17)]
    assert eventually(lambda: waiting(server) == 17)
    reply = get(port, "/page?too-many")
    assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
    scrape = ask(port, "/first?scrape")
    assert eventually(lambda: waiting(server) == 18)
    work.step(2)
    assert body(scrape) == b"scrape"
    assert work.begun[1] == "/first?scrape"
    for client in clients:
        client.close()


def test_an_answer_that_no_client_waits_for_any_more_is_told_so(
    server: HttpServer, port: int, work: Work
) -> None:
    ask(port, "/page?gone").close()
    work.await_begun(1)
    assert eventually(lambda: waiting(server) == 0)
    work.step()
    assert eventually(lambda: work.abandoned == 1)


def test_a_profile_ends_with_its_client(server: HttpServer) -> None:
    listener = server.listen("debug", [(LOOPBACK[0], 0)], partial(dispatch, Debug(lambda _: None).handlers))
    settle(server)
    port = port_of(listener)
    for path in ("profile", "heap"):
        with connect(port) as client:
            client.sendall(f"GET /debug/pprof/{path}?seconds=300 HTTP/1.0\r\n\r\n".encode())
            assert eventually(lambda: get(port, "/debug/pprof/profile?seconds=0.01").status == 409)
        assert eventually(lambda: get(port, "/debug/pprof/profile?seconds=0.01").status == 200)


def test_answers_rest_four_times_as_long_as_they_took() -> None:
    answers: SlowAnswers[str] = SlowAnswers()
    answers.add(_PAGE, slow(), "a")
    answers.add(_PAGE, slow(), "b")
    job = answers.take(100.0)
    assert job is not None
    assert (answers.take(100.0), answers.next_at()) == (None, None)
    assert answers.made(job, 0.5, 100.5) == ["a"]
    assert (answers.take(102.4), answers.next_at()) == (None, 102.5)
    assert answers.take(102.5) is not None


def test_a_scrape_does_not_wait_for_the_rest_after_pages() -> None:
    answers: SlowAnswers[str] = SlowAnswers()
    answers.add(_PAGE, slow(), "page")
    page = answers.take(100.0)
    assert page is not None
    answers.made(page, 1.0, 101.0)
    answers.add(_PAGE, slow(Turn.FIRST), "scrape")
    scrape = answers.take(101.0)
    assert scrape is not None
    answers.made(scrape, 0.25, 101.25)
    answers.add(_PAGE, slow(), "page")
    answers.add(_PAGE, slow(Turn.FIRST), "scrape")
    assert answers.take(102.2) is None
    again = answers.take(102.25)
    assert again is not None
    assert again.slow.turn is Turn.FIRST
    answers.made(again, 0.0, 102.25)
    assert (answers.take(105.9), answers.next_at()) == (None, 106.0)


def test_a_profile_waits_for_no_other_answer() -> None:
    answers: SlowAnswers[str] = SlowAnswers()
    answers.add(_PAGE, slow(), "page")
    assert answers.take(100.0) is not None
    answers.add(_PAGE, slow(Turn.AT_ONCE), "profile")
    assert answers.next_at() is not None
    assert answers.take(100.0) is not None


def test_without_a_further_thread_the_client_is_told_so(
    server: HttpServer, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert get(port, "/page?a").status == 503
