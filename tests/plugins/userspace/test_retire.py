"""Switches from and to another mode, with clients that never pause."""

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from kproxy_conformance.builders import endpoint_slice, full_update, plans, service
from kproxy_core.contract import Backend, BackendSettings
from kproxy_core.linux.relay.orders import WorkerSettings
from kproxy_core.linux.relay.pool import WorkerPool
from kproxy_core.model.address import Family
from kproxy_core.model.service import Service, ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_nftables.backend import NftablesBackend
from kproxy_userspace import retire as retire_module
from kproxy_userspace.cleanup import cleanup
from tests.patience import PATIENCE

from .endpoints import connect, datagram, endpoints, name_of, reached
from .proxies import NODE, VIP, Proxy, Start

pytestmark = pytest.mark.usefixtures("node")

HOST = "192.0.2.2"
WHERE = (HOST, 9001)
NAME = f"{HOST}:9001"


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retire_module, "GRACE_SECONDS", 0.5)


@pytest.fixture
def other() -> Iterator[NftablesBackend]:
    """A backend of another mode."""
    backend = NftablesBackend(BackendSettings((Family.IPV4,)))
    yield backend
    backend.close()


def program(backend: Backend, *services: Service, port: str = "9001") -> int:
    """Sync *backend* fully with *services*. Return its number of operations."""
    found: dict[ServicePortKey, ServicePlan] = {}
    for of in services:
        found |= plans(NODE[Family.IPV4], of, endpoint_slice(of.name.name, HOST, ports=[port]))
    return backend.sync(full_update(NODE[Family.IPV4], found)).operations


def await_retired(proxy: Proxy, kept: int) -> None:
    """Let *proxy* retire until it stops accepting, and only *kept* connections are open.

    Others may have been accepted just before, and last as long as their clients need.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        found = proxy.backend.retire()
        assert not found.errors
        retirement = proxy.backend._retirement
        if retirement is not None and not retirement.is_accepting and found.waiting == kept:
            return
        assert time.monotonic() < deadline, f"{found.waiting} connections are open instead of {kept}"
        time.sleep(0.1)


def ends(proxy: Proxy) -> bool:
    """Return whether the last client leaves in time."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if not proxy.backend.retire().waiting:
            return True
        time.sleep(0.02)
    return False


@contextlib.contextmanager
def clients(host: str, port: int, threads: int = 3) -> Iterator[list[str]]:
    """Make connections without pause. The result lists failures."""
    failures: list[str] = []
    answered = [0]
    done = threading.Event()

    def load() -> None:
        while not done.is_set():
            try:
                assert reached(host, port) == NAME
                answered[0] += 1
            except OSError as error:
                failures.append(str(error))

    started = [threading.Thread(target=load) for _ in range(threads)]
    for thread in started:
        thread.start()
    try:
        yield failures
    finally:
        done.set()
        for thread in started:
            thread.join()
        assert answered[0]


def test_another_mode_takes_over_without_harm_to_connections(start: Start, other: NftablesBackend) -> None:
    of = service("web", "80@30080")
    with endpoints(WHERE):
        proxy = start()
        proxy.serve(of, HOST)
        with connect(VIP, 80) as kept, clients(VIP, 80) as failures, clients("192.0.2.1", 30080) as more:
            assert name_of(kept) == NAME
            program(other, of)
            assert program(other, of) == 0
            await_retired(proxy, 1)  # the one that is kept; all others have the new mode
            chains = [line for line in cleanup(dry_run=True).removed if ": chain" in line]
            assert [line.split()[-1] for line in chains] == ["filter"]  # for connections that go on
            kept.sendall(b"still here;")
            assert name_of(kept) == "still here"
            kept.close()
            assert ends(proxy)
            proxy.backend.close()
            assert cleanup(dry_run=False).errors == cleanup(dry_run=True).removed == ()
            assert reached(VIP, 80) == NAME
        assert failures == more == []


def test_this_mode_takes_over_without_harm_to_connections(start: Start, other: NftablesBackend) -> None:
    of = service("web", "80@30080")
    with endpoints(WHERE):
        program(other, of)
        with connect(VIP, 80) as kept, clients(VIP, 80) as failures, clients("192.0.2.1", 30080) as more:
            assert name_of(kept) == NAME
            proxy = start()
            assert program(proxy.backend, of)
            assert program(proxy.backend, of) == 0
            program(proxy.backend, of, service("probe", "81", ip="10.96.0.2"))
            assert reached("10.96.0.2", 81) == NAME  # though the rules of both are there
            program(proxy.backend, of)
            kept.sendall(b"still here;")
            assert name_of(kept) == "still here"
        assert failures == more == []


def test_udp_clients_continue_until_conntrack_forgets_them(
    start: Start, other: NftablesBackend
) -> None:
    of = service("dns", "53/UDP@30053")
    places = ((VIP, 53), ("192.0.2.1", 30053))
    with endpoints(WHERE) as (one,), contextlib.ExitStack() as stack:
        asking = {place: stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                  for place in places}
        proxy = start(udpIdleTimeout="1h")
        proxy.serve(of, HOST, ports="9001/UDP")
        for place, client in asking.items():
            assert datagram(client, b"1", *place) == NAME
        relayed = set(one.flows)
        program(other, of, port="9001/UDP")
        await_retired(proxy, len(places))
        for place, client in asking.items():
            assert datagram(client, b"2", *place) == NAME
        assert one.flows == relayed
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            assert datagram(client, b"new", VIP, 53) == NAME
        assert len(one.flows) == len(relayed) + 1
        assert proxy.backend.retire().waiting == len(places)
        subprocess.run(["conntrack", "-F"], check=True, capture_output=True)  # as time does
        for place, client in asking.items():
            assert datagram(client, b"3", *place) == NAME
        assert len(one.flows) == len(relayed) + 1 + len(places)
        assert proxy.backend.retire().waiting == 0


def test_udp_clients_without_an_endpoint_get_the_other_mode(start: Start, other: NftablesBackend) -> None:
    of = service("dns", "53/UDP")
    with endpoints(WHERE), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        proxy = start()
        proxy.serve(of)
        client.sendto(b"?", (VIP, 53))
        program(other, of, port="9001/UDP")
        await_retired(proxy, 0)
        assert datagram(client, b"?", VIP, 53) == NAME


def test_connections_of_a_killed_worker_are_not_waited_for(start: Start) -> None:
    with endpoints(WHERE):
        proxy = start()
        proxy.serve(service(), HOST)
        with connect(VIP, 80) as kept:
            assert name_of(kept) == NAME
            await_retired(proxy, 1)
            for worker in proxy.workers():
                worker.process.kill()
                worker.process.wait()
            assert proxy.backend.retire().waiting == 0


def test_without_portals_ports_close_at_once_and_connections_continue(start: Start) -> None:
    with endpoints(WHERE):
        proxy = start(listen="127.0.0.9")
        proxy.serve(service("web", "8080"), HOST)
        with connect("127.0.0.9", 8080) as kept:
            assert name_of(kept) == NAME
            assert proxy.backend.retire().waiting == 1
            with pytest.raises(ConnectionRefusedError):
                connect("127.0.0.9", 8080)
            kept.sendall(b"still here;")
            assert name_of(kept) == "still here"
        assert ends(proxy)


def test_a_worker_without_relays_outlives_the_end_of_accepting() -> None:
    workers = WorkerPool(1, WorkerSettings(0.25, -1.0, 3600.0))
    try:
        workers.serve({})
        workers.stop_accepting([])
        assert [worker.is_running for worker in workers.running()] == [True]
        assert workers.report() == []
    finally:
        workers.close()
