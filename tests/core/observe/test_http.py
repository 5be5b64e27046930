"""The HTTP server over real sockets: no client can keep it from answering the others."""

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from h11._receivebuffer import ReceiveBuffer

from kproxy_conformance.network.patience import patience
from kproxy_core.model.address import Address, parse_address
from kproxy_core.observe.exchange import Exchange
from kproxy_core.observe.messages import Answer, Request
from kproxy_core.observe.server import HttpServer
from tests.core.namespaces import own_network
from tests.core.observe.http_clients import (
    ANYWHERE,
    LOOPBACK,
    connect,
    eventually,
    free_port,
    get,
    is_refused,
    port_of,
    received,
    serving,
    settle,
)

__all__ = ["own_network"]

pytestmark = pytest.mark.usefixtures("own_network")

V4, V6 = LOOPBACK


def echo(request: Request) -> Answer:
    return Answer(
        200, f"{request.method} {request.path} {request.query}".encode(), headers=(("X-Extra", "1"),)
    )


@pytest.fixture
def server(own_network: None) -> Iterator[HttpServer]:
    with serving() as running:
        yield running


@pytest.fixture
def port(server: HttpServer) -> int:
    listener = server.listen("echo", [(V4, 0)], echo)
    settle(server)
    return port_of(listener)


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_any_method_is_answered(port: int, method: str) -> None:
    status, headers, body = get(port, "/a/b?c=d&e", method=method)
    assert (status, body) == (200, f"{method} /a/b c=d&e".encode())
    assert headers["Content-Length"] == str(len(body))
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Content-Type"] == "text/plain; charset=utf-8"
    assert headers["X-Extra"] == "1"
    assert headers["Date"].endswith(" GMT")


def test_head_has_everything_but_the_body(port: int) -> None:
    reply = get(port, method="HEAD")
    assert (reply.status, reply.headers["Content-Length"], reply.body) == (200, "7", b"")


def test_a_request_body_is_taken_and_ignored(port: int) -> None:
    assert get(port, method="POST", body=b"x" * 60_000).body == b"POST / "


def test_a_request_may_arrive_in_pieces(port: int) -> None:
    with connect(port) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"POST /slow HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nxy":
            client.send(bytes((byte,)))
        assert received(client).endswith(b"\r\n\r\nPOST /slow ")


def test_a_body_of_chunks_is_bounded(port: int) -> None:
    with connect(port) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        client.sendall((b"1000\r\n" + b"x" * 4096 + b"\r\n") * 16 + b"1\r\nx")
        assert received(client).startswith(b"HTTP/1.1 413 ")


def test_each_byte_is_parsed_once(monkeypatch: pytest.MonkeyPatch, server: HttpServer, port: int) -> None:
    """A client that drips bytes costs as much parsing as it sends, whatever has arrived before."""
    searched: list[int] = []
    find = ReceiveBuffer.maybe_extract_lines

    def counting(buffer: ReceiveBuffer) -> list[bytearray] | None:
        searched.append(len(buffer) - buffer._multiple_lines_search)
        return find(buffer)

    monkeypatch.setattr(ReceiveBuffer, "maybe_extract_lines", counting)
    request = b"GET / HTTP/1.1\r\nHost: a\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(200)) + b"\r\n"
    exchange = Exchange()
    complete = [exchange.receive(bytes((byte,))) for byte in request]
    assert complete[-1] == Request("GET", "/", "", host="a")
    assert set(complete[:-1]) == {None}
    assert sum(searched) <= 3 * len(request)


def test_clients_that_drip_bytes_cost_few_reads_and_little_cpu(
    monkeypatch: pytest.MonkeyPatch, server: HttpServer, port: int
) -> None:
    """Syncs run in the same process, and each byte that arrives alone wakes the server's thread."""
    reads: list[int] = []
    receive = Exchange.receive

    def counting(exchange: Exchange, data: bytes) -> Request | None:
        reads.append(len(data))
        return receive(exchange, data)

    monkeypatch.setattr(Exchange, "receive", counting)
    thread = next(thread for thread in threading.enumerate() if thread.name == "http")
    schedstat = Path(f"/proc/self/task/{thread.native_id}/schedstat")
    clients = [connect(port) for _ in range(20)]
    for client in clients:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(b"GET / HTTP/1.0\r\nX-Drip: ")
    began, used = time.monotonic(), int(schedstat.read_text().split()[0])
    while time.monotonic() < began + 0.5:
        for client in clients:
            client.send(b"x")
    seconds, used = time.monotonic() - began, int(schedstat.read_text().split()[0]) - used
    assert used / 1e9 < 0.3 * seconds
    assert len(reads) <= len(clients) * (seconds / 0.05 + 2)
    assert get(port).status == 200
    for client in clients:
        client.close()


