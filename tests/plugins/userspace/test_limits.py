"""Shortages of file descriptors, and connections that only one peer has closed."""

import os
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from kproxy_conformance.builders import service
from kproxy_conformance.network.patience import patience
from tests.patience import PATIENCE

from .endpoints import connect, endpoints, name_of
from .proxies import ONE, VIP, A, Proxy, Start

pytestmark = pytest.mark.usefixtures("node")

CLIENTS = 8
_RESET = struct.pack("ii", 1, 0)


def await_true(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def measured(proxy: Proxy, name: str) -> float:
    found = {each.name: each.value for each in proxy.backend.measure()}
    return found[f"kproxy_userspace_{name}"]


@contextmanager
def few_descriptors(proxy: Proxy, spare: int) -> Iterator[None]:
    """Let the only worker open *spare* more files."""
    (worker,) = proxy.workers()
    pid = worker.process.pid
    used = {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")}
    free = [number for number in range(len(used) + spare) if number not in used]
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[spare - 1] + 1, limits[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("spare", [2, 3, 4, 7])
def test_without_file_descriptors_clients_wait_for_their_turn(start: Start, spare: int) -> None:
    with endpoints(ONE), ExitStack() as stack:
        proxy = start(workers=1)
        proxy.serve(service(), "127.0.0.1")
        with few_descriptors(proxy, spare):
            clients = [stack.enter_context(connect(VIP, 80)) for _ in range(CLIENTS)]
            for client in clients:
                client.settimeout(PATIENCE)
                assert name_of(client) == A
                client.close()
        assert measured(proxy, "abandoned_connections_total") == 0
        assert measured(proxy, "shortages_total") > 0


@pytest.mark.parametrize("spare", [2, 3, 5])
def test_an_endpoint_that_does_not_answer_costs_no_client_when_descriptors_are_short(
    start: Start, spare: int
) -> None:
    with endpoints(ONE), ExitStack() as stack:
        proxy = start(workers=1)
        proxy.serve(service(), "127.0.0.1", "203.0.113.9")
        with few_descriptors(proxy, spare):
            clients = [stack.enter_context(connect(VIP, 80)) for _ in range(CLIENTS)]
            for client in clients:
                client.settimeout(PATIENCE)
                assert name_of(client) == A
                client.close()


def test_bulk_data_is_copied_without_file_descriptors_for_a_pipe(start: Start) -> None:
    with endpoints(ONE):
        proxy = start(workers=1)
        proxy.serve(service(), "127.0.0.1")
        with few_descriptors(proxy, 2), connect(VIP, 80) as client:
            assert name_of(client) == A
            sent = os.urandom(1 << 20)
            got = bytearray()
            for at in range(0, len(sent), 1 << 16):
                client.sendall(sent[at : at + (1 << 16)])
                while len(got) < at + (1 << 16):
                    got += client.recv(1 << 16)
            assert bytes(got) == sent


def test_a_udp_client_without_a_local_port_left_is_counted_as_a_shortage(start: Start) -> None:
    with endpoints(ONE), ExitStack() as stack:
        Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40003")
        proxy = start(workers=1, udpIdleTimeout="1h")
        proxy.serve(service("dns", "53/UDP"), "127.0.0.1", ports="9001/UDP")
        clients = []
        for number in range(4):  # The relay itself has one of the four ports.
            client = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            client.settimeout(PATIENCE)
            client.bind(("", 50000 + number))
            client.connect((VIP, 53))
            clients.append(client)
        for client in clients[:3]:
            client.send(b"?")
            assert client.recv(100) == f"{A};?".encode()
        assert measured(proxy, "shortages_total") == 0
        clients[3].send(b"?")
        await_true(lambda: measured(proxy, "shortages_total") == 1)


def test_a_tcp_client_without_a_local_port_left_is_counted_as_a_shortage(start: Start) -> None:
    with endpoints(ONE), ExitStack() as stack:
        Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40003")
        proxy = start(workers=1)
        proxy.serve(service(), "127.0.0.1")
        clients = [stack.enter_context(socket.socket()) for _ in range(4)]
        for number, client in enumerate(clients):
            client.settimeout(PATIENCE)
            client.bind(("", 50000 + number))
        *served, last = clients
        for client in served:  # The relay itself has one of the four ports.
            client.connect((VIP, 80))
            assert name_of(client) == A
        with suppress(ConnectionResetError):  # It may be noticed before or after the end of the handshake.
            last.connect((VIP, 80))
            assert last.recv(1) == b"", "the relay has no port for the endpoint"
        await_true(lambda: measured(proxy, "shortages_total") == 4)
        assert measured(proxy, "dial_failures_total") == 0


def test_a_shortage_is_logged_with_the_worker(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with endpoints(ONE), ExitStack() as stack:
        proxy = start(workers=1)
        proxy.serve(service(), "127.0.0.1")
        assert proxy.backend.watch(lambda family, what: None)
        with few_descriptors(proxy, 1):
            stack.enter_context(connect(VIP, 80))
            logged = "relay worker out of file descriptors, memory or local ports"
            await_true(lambda: logged in caplog.messages)
        (record,) = [each for each in caplog.records if each.msg.startswith("relay worker out of")]
        assert record.__dict__["fields"]["pid"] == proxy.workers()[0].process.pid


@contextmanager
def silent_endpoint() -> Iterator[tuple[socket.socket, Callable[[], socket.socket]]]:
    """An endpoint that does nothing by itself, not even close."""
    with socket.create_server(ONE) as listener, ExitStack() as stack:
        listener.settimeout(PATIENCE)

        def accept() -> socket.socket:
            accepted = stack.enter_context(listener.accept()[0])
            accepted.settimeout(PATIENCE)
            return accepted

        yield listener, accept


def test_the_relay_of_a_client_that_left_ends_though_the_endpoint_never_closes(start: Start) -> None:
    with silent_endpoint() as (_, accept):
        proxy = start(halfClosedTimeout="200ms")
        proxy.serve(service(), "127.0.0.1")
        connect(VIP, 80).close()
        server = accept()
        assert server.recv(1) == b""
        await_true(lambda: measured(proxy, "connections") == 0)
        assert measured(proxy, "half_closed_timeouts_total") == 1


def test_the_relay_of_an_endpoint_that_left_ends_though_the_client_never_closes(start: Start) -> None:
    with silent_endpoint() as (_, accept):
        proxy = start(halfClosedTimeout="200ms")
        proxy.serve(service(), "127.0.0.1")
        with connect(VIP, 80) as client:
            accept().shutdown(socket.SHUT_WR)
            assert client.recv(1) == b""
            await_true(lambda: measured(proxy, "connections") == 0)


def test_a_half_closed_connection_continues_while_bytes_move(start: Start) -> None:
    pause, timeout = 0.1, patience()
    with silent_endpoint() as (_, accept):
        proxy = start(halfClosedTimeout=f"{timeout}s")
        proxy.serve(service(), "127.0.0.1")
        with connect(VIP, 80) as client:
            server = accept()
            client.shutdown(socket.SHUT_WR)
            assert server.recv(1) == b""
            for number in range(round(1.3 * timeout / pause)):
                time.sleep(pause)
                server.sendall(bytes([number % 256]))
                assert client.recv(1) == bytes([number % 256])
            server.close()
            assert client.recv(1) == b""
        assert measured(proxy, "half_closed_timeouts_total") == 0


def test_a_client_that_breaks_after_half_closing_ends_its_relay(start: Start) -> None:
    with silent_endpoint() as (_, accept):
        proxy = start()
        proxy.serve(service(), "127.0.0.1")
        client = connect(VIP, 80)
        server = accept()
        client.shutdown(socket.SHUT_WR)
        assert server.recv(1) == b""
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        client.close()
        await_true(lambda: measured(proxy, "connections") == 0)
