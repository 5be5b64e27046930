"""Numbers that programs count for connections of every kind, and for datagrams."""

import socket
import struct
import time
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy_conformance.builders import endpoint_slice, full_update, node_view, plans, service
from kproxy_core.contract.values import BackendSettings, Carried, Failure, Handshake
from kproxy_core.model.address import Family, format_address
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_ebpf.backend import EbpfBackend
from kproxy_ebpf.settings import Settings
from tests.core.late_endpoints import Lateness, handshake_of, late_endpoints
from tests.core.namespaces import Namespace, namespace
from tests.plugins.ebpf.node import PORT, echo
from tests.plugins.ebpf.sockets import Sockets, sockets_in
from tests.plugins.ebpf.test_backend import Rules
from tests.plugins.ebpf.test_traffic import exchange
from tests.plugins.ebpf.watched import Watched, watched

OPEN, CLOSED = "10.244.2.1", "10.244.2.2"
LATE, LOSSY, SILENT = "198.18.0.1", "198.18.0.2", "198.18.0.3"
ENDPOINTS = (OPEN, CLOSED, LATE, LOSSY, SILENT)
FRONTENDS = {endpoint: f"10.96.0.{number}" for number, endpoint in enumerate(ENDPOINTS, 1)}
OPEN6, FRONTEND6 = "fd00:244:2::1", "fd00:96::1"
NODE = node_view("node1", pods="10.244.1.0/24", node_port_addresses="192.0.2.1")
NODE6 = node_view("node1", family=Family.IPV6, pods="fd00:244:1::/64", node_port_addresses="2001:db8::1")
SETTLED = 0.3
"""Seconds after which no acknowledgement is delayed any more."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER for a reset at close(2)."""
RANGES = [one for one in Handshake if one is not Handshake.MICROSECONDS]

Numbers = Counter[tuple[str, Failure | Carried | Handshake | None]]
"""By endpoint; None: all connections."""


@pytest.fixture
def where() -> Iterator[Namespace]:
    late = {LATE: Lateness(0.02), LOSSY: Lateness(0, lost=1), SILENT: Lateness(0, lost=99)}
    with namespace() as made:
        made.ip(*(f"address add {address}/32 dev lo" for address in (OPEN, CLOSED)),
                f"address add {OPEN6}/128 dev lo nodad")
        with late_endpoints(made, late), echo(made, [OPEN, OPEN6]):
            yield made


