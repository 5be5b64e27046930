"""Switches between the ipvs and iptables modes with open connections. `test_kernel` runs these in a guest.

A client outside, this node, and two pods, each in a namespace; rules of both modes are in the kernel at the
same time, as they are during a switch.
"""

import contextlib
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kproxy_conformance.builders import (
    addresses,
    endpoint,
    endpoint_slice,
    full_update,
    node_view,
    plans,
    service,
)
from kproxy_conformance.network.namespaces import Namespace
from kproxy_core.contract.values import BackendSettings, Failure, Update
from kproxy_core.linux.rulesets import table_exists
from kproxy_core.model.address import Family, Protocol, parse_address
from kproxy_core.model.service import ServicePortKey
from kproxy_core.observe.traffic.recorder import FrontendOwners, StoredTotals, TrafficRecorder
from kproxy_core.plan.service_plan import Frontend
from kproxy_iptables.backend import IptablesBackend
from kproxy_iptables.cleanup import cleanup as clean_up_iptables
from kproxy_ipvs.backend import IpvsBackend
from kproxy_ipvs.cleanup import cleanup
from kproxy_ipvs.kernel import connections, device
from kproxy_ipvs.kernel.servers import VirtualServers
from kproxy_ipvs.names import IPVS_ACCESS, LOAD_BALANCER, MANGLE, NAT
from kproxy_ipvs.retire import retire
from kproxy_ipvs.wanted import ServerKey
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import find_variant
from tests.plugins.ipvs.rig import Plans, answers

NODE_PORT = 30080
PAUSE = 0.02
"""Seconds between two connections of a client, which would take the whole processor from the switch."""


class Net(NamedTuple):
    """The addresses of one family."""

    family: Family
    client: str
    node: str
    """The node as seen by the client."""
    gateway: str
    """The node as seen by pods."""
    pods: tuple[str, str]
    network: str
    """The network of all pods."""
    vip: str
    idle: str
    dns: str
    external: str
    closed: str
    empty: str

    @property
    def update(self) -> Update:
        """A Service with a node port and a short circuit, an unused one, and one with UDP."""
        node = node_view(
            "node1", family=self.family, pods=self.network, node_port_addresses=self.node, ip=self.node,
            anywhere=True,
        )  # fmt: skip
        found: Plans = {}
        pods = [endpoint(address, name) for address, name in zip(self.pods, ("node1", "node2"), strict=True)]
        web = service(
            "web", f"80@{NODE_PORT}", ip=self.vip, external_ips=self.external, external_local=True)
        for svc, port in (
            (web, "8080"), (service("idle", ip=self.idle), "8080"),
            (service("dns", "53/UDP", ip=self.dns), "8080/UDP"),
        ):  # fmt: skip
            found |= plans(node, svc, endpoint_slice(str(svc.name), *pods, ports=[port]))
        return full_update(node, found)


NETS = [
    Net(Family.IPV4, "192.0.2.10", "192.0.2.1", "10.244.1.1", ("10.244.1.5", "10.244.1.6"), "10.244.1.0/24",
        "10.96.0.1", "10.96.0.2", "10.96.0.3", "198.51.100.1", "10.96.0.4", "10.96.0.5"),
    Net(Family.IPV6, "2001:db8::10", "2001:db8::1", "fd00:1::1", ("fd00:1::5", "fd00:1::6"), "fd00:1::/64",
        "fd00::1", "fd00::2", "fd00::3", "fd00:51::1", "fd00::4", "fd00::5"),
]  # fmt: skip


