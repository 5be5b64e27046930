"""Answers of an API server arrive whole however they are cut, within their limits, or not at all."""

import errno
import gzip
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy_conformance.network.patience import patience
from kproxy_core.kube import transport as wire
from kproxy_core.kube.access import Access
from kproxy_core.kube.transport import (
    LIMITS,
    Limits,
    Lines,
    ProtocolError,
    ResponseTooLarge,
    Transport,
    Unreachable,
)
from tests.listeners import accepting

EXTENSIONS = st.sampled_from([b"", b";x", b' ; name="a;b"'])
OK = b"HTTP/1.1 200 OK\r\n"


@st.composite
def chunked(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A chunked body, and what is in it."""
    payload, sent = b"", b""
    for piece in draw(st.lists(st.binary(min_size=1, max_size=40) | st.just(b"\r\n0\r\n\r\n"), max_size=6)):
        size = draw(st.sampled_from([b"%x", b"%X", b"%04x"])) % len(piece)
        sent += size + draw(EXTENSIONS) + b"\r\n" + piece + b"\r\n"
        payload += piece
    return sent + b"0\r\n" + draw(st.sampled_from([b"", b"Trailer: x\r\n"])) + b"\r\n", payload


@st.composite
def pieces(draw: st.DrawFn, whole: bytes) -> list[bytes]:
    """*whole*, cut at any places."""
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    return [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


Serve = Callable[[socket.socket], None]


@contextmanager
def server(serve: Serve, limits: Limits = LIMITS) -> Iterator[Transport]:
    """A transport to a server that handles each connection with *serve*, then closes it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve_without_delay(connection: socket.socket) -> None:
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            serve(connection)

    transport = Transport(Access(server=f"http://127.0.0.1:{listener.getsockname()[1]}"), limits)
    with accepting(listener, serve_without_delay):
        try:
            yield transport
        finally:
            transport.abort()
            transport.close()


def answering(*answers: list[bytes]) -> Serve:
    """Answer one request after the other, each with pieces that are sent one by one."""
    def serve(connection: socket.socket) -> None:
        for answer in answers:
            request = b""
            while not request.endswith(b"\r\n\r\n"):
                data = connection.recv(65536)
                if not data:
                    return
                request += data
            for piece in answer:
                connection.sendall(piece)
        # Let the client take what was sent before this end closes.
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
    return serve


@settings(max_examples=60)
@given(st.data())
def test_a_chunked_body_arrives_whole_and_leaves_the_connection_usable(data: st.DataObject) -> None:
    body, payload = data.draw(chunked())
    answer = data.draw(pieces(OK + b"Transfer-Encoding: Chunked\r\n\r\n" + body))
    with server(answering(answer, answer)) as transport:
        for _ in range(2):
            assert transport.get("/", 10.0).read_all(1000) == payload
        assert transport.socket.connections == 1


@pytest.mark.parametrize("answer", [
    b"", b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 20\r\n\r\n",
    OK + b"X: " + b"x" * 100_000,
    OK + b"X: y\r\n" * 200 + b"\r\n",
    OK + b"Content-Length: 3\r\n\r\nab",
    *(OK + b"Transfer-Encoding: chunked\r\n\r\n" + body for body in (
        b"x\r\n", b"\r\n", b"-1\r\na\r\n", b"5\r\nabc", b"3\r\nabc", b"1" * 100_000, b"")),
], ids=lambda answer: repr(answer[:60]))
def test_a_broken_answer_is_an_error(answer: bytes) -> None:
    with server(answering([answer])) as transport, pytest.raises((ProtocolError, ConnectionError)):
        transport.get("/", 10.0).read_all(1000)


def test_bytes_that_arrived_before_an_error_are_read_first() -> None:
    answer = OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n5\r\nde"
    with server(answering([answer])) as transport:
        response = transport.get("/", 10.0)
        found: list[bytes] = []
        with pytest.raises(ProtocolError):
            found.extend(iter(response.read, b""))
    assert b"".join(found) == b"abcde"


# -- bounds

def test_a_body_is_read_up_to_its_limit_and_no_further() -> None:
    sent = 0

    def endless(connection: socket.socket) -> None:
        nonlocal sent
        connection.recv(65536)
        connection.sendall(OK + b"Content-Length: 3221225472\r\n\r\n")
        while True:
            connection.sendall(b" " * 65536)
            sent += 65536

    with server(endless) as transport:
        with pytest.raises(ResponseTooLarge, match="exceeds 1000000 bytes"):
            transport.get("/", 10.0).read_all(1_000_000)
    # The content of the buffers of two sockets.
    assert sent < 100_000_000


def test_a_compressed_body_is_bounded_by_its_size_after_decompression() -> None:
    bomb = gzip.compress(bytes(200 << 20))
    assert len(bomb) < 1 << 20
    answer = OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb) + bomb
    with server(answering([answer])) as transport, pytest.raises(ResponseTooLarge):
        transport.get("/", 10.0, compressed=True).read_all(1 << 20)


