"""Connections counted by programs, beside those that the rules count."""

import os
import re
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kproxy_core.model.address import Protocol
from kproxy_ebpf import names
from kproxy_ebpf.kernel import bpf
from tests.core.agreement import expect_equal
from tests.core.processes import KPROXY
from tests.plugins.ebpf.node import NODE, PORT, REMOTE, REMOTE6, Node, node, until
from tests.plugins.ebpf.sockets import Sockets
from tests.plugins.ebpf.test_translation import DNS6, MAPPED, TCP, UDP, V4, V6, WEB6, ask, dial

WEB, DNS = "10.96.0.10", "10.96.0.53"
CLOSED, SILENT, EMPTY = "10.96.0.31", "10.96.0.32", "10.96.0.33"
NO_LISTENER = "203.0.113.2"
"""Refuses connections."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER for a reset at close(2)."""
COUNTERS = """
table inet watched {
    counter to_endpoint {}
    counter from_endpoint {}
    chain sent {
        type filter hook output priority 0;
        meta l4proto { tcp, udp } th dport { 80, 8080 } counter name to_endpoint;
    }
    chain received {
        type filter hook input priority 0;
        meta l4proto { tcp, udp } th sport { 80, 8080 } counter name from_endpoint;
    }
}
"""
"""Rules of the pod: what its sockets exchange with frontends and endpoints."""
ACCOUNTING = "net.netfilter.nf_conntrack_acct=1"
DIRECTIONS = ("to_endpoint", "from_endpoint")
NODE_PORT = 30080
COUNTED = {"trafficMetrics": "endpoint"}

Volumes = Counter[tuple[str, str]]
"""Numbers by direction, and packets or bytes."""


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path) as made:
        made.serve("web", WEB, REMOTE, node_port=NODE_PORT)
        made.serve("dns", DNS, REMOTE, protocol="UDP")
        yield made


def connect(sockets: Sockets, times: int) -> Counter[str]:
    """Connect to the web, and return the number of connections by endpoint."""
    return Counter(dial(sockets, V4, WEB)[0] for _ in range(times))


def metrics(where: Node) -> str:
    time.sleep(1.1)  # A reading answers every scrape of a second.
    return where.host.run("curl", "-s", "http://127.0.0.1:10249/metrics")


def refused(sockets: Sockets, address: str, times: int) -> None:
    for _ in range(times):
        with pytest.raises(ConnectionRefusedError):
            dial(sockets, V4, address)


def failures(where: Node) -> Counter[str]:
    """Return the failed connections like ``web reset``. Those of endpoints add up to the same."""
    result = {"service": Counter[str](), "endpoint": Counter[str]()}
    pattern = r"^kproxy_(service|endpoint)_failures_total\{(.*)\} (\d+)$"
    for kind, labels, value in re.findall(pattern, metrics(where), re.MULTILINE):
        values = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        result[kind][f"{values['service']} {values['reason']}"] += int(value)
    assert result["service"] == result["endpoint"]
    return result["service"]


def expect_failures(where: Node, wanted: dict[str, int]) -> None:
    """Wait for these numbers: ends of connections that rules translate are announced a moment later."""
    expect_equal(lambda: failures(where), lambda: wanted)


def counted(where: Node) -> dict[str, Counter[str]]:
    """Return the connections by Service, and those by endpoint, as the metrics have them."""
    result = {"service": Counter[str](), "endpoint": Counter[str]()}
    pattern = r"^kproxy_(service|endpoint)_connections_total\{(.*)\} (\d+)$"
    for kind, labels, value in re.findall(pattern, metrics(where), re.MULTILINE):
        values = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if kind == "service" or values["service"] == "web":
            result[kind][values["service"] if kind == "service" else values["endpoint"]] += int(value)
    return result


def switch(where: Node, mode: str) -> None:
    where.host.run(KPROXY, "switch", mode)


def test_no_connection_is_lost_or_counted_twice(where: Node) -> None:
    pod, outside = where.sockets(where.pod), where.sockets(where.pod, translated=False)
    with where.proxy(kproxy=COUNTED) as proxy:
        made = connect(pod, 20) + connect(outside, 5)
        made[dial(pod, V4, NODE, NODE_PORT)[0]] += 1
        for _ in range(3):
            with pod.open(socket.AF_INET, UDP) as client:
                for _ in range(4):
                    ask(client, DNS)
        found = counted(where)
        assert found["service"] == {"web": 26, "dns": 3}
        assert found["endpoint"] == {f"{endpoint}:8080": number for endpoint, number in made.items()}
        where.serve("web", WEB, REMOTE[1:], node_port=NODE_PORT)
        where.serve("dns", DNS, REMOTE[1:], protocol="UDP")
        where.await_endpoints(DNS, *REMOTE[1:])
        connect(pod, 4)
        assert counted(where)["service"]["web"] == 30
        proxy.end(signal.SIGKILL)
    connect(pod, 3)
    with where.proxy(kproxy=COUNTED) as proxy:
        assert counted(where)["service"] == {"web": 33, "dns": 3}
        expected = 33
        for mode in ("nftables", "ebpf", "nftables"):
            switch(where, mode)
            assert counted(where)["service"]["web"] == expected
            connect(pod, 2)
            connect(outside, 1)
            expected += 3
            assert counted(where)["service"]["web"] == expected
        switch(where, "ebpf")
        connect(pod, 2)
        switch(where, "nftables")
        connect(pod, 4)
        proxy.end(signal.SIGKILL)
    connect(outside, 1)
    with where.proxy(kproxy=COUNTED):
        assert counted(where)["service"]["web"] == expected + 7


