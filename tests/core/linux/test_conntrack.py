"""Stale flows are deleted from the kernel's table, and nothing else is: with real packets."""

import contextlib
import itertools
import queue
import re
import select
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from kproxy_conformance.builders import endpoint_slice, node_view, service
from kproxy_core.linux import conntrack
from kproxy_core.linux.conntrack import TcpFlow, UdpFlow, delete_stale_syns, delete_stale_udp, read_udp_flows
from kproxy_core.linux.conntrack_events import ResetWatch
from kproxy_core.model.address import Family, Protocol, Socket, parse_address
from kproxy_core.model.service import Destination, Service, ServicePortKey
from kproxy_core.plan.endpoints import endpoints_of
from kproxy_core.plan.service_plan import Frontend, plan_service, serving_destinations
from kproxy_core.plan.stale_flows import StaleFlows, StaleFlowTracker, is_stale_syn
from tests.core.namespaces import Namespace, namespace
from tests.patience import PATIENCE


class Places(NamedTuple):
    """Addresses of one family. All but the VIPs and `elsewhere` are addresses of the namespace."""

    client: str
    a: str
    b: str
    vip: str
    external: str
    node: str
    other_node: str
    elsewhere: str


PLACES = {
    Family.IPV4: Places("10.0.0.1", "10.244.0.1", "10.244.0.2", "10.96.0.1", "192.0.2.1", "172.18.0.2",
                        "172.19.0.2", "198.51.100.1"),
    Family.IPV6: Places("fd00::1", "fd00:244::1", "fd00:244::2", "fd00:96::1", "2001:db8::1", "fd00:18::2",
                        "fd00:19::2", "2001:db8:100::1"),
}
ECHO = {
    Family.IPV4: ("icmp", socket.IPPROTO_ICMP, bytes.fromhex("0800 f7fe 0000 0001")),
    Family.IPV6: ("icmpv6", socket.IPPROTO_ICMPV6, bytes.fromhex("8000 0000 0000 0001")),
}
CHECKOUT = Path(__file__).parents[3]
SILENCE = 0.2
"""Seconds in which a packet that is not dropped arrives."""
NAT = {Family.IPV4: "ip", Family.IPV6: "ip6"}


