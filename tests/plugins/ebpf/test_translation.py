"""Local sockets and the Services that they dial, through a whole kproxy and real packets."""

import os
import socket
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from kproxy_ebpf import names
from kproxy_ebpf.kernel import bpf
from tests.plugins.ebpf.node import (
    NEIGHBOUR,
    NEIGHBOUR6,
    NODE,
    NODE6,
    POD,
    POD6,
    REMOTE,
    REMOTE6,
    Node,
    node,
    until,
)
from tests.plugins.ebpf.sockets import Sockets

TCP, UDP = socket.SOCK_STREAM, socket.SOCK_DGRAM
WEB, WEB6, DNS, DNS6 = "10.96.0.10", "fd00:96::10", "10.96.0.53", "fd00:96::53"
OWN = "10.96.0.20"
"""Its endpoints are the pod on the node and a pod elsewhere."""
EXTERNAL = "10.96.0.30"
"""Its external traffic policy is Local, and its endpoints are elsewhere."""
SINGLE = tuple(f"10.96.1.{number}" for number in range(5))
"""Of UDP Services with one endpoint each."""
NODE_PORT, LOCAL_NODE_PORT = 30080, 30081
NEAR, NEAR6 = "10.96.0.21", "fd00:96::21"
"""The only endpoint is the other pod of the node."""
ASKED, ASKED6 = "10.96.0.40", "fd00:96::40"
"""Of UDP Services with node ports and external traffic policy Local."""


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("node")) as made:
        made.serve("web", WEB, REMOTE, node_port=NODE_PORT)
        made.serve("web6", WEB6, REMOTE6, node_port=NODE_PORT)
        made.serve("dns", DNS, REMOTE, protocol="UDP")
        made.serve("dns6", DNS6, REMOTE6, protocol="UDP")
        made.serve("own", OWN, [POD, REMOTE[0]])
        made.serve("near", NEAR, [NEIGHBOUR])
        made.serve("near6", NEAR6, [NEIGHBOUR6])
        for number, address in enumerate(SINGLE):
            made.serve(f"single-{number}", address, [REMOTE[number]], protocol="UDP")
        made.serve("lb", EXTERNAL, REMOTE, node_port=LOCAL_NODE_PORT, externalTrafficPolicy="Local")
        local: dict[str, Any] = {"node_port": LOCAL_NODE_PORT, "externalTrafficPolicy": "Local"}
        made.serve("asked", ASKED, REMOTE, protocol="UDP", externalIPs=[NODE], **local)
        made.serve("asked6", ASKED6, REMOTE6, protocol="UDP", **local)
        with made.proxy(settings={"nodePortAddresses": ["0.0.0.0/0", "::/0"]}):
            yield made


@pytest.fixture(scope="module")
def host(where: Node) -> Sockets:
    return where.sockets(where.host)


@pytest.fixture(scope="module")
def pod(where: Node) -> Sockets:
    return where.sockets(where.pod)


@pytest.fixture
def stranger(where: Node, pod: Sockets) -> Sockets:
    """The pod, which the programs do not yet know as an endpoint of any Service."""
    (path,) = where.pins.glob(f"*/maps-*/{names.HAIRPINS}")
    known = bpf.open_pin(str(path))
    bpf.delete_all(known, [key for key, _ in bpf.elements(known, bpf.map_definition(known))])
    os.close(known)
    return pod


class Way(NamedTuple):
    """A family of sockets, and how it writes addresses."""

    family: socket.AddressFamily
    prefix: str

    def address(self, text: str) -> str:
        return f"{self.prefix}{text}"


V4, V6, MAPPED = Way(socket.AF_INET, ""), Way(socket.AF_INET6, ""), Way(socket.AF_INET6, "::ffff:")
WAYS = pytest.mark.parametrize(
    ("way", "web", "dns", "endpoints"),
    [(V4, WEB, DNS, REMOTE), (V6, WEB6, DNS6, REMOTE6), (MAPPED, WEB, DNS, REMOTE)],
    ids=["IPv4", "IPv6", "IPv4-mapped"],
)


def dial(sockets: Sockets, way: Way, address: str, port: int = 80) -> tuple[str, str, Any]:
    """Return the endpoint that answered, the client's address there, and what getpeername(2) returned."""
    with sockets.open(way.family, TCP) as client:
        client.connect((way.address(address), port))
        endpoint, seen = client.recv(100).decode().split()
        return endpoint, seen, client.getpeername()[:2]


