"""Readers of netlink, with answers and notifications that are cut or changed at any place.

The messages are those of this machine's kernel, recorded once and played again. Readers return a value or
raise one of the errors that they name, and threads continue.
"""

import errno
import os
import queue
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kproxy_conformance.builders import node_view
from kproxy_core.app.drops import FilteredPacket, drops
from kproxy_core.contract.errors import BackendError
from kproxy_core.contract.values import BackendSettings, Scope, Update
from kproxy_core.linux import (
    addresses,
    conntrack,
    conntrack_events,
    conntrack_volumes,
    links,
    rulesets,
    sockets,
    tracing,
)
from kproxy_core.linux.addresses import AddressWatch
from kproxy_core.linux.conntrack_events import ResetWatch
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.resets import Pair, ResetTable
from kproxy_core.model.address import Family, Protocol, parse_address
from kproxy_core.model.service import Destination
from kproxy_core.netlink import sockets as netlink
from kproxy_core.netlink.messages import HEADER, NETLINK_NETFILTER, Malformed, attribute, attributes
from kproxy_core.netlink.sockets import NetlinkSocket, RawSocket
from kproxy_core.nft import transaction
from kproxy_core.nft.packet import Interface
from kproxy_core.nft.ruleset import ListedRuleset
from kproxy_core.nft.watch import CommitWatch
from kproxy_core.plan.service_plan import Frontend
from kproxy_ebpf.kernel import sockets as socket_storage
from kproxy_ipvs import batch as ipvs
from kproxy_ipvs.batch import PutDestination, PutServer
from kproxy_ipvs.kernel import sets
from kproxy_ipvs.names import SETS
from kproxy_ipvs.wanted import Scheduling, ServerKey
from kproxy_nft.table import Counting
from kproxy_nftables.backend import NftablesBackend
from kproxy_nftables.kernel import Kernel
from kproxy_userspace.kernel.portals import NftPortals, bridged_sources
from kproxy_xtables import tables

from .nftables.test_kernel import NODES, resync, rich

EXAMPLES = 200

V4 = Family.IPV4
POD = Destination(parse_address("127.0.0.1"), 8080)
VIP = parse_address("127.0.0.2")
SERVICE = Frontend(VIP, Protocol.TCP, 80)

RULES = """
table ip other {
    set nets { type ipv4_addr; flags interval; elements = { 10.0.0.0/8 }; }
    map ports { type inet_service : verdict; elements = { 80 : accept, 81 : jump more }; }
    counter c { }
    chain more { ct state new counter name c ip saddr @nets drop; }
    chain in { type filter hook input priority 0; tcp dport vmap @ports; meta mark { 1, 2 } drop; }
    chain nat {
        type nat hook output priority -100;
        ip daddr 127.0.0.2 meta l4proto { tcp, udp } dnat to 127.0.0.1:8080
    }
    chain trace { type filter hook output priority -300; udp dport 80 meta nftrace set 1; }
}
table ip nat {
    chain KUBE-SERVICES { }
}
"""

# Recording and playing.

_Tape = dict[bytes, list[bytes]]
"""Datagrams by request."""


def _without_numbers(data: bytes) -> bytes:
    return b"".join(
        bytes(HEADER.pack(size, kind, flags, 0, 0)) + data[start:start + size - HEADER.size]
        for size, kind, flags, start in _headers(data))


def _renumbered(data: bytes, number: int) -> bytes:
    return b"".join(
        HEADER.pack(size, kind, flags, number, 0) + data[start:start - HEADER.size + (size + 3 & ~3)]
        for size, kind, flags, start in _headers(data))