class Lab:
    """A node with two UDP servers, translation rules and clients, all in one namespace."""

    def __init__(self, family: Family, inside: Namespace, cleanup: contextlib.ExitStack) -> None:
        self.family = family
        self.at = PLACES[family]
        self.inside = inside
        self.tracker = StaleFlowTracker()
        self._number = socket.AF_INET if family is Family.IPV4 else socket.AF_INET6
        self._cleanup = cleanup
        at = self.at
        option = "-6" if family is Family.IPV6 else "-4"
        inside.ip("link add out type veth peer name nobody", "link set nobody up", "link set out up")
        inside.ip(*(
            f"addr add {address}/{family.bits} dev lo{' nodad' if family is Family.IPV6 else ''}"
            for address in (at.client, at.a, at.b, at.node, at.other_node)
        ))
        inside.run("ip", option, "route", "add", "default", "dev", "out")
        self.servers = {
            self.bound(socket.SOCK_DGRAM, address, 9053): name for name, address in (("a", at.a), ("b", at.b))
        }
        self.nat({})

    def bound(self, kind: int, address: str, port: int = 0) -> socket.socket:
        """Return a bound socket that is closed with the lab."""
        sock = self.inside.inside(lambda: self.open(kind))
        self._cleanup.callback(sock.close)
        sock.bind((address, port))
        return sock

    def open(self, kind: int = socket.SOCK_DGRAM, protocol: int = 0) -> socket.socket:
        return socket.socket(self._number, kind, protocol)

    def client(self, to: str, port: int) -> socket.socket:
        """Return a UDP client connected to one address."""
        sock = self.bound(socket.SOCK_DGRAM, self.at.client)
        sock.connect((to, port))
        return sock

    def nat(self, rules: dict[tuple[str, int], str], *, zone: str = "") -> None:
        """Translate new connections to these addresses and ports to port 9053 of others."""
        word = NAT[self.family]
        lines = [zone and f"add rule {word} lab zones {zone}"]
        for (to, port), where in rules.items():
            target = f"[{where}]:9053" if self.family is Family.IPV6 else f"{where}:9053"
            match = f"{word} daddr {to} meta l4proto {{ tcp, udp }} th dport {port}"
            lines.append(f"add rule {word} lab nat {match} dnat to {target}")
        self.inside.nft("\n".join([
            f"add table {word} lab",
            f"add chain {word} lab zones {{ type filter hook output priority -300; }}",
            f"add chain {word} lab nat {{ type nat hook output priority -100; }}",
            f"flush table {word} lab",
            # Without a rule that needs it, the kernel tracks nothing.
            f"add rule {word} lab nat ct state new counter",
            *lines,
            "",
        ]))

    def answer(self, client: socket.socket) -> str:
        """Return the server that answers the next packet of *client*. Fails if none does."""
        answered = self._ask(client, PATIENCE)
        assert answered, "no server got the packet"
        return answered

    def is_silent(self, client: socket.socket) -> bool:
        """Return whether no server answers the next packet of *client*."""
        return not self._ask(client, SILENCE)

    def _ask(self, client: socket.socket, seconds: float) -> str:
        client.send(b"?")
        poller = select.poll()
        by_descriptor = {server.fileno(): server for server in self.servers}
        for descriptor in by_descriptor:
            poller.register(descriptor, select.POLLIN)
        for descriptor, _ in poller.poll(seconds * 1000):
            server = by_descriptor[descriptor]
            _, sender = server.recvfrom(64)
            server.sendto(self.servers[server].encode(), sender)
            client.settimeout(PATIENCE)
            return client.recv(64).decode()
        return ""

    def proxy(self, wanted: Service | None, *endpoints: str, name: str = "dns") -> int:
        """Give *wanted* these endpoints, or delete it for None. Return the number of deleted flows."""
        return self.delete(self.decide(wanted, *endpoints, name=name))

    def decide(self, wanted: Service | None, *endpoints: str, name: str = "dns") -> StaleFlows:
        if wanted is None:
            self.tracker.put(ServicePortKey("default", name, "", Protocol.UDP), None, frozenset())
        else:
            slices = {"": endpoint_slice(name, *endpoints, ports=["9053/UDP"], family=self.family)}
            serving = serving_destinations(endpoints_of(wanted.ports[0], slices))
            for plan in plan_service(wanted, slices, node_view(family=self.family)):
                self.tracker.put(plan.key, plan, serving)
        return self.take()

    def take(self) -> StaleFlows:
        return self.tracker.take(frozenset([parse_address(self.at.node)]))

    def delete(self, stale: StaleFlows) -> int:
        return self.inside.inside(lambda: delete_stale_udp(self.family, stale.ports, stale.is_stale))

    def dns(self, port: str = "53/UDP", *, external: bool = False) -> Service:
        return service("dns", port, ip=self.at.vip, external_ips=self.at.external if external else "")

    def flows(self, protocol: str = "udp") -> set[str]:
        """Return the listing of conntrack(8) without the fields that change by themselves."""
        family = self.family.label.lower()
        listed = self.inside.run("conntrack", "-L", "-f", family, "-p", protocol, "-o", "id")
        return {
            " ".join(re.findall(r"(?:src|dst|sport|dport|id|zone[a-z-]*)=\S+", line))
            for line in listed.splitlines()
        }

    def only_flow(self, port: int) -> str:
        """Return the id of the only UDP flow to *port*."""
        (found,) = (flow for flow in self.flows() if f" dport={port} " in flow)
        return found.rpartition("id=")[2]


@pytest.fixture(params=Family, ids=lambda family: family.label)
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    with namespace() as inside, contextlib.ExitStack() as cleanup:
        yield Lab(request.param, inside, cleanup)