def ask(client: socket.socket, address: str, what: bytes = b"now") -> tuple[str, Any]:
    """Send one datagram; return the endpoint that answered, and the sender of the answer."""
    client.sendto(what, (address, 80))
    answer, sender = client.recvfrom(100)
    return answer.decode().split()[0], sender[:2]


@WAYS
def test_a_connection_reaches_an_endpoint_and_shows_the_frontend(
    pod: Sockets, way: Way, web: str, dns: str, endpoints: tuple[str, ...]
) -> None:
    endpoint, _, peer = dial(pod, way, web)
    assert endpoint in endpoints
    assert peer == (way.address(web), 80)


@pytest.mark.parametrize(
    ("way", "server_address", "source"),
    [
        (V4, POD, (NODE, LOCAL_NODE_PORT)), (V6, POD6, (NODE6, LOCAL_NODE_PORT)),
        (MAPPED, POD, (NODE, LOCAL_NODE_PORT)), (V4, POD, (NODE, 80)),
    ],
    ids=["IPv4", "IPv6", "IPv4-mapped", "external IP"],
)  # fmt: skip
def test_a_client_with_the_source_of_a_frontend_is_answered(
    host: Sockets, pod: Sockets, way: Way, server_address: str, source: tuple[str, int]
) -> None:
    """The rules masquerade one of 64,512 flows with the port of a node port."""
    family = V6.family if way is V6 else V4.family
    with host.open(family, UDP) as client, pod.open(way.family, UDP) as server:
        client.bind(source)
        server.bind(("", 0))
        for said in (b"first", b"second"):
            client.sendto(said, (server_address, server.getsockname()[1]))
            heard, sender = server.recvfrom(100)
            server.sendto(heard, sender)
            assert client.recvfrom(100)[0] == said
    with pod.open(way.family, UDP) as other:
        frontend = way.address(source[0]), source[1]
        other.sendto(b"now", frontend)
        answer, sender = other.recvfrom(100)
        assert answer.decode().split()[0] in (*REMOTE, *REMOTE6)
        assert sender[:2] == frontend


@WAYS
def test_the_answer_to_a_datagram_bears_the_frontend(
    pod: Sockets, way: Way, web: str, dns: str, endpoints: tuple[str, ...]
) -> None:
    with pod.open(way.family, UDP) as client:
        endpoint, sender = ask(client, way.address(dns))
        assert endpoint in endpoints
        assert sender == (way.address(dns), 80)
        client.sendmsg([b"now"], [], 0, (way.address(dns), 80))
        assert client.recvmsg(100)[3][:2] == (way.address(dns), 80)


@WAYS
def test_a_connected_socket_that_names_its_peer_is_answered(
    pod: Sockets, way: Way, web: str, dns: str, endpoints: tuple[str, ...]
) -> None:
    """Option ``connectedUdp`` is ``rules`` by default."""
    with pod.open(way.family, UDP) as client:
        client.connect((way.address(dns), 80))
        endpoint, sender = ask(client, way.address(dns))
        assert endpoint in endpoints
        assert sender == (way.address(dns), 80)


def test_packets_of_translated_sockets_carry_the_endpoint(where: Node, pod: Sockets) -> None:
    with pod.open(socket.AF_INET, TCP) as client:
        client.connect((WEB, 80))
        endpoint = client.recv(100).decode().split()[0]
        _, port = client.getsockname()
        assert f"{endpoint}:8080" in where.pod.run("ss", "-tnH", "sport", "=", f":{port}")


def test_sockets_outside_the_cgroup_are_served_by_the_rules(where: Node) -> None:
    outside = where.sockets(where.pod, translated=False)
    with outside.open(socket.AF_INET, TCP) as client:
        client.connect((WEB, 80))
        assert client.recv(100).decode().split()[0] in REMOTE
        _, port = client.getsockname()
        assert f"{WEB}:80" in where.pod.run("ss", "-tnH", "sport", "=", f":{port}")


def test_connections_use_all_endpoints_evenly(pod: Sockets) -> None:
    """Chi-squared with four degrees of freedom exceeds 33.4 once in a million runs."""
    counts = dict.fromkeys(REMOTE, 0)
    for _ in range(250):
        counts[dial(pod, V4, WEB)[0]] += 1
    assert sum((count - 50) ** 2 / 50 for count in counts.values()) < 33.4


