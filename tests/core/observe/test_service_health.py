"""Health check node ports, as load balancers use them."""

import json
import socket
import threading
from collections.abc import Iterator

import pytest

from kproxy_core.model.address import Address, Family, parse_address
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServiceName
from kproxy_core.observe.health import ServiceHealth
from kproxy_core.observe.server import HttpServer
from kproxy_core.plan.health_checks import HealthCheck
from tests.core.namespaces import own_network
from tests.core.observe.http_clients import (
    eventually,
    free_port,
    free_ports,
    get,
    is_refused,
    serving,
    settle,
)
from tests.patience import PATIENCE

__all__ = ["own_network"]

pytestmark = pytest.mark.usefixtures("own_network")

V4, V6 = Family.IPV4, Family.IPV6
WEB, DNS = ServiceName("default", "web"), ServiceName("kube-system", "dns")


class Proxy:
    """The health check node ports of one family, and the health of the proxy itself."""

    def __init__(
        self, server: HttpServer, family: Family = V4, addresses: tuple[str, ...] | None = None
    ) -> None:
        self.server = server
        self.family = family
        self.healthy = True
        self.failures: list[tuple[ServiceName, str]] = []
        self.ports = ServiceHealth(
            family, server, lambda: self.healthy,
            lambda service, problem: self.failures.append((service, problem)))
        self.place(addresses)

    def place(self, addresses: tuple[str, ...] | None) -> None:
        """Node ports on *addresses*; None: anywhere."""
        self.ports.node_changed(
            NodeView(
                family=self.family,
                name="node",
                node_ports_anywhere=addresses is None,
                node_port_addresses=tuple(parse_address(address) for address in addresses or ()),
            )
        )
        settle(self.server)

    def apply(self, changes: dict[ServiceName, tuple[int, int] | None]) -> None:
        self.ports.apply({name: told and HealthCheck(*told) for name, told in changes.items()})
        settle(self.server)


@pytest.fixture
def server(own_network: None) -> Iterator[HttpServer]:
    with serving(retry_seconds=0.02) as running:
        yield running


def test_the_answer_is_kube_proxys(server: HttpServer) -> None:
    proxy, port = Proxy(server), free_port()
    proxy.apply({WEB: (port, 2)})
    status, headers, body = get(port, "/any/path?at=all")
    assert status == 200
    assert headers["Content-Type"] == "application/json"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Load-Balancing-Endpoint-Weight"] == "2"
    assert body == (
        b'{\n\t"service": {\n\t\t"namespace": "default",\n\t\t"name": "web"\n\t},\n'
        b'\t"localEndpoints": 2,\n\t"serviceProxyHealthy": true\n}'
    )


@pytest.mark.parametrize(
    ("ready", "healthy", "status"), [(1, True, 200), (0, True, 503), (1, False, 503), (0, False, 503)]
)
def test_success_needs_an_endpoint_and_a_healthy_proxy(
    server: HttpServer, ready: int, healthy: bool, status: int
) -> None:
    proxy, port = Proxy(server), free_port()
    proxy.apply({WEB: (port, ready)})
    proxy.healthy = healthy
    reply = get(port)
    assert reply.status == status
    assert reply.headers["X-Load-Balancing-Endpoint-Weight"] == str(ready)
    assert json.loads(reply.body)["serviceProxyHealthy"] is healthy


def test_a_new_count_shows_on_the_same_socket(server: HttpServer) -> None:
    proxy, (port, other) = Proxy(server), free_ports(2)
    proxy.apply({WEB: (port, 1), DNS: (other, 1)})
    early = socket.create_connection(
        ("127.0.0.1", port), timeout=PATIENCE
    )  # in the queue of this socket, or served
    proxy.apply({WEB: (port, 0)})
    early.sendall(b"GET / HTTP/1.0\r\n\r\n")
    assert early.recv(12) == b"HTTP/1.1 503"
    early.close()


def test_ports_close_with_their_service(server: HttpServer) -> None:
    proxy, (port, other) = Proxy(server), free_ports(2)
    proxy.apply({WEB: (port, 1), DNS: (other, 1)})
    proxy.apply({WEB: None})
    assert is_refused(port)
    assert get(other).status == 200
    proxy.apply({WEB: None})
    proxy.apply({WEB: (port, 3)})
    assert json.loads(get(port).body)["localEndpoints"] == 3


def test_services_may_swap_their_ports(server: HttpServer) -> None:
    proxy, (one, two) = Proxy(server), free_ports(2)
    proxy.apply({WEB: (one, 1), DNS: (two, 2)})
    proxy.apply({WEB: (two, 1), DNS: (one, 2)})
    assert json.loads(get(one).body)["service"]["name"] == "dns"
    assert json.loads(get(two).body)["service"]["name"] == "web"


