"""Clients and an endpoint for measuring relays, in separate processes."""

import contextlib
import multiprocessing
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

_CHUNK = 1 << 18
_MESSAGE = bytes(128)


def allow_descriptors() -> None:
    """Raise the limit of file descriptors for ten thousand connections with both ends."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 18, 1 << 18))


@contextlib.contextmanager
def endpoint(bulk: int, echo: int, host: str = "127.0.0.1") -> Iterator[None]:
    """Run an endpoint that listens on both ports."""
    process = multiprocessing.Process(target=_serve, args=(bulk, echo, host), daemon=True)
    process.start()
    time.sleep(0.5)
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _serve(bulk: int, echo: int, host: str) -> None:
    allow_descriptors()
    listeners = {}
    poll = select.epoll()
    for port in (bulk, echo):
        sock = socket.create_server((host, port), backlog=8192)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listeners[sock.fileno()] = sock, port == bulk
        poll.register(sock, select.EPOLLIN)
    clients: dict[int, tuple[socket.socket, bool]] = {}
    buffer = bytearray(_CHUNK)
    while True:
        for fd, _ in poll.poll():
            if fd in listeners:
                listener, is_bulk = listeners[fd]
                with contextlib.suppress(BlockingIOError):
                    while True:
                        client, _ = listener.accept()
                        clients[client.fileno()] = client, is_bulk
                        poll.register(client, select.EPOLLIN)
                continue
            client, is_bulk = clients[fd]
            try:
                # MSG_TRUNC discards the bytes in the kernel: the sink is not under test.
                size = client.recv_into(buffer, _CHUNK, socket.MSG_TRUNC if is_bulk else 0)
                if size and not is_bulk:
                    client.sendall(buffer[:size])
            except OSError:
                size = 0
            if not size:
                del clients[fd]
                client.close()


def _in_process(what: Callable[..., object], *arguments: object) -> object:
    """Return the result of *what*, called in a separate process."""
    ours, theirs = multiprocessing.Pipe()

    def act(result: Connection) -> None:
        result.send(what(*arguments))

    process = multiprocessing.Process(target=act, args=(theirs,))
    process.start()
    theirs.close()  # Else an exit of the process would go unnoticed.
    found = ours.recv()
    process.join()
    return found


def throughput(port: int, count: int, seconds: float) -> float:
    """Return the Gbit/s of *count* connections that send without pause."""
    return float(_in_process(_throughput, port, count, seconds))  # type: ignore[arg-type]


def _throughput(port: int, count: int, seconds: float) -> float:
    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    data = bytes(_CHUNK)
    poll = select.epoll()
    by_fd = {}
    for sock in socks:
        sock.setblocking(False)
        poll.register(sock, select.EPOLLOUT)
        by_fd[sock.fileno()] = sock
    sent = 0
    started = time.monotonic()
    warm = started + 0.3
    counted_from = 0
    began = 0.0
    while (now := time.monotonic()) < warm + seconds:
        if not began and now >= warm:
            began, counted_from = now, sent
        for fd, _ in poll.poll(0.1):
            with contextlib.suppress(BlockingIOError):
                sent += by_fd[fd].send(data)
    ended = time.monotonic()
    for sock in socks:
        sock.close()
    return (sent - counted_from) * 8 / (ended - began) / 1e9


def connections(port: int, threads: int, seconds: float) -> float:
    """Return connections per second: connect, exchange one message, close; *threads* at a time."""
    return float(_in_process(_connections, port, threads, seconds))  # type: ignore[arg-type]


def _connections(port: int, at_once: int, seconds: float) -> float:
    poll = select.epoll()
    open_now: dict[int, socket.socket] = {}
    asked: set[int] = set()

    def start() -> None:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        sock.connect_ex(("127.0.0.1", port))
        open_now[sock.fileno()] = sock
        poll.register(sock, select.EPOLLOUT)

    for _ in range(at_once):
        start()
    done = 0
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        for fd, _ in poll.poll(0.1):
            sock = open_now[fd]
            if fd not in asked:
                sock.send(_MESSAGE)
                asked.add(fd)
                poll.modify(fd, select.EPOLLIN)
                continue
            if len(sock.recv(4096)) != len(_MESSAGE):
                raise RuntimeError("a connection failed")
            asked.discard(fd)
            del open_now[fd]
            sock.close()
            done += 1
            start()
    ended = time.monotonic()
    for sock in open_now.values():
        sock.close()
    return done / (ended - began)


def latency(port: int, count: int, seconds: float) -> tuple[float, float]:
    """Return median and 99th percentile of a message's round trip in microseconds.

    *count* connections are open, one after the other asks: what is measured is the way, not the queue.
    """
    found = _in_process(_latency, port, count, seconds)
    assert isinstance(found, list)
    found.sort()
    return found[len(found) // 2] * 1e6, found[len(found) * 99 // 100] * 1e6


def _latency(port: int, count: int, seconds: float) -> list[float]:
    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for sock in socks:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for sock in socks:
            began = time.perf_counter()
            sock.send(_MESSAGE)
            sock.recv(4096)
            found.append(time.perf_counter() - began)
    for sock in socks:
        sock.close()
    return found


@contextlib.contextmanager
def idle_connections(port: int, count: int, host: str = "127.0.0.1") -> Iterator[None]:
    """Open *count* connections and use each once."""
    ready, leave = multiprocessing.Event(), multiprocessing.Event()

    def hold() -> None:
        allow_descriptors()
        socks = []
        for _ in range(count):
            sock = socket.create_connection((host, port))
            sock.send(_MESSAGE)
            if len(sock.recv(4096)) != len(_MESSAGE):
                raise RuntimeError("a connection failed")
            socks.append(sock)
        ready.set()
        leave.wait()

    process = multiprocessing.Process(target=hold)
    process.start()
    try:
        if not ready.wait(60):
            raise RuntimeError(f"{count} connections can't be had")
        yield
    finally:
        leave.set()
        process.join()