@pytest.mark.parametrize("start", [
    OK + b"Content-Length: 1000000\r\n\r\n",
    OK + b"Transfer-Encoding: chunked\r\n\r\n",
    OK + b"X: ",
    b"",
], ids=["body", "chunk", "header", "status"])
def test_a_dripping_answer_ends_at_its_deadline(start: bytes) -> None:
    ended = threading.Event()

    def drip(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(start)
        while not ended.wait(0.02):
            connection.sendall(b"1")

    with server(drip) as transport:
        with pytest.raises(wire.TooSlow, match=r"bytes in \d+ s"):
            transport.get("/", 10.0, allowance=0.6).read_all(1_000_000)
        ended.set()


def test_the_deadline_grows_with_the_bytes_that_arrive() -> None:
    ticks = threading.Event()

    def steady(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(OK + b"Content-Length: 6000\r\n\r\n")
        for _ in range(60):
            connection.sendall(b"x" * 100)
            ticks.wait(0.01 * patience())

    with server(steady, Limits(min_rate=1000)) as transport:
        # On a quiet machine, 0.6 s for an answer of 6 s at the slowest.
        assert len(transport.get("/", 10.0, allowance=0.3 * patience()).read_all(10_000)) == 6000


def test_a_silent_answer_ends() -> None:
    def silent(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(OK + b"Content-Length: 6000\r\n\r\n")
        connection.recv(1)

    with server(silent) as transport, pytest.raises(TimeoutError, match=r"silent for 0\.2 s"):
        transport.get("/", 0.2).read_all(10_000)


def test_a_server_that_resets_connections_while_they_are_made_can_not_be_reached(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    def reset(wire: wire.AbortableSocket, plain: socket.socket, address: object) -> None:
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))

    monkeypatch.setattr(wire.AbortableSocket, "_connect", reset)
    with server(answering()) as transport, pytest.raises(Unreachable, match=r"can't connect to 127\.0\.0\.1"):
        transport.get("/", 1.0)


# -- lines

@given(st.data())
def test_lines_arrive_whole(data: st.DataObject) -> None:
    whole = data.draw(st.lists(st.sampled_from([b"a", b"bc", b"\n", b'{"x":1}', b"\r"])).map(b"".join))
    lines = Lines()
    found = [line for piece in data.draw(pieces(whole)) for line in lines.feed(piece)]
    assert found == [line + b"\n" for line in whole.split(b"\n")[:-1] if line]


@given(st.data())
def test_a_line_that_is_too_long_is_skipped_and_told(data: st.DataObject) -> None:
    whole = b"one\n" + b"x" * data.draw(st.integers(21, 200)) + b"\ntwo\n"
    lines = Lines(limit=20)
    found = [line for piece in data.draw(pieces(whole + b"y" * 50)) for line in lines.feed(piece)]
    assert found == [b"one\n", None, b"two\n", None]