def test_failures_are_counted_whether_programs_or_rules_translate(where: Node) -> None:
    pod, outside = where.sockets(where.pod), where.sockets(where.pod, translated=False)
    where.serve("closed", CLOSED, [NO_LISTENER])
    where.serve("silent", SILENT, ["192.0.2.99"])
    where.serve("empty", EMPTY, [])
    with where.proxy({"getpeername": False}, kproxy=COUNTED):
        refused(pod, CLOSED, 3)
        refused(outside, CLOSED, 2)
        refused(pod, EMPTY, 1)
        with pod.open(socket.AF_INET, TCP) as client:  # Closed before its SYN is sent again.
            client.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.connect((SILENT, 80))
        with pod.open(socket.AF_INET, TCP) as client:
            client.settimeout(1.5)
            with pytest.raises(TimeoutError):
                client.connect((SILENT, 80))
        for _ in range(4):
            with pod.open(socket.AF_INET, TCP) as client:
                client.connect((WEB, 80))
                assert client.recv(100)
                assert client.getpeername()[0] in REMOTE
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connect(pod, 5)
        expect_failures(where, {"closed refused": 5, "silent unanswered": 1, "web reset": 4})
        assert counted(where)["service"] == {"closed": 5, "empty": 1, "silent": 2, "web": 9}
        for endpoints in ([NO_LISTENER, "192.0.2.98"], [NO_LISTENER]):
            where.serve("closed", CLOSED, endpoints)
            where.await_endpoints(CLOSED, *endpoints, protocol=Protocol.TCP)
        refused(pod, CLOSED, 1)
        expect_equal(lambda: failures(where)["closed refused"], lambda: 6)
    with where.proxy(kproxy=COUNTED):
        refused(pod, CLOSED, 2)
        expect_failures(where, {"closed refused": 2})
        switch(where, "nftables")
        refused(pod, CLOSED, 1)
        expect_failures(where, {"closed refused": 3})


def test_a_socket_that_dials_again_is_counted_for_its_last_endpoint(where: Node) -> None:
    where.serve("closed", CLOSED, [NO_LISTENER])
    with where.proxy(kproxy=COUNTED), where.sockets(where.pod).open(socket.AF_INET, TCP) as client:
        client.settimeout(None)
        for address, port in ((CLOSED, 80), (CLOSED, 80), (NO_LISTENER, 8081)):
            with pytest.raises(ConnectionRefusedError):
                client.connect((address, port))
        expect_failures(where, {"closed refused": 2})


def volumes(where: Node) -> Volumes:
    """Return packets and bytes of all Services by direction. Those of endpoints add up to the same."""
    result = {"service": Counter[tuple[str, str]](), "endpoint": Counter[tuple[str, str]]()}
    pattern = r'^kproxy_(service|endpoint)_(packets|bytes)_total\{direction="(\w+)".*\} ([\d.e+]+)$'
    for kind, unit, direction, value in re.findall(pattern, metrics(where), re.MULTILINE):
        result[kind][direction, unit] += int(float(value))
    assert result["service"] == result["endpoint"]
    return result["service"]


def passed(where: Node) -> Volumes:
    """Return the same as the rules of the pod have counted it."""
    listed = where.pod.run("nft", "list", "counters")
    return Counter({
        (name, unit): int(number)
        for name, *numbers in re.findall(r"counter (\w+) {\s+packets (\d+) bytes (\d+)", listed)
        for unit, number in zip(("packets", "bytes"), numbers, strict=True)
    })  # fmt: skip


def exchange(client: socket.socket, size: int) -> None:
    """Send *size* bytes to the echo, receive them, and have it close: all packets are those of a socket."""
    client.sendall(b"x" * size)
    client.shutdown(socket.SHUT_WR)
    while client.recv(1 << 16):
        pass
    client.close()


@pytest.fixture
def accounted(where: Node) -> Node:
    """A node with accounting in connection tracking, and rules that count in the pod."""
    where.host.run("sysctl", "-qw", ACCOUNTING)
    where.pod.run("nft", "-f", "-", stdin=COUNTERS)
    return where


def opened(sockets: Sockets) -> socket.socket:
    client = sockets.open(socket.AF_INET, TCP)
    client.connect((WEB, 80))
    return client