class Lab:
    """The machines around this node, each in a namespace."""

    def __init__(self, net: Net, client: Namespace, sockets: contextlib.ExitStack) -> None:
        self.net = net
        self.number = socket.AF_INET if net.family is Family.IPV4 else socket.AF_INET6
        self.client = client
        self._sockets = sockets
        self.last_word = threading.Event()
        """Set it to make waiting servers answer."""

    def dial(self, address: str, port: int = 80, *, inside: bool = False) -> socket.socket:
        """Connect from outside, or from the node itself."""

        with contextlib.nullcontext() if inside else self.client.joined():
            return self._sockets.enter_context(socket.create_connection((address, port), timeout=20))

    def datagrams(self, address: str, port: int, *, inside: bool = False) -> socket.socket:
        """Return a connected UDP socket outside, or on the node itself."""

        with contextlib.nullcontext() if inside else self.client.joined():
            sock = socket.socket(self.number, socket.SOCK_DGRAM)
        sock.settimeout(20)
        sock.connect((address, port))
        return self._sockets.enter_context(sock)

    @contextlib.contextmanager
    def echoing(self, pod: Namespace, address: str) -> Iterator[None]:
        """Run a TCP and a UDP echo server in *pod*."""
        with pod.joined():
            listener = socket.create_server((address, 8080), family=self.number)
            datagrams = socket.socket(self.number, socket.SOCK_DGRAM)
        datagrams.bind((address, 8080))

        def serve(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                while data := connection.recv(100):
                    connection.sendall(data)
                    if data == b"wait":
                        self.last_word.wait(120)
                        connection.sendall(b"bye")

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=serve, args=[connection], daemon=True).start()

        def reply() -> None:
            while (received := datagrams.recvfrom(100))[0]:
                data, sender = received
                if data == b"wait":
                    waiting.append(sender)
                else:
                    datagrams.sendto(address.encode() if data == b"who?" else data, sender)

        def say_goodbye() -> None:
            self.last_word.wait(120)
            for sender in waiting:
                datagrams.sendto(b"bye", sender)

        waiting: list[tuple[str, int]] = []
        threads = [threading.Thread(target=each, daemon=True) for each in (accept, reply, say_goodbye)]
        for thread in threads:
            thread.start()
        yield
        self.last_word.set()
        listener.shutdown(socket.SHUT_RDWR)
        datagrams.sendto(b"", (address, 8080))
        for thread in threads:
            thread.join()
        listener.close()
        datagrams.close()


@pytest.fixture(params=NETS, ids=[net.family.label for net in NETS])
def lab(request: pytest.FixtureRequest, node: Namespace) -> Iterator[Lab]:
    net: Net = request.param
    single = f"/{net.family.bits}"
    everywhere = "::/0" if net.family is Family.IPV6 else "0.0.0.0/0"
    node.forward()
    links = [(net.client, net.node), *((address, net.gateway) for address in net.pods)]
    with contextlib.ExitStack() as stack:
        spaces = [stack.enter_context(contextlib.closing(Namespace(there))) for there, _ in links]
        for number, (space, (there, here)) in enumerate(zip(spaces, links, strict=True)):
            device = f"side{number}"
            node.add_veth(device, space, "uplink")
            node.add_address(f"{here}{single}", device)
            space.add_address(f"{there}{single}", "uplink")
            space.add_route(f"{here}{single}", device="uplink")
            space.add_route(everywhere, via=here, device="uplink")
            node.add_route(f"{there}{single}", device=device, source=here)
        # Without it the node can't even begin to send to a VIP that rules would translate.
        node.add_route(everywhere, via=net.client, device="side0")
        made = Lab(net, spaces[0], stack.enter_context(contextlib.ExitStack()))
        for space, address in zip(spaces[1:], net.pods, strict=True):
            stack.enter_context(made.echoing(space, address))
        yield made


@pytest.fixture
def iptables() -> Iterator[IptablesBackend]:
    """Yield a backend of the iptables mode."""
    backend = IptablesBackend(BackendSettings(tuple(Family)))
    yield backend
    backend.close()


def chains(family: Family) -> dict[tuple[str, str], list[str]]:
    return Tables(family, find_variant()).chains()


def answered_by(flow: socket.socket) -> bytes:
    flow.send(b"who?")
    return flow.recv(100)


def forget_flows(net: Net) -> None:
    """Delete the conntrack entries of the UDP Service.

    None may be left: an IPVS connection that ends deletes the entry with its addresses and ports.
    """
    family = net.family.label.lower()
    command = ["conntrack", "-D", "-f", family, "-p", "udp", "--orig-dst", net.dns]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "0 flow entries have been deleted" in done.stderr, done.stderr