def test_a_client_that_never_pauses_moves_to_another_endpoint_when_its_own_is_removed(lab: Lab) -> None:
    at = lab.at
    lab.nat({(at.vip, 53): at.a})
    leaving = lab.client(at.vip, 53)
    assert lab.answer(leaving) == "a"
    lab.nat({(at.vip, 53): at.b})
    staying = lab.client(at.vip, 53)
    assert lab.answer(staying) == "b"
    assert lab.proxy(lab.dns(), at.a, at.b) == 0
    assert lab.answer(leaving) == "a"
    before = lab.flows()
    assert lab.proxy(lab.dns(), at.b) == 1
    assert len(before - lab.flows()) == 1
    assert lab.answer(leaving) == "b"
    assert lab.answer(staying) == "b"
    assert lab.proxy(lab.dns(), at.b) == 0


def test_other_flows_are_kept(lab: Lab) -> None:
    """TCP to the same VIP and port, other ports, untranslated and foreign flows."""
    at = lab.at
    lab.nat({(at.vip, 53): at.a, (at.vip, 54): at.a, (at.elsewhere, 53): at.a, (at.elsewhere, 99): at.b})
    for to, port in ((at.vip, 54), (at.elsewhere, 53), (at.elsewhere, 99)):
        assert lab.answer(lab.client(to, port))
    assert lab.is_silent(lab.client(at.external, 53))
    listener = lab.bound(socket.SOCK_STREAM, at.a, 9053)
    listener.listen()
    connection = lab.bound(socket.SOCK_STREAM, at.client)
    connection.connect((at.vip, 53))
    others, tcp = lab.flows(), lab.flows("tcp")
    assert len(others) == 4
    assert len(tcp) == 1
    assert lab.answer(lab.client(at.vip, 53)) == "a"
    assert lab.proxy(lab.dns(), at.b) == 1
    assert lab.flows() == others
    assert lab.flows("tcp") == tcp


def test_a_flow_older_than_its_service_is_deleted(lab: Lab) -> None:
    at = lab.at
    older = lab.client(at.external, 53)
    assert lab.is_silent(older)
    lab.nat({(at.external, 53): at.b})
    assert lab.proxy(lab.dns(external=True)) == 0
    assert lab.is_silent(older)
    assert lab.proxy(lab.dns(external=True), at.b) == 1
    assert lab.answer(older) == "b"


@pytest.mark.parametrize("gone", [False, True], ids=["without endpoints", "deleted"])
def test_flows_are_deleted_with_the_last_endpoint(lab: Lab, gone: bool) -> None:
    at = lab.at
    lab.nat({(at.vip, 53): at.a})
    client = lab.client(at.vip, 53)
    assert lab.answer(client) == "a"
    assert lab.proxy(lab.dns(), at.a) == 0
    lab.nat({})
    assert lab.answer(client) == "a"
    assert lab.proxy(None if gone else lab.dns()) == 1
    assert lab.is_silent(client)


def test_node_port_flows_to_addresses_without_node_ports_are_kept(lab: Lab) -> None:
    at = lab.at
    here, other, elsewhere = ((address, 30053) for address in (at.node, at.other_node, at.elsewhere))
    lab.nat({here: at.a, other: at.a, elsewhere: at.a})
    assert [lab.answer(lab.client(*to)) for to in (here, other, elsewhere)] == ["a", "a", "a"]
    assert lab.proxy(lab.dns("53/UDP@30053"), at.b) == 1
    left = " ".join(lab.flows())
    assert f"dst={at.node} " not in left
    assert left.count("dport=30053") == 2


@pytest.mark.parametrize("zone", ["ct zone set 7", "ct original zone set 7"])
def test_flows_in_zones_are_deleted_in_their_zone(lab: Lab, zone: str) -> None:
    at = lab.at
    rules = {(at.vip, 53): at.a}
    lab.nat(rules)
    clients = [lab.client(at.vip, 53)]
    assert lab.answer(clients[0]) == "a"
    lab.nat(rules, zone=zone)
    clients[0].send(b"now in the zone too")
    assert len(lab.flows()) == 2
    assert lab.proxy(lab.dns(), at.b) == 2
    assert lab.flows() == set()


