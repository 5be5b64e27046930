"""Fixtures of the checks in the guest: backends, service ports, and servers that answer."""

import contextlib
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping

import pytest

from kproxy_conformance.builders import (
    changed_update,
    endpoint,
    endpoint_slice,
    full_update,
    node_view,
    plans,
    service,
)
from kproxy_conformance.network.namespaces import Namespace
from kproxy_core.contract.values import BackendSettings
from kproxy_core.model.address import Family, Protocol, parse_address
from kproxy_core.model.service import Destination, ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_ipvs.applied import HeldServer
from kproxy_ipvs.backend import IpvsBackend
from kproxy_ipvs.kernel.servers import VirtualServers
from kproxy_ipvs.wanted import ServerKey
from tests.listeners import accepting, in_a_thread

Plans = dict[ServicePortKey, ServicePlan]

NODES = {
    Family.IPV4: node_view(
        "node1", pods="10.244.1.0/24", node_port_addresses="192.0.2.1", ip="192.0.2.1", anywhere=True
    ),
    Family.IPV6: node_view(
        "node1", family=Family.IPV6, pods="fd00:1::/64", node_port_addresses="2001:db8::1", ip="2001:db8::1"
    ),
}
VIP = parse_address("10.96.0.1")
WEB = ServerKey(Family.IPV4, 0, VIP, Protocol.TCP, 80)


@pytest.fixture(autouse=True)
def node() -> Iterator[Namespace]:
    """Run each test in a network namespace of its own, whose end is quicker than a clean-up."""
    with contextlib.closing(Namespace("node")) as made, made.joined():
        yield made


@pytest.fixture
def make() -> Iterator[Callable[..., IpvsBackend]]:
    """Return a function that makes backends. They are closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def made(**options: object) -> IpvsBackend:
            backend = IpvsBackend(BackendSettings((Family.IPV4, Family.IPV6), options=options))
            stack.callback(backend.close)
            return backend

        yield made


@pytest.fixture(scope="session")
def _ip_vs() -> None:
    subprocess.run(["modprobe", "ip_vs"], check=True)


@pytest.fixture
def kernel(_ip_vs: None) -> Iterator[VirtualServers]:
    servers = VirtualServers()
    yield servers
    servers.close()


def everything(family: Family) -> Plans:
    """Return service ports of every kind."""
    v4 = family is Family.IPV4
    node = NODES[family]
    prefix = "10.96.0." if v4 else "fd00::"
    near, far = ("10.244.1.5", "10.244.2.5") if v4 else ("fd00:1::5", "fd00:2::5")
    external, balancer = ("198.51.100.1", "203.0.113.1") if v4 else ("fd00:51::1", "fd00:113::1")
    ranges = "192.0.2.0/24 198.18.0.1/32" if v4 else "2001:db8::/32 fd00:18::1/128"
    local = endpoint(near, "node1")
    remote = endpoint(far, "node2")
    found: Plans = {}
    for number, (ports, options) in enumerate([
        (("a:80@30080", "b:53/UDP@30053", "c:9/SCTP@30009"), {}),
        (("80@30081",), {"external_local": True, "health_check_node_port": 31000,
                         "load_balancer_ips": balancer, "external_ips": external}),
        (("81",), {"load_balancer_ips": balancer, "source_ranges": ranges, "affinity": 600}),
        (("80",), {"internal_local": True}),
    ], 1):  # fmt: skip
        svc = service(f"web-{number}", *ports, ip=f"{prefix}{number}", **options)  # type: ignore[arg-type]
        named = ports if len(ports) > 1 else ("8080",)
        piece = endpoint_slice(str(svc.name), local, remote, ports=[p.partition("@")[0] for p in named])
        found |= plans(node, svc, piece)
    return found


def web(*endpoints: str) -> Plans:
    """Return one Service at `VIP`, with endpoints on port 8080."""
    return plans(NODES[Family.IPV4], service(), endpoint_slice("web", *endpoints, family=Family.IPV4))


def full(backend: IpvsBackend, wanted: Mapping[ServicePortKey, ServicePlan]) -> int:
    family = next(iter(wanted.values())).family
    return backend.sync(full_update(NODES[family], wanted)).operations


def change(backend: IpvsBackend, wanted: Plans) -> int:
    return backend.sync(changed_update(NODES[Family.IPV4], wanted, wanted)).operations


@pytest.fixture
def pods(node: Namespace) -> Iterator[tuple[str, str]]:
    """Yield two addresses of this machine with echo servers on port 8080."""
    addresses = ("192.0.2.71", "192.0.2.72")
    with contextlib.ExitStack() as stack:
        for address in addresses:
            node.add_address(f"{address}/32", "lo")
            stack.enter_context(accepting(socket.create_server((address, 8080)), in_a_thread(echo)))
        yield addresses


def echo(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        while data := connection.recv(100):
            connection.sendall(data)


def answers(connection: socket.socket) -> bool:
    connection.sendall(b"hello")
    return connection.recv(100) == b"hello"


def weight(held: Mapping[ServerKey, HeldServer], address: str) -> int | None:
    """Return the weight of a real server of `WEB`; None if it does not exist."""
    return held[WEB].weights.get(Destination(parse_address(address), 8080))