def read(path: Path) -> list[str]:
    return path.read_text().splitlines()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert holds()


def test_connections_survive_a_switch_to_iptables(
    lab: Lab, make: Callable[..., IpvsBackend], iptables: IptablesBackend, kernel: VirtualServers
) -> None:
    net, update = lab.net, lab.net.update
    family, vip = net.family, net.vip
    ipvs = make()
    ipvs.sync(update)
    held = [
        lab.dial(vip), lab.dial(net.node, NODE_PORT), lab.dial(net.external), lab.dial(vip, inside=True),
        lab.dial(net.external, inside=True), lab.dial(net.external, inside=True),
    ]  # fmt: skip
    half_closed = lab.dial(vip)
    half_closed.sendall(b"wait")
    assert half_closed.recv(100) == b"wait"
    half_closed.shutdown(socket.SHUT_WR)
    with lab.dial(vip) as connection:  # TIME_WAIT lasts two minutes; retirement does not wait.
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""
    flows = [lab.datagrams(net.dns, 53) for _ in range(6)]
    own_flows = [lab.datagrams(net.dns, 53, inside=True) for _ in range(4)]
    answering = list(map(answered_by, [*flows, *own_flows]))
    assert all(map(answers, held))
    until(lambda: connections.count_closing().total() == 1)
    late = lab.datagrams(net.dns, 53)
    late.send(b"wait")

    iptables.sync(update)
    held.append(lab.dial(net.idle, inside=True))  # Not through IPVS: its source address will be deleted.
    left = retire(())
    assert not left.errors
    assert left.waiting == len([*held, half_closed, *flows, *own_flows, late])
    assert list(map(answered_by, [*flows, *own_flows])) == answering, "a flow has another endpoint"
    assert all(map(answers, held))
    vips = set(addresses(f"{vip} {net.external} {net.dns}"))
    assert device.read(family)[0] == {*vips, *addresses(net.idle)}
    assert {key.address for key in kernel.read(family)} == {*vips, parse_address(net.node), None}
    assert not {(MANGLE, IPVS_ACCESS), (NAT, LOAD_BALANCER)} & chains(family).keys()

    later = [
        lab.dial(vip), lab.dial(net.node, NODE_PORT), lab.dial(vip, inside=True),
        lab.dial(net.idle, inside=True),
    ]  # fmt: skip
    assert all(map(answers, [*later, lab.datagrams(net.dns, 53), lab.datagrams(net.dns, 53, inside=True)]))
    assert later[2].getsockname()[0] == net.node, "its source address is deleted"
    again = retire(())
    assert again.waiting == left.waiting, "IPVS took a new connection"
    assert not again.removed
    assert not again.errors

    lab.last_word.set()
    assert half_closed.recv(100) == b"bye"
    assert late.recv(100) == b"bye"
    half_closed.close()
    held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    for connection in held:
        connection.close()
    until(lambda: retire(()).waiting == len([*flows, *own_flows, late]))
    forget_flows(net)  # As after the removal of their endpoint. The node's own flows keep their source.
    until(lambda: retire(()).waiting == len(own_flows))
    assert device.read(family)[0] == set(addresses(net.dns))
    assert not kernel.read(family)
    # A connection of IPVS that ends now would delete the new flow, between a datagram and its answer.
    until(lambda: not any(line.startswith("UDP") for line in read(connections.CONNECTIONS)))
    assert all(map(answers, [*flows, *own_flows]))
    for flow in own_flows:
        flow.close()
    forget_flows(net)
    assert retire(()).waiting == 0
    assert not device.read(family)[0]

    ipvs.close()
    assert not cleanup(dry_run=False).errors
    assert not device.exists()
    assert not any("--match-set" in rule for found in chains(family).values() for rule in found)
    assert all(map(answers, later))
    assert answers(lab.dial(vip))
    assert all(map(answers, flows))


