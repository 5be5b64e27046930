"""Connections counted by relays, by the frontend that was dialled and the endpoint."""

import os
import signal
import socket
from collections import Counter

import pytest

from kproxy_core.backend.api import BackendSettings
from kproxy_core.model.address import Family, format_address, parse_address
from kproxy_core.model.service import Service
from kproxy_core.testing.builders import endpoint_slice, plans, service
from kproxy_userspace.backend import UserspaceBackend
from kproxy_userspace.wanted import wanted

from .endpoints import PATIENCE, datagram, endpoints, reached
from .proxies import NODE, ONE, TWO, VIP, A, B, Proxy, Start


@pytest.fixture
def counting(start: Start) -> Proxy:
    """Return a backend that counts. It is closed with those of *start*."""
    proxy = start()
    proxy.backend = UserspaceBackend(
        BackendSettings(tuple(Family), options={"workers": 2}, count_traffic=True))
    return proxy


def counted(proxy: Proxy, family: Family = Family.IPV4) -> Counter[str]:
    """Return the counts as ``tcp 10.96.0.1:80 127.0.0.1:9001``."""
    found: Counter[str] = Counter()
    for (address, protocol, port), where, number, _, _ in proxy.backend.kproxy_traffic(family):
        dialled = format_address(address) if address else "any"
        assert where is not None
        endpoint = f"{format_address(where.address)}:{where.port}"
        found[f"{protocol.name.lower()} {dialled}:{port} {endpoint}"] += number
    return found


@pytest.mark.usefixtures("node")
def test_tcp_connections_are_counted_for_the_frontend_that_was_dialled(counting: Proxy) -> None:
    with endpoints(ONE, TWO):
        counting.serve(service("web", "80@30080"), "127.0.0.1")
        for _ in range(3):
            assert reached(VIP, 80) == A
        assert reached("192.0.2.2", 30080) == A
        wanted_counts = {f"tcp {VIP}:80 {A}": 3, f"tcp 192.0.2.2:30080 {A}": 1}
        assert counted(counting) == wanted_counts
        counting.serve(service("web", "80@30080"), "127.0.0.2")
        assert reached(VIP, 80) == B
        assert counted(counting) == {**wanted_counts, f"tcp {VIP}:80 {B}": 1}


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
def test_nothing_is_counted_without_the_option(start: Start) -> None:
    with endpoints(ONE):
        proxy = start()
        proxy.serve(service(), "127.0.0.1")
        reached(VIP, 80)
        assert counted(proxy) == {}


@pytest.mark.parametrize(("of", "counted_frontends"), [
    (service("web", "80@30080"), [(VIP, 80)]),
    (service("dns", "53/UDP@30053"), [(VIP, 53), (None, 30053)]),
    (service("dns", "53/UDP@30053", affinity=60), [(VIP, 53)]),
])  # fmt: skip
def test_udp_without_affinity_has_a_relay_for_each_frontend(
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
