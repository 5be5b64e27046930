"""Connected UDP sockets under ``connectedUdp: destroy`` when their endpoint is removed."""

import errno
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import pytest

from kproxy_conformance.builders import endpoint_slice, full_update, node_view, plans, service
from kproxy_core.linux import sockets as diag
from kproxy_core.linux.sockets import connected_udp_sockets, destroy_udp_sockets, udp_destruction_problem
from kproxy_ebpf import names
from kproxy_ebpf.family import FamilyState
from kproxy_ebpf.kernel import bpf
from kproxy_ebpf.kernel.maps import Kernel
from kproxy_ebpf.kernel.programs import Compiled
from kproxy_ebpf.settings import Settings
from tests.core.bpf_places import inside
from tests.core.namespaces import Namespace, namespace
from tests.patience import PATIENCE
from tests.plugins.ebpf.node import NODE, POD, PORT, REMOTE, REMOTE6, Node, node, until
from tests.plugins.ebpf.sockets import Sockets, sockets_in

UDP = socket.SOCK_DGRAM
SO_COOKIE = 57
DNS, DNS6 = "10.96.0.53", "fd00:96::53"


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("node")) as made, made.proxy({"connectedUdp": "destroy"}):
        yield made


@pytest.fixture(params=["node", "pod"])
def sockets(request: pytest.FixtureRequest, where: Node) -> Sockets:
    """Of the proxy's own network namespace, and of another."""
    return where.sockets(where.host if request.param == "node" else where.pod)


def connect(sockets: Sockets, family: socket.AddressFamily, address: str, port: int = 80) -> socket.socket:
    client = sockets.open(family, UDP)
    client.connect((address, port))
    return client


def answer(client: socket.socket) -> str:
    client.send(b"now")
    return client.recv(100).decode().split()[0]


def error_of(client: socket.socket) -> int:
    return client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


@pytest.mark.parametrize(
    ("family", "dialled", "address", "endpoints"),
    [
        (socket.AF_INET, DNS, DNS, REMOTE),
        (socket.AF_INET6, DNS6, DNS6, REMOTE6),
        (socket.AF_INET6, f"::ffff:{DNS}", DNS, REMOTE),
    ],
    ids=["IPv4", "IPv6", "IPv4-mapped"],
)
def test_the_sockets_of_a_removed_endpoint_are_destroyed_and_no_other(
    where: Node, sockets: Sockets, family: socket.AddressFamily, dialled: str, address: str,
    endpoints: tuple[str, ...],
) -> None:
    where.serve("dns", address, endpoints[:1], protocol="UDP")
    where.await_endpoints(address, endpoints[0])
    prefix = dialled.removesuffix(address)
    with (
        connect(sockets, family, dialled) as leaving,
        connect(sockets, family, f"{prefix}{endpoints[0]}", PORT) as direct,
        connect(sockets, family, dialled) as moved,
        sockets.open(family, UDP) as bound,
    ):
        assert answer(leaving) == answer(moved) == answer(direct) == endpoints[0]
        assert leaving.getpeername()[:2] == (dialled, 80)
        bound.bind(("", 0))
        moved.connect((f"{prefix}{endpoints[1]}", PORT))
        where.serve("dns", address, endpoints[1:2], protocol="UDP")
        where.await_endpoints(address, endpoints[1])
        leaving.settimeout(PATIENCE)  # Its endpoint is gone before it is destroyed.
        with pytest.raises(ConnectionAbortedError):
            leaving.recv(100)
        leaving.connect((dialled, 80))
        assert answer(leaving) == answer(moved) == endpoints[1]
        assert answer(direct) == endpoints[0]
        assert error_of(bound) == 0
        bound.sendto(b"now", (dialled, 80))
        assert bound.recv(100).decode().split()[0] == endpoints[1]