@pytest.fixture
def backend(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[EbpfBackend]:
    """Programs that translate and count, without rules."""
    monkeypatch.setattr("kproxy_ebpf.backend.accounting_enabled", lambda: True)
    options = {"cgroup": settings.cgroup, "pinDirectory": settings.pin_directory}
    made = EbpfBackend(Rules(), BackendSettings(tuple(Family), options=options, count_traffic=True))
    assert made.begin()
    found: dict[ServicePortKey, ServicePlan] = {}
    for endpoint, frontend in FRONTENDS.items():
        name = f"s{frontend.rpartition('.')[2]}"
        ports = "http:80", "dns:80/UDP"
        found |= plans(NODE, service(name, *ports, ip=frontend),
                       endpoint_slice(name, endpoint, ports=("http:8080", "dns:8080/UDP")))
    made.sync(full_update(NODE, found))
    found = plans(NODE6, service("s6", "80/UDP", ip=FRONTEND6),
                  endpoint_slice("s6", OPEN6, ports=("8080/UDP",)))
    made.sync(full_update(NODE6, found))
    yield made
    made.close()


@pytest.fixture
def taps(where: Namespace) -> Iterator[Watched]:
    with watched(where, PORT) as made:
        yield made


def counted(backend: EbpfBackend) -> Numbers:
    found: Numbers = Counter()
    for family in Family:
        for one in backend.traffic(family):
            assert one.endpoint is not None
            address = format_address(one.endpoint.address)
            found[address, None] += one.number
            numbers = *one.failed, *one.carried, *one.handshakes
            for kind, number in zip((*Failure, *Carried, *Handshake), numbers, strict=True):
                found[address, kind] += number
    return found


def connected(sockets: Sockets, endpoint: str, expected: Numbers) -> socket.socket:
    """Connect to the frontend of *endpoint*, and add what its connection counts to *expected*."""
    client = sockets.open(socket.AF_INET, socket.SOCK_STREAM)
    client.connect((FRONTENDS[endpoint], 80))
    round_trip, again = handshake_of(client)
    took = max(round_trip, again * 1_000_000)
    bounds = [float(one.value) * 1_000_000 for one in RANGES]
    expected[endpoint, None] += 1
    expected[endpoint, RANGES[bisect(bounds, took)]] += 1
    expected[endpoint, Handshake.MICROSECONDS] += took
    return client


def test_connections_of_every_kind_are_counted(
    where: Namespace, settings: Settings, backend: EbpfBackend, taps: Watched
) -> None:
    expected: Numbers = Counter({
        (CLOSED, None): 2, (CLOSED, Failure.REFUSED): 2, (SILENT, None): 1, (SILENT, Failure.UNANSWERED): 1,
        (LOSSY, Failure.UNANSWERED): 1,
    })  # fmt: skip
    with sockets_in(where, Path(settings.cgroup)) as sockets:
        for _ in range(2):
            with sockets.open(socket.AF_INET, socket.SOCK_STREAM) as client, \
                    pytest.raises(ConnectionRefusedError):
                client.connect((FRONTENDS[CLOSED], 80))
        with sockets.open(socket.AF_INET, socket.SOCK_STREAM) as client:
            client.settimeout(1.5)
            with pytest.raises(TimeoutError):
                client.connect((FRONTENDS[SILENT], 80))
        for size in (10, 90):
            exchange(connected(sockets, OPEN, expected), size)
        for endpoint in (LATE, LATE, LATE, LOSSY):
            with connected(sockets, endpoint, expected) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            expected[endpoint, Failure.RESET] += 1
        time.sleep(SETTLED)
    passed = taps.volumes()
    assert {endpoint for endpoint, _ in passed} == set(ENDPOINTS)
    assert counted(backend) == expected + passed
    assert expected[LOSSY, Handshake.LONGER] == 1
    assert not any(expected[LATE, handshake] for handshake in RANGES[:4])


def test_datagrams_are_counted_as_the_stack_has_them(
    where: Namespace, settings: Settings, backend: EbpfBackend, taps: Watched
) -> None:
    dialled = {"": FRONTENDS[OPEN], "::ffff:": FRONTENDS[OPEN], "::": FRONTEND6}
    with sockets_in(where, Path(settings.cgroup)) as sockets:
        with sockets.open(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.sendto(b"x", (OPEN, PORT))
            client.recvfrom(100)
        directly = taps.volumes()
        for kind, frontend in dialled.items():
            family = socket.AF_INET6 if kind else socket.AF_INET
            with sockets.open(family, socket.SOCK_DGRAM) as client:
                for size in (1, 10, 1000):
                    client.sendto(bytes(size), (frontend if ":" in frontend else kind + frontend, 80))
                    client.recvfrom(100)
                client.sendto(b"x", ("::1" if kind == "::" else f"{kind}127.0.0.1", PORT))
                client.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, bytes([1] * 8))  # No operations.
                client.sendto(b"x", (frontend if ":" in frontend else kind + frontend, 80))
                client.recvfrom(100)
    found = Counter({key: number for key, number in counted(backend).items() if isinstance(key[1], Carried)})
    passed = taps.volumes()
    assert passed[OPEN6, Carried.PACKETS_TO_ENDPOINT] == 4
    for local in ("127.0.0.1", "::1"):
        assert passed.pop((local, Carried.PACKETS_TO_ENDPOINT))
        del passed[local, Carried.TO_ENDPOINT]
    assert found == passed - directly