def test_packets_and_bytes_of_translated_sockets_are_those_of_the_stack(accounted: Node) -> None:
    where = accounted
    where.serve("closed", CLOSED, [NO_LISTENER])
    pod = where.sockets(where.pod)
    with where.proxy({"connectedUdp": "destroy"}, kproxy=COUNTED) as proxy:
        for size in (50, 200_000):
            exchange(opened(pod), size)
        refused(pod, CLOSED, 1)
        with pod.open(socket.AF_INET, UDP) as client:
            for size in (1, 4000):  # The latter is sent in fragments.
                ask(client, DNS, b"x" * size)
        with pod.open(socket.AF_INET, UDP) as client:
            client.connect((DNS, 80))
            client.send(b"x")
            endpoint = client.recv(100).decode().split()[0]
            client.connect((next(other for other in REMOTE if other != endpoint), PORT))
            before = passed(where)
            client.send(b"x")
            assert client.recv(100)
            directly = passed(where) - before
        with opened(pod) as reset, opened(pod) as lasting:
            assert reset.recv(100)
            reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            reset.close()
            expect_equal(lambda: volumes(where), lambda: passed(where) - directly)
            where.serve("web", WEB, REMOTE[1:], node_port=NODE_PORT)
            where.serve("dns", DNS, REMOTE[1:], protocol="UDP")
            where.await_endpoints(DNS, *REMOTE[1:])
            proxy.end(signal.SIGKILL)
            exchange(lasting, 90)
    with where.proxy(kproxy=COUNTED):
        expect_equal(lambda: volumes(where), lambda: passed(where) - directly)
        for mode in ("nftables", "ebpf"):
            exchange(opened(pod), 30)
            switch(where, mode)
            expect_equal(lambda: volumes(where), lambda: passed(where) - directly)
        exchange(opened(pod), 40)
        expect_equal(lambda: volumes(where), lambda: passed(where) - directly)


def test_the_last_packets_of_a_socket_that_is_gone_are_not_counted(accounted: Node) -> None:
    """Its connection ends in a structure that no program sees."""
    where = accounted
    with where.elsewhere.inside(partial(socket.create_server, (NO_LISTENER, PORT))) as listener:
        where.serve("closed", CLOSED, [NO_LISTENER])
        pod = where.sockets(where.pod)
        with where.proxy(kproxy=COUNTED):
            client = pod.open(socket.AF_INET, TCP)
            client.connect((CLOSED, 80))
            server, _ = listener.accept()
            client.close()
            until(lambda: " 05 " in where.pod.run("cat", "/proc/net/tcp"))  # TCP_FIN_WAIT2
            expect_equal(lambda: volumes(where), lambda: passed(where))
            before = passed(where)
            server.close()
            until(lambda: passed(where)["to_endpoint", "packets"] > before["to_endpoint", "packets"])
            expect_equal(lambda: volumes(where), lambda: before)
            ends = passed(where) - before
            assert {ends[direction, "packets"] for direction in DIRECTIONS} == {1}


def test_packets_and_bytes_add_up_whether_programs_or_rules_translate(accounted: Node) -> None:
    where = accounted
    where.serve("web6", WEB6, REMOTE6)
    where.serve("dns6", DNS6, REMOTE6, protocol="UDP")
    pod, outside = where.sockets(where.pod), where.sockets(where.pod, translated=False)
    with where.proxy({"connectedUdp": "destroy"}, kproxy=COUNTED), opened(pod) as client:
        assert client.recv(100)
        for way, web, dns in ((V4, WEB, DNS), (V6, WEB6, DNS6), (MAPPED, WEB, DNS)):
            for sockets in (pod, outside):
                stream = sockets.open(way.family, TCP)
                stream.connect((way.address(web), 80))
                exchange(stream, 1)
                with sockets.open(way.family, UDP) as asking:
                    ask(asking, way.address(dns))
                with sockets.open(way.family, UDP) as connected:
                    connected.connect((way.address(dns), 80))
                    connected.send(b"x")
                    assert connected.recv(100)
        expect_equal(lambda: volumes(where), lambda: passed(where))


def test_packets_cost_nothing_where_connection_tracking_does_not_count_them(accounted: Node) -> None:
    where = accounted
    pod = where.sockets(where.pod)
    for value, programs in (("1", set(names.ON_PACKETS)), ("0", set())):
        where.host.run("sysctl", "-qw", ACCOUNTING[:-1] + value)
        with where.proxy(kproxy=COUNTED) as proxy:
            exchange(opened(pod), 10)
            assert {path.name for path in where.pins.glob("*/links/*gress")} == programs
            before = volumes(where)
            exchange(opened(pod), 10)
            assert (volumes(where) != before) is bool(programs)
            assert ("bytes are not counted" in proxy.end()[1]) is not bool(programs)


def test_nothing_is_counted_without_the_option(where: Node) -> None:
    with where.proxy(kproxy={"trafficMetrics": "off"}):
        connect(where.sockets(where.pod), 3)
        (path,) = where.pins.glob("*/maps-*/connections")
        found = bpf.open_pin(str(path))
        assert list(bpf.elements(found, bpf.map_definition(found))) == []
        os.close(found)