def test_a_destroyed_socket_fails_until_it_connects_again(where: Node, sockets: Sockets) -> None:
    """As docs/ebpf.md says: the error of the socket is returned once, by whatever asks for it first."""
    address = "10.96.0.56"
    where.serve("failing", address, REMOTE[:1], protocol="UDP")
    where.await_endpoints(address, REMOTE[0])
    with (
        connect(sockets, socket.AF_INET, address) as receiving,
        connect(sockets, socket.AF_INET, address) as sending,
    ):
        where.serve("failing", address, REMOTE[1:2], protocol="UDP")
        receiving.settimeout(PATIENCE)
        with pytest.raises(ConnectionAbortedError):
            receiving.recv(100)
        for client in (receiving, sending):
            for _ in range(2):
                with pytest.raises(OSError, match=os.strerror(errno.EDESTADDRREQ)):
                    client.send(b"now")
            client.connect((address, 80))
        with pytest.raises(ConnectionAbortedError):
            sending.send(b"now")
        assert answer(receiving) == answer(sending) == REMOTE[1]


_MANY = """
import socket, sys
address, number = sys.argv[1], int(sys.argv[2])
for _ in range(number):
    with socket.socket(type=socket.SOCK_DGRAM) as client:
        client.connect((address, 80))
"""


def test_a_socket_is_destroyed_however_many_were_connected_since(where: Node) -> None:
    address = "10.96.0.57"
    where.serve("busy", address, REMOTE[:1], protocol="UDP")
    where.await_endpoints(address, REMOTE[0])
    number = str(2 * noted_sockets(where).entries)
    with connect(where.sockets(where.pod), socket.AF_INET, address) as client:
        assert answer(client) == REMOTE[0]
        churn = ["ip", "netns", "exec", where.pod.name, sys.executable, "-S", "-c", _MANY, address, number]
        subprocess.run(inside(where.cgroup, churn), check=True)
        where.serve("busy", address, REMOTE[1:2], protocol="UDP")
        client.settimeout(PATIENCE)
        with pytest.raises(ConnectionAbortedError):
            client.recv(100)


def test_a_closed_socket_is_forgotten_by_its_last_descriptor(where: Node, sockets: Sockets) -> None:
    address = "10.96.0.58"
    where.serve("closing", address, REMOTE, protocol="UDP")
    where.await_endpoints(address, *REMOTE)
    client = connect(sockets, socket.AF_INET, address)
    other = client.dup()
    cookie = client.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8)
    client.close()
    assert cookie in noted_sockets(where).cookies
    other.close()
    until(lambda: cookie not in noted_sockets(where).cookies)  # The process that made it had a descriptor.


class Noted(NamedTuple):
    entries: int
    """For how many sockets there is room."""
    cookies: set[bytes]


def noted_sockets(where: Node) -> Noted:
    """Return the sockets that the programs know."""
    (path,) = where.pins.glob(f"*/maps-*/{names.CONNECTED}")
    known = bpf.open_pin(str(path))
    definition = bpf.map_definition(known)
    cookies = {cookie for cookie, _ in bpf.elements(known, definition)}
    os.close(known)
    return Noted(definition.entries, cookies)


def test_a_client_with_the_source_of_a_node_port_is_answered_by_a_connected_socket(where: Node) -> None:
    """DTLS servers bind another socket to the same port, and connect it to the client."""
    asked, node_port = "10.96.0.54", 30053
    local = {"node_port": node_port, "externalTrafficPolicy": "Local"}
    where.serve("asked", asked, REMOTE, protocol="UDP", **local)
    where.await_endpoints(asked, *REMOTE)
    pod = where.sockets(where.pod)
    with (
        where.sockets(where.host).open(socket.AF_INET, UDP) as client,
        pod.open(socket.AF_INET, UDP) as server, pod.open(socket.AF_INET, UDP) as connected,
    ):  # fmt: skip
        client.bind((NODE, node_port))
        for sock in (server, connected):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((POD, 5684))
        client.sendto(b"now", (POD, 5684))
        ready = select.select([server, connected], [], [], 5)[0]
        _, sender = ready[0].recvfrom(100)
        other = server if ready[0] is connected else connected
        other.connect(sender)
        other.send(b"answer")
        assert client.recv(100) == b"answer"


def test_a_socket_that_names_its_peer_keeps_to_its_endpoint(where: Node, sockets: Sockets) -> None:
    address = "10.96.0.55"
    where.serve("named", address, REMOTE, protocol="UDP")
    where.await_endpoints(address, *REMOTE)
    for _ in range(10):
        with connect(sockets, socket.AF_INET, address) as client:
            endpoint = answer(client)
            client.sendto(b"now", (address, 80))
            said, sender = client.recvfrom(100)
            assert said.decode().split()[0] == endpoint
            assert sender == (address, 80)


