"""The frontends that translated sockets dialled, as another process of the node finds them."""

import socket
from collections.abc import Iterator

import pytest

from kproxy_core.model.address import parse_address
from kproxy_core.model.service import Destination
from kproxy_ebpf.explain import dialled
from tests.plugins.ebpf.node import NODE, PORT, REMOTE, REMOTE6, Node, node
from tests.plugins.ebpf.sockets import Sockets
from tests.plugins.ebpf.test_translation import MAPPED, TCP, V4, V6, WEB, WEB6, Way

NODE_PORT = 30080


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("node")) as made:
        made.serve("web", WEB, REMOTE, node_port=NODE_PORT)
        made.serve("web6", WEB6, REMOTE6)
        with made.proxy():
            yield made


def found(where: Node, client: socket.socket, endpoint: str) -> Destination | None:
    """Return what the node's processes find out about *client*."""
    host, port = client.getsockname()[:2]
    source = Destination(parse_address(host.removeprefix("::ffff:")), port)
    to = Destination(parse_address(endpoint), PORT)
    return where.host.inside(lambda: dialled(source, to))


def connected(sockets: Sockets, way: Way, address: str, port: int = 80) -> tuple[socket.socket, str]:
    """Return a socket that dialled, and the endpoint that answered."""
    client = sockets.open(way.family, TCP)
    client.connect((way.address(address), port))
    return client, client.recv(100).decode().split()[0]


@pytest.mark.parametrize("place", ["host", "pod"])
@pytest.mark.parametrize(
    ("way", "frontend"), [(V4, WEB), (V6, WEB6), (MAPPED, WEB)], ids=["IPv4", "IPv6", "IPv4-mapped"])
def test_the_frontend_of_a_connection_is_found(where: Node, place: str, way: Way, frontend: str) -> None:
    client, endpoint = connected(where.sockets(getattr(where, place)), way, frontend)
    with client:
        assert found(where, client, endpoint) == Destination(parse_address(frontend), 80)


def test_a_node_port_is_found_as_it_was_dialled(where: Node) -> None:
    client, endpoint = connected(where.sockets(where.host), V4, NODE, NODE_PORT)
    with client:
        assert found(where, client, endpoint) == Destination(parse_address(NODE), NODE_PORT)


def test_a_socket_that_dialled_the_endpoint_has_no_frontend(where: Node) -> None:
    client, endpoint = connected(where.sockets(where.host), V4, REMOTE[0], PORT)
    with client:
        assert found(where, client, endpoint) is None
