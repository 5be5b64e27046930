"""Connections counted by relays, by the frontend that was dialled and the endpoint."""

import contextlib
import os
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import kproxy_userspace.family as family_module
from kproxy_conformance.builders import endpoint_slice, plans, service
from kproxy_conformance.network.namespaces import run
from kproxy_core.contract.values import BackendSettings, Failure
from kproxy_core.linux.relay.orders import Count
from kproxy_core.model.address import Family, format_address, parse_address
from kproxy_core.model.service import Service
from kproxy_core.observe.traffic.totals import Counts
from kproxy_userspace.backend import UserspaceBackend
from kproxy_userspace.traffic import Traffic
from kproxy_userspace.wanted import wanted
from tests.patience import PATIENCE

from .endpoints import connect, datagram, endpoints, name_of, reached
from .proxies import NODE, ONE, TWO, VIP, A, B, Proxy, Start


def refused_datagrams(times: int, host: str, port: int) -> None:
    """Send datagrams of one flow, which are all refused."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(PATIENCE)
        client.connect((host, port))
        for _ in range(times):
            client.send(b"?")
            with pytest.raises(ConnectionRefusedError):
                client.recv(1)


@pytest.fixture
def counting(start: Start) -> Proxy:
    """Return a backend that counts. It is closed with those of *start*."""
    proxy = start()
    proxy.backend = UserspaceBackend(
        BackendSettings(tuple(Family), options={"workers": 2}, count_traffic=True))
    return proxy


def counted(proxy: Proxy, family: Family = Family.IPV4) -> Counter[str]:
    """Return the counts as ``tcp 10.96.0.1:80 127.0.0.1:9001``, followed by a failure."""
    found: Counter[str] = Counter()
    for (address, protocol, port), where, number, _, failed, *_ in proxy.backend.traffic(family):
        dialled = format_address(address) if address else "any"
        endpoint = f"{format_address(where.address)}:{where.port}" if where else "rejected"
        pair = f"{protocol.name.lower()} {dialled}:{port} {endpoint}"
        found[pair] += number
        for failure, of in zip(Failure, failed, strict=True):
            found[f"{pair} {failure.value}"] += of
    return +found


def until_counted(proxy: Proxy, wanted: dict[str, int]) -> None:
    """Wait until the counts are *wanted*: a relay notices a reset later than the peer that sent it."""
    deadline = time.monotonic() + PATIENCE
    while counted(proxy) != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    assert counted(proxy) == wanted


@contextlib.contextmanager
def resetting(host: str, port: int) -> Iterator[None]:
    """Accept a connection there, and reset it at the end."""
    with socket.create_server((host, port)) as server:
        yield
        server.settimeout(PATIENCE)
        reset(server.accept()[0])


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def given_up(host: str, port: int) -> None:
    """Connect to a relay that reaches no endpoint."""
    with pytest.raises(ConnectionResetError), connect(host, port) as client:
        client.recv(1)


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize("affinity", [0, 60])
def test_tcp_connections_are_counted_for_the_frontend_that_was_dialled(
    counting: Proxy, affinity: int
) -> None:
    of = service("web", "80@30080", affinity=affinity)
    with endpoints(ONE, TWO):
        counting.serve(of, "127.0.0.1")
        for _ in range(3):
            assert reached(VIP, 80) == A
        assert reached("192.0.2.2", 30080) == A
        wanted_counts = {f"tcp {VIP}:80 {A}": 3, f"tcp any:30080 {A}": 1}
        assert counted(counting) == wanted_counts
        counting.serve(of, "127.0.0.2")
        assert reached(VIP, 80) == B
        assert counted(counting) == {**wanted_counts, f"tcp {VIP}:80 {B}": 1}


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize("protocol", ["TCP", "UDP"])
def test_affinity_holds_across_frontends_that_are_counted(counting: Proxy, protocol: str) -> None:
    ports = f"9001/{protocol}"
    of, without_node_port = (service("web", port, affinity=60)
                             for port in (f"80/{protocol}@30080", f"80/{protocol}"))
    wanted_counts: Counter[str] = Counter()

    def reach_each(*frontends: tuple[str, str, int]) -> list[set[str]]:
        """Return the endpoints that each of some clients reaches through *frontends*."""
        found = []
        for source in ("192.0.2.1", "192.0.2.2", "192.0.2.3"):
            found.append(set[str]())
            for frontend, host, port in frontends:
                if protocol == "TCP":
                    endpoint = reached(host, port, source)
                else:
                    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
                        client.bind((source, 0))
                        endpoint = datagram(client, b"?", host, port)
                found[-1].add(endpoint)
                wanted_counts[f"{protocol.lower()} {frontend} {endpoint}"] += 1
        return found

    vip, node_port = (f"{VIP}:80", VIP, 80), ("any:30080", "192.0.2.2", 30080)
    with endpoints(ONE, TWO, ("127.0.0.3", 9001)):
        counting.serve(of, "127.0.0.1", "127.0.0.2", ports=ports)
        kept = reach_each(vip, node_port, vip)
        assert {len(each) for each in kept} == {1}
        assert set.union(*kept) == {A, B}
        counting.serve(of, "127.0.0.1", "127.0.0.2", "127.0.0.3", ports=ports)
        assert reach_each(node_port, vip) == kept
        counting.serve(without_node_port, "127.0.0.1", "127.0.0.2", "127.0.0.3", ports=ports)
        assert reach_each(vip) == kept
        counting.serve(of, "127.0.0.2", "127.0.0.3", ports=ports)
        left = reach_each(vip, node_port)
        assert {len(each) for each in left} == {1}
        assert all(after == before for before, after in zip(kept, left, strict=True) if before == {B})
        assert counted(counting) == wanted_counts


@pytest.mark.usefixtures("node")
def test_frontends_that_a_service_gets_and_loses_are_counted(counting: Proxy) -> None:
    with endpoints(ONE):
        for of in ("80", "80@30080", "80"):
            counting.serve(service("web", of), "127.0.0.1")
            assert reached(VIP, 80) == A
            if "@" in of:
                assert reached("192.0.2.2", 30080) == A
        assert counted(counting) == {f"tcp {VIP}:80 {A}": 3, f"tcp any:30080 {A}": 1}


@pytest.mark.usefixtures("node")
def test_ipv6_connections_are_counted(counting: Proxy) -> None:
    with endpoints(("fd00:1::1", 9001)):
        counting.serve(service(ip="fd00:96::1"), "fd00:1::1", family=Family.IPV6)
        reached("fd00:96::1", 80)
        assert counted(counting, Family.IPV6) == {"tcp fd00:96::1:80 fd00:1::1:9001": 1}
        assert counted(counting) == {}


@pytest.mark.usefixtures("node")
def test_udp_flows_are_counted_for_the_frontend_that_was_dialled(counting: Proxy) -> None:
    with endpoints(ONE):
        counting.serve(service("dns", "53/UDP@30053"), "127.0.0.1", ports="9001/UDP")
        for host, port, times in ((VIP, 53, 2), ("192.0.2.1", 30053, 3)):
            for _ in range(times):
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
                    for _again in range(4):
                        assert datagram(client, b"?", host, port) == A
        assert counted(counting) == {f"udp {VIP}:53 {A}": 2, f"udp any:30053 {A}": 3}


@pytest.mark.usefixtures("node")
def test_the_port_of_a_udp_frontend_that_is_gone_serves_another_service(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family_module, "GRACE_SECONDS", 0.0)
    proxy = start()
    proxy.backend = UserspaceBackend(BackendSettings(
        tuple(Family), options={"workers": 2, "portRange": "21000-21001"}, count_traffic=True))
    with endpoints(ONE, TWO):
        for of in ("53/UDP@30053", "53/UDP"):
            proxy.serve(service("dns", of), "127.0.0.1", ports="9001/UDP")
        proxy.backend._families[Family.IPV4].close_departed()
        proxy.serve(service("other", "54/UDP"), "127.0.0.2", ports="9001/UDP")
        for _ in range(10):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
                assert datagram(client, b"?", VIP, 54) == B


@pytest.mark.usefixtures("node")
def test_connections_to_a_port_of_this_machine_are_counted_for_the_frontend_behind_it(start: Start) -> None:
    proxy = start()
    proxy.backend = UserspaceBackend(
        BackendSettings(tuple(Family), options={"workers": 1, "listen": "127.0.0.3"}, count_traffic=True))
    with endpoints(ONE):
        proxy.serve(service("web", "80@30080", external_ips="198.51.100.1"), "127.0.0.1")
        for port in (80, 80, 30080):
            assert reached("127.0.0.3", port) == A
        assert counted(proxy) == {f"tcp {VIP}:80 {A}": 2, f"tcp any:30080 {A}": 1}


@pytest.mark.usefixtures("node")
def test_counts_outlive_a_worker_that_is_killed(counting: Proxy) -> None:
    with endpoints(ONE):
        counting.serve(service(), "127.0.0.1")
        reached(VIP, 80)
        assert counted(counting) == {f"tcp {VIP}:80 {A}": 1}
        for worker in counting.workers():
            os.kill(worker.process.pid, signal.SIGKILL)
            worker.process.wait(PATIENCE)
        assert counted(counting) == {f"tcp {VIP}:80 {A}": 1}
        counting.serve(service(), "127.0.0.1")
        reached(VIP, 80)
        assert counted(counting) == {f"tcp {VIP}:80 {A}": 2}


@pytest.mark.usefixtures("node")
def test_each_attempt_of_a_relay_counts_and_its_failure(counting: Proxy) -> None:
    run("nft", "add table ip lossy; add chain ip lossy input { type filter hook input priority 0; }; "
        "add rule ip lossy input ip daddr 127.0.0.3 tcp dport 9001 drop")
    counting.serve(service(), "127.0.0.2")
    for _ in range(3):
        given_up(VIP, 80)
    wanted_counts = {f"tcp {VIP}:80 {B}": 12, f"tcp {VIP}:80 {B} refused": 12}
    assert counted(counting) == wanted_counts
    counting.serve(service(), "127.0.0.3")
    given_up(VIP, 80)
    silent = f"tcp {VIP}:80 127.0.0.3:9001"
    wanted_counts |= {silent: 4, f"{silent} unanswered": 4}
    assert counted(counting) == wanted_counts
    with endpoints(ONE):
        counting.serve(service(), "127.0.0.1", "127.0.0.3")
        for _ in range(4):
            assert reached(VIP, 80) == A
    found = counted(counting)
    skipped = found[silent] - 4
    assert skipped  # Each worker takes the endpoints in turn.
    assert found == {
        **wanted_counts, f"tcp {VIP}:80 {A}": 4, silent: 4 + skipped, f"{silent} unanswered": 4 + skipped}


@pytest.mark.usefixtures("node")
def test_attempts_that_fail_at_once_are_counted_like_later_failures(counting: Proxy) -> None:
    run("ip", "route", "add", "unreachable", "203.0.113.1")
    counting.serve(service(), "203.0.113.1")
    given_up(VIP, 80)
    silent = f"tcp {VIP}:80 203.0.113.1:9001"
    assert counted(counting) == {silent: 4, f"{silent} unanswered": 4}


@pytest.mark.usefixtures("node")
def test_resets_by_either_side_are_counted_and_ends_without_are_not(counting: Proxy) -> None:
    to_one, to_two = f"tcp {VIP}:80 {A}", f"tcp {VIP}:80 {B}"
    with endpoints(ONE):
        counting.serve(service(), "127.0.0.1")
        for _ in range(3):
            with connect(VIP, 80) as client:
                assert name_of(client) == A
                client.shutdown(socket.SHUT_WR)
                assert client.recv(1) == b""
        for _ in range(2):
            client = connect(VIP, 80)
            assert name_of(client) == A
            reset(client)
        until_counted(counting, {to_one: 5, f"{to_one} reset": 2})
    with resetting(*TWO):
        counting.serve(service(), "127.0.0.2")
        client = connect(VIP, 80)
        until_counted(counting, {to_one: 5, f"{to_one} reset": 2, to_two: 1})
        counting.serve(service())  # The connection continues without its endpoint.
    with client, pytest.raises(ConnectionResetError):
        client.recv(1)
    until_counted(counting, {to_one: 5, f"{to_one} reset": 2, to_two: 1, f"{to_two} reset": 1})


@pytest.mark.usefixtures("node")
def test_failures_outlive_a_worker_that_is_killed_and_its_end_is_none(counting: Proxy) -> None:
    with endpoints(ONE):
        counting.serve(service(), "127.0.0.1")
        client = connect(VIP, 80)
        assert name_of(client) == A
        reset(client)
        failed = {f"tcp {VIP}:80 {A}": 1, f"tcp {VIP}:80 {A} reset": 1}
        until_counted(counting, failed)
        with connect(VIP, 80) as client:
            assert name_of(client) == A
            failed[f"tcp {VIP}:80 {A}"] = 2
            assert counted(counting) == failed
            for worker in counting.workers():
                os.kill(worker.process.pid, signal.SIGKILL)
                worker.process.wait(PATIENCE)
        counting.serve(service(), "127.0.0.2")
        given_up(VIP, 80)
        assert counted(counting) == {**failed, f"tcp {VIP}:80 {B}": 4, f"tcp {VIP}:80 {B} refused": 4}


@pytest.mark.usefixtures("node")
def test_each_udp_flow_without_an_endpoint_is_rejected_once(counting: Proxy) -> None:
    rejected = f"udp {VIP}:53 rejected"
    of = service("dns", "53/UDP@30053")
    counting.serve(of)
    for host, port, times in ((VIP, 53, 2), ("192.0.2.1", 30053, 1)):
        for _ in range(times):
            refused_datagrams(3, host, port)
    wanted_counts = {rejected: 2, "udp 192.0.2.1:30053 rejected": 1}
    for _ in range(3):
        assert counted(counting) == wanted_counts
    with endpoints(ONE), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        counting.serve(of, "127.0.0.1", ports="9001/UDP")
        assert datagram(client, b"?", VIP, 53) == A
        assert counted(counting) == {**wanted_counts, f"udp {VIP}:53 {A}": 1}
    counting.serve(of)
    refused_datagrams(1, VIP, 53)
    assert counted(counting) == {**wanted_counts, f"udp {VIP}:53 {A}": 1, rejected: 3}


@pytest.mark.usefixtures("node")
def test_nothing_is_counted_without_the_option(start: Start) -> None:
    with endpoints(ONE):
        proxy = start()
        proxy.serve(service(), "127.0.0.1")
        reached(VIP, 80)
        assert counted(proxy) == {}


@pytest.mark.parametrize(("of", "counted_frontends"), [
    (service("web", "80@30080"), [(VIP, 80), (None, 30080)]),
    (service("web", "80@30080", affinity=60), [(VIP, 80), (None, 30080)]),
    (service("dns", "53/UDP@30053"), [(VIP, 53), (None, 30053)]),
    (service("dns", "53/UDP@30053", affinity=60), [(VIP, 53), (None, 30053)]),
])  # fmt: skip
def test_each_frontend_has_a_relay(
    of: Service, counted_frontends: list[tuple[str | None, int]]
) -> None:
    node = NODE[Family.IPV4]
    protocol = next(iter(of.ports)).protocol
    ports = [f"9001/{protocol.name}"]
    (plan,) = plans(node, of, endpoint_slice(of.name.name, "127.0.0.1", ports=ports)).values()
    relays = wanted(plan, node, None, counted=True)
    assert [relay.frontend for relay in relays.values()] == [
        (parse_address(host) if host else None, protocol, port) for host, port in counted_frontends]
    (only,) = wanted(plan, node, None).values()
    assert only.frontend is None
    assert Counter(portal for relay in relays.values() for portal in relay.portals) == Counter(only.portals)


class HourlyClient:
    """Workers whose relays see one connection an hour, each a little later than the last one."""

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock
        self.made = 0

    def report(self) -> list[Count]:
        if self._clock[0] < self.made * 3625:
            return []
        self.made += 1
        return [Count((parse_address(VIP), 6, 80), ONE, (1, *[0] * 12))]


def test_each_connection_of_an_hourly_client_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("kproxy_userspace.traffic.time.monotonic", lambda: clock[0])
    workers: Any = HourlyClient(clock)
    traffic, counts, total = Traffic(workers), Counts(), 0
    while workers.made < 10:
        total += sum(one.number for one in counts.new(Family.IPV4, traffic.read(Family.IPV4, ())))
        clock[0] += 15
    assert total == 10