def test_a_large_answer_arrives_whole(server: HttpServer) -> None:
    body = os.urandom(8 << 20)
    listener = server.listen("large", [(V4, 0)], lambda _: Answer(200, body))
    settle(server)
    assert get(port_of(listener)).body == body


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET  / HTTP/1.1\r\n\r\n", 400),
        (b"G(T / HTTP/1.1\r\n\r\n", 400),
        (b"GET x HTTP/1.0\r\n\r\n", 400),
        (b"GET * HTTP/1.0\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # without the mandatory Host
        (b"GET / HTTP/1.0\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nAccept : a\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nContent-Length : 5\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nContent-Length: 1e3\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nContent-Length: " + b"1" * 5000 + b"\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 505),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 65537\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n", 413),
        (b"GET /" + b"a" * 16380, 431),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", 200),
        (b"GET http://node:1/a HTTP/1.1\r\nHost: a\r\n\r\n", 200),
        (b"GET / HTTP/1.0\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", 200),
    ],
)
def test_malformed_and_unusual_requests(port: int, sent: bytes, status: int) -> None:
    with connect(port) as client:
        client.sendall(sent)
        assert received(client).startswith(f"HTTP/1.1 {status} ".encode())
    assert get(port).status == 200


def test_a_failing_handler_harms_only_its_own_request(
    server: HttpServer, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: Request) -> Answer:
        raise ZeroDivisionError

    failing = server.listen("failing", [(V4, 0)], fail)
    settle(server)
    assert get(port_of(failing)).status == 500
    assert get(port).status == 200
    assert [record.message for record in caplog.records] == ["HTTP handler failed"]


def test_silent_clients_delay_no_other(port: int) -> None:
    idle = [connect(port) for _ in range(100)]
    assert get(port).status == 200
    for client in idle:
        client.close()


def test_a_client_that_does_not_read_delays_no_other(server: HttpServer, port: int) -> None:
    listener = server.listen("large", [(V4, 0)], lambda _: Answer(200, bytes(32 << 20)))
    settle(server)
    with connect(port_of(listener)) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert client.recv(4) == b"HTTP"
        assert get(port).status == 200


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n"])
def test_a_slow_client_is_dropped(sent: bytes) -> None:
    with serving(connection_seconds=0.2 * patience()) as server:
        listener = server.listen("echo", [(V4, 0)], echo)
        settle(server)
        with connect(port_of(listener)) as client:
            client.sendall(sent)
            assert received(client) == b""


def test_the_oldest_of_too_many_clients_is_dropped(port: int) -> None:
    clients = [connect(port) for _ in range(300)]
    assert get(port).status == 200
    assert received(clients[0]) == b""
    clients[-1].sendall(b"GET /last HTTP/1.0\r\n\r\n")
    assert b"GET /last" in received(clients[-1])
    for client in clients:
        client.close()


