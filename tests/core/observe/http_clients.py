"""Clients and servers for HTTP tests: plain sockets on the loopback interface."""

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kproxy_core.model.address import Address, parse_address
from kproxy_core.observe.server import HttpServer, Listener
from tests.patience import PATIENCE

LOOPBACK = (parse_address("127.0.0.1"), parse_address("::1"))
ANYWHERE = (Address(bytes(4)), Address(bytes(16)))


class Reply(NamedTuple):
    """One response."""

    status: int
    headers: dict[str, str]
    body: bytes


def get(
    port: int, path: str = "/", host: str = "127.0.0.1", method: str = "GET", body: bytes | None = None
) -> Reply:
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return Reply(response.status, dict(response.getheaders()), response.read())
    finally:
        connection.close()


def connect(port: int, host: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection((host, port), timeout=PATIENCE)


def is_refused(port: int, host: str = "127.0.0.1") -> bool:
    try:
        connect(port, host).close()
    except ConnectionRefusedError:
        return True
    return False


def received(client: socket.socket) -> bytes:
    """Return everything until the server closes."""
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)


def settle(server: HttpServer) -> None:
    """Wait until earlier calls of *server* have taken effect, each bind tried once."""
    done = threading.Event()
    server._do(done.set)
    assert done.wait(PATIENCE), "the HTTP server does not respond"


def port_of(listener: Listener) -> int:
    """Return the port of the first binding; 0: not bound."""
    return int(listener.sockets[0].getsockname()[1]) if listener.sockets else 0


def free_ports(number: int) -> list[int]:
    """Return different ports without a listener in either family.

    Only for tests in a network namespace of their own: another process would take one now and then.
    """
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket(socket.AF_INET6)) for _ in range(number)]
        for probe in probes:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(("::", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def free_port() -> int:
    (port,) = free_ports(1)
    return port


@contextmanager
def serving(**options: float) -> Iterator[HttpServer]:
    server = HttpServer(**options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def eventually(holds: Callable[[], bool]) -> bool:
    """Return whether *holds* becomes true within `PATIENCE`."""
    end = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
