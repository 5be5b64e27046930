"""Connections counted by programs, beside those that the rules count."""

import os
import re
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy_core.model.address import Protocol
from kproxy_ebpf.kernel import bpf
from tests.core.processes import KPROXY
from tests.plugins.ebpf.node import NODE, REMOTE, Node, node
from tests.plugins.ebpf.sockets import Sockets
from tests.plugins.ebpf.test_translation import TCP, UDP, V4, ask, dial

WEB, DNS = "10.96.0.10", "10.96.0.53"
CLOSED, SILENT, EMPTY = "10.96.0.31", "10.96.0.32", "10.96.0.33"
NO_LISTENER = "203.0.113.2"
"""Refuses connections."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER for a reset at close(2)."""
COUNTERS = f"""
table ip watched {{
    counter to_endpoint {{}}
    counter from_endpoint {{}}
    chain sent {{ type filter hook output priority 0; ip daddr {WEB} counter name to_endpoint; }}
    chain received {{ type filter hook input priority 0; ip saddr {WEB} counter name from_endpoint; }}
}}
"""
"""Rules of the pod: what its sockets exchange with the frontend."""
NODE_PORT = 30080
COUNTED = {"trafficMetrics": "endpoint"}


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
    with where.proxy(kproxy=COUNTED):
        assert counted(where)["service"] == {"web": 33, "dns": 3}
        expected = 33
        for mode in ("nftables", "ebpf", "nftables"):
            switch(where, mode)
            assert counted(where)["service"]["web"] == expected
            connect(pod, 2)
            connect(outside, 1)
            expected += 3
            assert counted(where)["service"]["web"] == expected


def test_failures_are_counted_whether_programs_or_rules_translate(where: Node) -> None:
    pod, outside = where.sockets(where.pod), where.sockets(where.pod, translated=False)
    where.serve("closed", CLOSED, [NO_LISTENER])
    where.serve("silent", SILENT, ["192.0.2.99"])
    where.serve("empty", EMPTY, [])
    with where.proxy({"getpeername": False}, kproxy=COUNTED):
        refused(pod, CLOSED, 3)
        refused(outside, CLOSED, 2)
        refused(pod, EMPTY, 1)
        for patience in (0.1, 1.5):
            with pod.open(socket.AF_INET, TCP) as client:
                client.settimeout(patience)
                with pytest.raises(TimeoutError):
                    client.connect((SILENT, 80))
        for _ in range(4):
            with pod.open(socket.AF_INET, TCP) as client:
                client.connect((WEB, 80))
                assert client.recv(100)
                assert client.getpeername()[0] in REMOTE
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connect(pod, 5)
        assert failures(where) == {"closed refused": 5, "silent unanswered": 1, "web reset": 4}
        assert counted(where)["service"] == {"closed": 5, "empty": 1, "silent": 2, "web": 9}
        for endpoints in ([NO_LISTENER, "192.0.2.98"], [NO_LISTENER]):
            where.serve("closed", CLOSED, endpoints)
            where.await_endpoints(CLOSED, *endpoints, protocol=Protocol.TCP)
        refused(pod, CLOSED, 1)
        assert failures(where)["closed refused"] == 6
    with where.proxy(kproxy=COUNTED):
        refused(pod, CLOSED, 2)
        assert failures(where) == {"closed refused": 2}
        switch(where, "nftables")
        refused(pod, CLOSED, 1)
        assert failures(where) == {"closed refused": 3}


def test_a_socket_that_dials_again_is_counted_for_its_last_endpoint(where: Node) -> None:
    where.serve("closed", CLOSED, [NO_LISTENER])
    with where.proxy(kproxy=COUNTED), where.sockets(where.pod).open(socket.AF_INET, TCP) as client:
        client.settimeout(None)
        for address, port in ((CLOSED, 80), (CLOSED, 80), (NO_LISTENER, 8081)):
            with pytest.raises(ConnectionRefusedError):
                client.connect((address, port))
        assert failures(where) == {"closed refused": 2}


def volumes(where: Node) -> dict[str, int]:
    """Return the bytes of the web by direction. Those of endpoints add up to the same."""
    result = {"service": Counter[str](), "endpoint": Counter[str]()}
    pattern = r'^kproxy_(service|endpoint)_bytes_total\{direction="(\w+)".*service="web"\} (\d+)$'
    for kind, direction, value in re.findall(pattern, metrics(where), re.MULTILINE):
        result[kind][direction] += int(value)
    assert result["service"] == result["endpoint"]
    return dict(result["service"])


def exchange(client: socket.socket, size: int) -> Counter[str]:
    """Send *size* bytes to the echo, receive them, and have it close. Return the bytes that TCP exchanged.

    SYN and FIN count as one byte each; that of the first SYN received does not.
    """
    client.sendall(b"x" * size)
    client.shutdown(socket.SHUT_WR)
    received = sum(map(len, iter(lambda: client.recv(100), b"")))
    client.close()
    return Counter(to_endpoint=1 + size + 1, from_endpoint=received + 1)


def test_bytes_of_translated_connections_are_those_of_tcp(where: Node) -> None:
    where.serve("closed", CLOSED, [NO_LISTENER])
    pod = where.sockets(where.pod)

    def opened() -> socket.socket:
        client = pod.open(socket.AF_INET, TCP)
        client.connect((WEB, 80))
        return client

    with where.proxy(kproxy=COUNTED) as proxy:
        expected = exchange(opened(), 50) + exchange(opened(), 70)
        refused(pod, CLOSED, 1)
        assert volumes(where) == expected
        with opened() as reset, opened() as lasting:
            greeting = len(reset.recv(100))
            reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            reset.close()
            expected += Counter(to_endpoint=1, from_endpoint=greeting)
            assert volumes(where) == expected
            where.serve("web", WEB, REMOTE[1:], node_port=NODE_PORT)
            where.serve("dns", DNS, REMOTE[1:], protocol="UDP")
            where.await_endpoints(DNS, *REMOTE[1:])
            proxy.end(signal.SIGKILL)
            expected += exchange(lasting, 90)
    with where.proxy(kproxy=COUNTED):
        assert volumes(where) == expected
        expected += exchange(opened(), 30)
        for mode in ("nftables", "ebpf"):
            switch(where, mode)
            assert volumes(where) == expected
        expected += exchange(opened(), 40)
        assert volumes(where) == expected


def test_bytes_are_counted_of_connections_that_the_rules_translate(where: Node) -> None:
    where.host.run("sysctl", "-qw", "net.netfilter.nf_conntrack_acct=1")
    where.pod.run("nft", "-f", "-", stdin=COUNTERS)
    pod, outside = where.sockets(where.pod), where.sockets(where.pod, translated=False)
    with where.proxy(kproxy=COUNTED):
        with pod.open(socket.AF_INET, TCP) as client:  # Its bytes count once it is closed.
            client.connect((WEB, 80))
            connect(outside, 4)
            found = volumes(where)
        passed = where.pod.run("nft", "list", "counters")
        counters = re.findall(r"counter (\w+) {\s+packets \d+ bytes (\d+)", passed)
        assert found == {name: int(octets) for name, octets in counters}


def test_nothing_is_counted_without_the_option(where: Node) -> None:
    with where.proxy(kproxy={"trafficMetrics": "off"}):
        connect(where.sockets(where.pod), 3)
        (path,) = where.pins.glob("*/maps-*/connections")
        found = bpf.open_pin(str(path))
        assert list(bpf.elements(found, bpf.map_definition(found))) == []
        os.close(found)