def test_sockets_connected_before_a_restart_are_destroyed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The endpoint is removed while no proxy runs."""
    with node(tmp_path_factory.mktemp("node")) as where:
        where.serve("dns", DNS, REMOTE[:1], protocol="UDP")
        with where.proxy({"connectedUdp": "destroy"}):
            client = connect(where.sockets(where.pod), socket.AF_INET, DNS)
            assert answer(client) == REMOTE[0]
        where.serve("dns", DNS, REMOTE[1:2], protocol="UDP")
        with closing(client), where.proxy({"connectedUdp": "destroy"}):
            with pytest.raises(ConnectionAbortedError):
                client.recv(100)


def test_a_process_that_leaves_connected_sockets_to_the_rules_knows_none(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Nothing tells it when those of a former process are closed."""
    with node(tmp_path_factory.mktemp("node")) as where:
        where.serve("dns", DNS, REMOTE[:1], protocol="UDP")
        with where.proxy({"connectedUdp": "destroy"}), connect(where.sockets(where.pod), socket.AF_INET, DNS):
            assert len(noted_sockets(where).cookies) == 1
            assert list(where.pins.glob(f"*/links/{names.RELEASE}"))
        client = connect(where.sockets(where.pod), socket.AF_INET, DNS)
        with client, where.proxy({"connectedUdp": "rules"}):
            assert noted_sockets(where).cookies == set()
            assert not list(where.pins.glob(f"*/links/{names.RELEASE}"))


def test_a_socket_that_finds_no_room_is_left_to_the_rules(settings: Settings, compiled: Compiled) -> None:
    of_two = compiled.maps[names.CONNECTED]._replace(entries=2)
    small = compiled._replace(maps={**compiled.maps, names.CONNECTED: of_two})
    view = node_view("node1", pods="10.244.1.0/24")
    found = plans(view, service("dns", "80/UDP"), endpoint_slice("dns", REMOTE[0], ports=("8080/UDP",)))
    update = full_update(view, found)

    def program() -> None:
        kernel = Kernel(settings._replace(connected_udp=True))
        kernel.open(small)
        state = FamilyState(update.family, kernel)
        state.write(update, state.withdraw(update))
        kernel.attach()
        kernel.close()

    with namespace() as alone:
        alone.ip("route add default dev lo")
        alone.inside(program)
        with sockets_in(alone, Path(settings.cgroup)) as sockets, ExitStack() as stack:

            def peer() -> str:
                client = stack.enter_context(connect(sockets, socket.AF_INET, "10.96.0.1"))
                _, port = client.getsockname()
                return alone.run("ss", "-unH", "sport", "=", f":{port}").split()[3]

            translated, left = f"{REMOTE[0]}:{PORT}", "10.96.0.1:80"
            assert [peer() for _ in range(3)] == [translated, translated, left]
            stack.close()
            assert peer() == translated


@pytest.fixture
def apart() -> Iterator[Namespace]:
    with namespace() as made:
        yield made


def test_only_connected_sockets_are_listed(apart: Namespace) -> None:
    def listed() -> list[tuple[bytes, int]]:
        with socket.socket(type=UDP) as bound, socket.socket(type=UDP) as client:
            bound.bind(("127.0.0.1", 0))
            client.connect(bound.getsockname())
            assert [one.peer[1] for one in connected_udp_sockets()] == [bound.getsockname()[1]]
            return [one.peer for one in connected_udp_sockets()]

    assert [address for address, _ in apart.inside(listed)] == [socket.inet_aton("127.0.0.1")]


def test_a_socket_closed_meanwhile_is_no_error(apart: Namespace) -> None:
    def destroy() -> int:
        with socket.socket(type=UDP) as client:
            client.connect(("127.0.0.1", 9))
            found = connected_udp_sockets()
        return destroy_udp_sockets(found)

    assert apart.inside(destroy) == 0


def test_destruction_is_available_here() -> None:
    assert udp_destruction_problem() == ""


def test_a_kernel_without_destruction_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unix sockets cannot be destroyed by any kernel; the refusal is the same."""
    request = diag._destruction(socket.AF_UNIX, bytes(48))
    monkeypatch.setattr(diag, "_destruction", lambda *_: request)
    assert udp_destruction_problem() == "the kernel has no CONFIG_INET_DIAG_DESTROY"