def test_switch_from_iptables_has_no_gap(
    lab: Lab, make: Callable[..., IpvsBackend], iptables: IptablesBackend, kernel: VirtualServers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    net, update, vip = lab.net, lab.net.update, lab.net.vip
    key = ServerKey(net.family, 0, parse_address(vip), Protocol.TCP, 80)
    iptables.sync(update)
    held = [lab.dial(vip), lab.dial(net.node, NODE_PORT), lab.dial(vip, inside=True)]
    restore, restored = Tables.restore, []

    def observed(tables: Tables, text: str) -> None:
        """Check that new connections are served before the other mode's rules are replaced."""
        restored.append(text)
        assert key in kernel.read(net.family)
        assert key.address in device.read(net.family)[0]
        assert answers(lab.dial(vip))
        restore(tables, text)

    monkeypatch.setattr(Tables, "restore", observed)
    ipvs = make()
    with clients(lab) as failures:
        ipvs.sync(update)
        assert ipvs.sync(update).operations == 0
        assert len(restored) == 1
        monkeypatch.undo()
        assert not clean_up_iptables(dry_run=False).errors
    assert not failures
    assert not any(chain.startswith(("KUBE-SVC-", "KUBE-SEP-")) for _, chain in chains(net.family))
    assert ipvs.sync(update).operations == 0, "what both modes have was removed"
    assert all(map(answers, held))
    fresh = lab.dial(vip)
    assert answers(fresh)
    _, servers = kernel.count(net.family)[key]
    assert sum(server.active for server in servers) == 1
    fresh.close()


def test_switch_back_during_retirement(
    lab: Lab, make: Callable[..., IpvsBackend], iptables: IptablesBackend, kernel: VirtualServers
) -> None:
    net, update = lab.net, lab.net.update
    key = ServerKey(net.family, 0, parse_address(net.vip), Protocol.TCP, 80)
    make().sync(update)
    held = [lab.dial(net.vip), lab.dial(net.vip, inside=True)]
    with clients(lab) as failures:
        iptables.sync(update)
        assert retire(()).waiting >= len(held)
        assert not any(kernel.read(net.family)[key].weights.values())
        assert make().sync(update).operations > 0
        assert not clean_up_iptables(dry_run=False).errors
    assert not failures
    assert set(kernel.read(net.family)[key].weights.values()) == {1}
    assert make().sync(update).operations == 0
    assert all(map(answers, held))


class Counting:
    """A mode that counts connections, as the recorder of a process sees it."""

    def __init__(self, mode: str, backend: IptablesBackend | IpvsBackend) -> None:
        self.mode = mode
        self.traffic = backend.traffic


class Owners(FrontendOwners):
    """The owners of all frontends of *update*."""

    def __init__(self, update: Update) -> None:
        super().__init__((update.family,), time.monotonic)
        self._keys = {frontend: key for key, plan in update.plans.items() for frontend in plan.frontends()}

    def owner(self, family: Family, frontend: Frontend) -> ServicePortKey | None:
        return self._keys.get(frontend) or self._keys.get(frontend._replace(address=None))


def with_closed_port(net: Net) -> Update:
    """Return the update of *net*, with a Service whose endpoint listens on another port, and an empty one."""
    update = net.update
    closed = endpoint_slice("closed", endpoint(net.pods[0], "node1"), ports=["8099"])
    return full_update(update.node, {
        **update.plans, **plans(update.node, service("closed", ip=net.closed), closed),
        **plans(update.node, service("empty", "53/UDP", ip=net.empty)),
    })


def test_counts_are_exact_across_switches_and_a_restart(lab: Lab, tmp_path: Path) -> None:
    net, update = lab.net, with_closed_port(lab.net)
    settings = BackendSettings(tuple(Family), count_traffic=True)
    subprocess.run(["modprobe", "nf_conntrack"], check=True)
    Path("/proc/sys/net/netfilter/nf_conntrack_acct").write_text("1")
    iptables, ipvs = IptablesBackend(settings), IpvsBackend(settings)
    made = 0

    def recorder(mode: str, backend: IptablesBackend | IpvsBackend) -> TrafficRecorder:
        instance: Any = Counting(mode, backend)
        found = TrafficRecorder(
            (net.family,), instance, Owners(update), StoredTotals(str(tmp_path)), time.monotonic)
        found.start()
        return found

    def check(counted: TrafficRecorder, *dialled: tuple[str, int, bool]) -> None:
        """Open a connection each from outside, or from the node itself, and compare the totals."""
        nonlocal made
        for address, port, inside in dialled:
            lab.dial(address, port, inside=inside)
            made += 1
        totals = counted.read(fresh=0.0).values()
        assert sum(total.forwarded for total in totals) == made
        assert sum(to.forwarded for total in totals for to in total.endpoints.values()) == made

    def reject(counted: TrafficRecorder, *, inside: bool) -> int:
        """Return the connections that were rejected, with one more."""
        with contextlib.suppress(PermissionError):  # IPVS lets the node's own datagrams fail at once.
            lab.datagrams(net.empty, 53, inside=inside).send(b"hello")  # A SYN would be sent again.
        time.sleep(1)
        return sum(total.rejected for total in counted.read(fresh=0.0).values())

    outside, node_port, inside = (net.vip, 80, False), (net.node, NODE_PORT, False), (net.vip, 80, True)
    try:
        iptables.sync(update)
        counted = recorder("iptables", iptables)
        check(counted, outside, outside, node_port, inside)
        assert reject(counted, inside=False) == 1
        ipvs.sync(update)
        check(counted, outside, node_port, inside, (net.external, 80, False))
        new: Any = Counting("ipvs", ipvs)
        counted.switched(new, shares=False)
        clean_up_iptables(dry_run=False)
        check(counted, outside, node_port, inside, (net.external, 80, False), (net.idle, 80, True))
        assert [reject(counted, inside=inside) for inside in (False, True)] == [2, 3]
        assert answers(lab.datagrams(net.dns, 53))
        with pytest.raises(ConnectionRefusedError):
            lab.dial(net.closed)
        made += 2
        check(counted)
        until(lambda: any(total.failed for total in counted.read(fresh=0.0).values()))
        found = {key.name: total for key, total in counted.read().items()}
        size = (20 if net.family is Family.IPV4 else 40) + 8 + len(b"hello")
        assert found["dns"].volume == (1, size, 1, size)
        assert {name: total.failed for name, total in found.items() if total.failed} == {
            "closed": {Failure.REFUSED: 1}}
        counted.stop()
        lab.dial(net.vip)
        made += 1
        ipvs.close()
        ipvs = IpvsBackend(settings)
        ipvs.sync(update)
        counted = recorder("ipvs", ipvs)
        check(counted, outside, node_port)
        assert reject(counted, inside=False) == 4
        iptables.sync(update)
        check(counted, outside, node_port)
        new = Counting("iptables", iptables)
        counted.switched(new, shares=False)
        retire(())
        check(counted, outside, node_port, inside)
        counted.stop()
    finally:
        ipvs.close()
        iptables.close()
        clean_up_iptables(dry_run=False)
    assert any("kproxy-ipvs-counts" in line for line in cleanup(dry_run=False).removed)
    assert not any(table_exists(family, "kproxy-ipvs-counts") for family in Family)


@contextlib.contextmanager
def clients(lab: Lab) -> Iterator[list[str]]:
    """Open a connection every `PAUSE`, from outside and from the node. Yields the failures."""
    failures: list[str] = []
    over = threading.Event()

    def keep_dialling(inside: bool) -> None:
        while not over.wait(PAUSE):
            try:
                with lab.dial(lab.net.vip, inside=inside) as connection:
                    if not answers(connection):
                        failures.append("cut")
            except OSError as error:
                failures.append(str(error))

    threads = [threading.Thread(target=keep_dialling, args=[inside]) for inside in (False, True)]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        over.set()
        for thread in threads:
            thread.join()