def _headers(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    at = 0
    while at + HEADER.size <= len(data):
        size, kind, flags, _, _ = HEADER.unpack_from(data, at)
        yield size, kind, flags, at + HEADER.size
        at += size + 3 & ~3


class Recorder:
    """A netlink socket that keeps the answers to each request on a tape."""

    def __init__(self, real: RawSocket, tape: _Tape) -> None:
        self._real = real
        self._tape = tape

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def send(self, data: bytes) -> int:
        self._answers = self._tape[_without_numbers(data)] = []
        return self._real.send(data)

    def recv(self, size: int, flags: int = 0) -> bytes:
        data = self._real.recv(size, flags)
        self._answers.append(data)
        return data


class Change(NamedTuple):
    """A change of the bytes of one datagram. Numbers beyond its size are taken modulo that."""

    datagram: int
    at: int
    value: bytes | None
    """What is written there; None: the datagram ends there."""

    def of(self, data: bytes) -> bytes:
        at = self.at % (len(data) or 1)
        return data[:at] if self.value is None else data[:at] + self.value + data[at + len(self.value):]


halves = st.sampled_from([0, 1, 3, 4, 5, 8, 12, 16, 0x7FFF, 0xFFFF]).map(struct.Struct("=H").pack)
changes = st.lists(st.builds(
    Change, st.integers(0, 50), st.integers(0, 4096) | st.integers(0, 40),
    st.none() | halves | st.binary(min_size=1, max_size=8)), max_size=3)


class Player:
    """A netlink socket that answers from a tape, with changes."""

    def __init__(self, tape: _Tape, wanted: Sequence[Change]) -> None:
        self._tape = tape
        self._changes = wanted
        self._queue: list[bytes] = []

    def send(self, data: bytes) -> int:
        numbers = [HEADER.unpack_from(data, start - HEADER.size)[3] for *_, start in _headers(data)]
        answers = self._tape.get(_without_numbers(data), ())
        self._queue = [_renumbered(each, numbers[-1]) for each in answers]
        for change in self._changes:
            if self._queue:
                at = change.datagram % len(self._queue)
                self._queue[at] = change.of(self._queue[at])
        return len(data)

    def recv(self, size: int, flags: int = 0) -> bytes:
        if not self._queue:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return self._queue.pop(0)

    def getsockname(self) -> tuple[int, int]:
        return 7, 0

    def getsockopt(self, *_: object) -> int:
        return 1 << 20

    def close(self) -> None:
        pass


# What reads.

def _filters() -> object:
    packet = FilteredPacket(
        V4, Protocol.TCP, parse_address("10.0.0.1"), None, 81, Interface("lo", 1), None, None, None,
        is_translated=False, is_from_node=False, is_to_node=True)
    with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
        return drops(ListedRuleset(sock), [("input", packet)])


def _plugin() -> object:
    wanted = rich()
    made = NftablesBackend(BackendSettings(families=(V4,), count_traffic=True))
    with Kernel() as kernel:
        kernel.generation()
        kernel.counts(V4)
        made.traffic(V4)
        for key in list(kernel.elements(V4, "vips"))[:1]:
            with suppress(KeyError):
                kernel.element(V4, "vips", key)
        return made.preview(Update(V4, Scope.RESYNC, NODES[V4], dict(wanted), wanted))


def _frontends() -> object:
    return NftablesBackend(BackendSettings(families=(V4,))).frontends(V4)


READERS: dict[str, Callable[[], object]] = {
    "nftables": _plugin,
    "frontends": _frontends,
    "counts": lambda: Counting().read(V4),
    "resets": lambda: ResetTable(V4).read(),
    "portals": lambda: NftPortals(V4, None).held(),
    "all tables": rulesets.all_tables,
    "a chain": lambda: rulesets.chain_exists(V4, "nat", "KUBE-SERVICES"),
    "filters": _filters,
    "UDP flows": lambda: conntrack.read_udp_flows(V4, {VIP}, list),
    "stale UDP flows": lambda: conntrack.delete_stale_udp(V4, {80}, lambda *_: True),
    "stale SYNs": lambda: conntrack.delete_stale_syns(V4, lambda _: True),
    "removed endpoints": lambda: conntrack.find_pairs(V4, lambda *_: True, [POD]),
    "volumes": lambda: conntrack_volumes.read_volumes(V4),
    "unanswered connections": lambda: conntrack.read_unanswered(V4),
    "attempts": lambda: conntrack.read_unanswered_to([POD], 10),
    "answers": lambda: conntrack.read_answered_by([POD], 10),
    "answers of one": lambda: conntrack.read_answered_by_one(POD, 10),
    "addresses": addresses.node_addresses,
    "a route": lambda: addresses.interface_towards(POD.address),
    "interfaces": links.read_links,
    "bridges": lambda: bridged_sources([POD.address], V4),
    "sockets": sockets.connected_udp_sockets,
    "values of sockets": lambda: socket_storage.stored_values(socket.IPPROTO_TCP, 0),
    "tables of iptables": lambda: (
        tables.dormant_tables(V4, ["nat"]), tables.count_chains(V4, "nat"), tables.owned_tables(V4, ["nat"])),
    "ipsets": lambda: sets.read(V4),
}


def connect(to: tuple[str, int], kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    sock = socket.socket(socket.AF_INET, kind)
    with suppress(ConnectionRefusedError):
        sock.connect(to)
        if kind == socket.SOCK_DGRAM:
            sock.send(b"?")
    return sock


@pytest.fixture
def node(netns: None) -> Iterator[None]:
    """A node with rules and sets of all kinds, and connections."""
    for command in ("ip link set lo up", "ip link add br0 type bridge", "ip addr add 192.0.2.1/24 dev lo",
                    "sysctl -qw net.netfilter.nf_conntrack_acct=1"):
        subprocess.run(command.split(), check=True)
    subprocess.run(["nft", "-f", "-"], input=RULES, text=True, check=True)
    for kind in SETS:
        subprocess.run(["ipset", "create", *kind.create(V4).split()], check=True)
        entry = "80" if kind.type == "bitmap:port" else ",".join(
            {"ip": "10.96.0.1", "port": "tcp:80", "net": "10.0.0.0/8"}[part]
            for part in kind.type.partition(":")[2].split(","))
        subprocess.run(["ipset", "add", kind.full_name(V4), entry], check=True)
    backend = NftablesBackend(BackendSettings(families=(V4,), count_traffic=True))
    resync(backend, rich())
    with Counting().during(Update(V4, Scope.RESYNC, node_view(), rich(), rich())):
        pass
    ResetTable(V4).write([Pair((VIP, 9), POD)])
    NftPortals(V4, None).rewrite([])
    unanswered = "-p tcp -s 127.0.0.1 -d 127.0.0.9 --sport 7 --dport 80 --state SYN_SENT -t 99"
    subprocess.run(["conntrack", "-I", *unanswered.split()], check=True, capture_output=True)
    service = SERVICE.port
    with socket.create_server(("127.0.0.1", 8080)) as server, connect(("127.0.0.2", service)):
        with server.accept()[0], connect(("127.0.0.2", service), socket.SOCK_DGRAM):
            yield
    backend.close()


@pytest.mark.parametrize("name", READERS)
def test_readers_return_a_value_or_raise_an_error_that_they_name(
    node: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tape: _Tape = {}
    really_open = NetlinkSocket.open

    def recorded(*args: Any, **kwargs: Any) -> NetlinkSocket:
        made = really_open(*args, **kwargs)
        made._socket = Recorder(made._socket, tape)
        return made

    monkeypatch.setattr(NetlinkSocket, "open", recorded)
    monkeypatch.setattr(transaction, "_shared", {})
    before = READERS[name]()
    assert max((len(data) for answers in tape.values() for data in answers), default=0) > 36
    monkeypatch.setattr(transaction, "_shared", {})
    played: list[Change] = []
    monkeypatch.setattr(NetlinkSocket, "open", lambda *_, **__: NetlinkSocket(Player(tape, played)))  # type: ignore[arg-type]
    assert READERS[name]() == before

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(changes)
    def check(wanted: list[Change]) -> None:
        played[:] = wanted
        with suppress(HostError, OSError, BackendError):
            READERS[name]()

    check()


@given(changes)
def test_virtual_servers_of_ipvs(wanted: list[Change]) -> None:
    """As kproxy writes them: this kernel may lack IPVS."""
    key = ServerKey(V4, 0, VIP, Protocol.TCP, 80)
    requests = (PutServer(key, Scheduling("rr"), new=True), PutDestination(key, POD, 1, new=True))
    server, destination = (ipvs.encode(each)[ipvs.GENERIC.size:] for each in requests)
    counters = b"".join(attribute(kind, bytes(4)) for kind in (7, 8))
    destination = attribute(2, attributes(destination)[2] + counters)
    assert ipvs.decode_server(attributes(attributes(server)[1])) == (key, Scheduling("rr"))
    assert ipvs.decode_destination(V4, attributes(attributes(destination)[2])).where == POD
    for change in wanted:
        server, destination = change.of(server), change.of(destination)
        with suppress(Malformed):
            ipvs.decode_server(attributes(attributes(server).get(1, b"")))
        with suppress(Malformed):
            ipvs.decode_destination(V4, attributes(attributes(destination).get(2, b"")))


# Notifications.


WATCHES: dict[str, tuple[tuple[int, ...], int, Callable[[queue.Queue[Any]], netlink.NotificationThread]]] = {
    "commits": (
        (7,), NETLINK_NETFILTER,
        lambda calls: CommitWatch("watch", (), calls.put, Family, lambda *found: calls.put(found))),
    "resets, volumes": (
        (3,), NETLINK_NETFILTER,
        lambda calls: ResetWatch("watch", lambda *found: calls.put(found), calls.put)),
    "resets": ((3,), NETLINK_NETFILTER, lambda calls: ResetWatch("watch", lambda *found: calls.put(found))),
    "addresses": ((5, 9), socket.NETLINK_ROUTE, lambda calls: AddressWatch(calls.put)),
}


@pytest.fixture
def notified(node: None) -> Callable[[tuple[int, ...], int], list[bytes]]:
    def record(groups: tuple[int, ...], protocol: int) -> list[bytes]:
        """Return the notifications that the kernel sends of changes of all kinds."""
        with NetlinkSocket.open(protocol, groups=groups) as sock:
            for command in (
                "ip addr add 192.0.2.9/32 dev lo", "ip addr del 192.0.2.9/32 dev lo", "nft add table ip x",
                "nft add map ip kproxy x { type mark : verdict; }", "nft delete map ip kproxy x",
                "nft delete table ip x",
            ):  # fmt: skip
                subprocess.run(command.split(), check=True)
            connect(("127.0.0.1", 8081)).close()
            connect(("127.0.0.2", 80), socket.SOCK_DGRAM).close()
            subprocess.run(["conntrack", "-F"], check=True, capture_output=True)
            return sock.pending()[0]

    return record


@pytest.mark.parametrize("name", WATCHES)
def test_watches_take_what_they_cannot_decode_for_lost(
    notified: Callable[[tuple[int, ...], int], list[bytes]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, protocol, make = WATCHES[name]
    recorded = notified(groups, protocol)
    assert recorded
    ours, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    really_open = NetlinkSocket.open
    monkeypatch.setattr(NetlinkSocket, "open", lambda *args, **kwargs: (
        NetlinkSocket(ours) if kwargs.get("groups") else really_open(*args, **kwargs)))
    calls: queue.Queue[Any] = queue.Queue()
    watch = make(calls)

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(changes)
    def check(wanted: list[Change]) -> None:
        data = list(recorded)
        for change in wanted:
            at = change.datagram % len(data)
            data[at] = change.of(data[at])
        for each in filter(None, data):
            end.send(each)

    check()
    before = netlink.failures[watch._thread.name]
    end.send(recorded[0][:-1])  # It is cut within a message.
    while netlink.failures[watch._thread.name] == before:
        assert watch._thread.is_alive()
    end.send(recorded[0])
    watch.close()
    end.close()
    assert before > 0
    assert watch._thread not in threading.enumerate()


@pytest.mark.parametrize(("groups", "parse"), [((1, 2, 3), conntrack_events.parse), ((9,), tracing.parse)])
def test_announcements(
    notified: Callable[[tuple[int, ...], int], list[bytes]], groups: tuple[int, ...],
    parse: Callable[[bytes], Iterator[object]],
) -> None:
    recorded = notified(groups, NETLINK_NETFILTER)
    assert any(list(parse(data)) for data in recorded)

    @settings(max_examples=EXAMPLES)
    @given(changes)
    def check(wanted: list[Change]) -> None:
        for change in wanted:
            with suppress(Malformed):
                list(parse(change.of(recorded[change.datagram % len(recorded)])))

    check()