def test_families_have_their_own_counts_on_one_port(server: HttpServer) -> None:
    port = free_port()
    for family, ready in ((V4, 4), (V6, 6)):
        Proxy(server, family).apply({WEB: (port, ready)})
    assert json.loads(get(port).body)["localEndpoints"] == 4
    assert json.loads(get(port, host="::1").body)["localEndpoints"] == 6


def test_only_the_addresses_of_node_ports_are_served(server: HttpServer) -> None:
    proxy, port = Proxy(server, addresses=("127.0.0.1", "127.0.0.2")), free_port()
    proxy.apply({WEB: (port, 1)})
    assert get(port).status == get(port, host="127.0.0.2").status == 200
    assert is_refused(port, "127.0.0.3")
    assert is_refused(port, "::1")


def test_loopback_is_served_where_node_ports_are(server: HttpServer) -> None:
    proxy, port = Proxy(server), free_port()
    node = NodeView(family=V4, name="node", node_port_addresses=(parse_address("127.0.0.2"),),
                    node_ports_on_loopback=True)
    proxy.ports.node_changed(node)
    proxy.apply({WEB: (port, 1)})
    assert get(port).status == get(port, host="127.0.0.2").status == 200
    assert is_refused(port, "127.0.0.3")


def test_hundreds_of_ports_take_no_thread_each(server: HttpServer) -> None:
    proxies = [Proxy(server, family) for family in (V4, V6)]
    ports = {ServiceName("shop", f"web-{number}"): port for number, port in enumerate(free_ports(300))}
    threads = set(threading.enumerate())
    for proxy in proxies:
        proxy.apply({service: (port, number) for number, (service, port) in enumerate(ports.items())})
    for number, (service, port) in enumerate(ports.items()):
        for host in ("127.0.0.1", "::1"):
            reply = get(port, host=host)
            assert json.loads(reply.body)["service"]["name"] == service.name
            assert reply.headers["X-Load-Balancing-Endpoint-Weight"] == str(number)
    assert set(threading.enumerate()) <= threads
    for proxy in proxies:
        proxy.apply(dict.fromkeys(ports))
    assert all(is_refused(port) for port in ports.values())


def test_every_method_is_answered_and_only_in_full(server: HttpServer) -> None:
    proxy, port = Proxy(server), free_port()
    proxy.apply({WEB: (port, 1)})
    for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS"):
        assert json.loads(get(port, method=method).body)["localEndpoints"] == 1
    head = get(port, method="HEAD")
    assert (head.status, head.body) == (200, b"")
    assert int(head.headers["Content-Length"]) > 0


def test_no_address_means_no_port(server: HttpServer) -> None:
    proxy, port = Proxy(server, addresses=()), free_port()
    proxy.apply({WEB: (port, 1)})
    assert is_refused(port)


def test_listeners_follow_the_nodes_addresses(server: HttpServer) -> None:
    proxy, port = Proxy(server, addresses=("127.0.0.2",)), free_port()
    proxy.apply({WEB: (port, 1)})
    proxy.place(("127.0.0.3",))
    assert is_refused(port, "127.0.0.2")
    assert get(port, host="127.0.0.3").status == 200
    proxy.place(None)
    assert get(port, host="127.0.0.2").status == 200


def test_unchanged_addresses_keep_connections(server: HttpServer) -> None:
    proxy, port = Proxy(server, addresses=("127.0.0.1",)), free_port()
    proxy.apply({WEB: (port, 1)})
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as early:
        proxy.place(("127.0.0.1",))
        early.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert early.recv(12) == b"HTTP/1.1 200"


def test_a_taken_port_is_reported_and_opened_once_it_is_free(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    proxy, other = Proxy(server), free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        proxy.apply({WEB: (port, 1), DNS: (other, 1)})
        assert get(other).status == 200
        ((service, problem),) = proxy.failures
        assert service == WEB
        assert problem.startswith(f"port {port} cannot be opened: ")
        (record,) = caplog.records
        assert record.fields["listener"] == "health check node port of default/web"  # type: ignore[attr-defined]
        assert record.fields["addresses"] == f"0.0.0.0:{port}"  # type: ignore[attr-defined]
    assert eventually(lambda: not is_refused(port))
    assert get(port).status == 200


def test_a_hostile_name_is_escaped(server: HttpServer) -> None:
    proxy, port = Proxy(server), free_port()
    name = ServiceName('n"\r\nX: 1', "\u2028</script>\\")
    proxy.apply({name: (port, 1)})
    reply = get(port)
    assert json.loads(reply.body)["service"] == {"namespace": name.namespace, "name": name.name}
    assert "X" not in reply.headers


def test_ports_may_be_set_before_the_node(server: HttpServer) -> None:
    ports, port = ServiceHealth(V4, server, lambda: True), free_port()
    ports.apply({WEB: HealthCheck(port, 1)})
    settle(server)
    assert is_refused(port)
    loopback = Address(bytes((127, 0, 0, 1)))
    ports.node_changed(NodeView(family=V4, name="node", node_port_addresses=(loopback,)))
    settle(server)
    assert get(port).status == 200