def test_many_flows(lab: Lab) -> None:
    """More flows than fit into one message of the kernel, deleted while they are listed."""
    at = lab.at
    lab.nat({(at.vip, 53): at.a, (at.external, 53): at.b})

    def send_from_many_ports() -> None:
        for to in (at.vip, at.external):
            for port in range(20000, 21500):
                with lab.open() as client:
                    client.bind((at.client, port))
                    client.sendto(b"?", (to, 53))

    lab.inside.inside(send_from_many_ports)
    assert len(lab.flows()) == 3000
    assert lab.proxy(lab.dns(external=True), at.b) == 1500
    assert all(f"dst={at.external} " in line for line in lab.flows())
    assert len(lab.flows()) == 1500


def test_many_services_at_once(lab: Lab) -> None:
    """More ports than are listed one by one."""
    at = lab.at
    ports = range(53, 58)
    lab.nat({(at.vip, port): at.a for port in ports})
    assert [lab.answer(lab.client(at.vip, port)) for port in ports] == ["a"] * 5
    stale = [lab.decide(lab.dns(f"{port}/UDP"), at.b, name=f"dns{port}") for port in ports[:4]]
    for each in stale:
        lab.tracker.give_back(each)
    assert lab.delete(lab.take()) == 4
    (left,) = lab.flows()
    assert "dport=57" in left


@pytest.mark.parametrize("zone", ["", "ct zone set 7"])
def test_flows_have_the_source_of_replies_and_whether_a_rule_translated_them(lab: Lab, zone: str) -> None:
    at = lab.at
    client, vip, a, b, external = map(parse_address, (at.client, at.vip, at.a, at.b, at.external))
    lab.nat({(at.vip, 53): at.a, (at.elsewhere, 53): at.a}, zone=zone)
    assert lab.answer(lab.client(at.vip, 53)) == "a"
    assert lab.answer(lab.client(at.elsewhere, 53)) == "a"
    assert lab.answer(lab.client(at.b, 9053)) == "b"
    assert lab.is_silent(lab.client(at.external, 53))
    found = lab.inside.inside(lambda: read_udp_flows(lab.family, {vip, b, external}, sorted))
    assert found == sorted([
        UdpFlow(client, (vip, 53), (a, 9053), translated=True),
        UdpFlow(client, (b, 9053), (b, 9053), translated=False),
        UdpFlow(client, (external, 53), (external, 53), translated=False),
    ])