def test_running_out_of_descriptors_is_survived() -> None:
    program = (
        "import resource, sys\n"
        "from kproxy_core.observe.server import HttpServer\n"
        "from kproxy_core.observe.messages import Answer\n"
        "from tests.core.observe import http_clients\n"
        "server = HttpServer()\n"
        "server.start()\n"
        "def handler(request): return Answer(200, b'still here')\n"
        "listener = server.listen('x', [(bytes((127, 0, 0, 1)), 0)], handler)\n"
        "http_clients.settle(server)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))\n"
        "print(http_clients.port_of(listener), flush=True)\n"
        "sys.stdin.read()\n"
        "server.stop()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        port = int(process.stdout.readline())
        clients = [connect(port) for _ in range(40)]
        assert get(port).body == b"still here"
        for client in clients:
            client.close()
        process.stdin.close()
    assert process.returncode == 0


@pytest.mark.parametrize("unspecified", ANYWHERE)
def test_an_unspecified_address_listens_on_both_families_if_asked(
    server: HttpServer, unspecified: Address
) -> None:
    listener = server.listen("both", [(unspecified, 0)], echo, both_families=True)
    settle(server)
    assert get(port_of(listener), host="127.0.0.1").status == get(port_of(listener), host="::1").status == 200


@pytest.mark.parametrize(
    ("unspecified", "host", "other"), [(ANYWHERE[0], "127.0.0.1", "::1"), (ANYWHERE[1], "::1", "127.0.0.1")]
)
def test_an_unspecified_address_listens_on_its_own_family_by_default(
    server: HttpServer, unspecified: Address, host: str, other: str
) -> None:
    listener = server.listen("one", [(unspecified, 0)], echo)
    settle(server)
    assert get(port_of(listener), host=host).status == 200
    assert is_refused(port_of(listener), other)


def test_both_families_can_have_the_same_port_with_different_handlers(server: HttpServer) -> None:
    port = free_port()
    server.listen("four", [(ANYWHERE[0], port)], lambda _: Answer(200, b"4"))
    server.listen("six", [(ANYWHERE[1], port)], lambda _: Answer(200, b"6"))
    settle(server)
    assert (get(port).body, get(port, host="::1").body) == (b"4", b"6")


def test_a_taken_port_is_retried_until_it_is_free(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with serving(retry_seconds=0.02) as server, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listener = server.listen("thing", [(V4, port), (V6, port)], echo)
        settle(server)
        assert port_of(listener) == 0
        assert is_refused(port, "::1")
        taken.close()
        assert eventually(lambda: port_of(listener) == port)
        assert get(port).status == get(port, host="::1").status == 200
    assert [record.message for record in caplog.records] == [
        "cannot listen",
        "listening again",
    ]


def test_each_new_problem_is_reported_once() -> None:
    errors: list[OSError] = []
    with serving(retry_seconds=0.01) as server:
        listener = server.listen("elsewhere", [(parse_address("192.0.2.1"), 0)], echo, failed=errors.append)
        settle(server)
        assert [error.errno for error in errors] == [errno.EADDRNOTAVAIL]
        for _ in range(20):  # each a turn of the server, which tries again in most of them
            time.sleep(0.005)
            settle(server)
        assert len(errors) == 1
        listener.close()


def test_a_closed_listener_frees_its_port_at_once(server: HttpServer) -> None:
    port = free_port()
    first = server.listen("first", [(V4, port)], lambda _: Answer(200, b"first"))
    settle(server)
    assert get(port).body == b"first"
    first.close()
    second = server.listen("second", [(V4, port)], lambda _: Answer(200, b"second"))
    settle(server)
    assert get(port).body == b"second"
    second.close()
    first.close()
    settle(server)
    assert is_refused(port)


def test_a_listener_that_never_could_bind_can_be_closed() -> None:
    with serving(retry_seconds=0.01) as server, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listener = server.listen("thing", [(V4, port)], echo)
        listener.close()
        settle(server)
        taken.close()
        other = server.listen("other", [(V4, 0)], echo)
        settle(server)
        assert get(port_of(other)).status == 200
        assert is_refused(port)


def test_stopping_closes_everything() -> None:
    with serving() as server:
        listener = server.listen("echo", [(V4, 0)], echo)
        settle(server)
        port, client = port_of(listener), connect(port_of(listener))
        get(port)  # by now the client is accepted as well
    assert received(client) == b""
    client.close()
    assert is_refused(port)
    assert "http" not in {thread.name for thread in threading.enumerate()}


def test_hundreds_of_listeners_need_one_thread(server: HttpServer) -> None:
    before = set(threading.enumerate())
    listeners = [
        server.listen(str(n), [(V4, 0)], lambda _, n=n: Answer(200, str(n).encode()))  # type: ignore[misc]
        for n in range(300)
    ]
    settle(server)
    assert set(threading.enumerate()) <= before
    assert [get(port_of(listener)).body for listener in listeners[::50]] == [
        b"0",
        b"50",
        b"100",
        b"150",
        b"200",
        b"250",
    ]


def test_an_idle_server_sleeps(server: HttpServer, port: int) -> None:
    """No timer is left once the last client is served."""
    get(port)
    settle(server)
    thread = next(thread for thread in threading.enumerate() if thread.name == "http")
    call = Path(f"/proc/self/task/{thread.native_id}/syscall")

    def waits_without_limit() -> bool:
        """The fourth argument of epoll_wait(2) is the timeout, an int in a register of 64 bits."""
        _, *arguments = call.read_text().split()
        return len(arguments) > 3 and int(arguments[3], 16) & 0xFFFFFFFF == 0xFFFFFFFF

    assert eventually(waits_without_limit)