def test_datagrams_of_one_socket_stay_with_one_endpoint(pod: Sockets) -> None:
    with pod.open(socket.AF_INET, UDP) as client:
        assert len({ask(client, DNS)[0] for _ in range(40)}) == 1


def test_two_frontends_of_one_socket_are_kept_apart(pod: Sockets) -> None:
    with pod.open(socket.AF_INET, UDP) as client:
        for _ in range(3):
            for number in (0, 1):
                assert ask(client, SINGLE[number]) == (REMOTE[number], (SINGLE[number], 80))


def test_a_socket_remembers_its_last_four_frontends(where: Node, pod: Sockets) -> None:
    """With a fifth, answers to the first one bear its endpoint's address, as the documentation says."""
    with pod.open(socket.AF_INET, UDP) as client:
        for number, address in enumerate(SINGLE):
            client.sendto(b"late", (address, 80))
            where.echo.await_held(number + 1)
        where.echo.release()
        answers = dict(client.recvfrom(100) for _ in SINGLE)
    senders = {answer.decode().split()[0]: sender for answer, sender in answers.items()}
    assert senders == {
        REMOTE[0]: (REMOTE[0], 8080),
        **{REMOTE[number]: (SINGLE[number], 80) for number in range(1, 5)},
    }


@pytest.mark.parametrize(
    ("way", "address"), [(V4, "127.0.0.1"), (V6, "::1"), (V4, NODE), (V6, NODE6)], ids=str
)
def test_node_ports_serve_the_node_itself(host: Sockets, way: Way, address: str) -> None:
    endpoint, _, peer = dial(host, way, address, NODE_PORT)
    assert endpoint in (*REMOTE, *REMOTE6)
    assert peer == (address, NODE_PORT)


@pytest.mark.parametrize(("way", "address"), [(V4, NODE), (V6, NODE6)], ids=str)
def test_node_ports_serve_pods(pod: Sockets, way: Way, address: str) -> None:
    assert dial(pod, way, address, NODE_PORT)[0] in (*REMOTE, *REMOTE6)


@pytest.mark.parametrize(("way", "address"), [(V4, "127.0.0.1"), (V6, "::1")], ids=str)
def test_a_pod_s_loopback_is_its_own(pod: Sockets, way: Way, address: str) -> None:
    with pod.open(way.family, TCP) as client, pytest.raises(ConnectionRefusedError):
        client.connect((address, NODE_PORT))


def test_a_pod_that_dials_itself_does_not_see_itself(pod: Sockets) -> None:
    """Once the programs have chosen the pod itself, the rules serve its connections to this Service."""
    seen = {endpoint: client for endpoint, client, _ in (dial(pod, V4, OWN) for _ in range(60))}
    assert set(seen) == {POD, REMOTE[0]}
    assert seen[POD] != POD


def test_the_node_reaches_its_own_pod(host: Sockets) -> None:
    assert {dial(host, V4, OWN)[0] for _ in range(60)} == {POD, REMOTE[0]}


def test_a_node_that_may_bind_any_address_reaches_its_own_pod(where: Node, host: Sockets) -> None:
    """The programs find out with bind(2) whether a client is the endpoint itself."""
    where.host.run("sysctl", "-qw", "net.ipv4.ip_nonlocal_bind=1")
    try:
        assert {dial(host, V4, OWN)[0] for _ in range(60)} == {POD, REMOTE[0]}
    finally:
        where.host.run("sysctl", "-qw", "net.ipv4.ip_nonlocal_bind=0")


TO_THE_OTHER_POD = pytest.mark.parametrize(
    ("way", "address", "path"),
    [(V4, NEAR, (NEIGHBOUR, POD)), (V6, NEAR6, (NEIGHBOUR6, POD6)), (MAPPED, NEAR, (NEIGHBOUR, POD))],
    ids=["IPv4", "IPv6", "IPv4-mapped"],
)
IP_FREEBIND, IP_TRANSPARENT, IP_BIND_ADDRESS_NO_PORT = 15, 19, 24
"""linux/in.h"""


@TO_THE_OTHER_POD
@pytest.mark.parametrize("option", [IP_FREEBIND, IP_TRANSPARENT], ids=["IP_FREEBIND", "IP_TRANSPARENT"])
def test_a_socket_that_may_bind_any_address_reaches_the_node_s_other_pod(
    stranger: Sockets, way: Way, address: str, path: tuple[str, str], option: int
) -> None:
    with stranger.open(way.family, TCP) as client:
        client.setsockopt(socket.IPPROTO_IP, option, 1)
        client.connect((way.address(address), 80))
        assert tuple(client.recv(100).decode().split()) == path
    assert dial(stranger, way, address) == (*path, (way.address(address), 80))


