"""Numbers that programs count for connections of every kind."""

import socket
import struct
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy_core.backend.api import BackendSettings, Carried, Connections, Failure, Handshake
from kproxy_core.model.address import Family
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_core.testing.builders import endpoint_slice, full_update, node_view, plans, service
from kproxy_ebpf.backend import EbpfBackend
from kproxy_ebpf.settings import Settings
from tests.core.late_endpoints import Lateness, handshake_of, late_endpoints
from tests.core.namespaces import Namespace, namespace
from tests.plugins.ebpf.node import echo
from tests.plugins.ebpf.sockets import Sockets, sockets_in
from tests.plugins.ebpf.test_backend import finish, sync
from tests.plugins.ebpf.test_traffic import exchange

OPEN, CLOSED = "10.244.2.1", "10.244.2.2"
LATE, LOSSY, SILENT = "198.18.0.1", "198.18.0.2", "198.18.0.3"
ENDPOINTS = (OPEN, CLOSED, LATE, LOSSY, SILENT)
FRONTENDS = {endpoint: f"10.96.0.{number}" for number, endpoint in enumerate(ENDPOINTS, 1)}
NODE = node_view("node1", pods="10.244.1.0/24", node_port_addresses="192.0.2.1")
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER for a reset at close(2)."""
RANGES = [one for one in Handshake if one is not Handshake.MICROSECONDS]

Numbers = Counter[tuple[str, Failure | Carried | Handshake | None]]
"""By endpoint; None: all connections."""


@pytest.fixture
def where() -> Iterator[Namespace]:
    late = {LATE: Lateness(0.02), LOSSY: Lateness(0, lost=1), SILENT: Lateness(0, lost=99)}
    with namespace() as made:
        made.ip(*(f"address add {address}/32 dev lo" for address in (OPEN, CLOSED)))
        with late_endpoints(made, late), echo(made, [OPEN]):
            yield made


@pytest.fixture
def backend(settings: Settings) -> Iterator[EbpfBackend]:
    """Programs that translate and count, without rules."""
    options = {"cgroup": settings.cgroup, "pinDirectory": settings.pin_directory}
    made = EbpfBackend(BackendSettings((Family.IPV4,), options=options, count_traffic=True))
    begun = made.kproxy_begin()
    next(begun)
    finish(begun, True)
    found: dict[ServicePortKey, ServicePlan] = {}
    for endpoint, frontend in FRONTENDS.items():
        name = f"s{frontend.rpartition('.')[2]}"
        found |= plans(NODE, service(name, ip=frontend), endpoint_slice(name, endpoint))
    sync(made, full_update(NODE, found))
    yield made
    closed = made.kproxy_close()
    next(closed)
    finish(closed, None)


def counted(backend: EbpfBackend) -> Numbers:
    calls = backend.kproxy_traffic(Family.IPV4)
    next(calls)
    reading = finish(calls, [])
    assert isinstance(reading, list)
    found: Numbers = Counter()
    for one in reading:
        assert isinstance(one, Connections)
        assert one.endpoint is not None
        address = socket.inet_ntoa(one.endpoint.address)
        found[address, one.failure or one.carried or one.handshake] += one.number
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
    where: Namespace, settings: Settings, backend: EbpfBackend
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
            passed = exchange(connected(sockets, OPEN, expected), size)
            for carried in Carried:
                expected[OPEN, carried] += passed[carried.value]
        for endpoint in (LATE, LATE, LATE, LOSSY):
            with connected(sockets, endpoint, expected) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            expected[endpoint, Failure.RESET] += 1
            expected[endpoint, Carried.TO_ENDPOINT] += 1  # The SYN.
    assert counted(backend) == expected
    assert expected[LOSSY, Handshake.LONGER] == 1
    assert not any(expected[LATE, handshake] for handshake in RANGES[:4])