def test_a_kernel_that_lists_every_flow(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 5.8 there was no filter: flows of all protocols are listed."""
    monkeypatch.setattr(conntrack, "_filter", lambda protocol, port=None: b"")
    at = lab.at
    lab.nat({(at.vip, 53): at.a, (at.vip, 54): at.a})
    listener = lab.bound(socket.SOCK_STREAM, at.a, 9053)
    listener.listen()
    lab.bound(socket.SOCK_STREAM, at.client).connect((at.vip, 53))
    icmp, number, echo_request = ECHO[lab.family]
    with lab.inside.inside(lambda: lab.open(socket.SOCK_RAW, number)) as echo:
        echo.sendto(echo_request, (at.node, 0))
    others = [lab.flows(protocol) for protocol in ("tcp", icmp)]
    assert all(others)
    assert [lab.answer(lab.client(at.vip, port)) for port in (53, 54)] == ["a", "a"]
    assert lab.proxy(lab.dns(), at.b) == 1
    assert [lab.flows(protocol) for protocol in ("tcp", icmp)] == others
    (left,) = lab.flows()
    assert "dport=54" in left


def connecting(lab: Lab, to: str, port: int) -> socket.socket:
    """Return a TCP client that has sent its first SYN."""
    client = lab.bound(socket.SOCK_STREAM, lab.at.client)
    client.setblocking(False)
    client.connect_ex((to, port))
    return client


def test_a_syn_older_than_its_service_is_repeated_to_the_service(lab: Lab) -> None:
    """Answered, translated and foreign connections are kept."""
    at = lab.at
    lab.nat({(at.vip, 80): at.elsewhere, (at.vip, 81): at.a})
    for address in (at.external, at.elsewhere):
        # A SYN that cannot be sent fails at once.
        lab.inside.ip(f"neigh add {address} lladdr 02:00:00:00:00:01 dev out nud permanent")
    for address in (at.a, at.b):
        lab.bound(socket.SOCK_STREAM, address, 9053).listen()
    for to in ((at.vip, 81), (at.b, 9053)):
        lab.bound(socket.SOCK_STREAM, at.client).connect(to)
    for to in ((at.vip, 80), (at.external, 81)):
        connecting(lab, *to)
    kept = lab.flows("tcp")
    assert len(kept) == 4
    early = [connecting(lab, at.external, 80), connecting(lab, at.elsewhere, 30080)]
    assert len(lab.flows("tcp")) == 6

    lab.nat({(at.external, 80): at.b, (at.elsewhere, 30080): at.b})
    frontends = {Frontend(parse_address(at.vip), Protocol.TCP, 80), Frontend(None, Protocol.TCP, 30080),
                 Frontend(parse_address(at.external), Protocol.TCP, 80),
                 Frontend(parse_address(at.b), Protocol.TCP, 9053)}  # fmt: skip
    is_stale = partial(is_stale_syn, owner=dict.fromkeys(frontends, "a plan").get,
                       node_port_addresses={parse_address(at.elsewhere)})  # fmt: skip
    assert lab.inside.inside(lambda: delete_stale_syns(lab.family, is_stale)) == 2
    for client in early:
        assert select.select([], [client], [], PATIENCE)[1]
        assert not client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    assert kept <= lab.flows("tcp")


def test_attempts_wait_until_they_are_answered(lab: Lab) -> None:
    """Translated or not; other endpoints, other protocols and the rest of the table are left out."""
    at = lab.at
    lab.nat({(at.vip, 80): at.elsewhere, (at.vip, 81): at.a, (at.vip, 53): at.elsewhere})
    lab.inside.ip(f"neigh add {at.elsewhere} lladdr 02:00:00:00:00:01 dev out nud permanent")
    for address in (at.a, at.b):
        lab.bound(socket.SOCK_STREAM, address, 9053).listen()
    for to in ((at.vip, 81), (at.a, 9053), (at.b, 9053)):
        lab.bound(socket.SOCK_STREAM, at.client).connect(to)
    for to in ((at.vip, 80), (at.elsewhere, 9053), (at.elsewhere, 9054)):
        connecting(lab, *to)
    lab.client(at.vip, 53).send(b"?")
    a, b, silent = (Destination(parse_address(to), 9053) for to in (at.a, at.b, at.elsewhere))
    watched = {a, b, silent}

    def read(most: int = 10) -> list[TcpFlow]:
        return lab.inside.inside(lambda: conntrack.read_unanswered_to(watched, most))

    found = read()
    assert [(one.client, one.endpoint) for one in found] == [(parse_address(at.client), silent)] * 2
    assert len({one.id for one in found}) == 2
    assert [one.id for one in read(1)] == [found[0].id]
    assert {one.id for one in read()} == {one.id for one in found}
    assert sorted(one.is_translated for one in found) == [False, True]

    def answered(read: Callable[[], list[TcpFlow]]) -> list[Destination]:
        return sorted(one.endpoint for one in lab.inside.inside(read))

    assert answered(lambda: conntrack.read_answered_by(watched, 10)) == sorted([a, a, b])
    assert answered(lambda: conntrack.read_answered_by({b, silent}, 10)) == [b]
    assert answered(lambda: conntrack.read_answered_by_one(a, 10)) == [a, a]
    assert answered(lambda: conntrack.read_answered_by_one(a, 1)) == [a]
    assert answered(lambda: conntrack.read_answered_by_one(silent, 10)) == []


def test_connections_that_a_reset_ends_are_told(lab: Lab) -> None:
    """Translated or not, refused or established."""
    at = lab.at
    lab.nat({(at.vip, 80): at.a})
    listener = lab.bound(socket.SOCK_STREAM, at.b, 9053)
    listener.listen()
    found: queue.SimpleQueue[TcpFlow] = queue.SimpleQueue()

    def note(ended: Sequence[TcpFlow], _lost: bool) -> None:
        for one in ended:
            found.put(one)

    watch = lab.inside.inside(lambda: ResetWatch("resets", note))
    try:
        with lab.bound(socket.SOCK_STREAM, at.client) as client:
            client.connect((at.b, 9053))
            served, _ = listener.accept()
            served.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            served.close()
        connecting(lab, at.a, 9054)
        connecting(lab, at.vip, 80)
        told = {}
        for _ in range(2):
            one = found.get(timeout=PATIENCE)
            told[one.dialled] = (one.client, one.endpoint, one.is_translated, one.is_assured)
        client_at, a = parse_address(at.client), parse_address(at.a)
        assert told == {
            (a, 9054): (client_at, Destination(a, 9054), False, False),
            (parse_address(at.vip), 80): (client_at, Destination(a, 9053), True, False),
        }
        lab.inside.run("conntrack", "-F", "-f", lab.family.label.lower())
        established = found.get(timeout=PATIENCE)
        assert (established.dialled, established.is_assured) == ((parse_address(at.b), 9053), True)
    finally:
        watch.close()


def test_a_rejected_syn_is_not_tracked(lab: Lab) -> None:
    at, word = lab.at, NAT[lab.family]
    lab.inside.nft(
        f"add chain {word} lab filter {{ type filter hook output priority 0; }}\n"
        f"add rule {word} lab filter {word} daddr {at.vip} reject\n"
        f"add rule {word} lab filter {word} daddr {at.external} drop\n"
    )
    for to in (at.vip, at.external):
        connecting(lab, to, 80)
    assert lab.flows("tcp") == set()


class Meddling(StaleFlows, frozen=True, kw_only=True):
    """Changes a flow between the moments when it is found stale and when it is deleted."""

    meddle: Callable[[], object]

    def is_stale(self, destination: Socket, answered_by: Socket) -> bool:
        found = super().is_stale(destination, answered_by)
        self.meddle()
        return found


def meddling(stale: StaleFlows, meddle: Callable[[], object]) -> StaleFlows:
    return Meddling(
        stale.frontends, stale.vips, stale.node_ports, stale.node_port_addresses, meddle=meddle)


def test_a_stale_flow_that_expires_first_is_no_error(lab: Lab) -> None:
    at = lab.at
    lab.nat({(at.vip, 53): at.a})
    assert lab.answer(lab.client(at.vip, 53)) == "a"
    stale = meddling(lab.decide(lab.dns(), at.b), lambda: lab.inside.run("conntrack", "-F"))
    assert lab.delete(stale) == 0
    assert lab.flows() == set()


def test_a_new_flow_in_place_of_a_stale_one_is_kept(lab: Lab) -> None:
    at = lab.at
    lab.nat({(at.vip, 53): at.a})
    client = lab.client(at.vip, 53)
    assert lab.answer(client) == "a"
    lab.nat({(at.vip, 53): at.b})
    family, stale_id = lab.family.label.lower(), lab.only_flow(53)

    def replace() -> None:
        # The kernel makes an id from where the flow is in memory, so others have to take that place first.
        for port in itertools.count(1000):
            lab.inside.run("conntrack", "-D", "-f", family, "-p", "udp", "--orig-port-dst", "53")
            lab.client(at.elsewhere, port).send(b"?")
            assert lab.answer(client) == "b"
            if lab.only_flow(53) != stale_id:
                return

    assert lab.delete(meddling(lab.decide(lab.dns(), at.b), replace)) == 0
    assert lab.only_flow(53)


def test_without_changes_no_table_is_read() -> None:
    stale = StaleFlowTracker().take(frozenset())
    assert delete_stale_udp(Family.IPV4, stale.ports, stale.is_stale) == 0


def test_without_privileges_the_error_names_the_operation(lab: Lab) -> None:
    """In its own user namespace, a process may not read this network namespace's table."""
    program = """if True:
        import sys
        from kproxy_core.linux.conntrack import delete_stale_udp
        from kproxy_core.linux.errors import HostError
        from kproxy_core.model.address import Family
        try:
            delete_stale_udp(Family(sys.argv[1]), [53], lambda destination, answered_by: False)
        except HostError as error:
            print(error.errno, error)
    """
    printed = lab.inside.run(
        "unshare", "--user", sys.executable, "-c", program, lab.family.label,
        cwd=CHECKOUT,
    )
    assert printed == f"1 cannot delete stale {lab.family.label} UDP flows: Operation not permitted\n"