@TO_THE_OTHER_POD
def test_a_pod_that_may_bind_any_address_reaches_the_node_s_other_pod(
    where: Node, stranger: Sockets, way: Way, address: str, path: tuple[str, str]
) -> None:
    option = f"net.{'ipv6' if way is V6 else 'ipv4'}.ip_nonlocal_bind"
    where.pod.run("sysctl", "-qw", f"{option}=1")
    try:
        assert dial(stranger, way, address)[:2] == path
    finally:
        where.pod.run("sysctl", "-qw", f"{option}=0")


@pytest.mark.parametrize("free", [0, 1])
@pytest.mark.parametrize(("dialled", "endpoints"), [(NEAR, {NEIGHBOUR}), (OWN, {POD, REMOTE[0]})])
def test_a_socket_keeps_the_source_that_it_is_bound_to(
    where: Node, stranger: Sockets, dialled: str, endpoints: set[str], free: int
) -> None:
    """A pod with a second address."""
    source = "10.244.1.13"
    where.pod.ip(f"addr add {source}/32 dev eth0")
    where.host.ip(f"route add {source}/32 dev pod")
    try:
        seen = set()
        for _ in range(20):
            with stranger.open(socket.AF_INET, TCP) as client:
                client.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, free)
                client.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
                client.bind((source, 0))
                client.connect((dialled, 80))
                assert client.getsockname()[0] == source
                seen.add(client.recv(100).decode().split()[0])
        assert seen == endpoints
    finally:
        where.host.ip(f"route del {source}/32 dev pod")
        where.pod.ip(f"addr del {source}/32 dev eth0")


def test_external_policy_local_is_not_for_local_clients(pod: Sockets, host: Sockets) -> None:
    assert dial(pod, V4, NODE, LOCAL_NODE_PORT)[0] in REMOTE
    assert dial(host, V4, NODE, LOCAL_NODE_PORT)[0] in REMOTE


def test_ping_sockets_are_left_alone(where: Node, pod: Sockets) -> None:
    where.pod.run("sysctl", "-qw", "net.ipv4.ping_group_range=0 0")
    with pod.open(socket.AF_INET, UDP, socket.IPPROTO_ICMP) as client:
        client.connect((WEB, 80))
        ((_, remote),) = [row.split()[1:3] for row in where.pod.run("cat", "/proc/net/icmp").splitlines()[1:]]
        assert remote == f"{int.from_bytes(socket.inet_aton(WEB), sys.byteorder):08X}:0050"


def test_a_connected_socket_moves_to_another_endpoint_unaware(where: Node, pod: Sockets) -> None:
    """Option ``connectedUdp`` is ``rules`` by default."""
    address = "10.96.2.2"
    where.serve("moving", address, [REMOTE[0]], protocol="UDP")
    where.await_endpoints(address, REMOTE[0])
    with pod.open(socket.AF_INET, UDP) as client:
        client.connect((address, 80))

        client.settimeout(0.5)

        def answer() -> str:
            client.send(b"now")
            try:
                return client.recv(100).decode().split()[0]
            except TimeoutError:  # The flow of the request was deleted before the reply came.
                return ""

        until(lambda: answer() == REMOTE[0])
        where.serve("moving", address, [REMOTE[1]], protocol="UDP")
        until(lambda: answer() == REMOTE[1])
        assert client.getpeername() == (address, 80)


def test_a_late_answer_of_a_removed_endpoint_bears_the_frontend(where: Node, pod: Sockets) -> None:
    address = "10.96.2.1"
    where.serve("leaving", address, [REMOTE[0]], protocol="UDP")
    where.await_endpoints(address, REMOTE[0])
    with pod.open(socket.AF_INET, UDP) as client:
        client.sendto(b"late", (address, 80))
        where.echo.await_held(1)
        where.serve("leaving", address, [REMOTE[1]], protocol="UDP")
        where.await_endpoints(address, REMOTE[1])
        where.echo.release()
        answer, sender = client.recvfrom(100)
        assert answer.decode().split()[0] == REMOTE[0]
        assert sender == (address, 80)
        assert ask(client, address) == (REMOTE[1], (address, 80))
