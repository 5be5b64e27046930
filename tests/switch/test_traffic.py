"""The metrics of traffic equal the connections made, across new endpoints, restarts and switches of modes."""

import fcntl
import json
import os
import pty
import re
import select
import socket
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.agreement import expect_equal
from tests.core.late_endpoints import Lateness, late_endpoints
from tests.switch.room import CLIENT, KPROXY, NODE, PATIENCE, PODS, SLICE, Proxy, Room, room

COUNTED = {"trafficMetrics": "endpoint"}
WEB, CART, EMPTY = ("10.96.201.10", 80), ("10.96.201.20", 80), ("10.96.201.50", 80)
LATE = ("10.96.201.70", 80)
CLOSED, SILENT, MUTE = ("10.96.201.30", 80), ("10.96.201.40", 80), ("10.96.201.60", 53)
OURS = """
apiVersion: v1
kind: Service
metadata: {name: one, namespace: counted}
spec: {type: NodePort, clusterIP: 10.96.201.10, ports: [{name: http, port: 80, nodePort: 31780}]}
---
apiVersion: v1
kind: Service
metadata: {name: two, namespace: counted}
spec: {clusterIP: 10.96.201.20, sessionAffinity: ClientIP, ports: [{name: http, port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: closed, namespace: counted}
spec: {clusterIP: 10.96.201.30, ports: [{name: http, port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: silent, namespace: counted}
spec: {clusterIP: 10.96.201.40, ports: [{name: http, port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: empty, namespace: counted}
spec: {clusterIP: 10.96.201.50, ports: [{name: http, port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: mute, namespace: counted}
spec: {clusterIP: 10.96.201.60, ports: [{name: dns, port: 53, protocol: UDP}]}
---
apiVersion: v1
kind: Service
metadata: {name: late, namespace: counted}
spec: {clusterIP: 10.96.201.70, ports: [{name: http, port: 80}]}
""" + "".join(
    SLICE.format(service=service, at=0, ports=f"[{{name: http, port: {port}}}]", family="IPv4",
                 here=here, elsewhere=elsewhere).replace("shop", "counted")
    for service, port, here, elsewhere in (
        ("one", 8080, PODS["here"][0], PODS["elsewhere"][0]),
        ("two", 8080, PODS["here"][0], PODS["elsewhere"][0]),
        ("closed", 8099, PODS["here"][0], PODS["here"][0]),
        ("silent", 8080, "192.0.2.99", "192.0.2.99"),
        ("late", 8080, "198.18.0.1", "198.18.0.1"),
    ))

CLIENT_COUNTERS = """
table ip watched {
    counter to_endpoint {}
    counter from_endpoint {}
    chain sent { type filter hook output priority 0; ip daddr 10.96.201.10 counter name to_endpoint; }
    chain received { type filter hook input priority 0; ip saddr 10.96.201.10 counter name from_endpoint; }
}
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Room]:
    with room(tmp_path) as made:
        (made.manifests / "ours.yaml").write_text(OURS)
        yield made


def dial(node: Room, where: tuple[str, int], times: int) -> None:
    for _ in range(times):
        node.client.inside(lambda: socket.create_connection(where, 5)).close()


def refused(node: Room, where: tuple[str, int], times: int) -> None:
    for _ in range(times):
        with pytest.raises(ConnectionRefusedError):
            dial(node, where, 1)


def refused_datagrams(node: Room, where: tuple[str, int], times: int) -> None:
    """Send datagrams of one flow, which are all refused."""
    with node.client.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
        sock.settimeout(PATIENCE)
        sock.connect(where)
        for _ in range(times):
            sock.send(b"?")
            with pytest.raises(ConnectionRefusedError):
                sock.recv(1)


def abandoned(node: Room, where: tuple[str, int], times: int) -> None:
    """Connect to a relay that reaches no endpoint."""
    for _ in range(times):
        with pytest.raises(ConnectionResetError), \
                node.client.inside(lambda: socket.create_connection(where, PATIENCE)) as client:
            client.recv(1)


def counted(proxy: Proxy) -> dict[str, int]:
    """Return the connections by service port, and the sum over all endpoints."""
    time.sleep(1.1)  # A reading answers every scrape of a second.
    status, text = proxy._get(10249, "/metrics")
    assert status == 200
    pattern = r"^kproxy_(service|endpoint)_(?:connections|failures)_total\{(.*)\} (\d+)$"
    found = re.findall(pattern, text, re.MULTILINE)
    result: dict[str, int] = {}
    for kind, labels, value in found:
        values = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        name = f"{values['service']} {values.get('outcome') or values.get('reason')}"
        if kind == "endpoint":
            if "reason" in values:
                continue
            name = "endpoints"
        result[name] = result.get(name, 0) + int(value)
    return result


def connections(proxy: Proxy) -> dict[str, int]:
    """Return the counts without resets: now and then one ends a connection that both sides had closed.

    Where a FIN overtakes an acknowledgement, the client acknowledges it twice, and the endpoint has no socket
    any more when the second one arrives: about once in 4,000 connections on a busy machine.
    """
    return {name: number for name, number in counted(proxy).items() if not name.endswith(" reset")}


def volumes(proxy: Proxy, *, by_endpoint: bool = True) -> dict[str, int]:
    """Return packets and bytes of the Service ``one`` by direction.

    *by_endpoint*: its endpoints' add up to the same; else there are none.
    """
    time.sleep(1.1)
    text = proxy._get(10249, "/metrics")[1]
    pattern = r'^kproxy_(service|endpoint)_(packets|bytes)_\w+\{.*direction="(\w+)".*service="one".*\} (\d+)$'
    result: dict[str, dict[str, int]] = {"service": {}, "endpoint": {}}
    for kind, unit, direction, value in re.findall(pattern, text, re.MULTILINE):
        name = f"{unit} {direction}"
        result[kind][name] = result[kind].get(name, 0) + int(value)
    assert result["endpoint"] == (result["service"] if by_endpoint else {})
    return result["service"]


def expect_counts(proxy: Proxy, wanted: dict[str, int]) -> None:
    """Fail unless the counts become these: relays, and ends of connections, are counted a moment later."""
    expect_equal(lambda: counted(proxy), lambda: wanted)


def expect_connections(proxy: Proxy, wanted: dict[str, int]) -> None:
    expect_equal(lambda: connections(proxy), lambda: wanted)


def usable_endpoints(node: Room, service: str) -> set[str] | None:
    """Return the addresses that serve *service*; None: there is no such Service."""
    done = node.kproxy("top", "--once", "-o", "json", "--filter", f"counted/{service}")
    for found in json.loads(done.stdout)["services"]:
        if found["name"] == service:
            return {end["endpoint"].rpartition(":")[0] for end in found["endpoints"] if end["usable"]}
    return None


def await_endpoints(node: Room, service: str, *names: str) -> None:
    """Wait until *service* is served by these of `PODS`."""
    expect_equal(lambda: usable_endpoints(node, service), lambda: {PODS[name][0] for name in names})


def move_endpoints(node: Room) -> None:
    """Have the endpoint on this node in place of the one elsewhere, and wait until it is served."""
    manifest = node.manifests / "ours.yaml"
    manifest.write_text(manifest.read_text().replace(PODS["elsewhere"][0], PODS["here"][0]))
    await_endpoints(node, "one", "here")


def at_the_client(node: Room) -> dict[str, int]:
    """Return what passed the client's own counters."""
    listed = node.client.run("nft", "list", "counters")
    return {
        f"{unit} {name}": int(re.findall(rf"counter {name} {{\s+packets (\d+) bytes (\d+)", listed)[0][at])
        for name in ("to_endpoint", "from_endpoint") for at, unit in enumerate(("packets", "bytes"))
    }  # fmt: skip


def test_no_connection_is_lost_or_counted_twice(node: Room) -> None:
    with node.proxy("nftables", COUNTED) as proxy:
        dial(node, WEB, 7)
        dial(node, (NODE, 31780), 3)
        expect_connections(proxy, {"one forwarded": 10, "endpoints": 10})
        kept = re.findall(
            r"expires (\d+)h(\d+)m", node.node.run("nft", "list", "set", "ip", "kproxy", "connections"))
        assert kept
        assert all((int(hours), int(minutes)) > (1, 5) for hours, minutes in kept)  # for hourly clients
        move_endpoints(node)
        dial(node, WEB, 2)
        expect_connections(proxy, {"one forwarded": 12, "endpoints": 12})
    dial(node, WEB, 4)
    with node.proxy("nftables", COUNTED) as proxy:
        dial(node, CART, 1)
        wanted = {"one forwarded": 16, "two forwarded": 1, "endpoints": 17}
        expect_connections(proxy, wanted)
        for mode, more in (("iptables", 3), ("nftables", 2), ("iptables", 0), ("nftables", 1)):
            assert node.kproxy("switch", mode).returncode == 0
            expect_connections(proxy, wanted)
            dial(node, WEB, more)
            wanted["one forwarded"] += more
            wanted["endpoints"] += more
            expect_connections(proxy, wanted)


def test_connections_belong_to_the_service_that_had_the_address(node: Room) -> None:
    manifest = node.manifests / "ours.yaml"
    text = manifest.read_text()
    with node.proxy("nftables", COUNTED) as proxy:
        dial(node, WEB, 3)
        manifest.write_text(re.sub(r"\bone\b", "renamed", text))
        await_endpoints(node, "renamed", "here", "elsewhere")
        dial(node, WEB, 2)
        wanted = {"one forwarded": 3, "renamed forwarded": 2, "endpoints": 5}
        expect_connections(proxy, wanted)
        dial(node, WEB, 1)
        manifest.write_text(text)
        await_endpoints(node, "one", "here", "elsewhere")
        dial(node, WEB, 1)
        expect_connections(proxy, {"one forwarded": 4, "renamed forwarded": 3, "endpoints": 7})


def test_relays_count_each_connection_once_across_restarts_and_switches(node: Room) -> None:
    with node.proxy("userspace", COUNTED) as proxy:
        dial(node, WEB, 4)
        dial(node, (NODE, 31780), 2)
        expect_counts(proxy, {"one forwarded": 6, "endpoints": 6})
        move_endpoints(node)
        dial(node, WEB, 1)
    with node.proxy("userspace", COUNTED) as proxy:
        dial(node, WEB, 9)
        wanted = {"one forwarded": 16, "endpoints": 16}
        expect_counts(proxy, wanted)
        for mode, more in (("nftables", 3), ("userspace", 2)):
            assert node.kproxy("switch", mode).returncode == 0
            expect_connections(proxy, wanted)
            dial(node, WEB, more)
            wanted = dict.fromkeys(wanted, wanted["one forwarded"] + more)
            expect_connections(proxy, wanted)


@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_bytes_and_packets_equal_those_of_the_client(node: Room, mode: str) -> None:
    node.node.run("sysctl", "-qw", "net.netfilter.nf_conntrack_acct=1")
    node.client.run("nft", "-f", "-", stdin=CLIENT_COUNTERS)
    with node.proxy(mode, COUNTED) as proxy:
        lasting = node.client.inside(lambda: socket.create_connection(WEB, 5))
        lasting.sendall(b"x" * 100)
        dial(node, WEB, 5)
        expect_equal(lambda: volumes(proxy), lambda: at_the_client(node))
        move_endpoints(node)
        dial(node, WEB, 3)
        lasting.sendall(b"x" * 200)
        expect_equal(lambda: volumes(proxy), lambda: at_the_client(node))
        node.node.run("conntrack", "-D", "-p", "tcp", "--dport", "80", "--state", "TIME_WAIT")
        expect_equal(lambda: volumes(proxy), lambda: at_the_client(node))
    lasting.sendall(b"x" * 300)
    dial(node, WEB, 2)
    with node.proxy(mode, COUNTED) as proxy:
        other = {"nftables": "iptables", "iptables": "nftables"}[mode]
        expect_equal(lambda: volumes(proxy), lambda: at_the_client(node))
        assert node.kproxy("switch", other).returncode == 0
        dial(node, WEB, 4)
        lasting.sendall(b"x" * 400)
        expect_equal(lambda: volumes(proxy), lambda: at_the_client(node))
    lasting.close()


def test_bytes_and_packets_through_relays_equal_those_of_the_client(node: Room) -> None:
    node.node.run("sysctl", "-qw", "net.netfilter.nf_conntrack_acct=1")
    node.client.run("nft", "-f", "-", stdin=CLIENT_COUNTERS)
    with node.proxy("userspace", COUNTED) as proxy:
        lasting = node.client.inside(lambda: socket.create_connection(WEB, 5))
        lasting.sendall(b"x" * 100)
        dial(node, WEB, 5)
        expect_equal(lambda: volumes(proxy, by_endpoint=False), lambda: at_the_client(node))
        move_endpoints(node)
        dial(node, WEB, 3)
        lasting.sendall(b"x" * 200)
        expect_equal(lambda: volumes(proxy, by_endpoint=False), lambda: at_the_client(node))
        lasting.close()
    with node.proxy("userspace", COUNTED) as proxy:
        dial(node, WEB, 2)
        expect_equal(lambda: volumes(proxy, by_endpoint=False), lambda: at_the_client(node))


def test_a_process_that_is_killed_loses_no_count(node: Room) -> None:
    with node.proxy("nftables", COUNTED) as proxy:
        dial(node, WEB, 5)
        expect_connections(proxy, {"one forwarded": 5, "endpoints": 5})
        proxy.process.kill()
        proxy.process.wait()
    dial(node, WEB, 2)
    with node.proxy("nftables", COUNTED) as proxy:
        expect_connections(proxy, {"one forwarded": 7, "endpoints": 7})


def test_a_process_that_is_killed_after_a_switch_loses_no_count(node: Room) -> None:
    with node.proxy("nftables", COUNTED) as proxy:
        dial(node, WEB, 5)
        assert node.kproxy("switch", "iptables").returncode == 0
        dial(node, WEB, 2)
        proxy.process.kill()
        proxy.process.wait()
    dial(node, WEB, 1)
    with node.proxy("nftables", COUNTED) as proxy:
        assert proxy.mode == "iptables"
        expect_connections(proxy, {"one forwarded": 8, "endpoints": 8})


def test_a_process_that_is_killed_after_a_start_in_another_mode_loses_no_count(node: Room) -> None:
    with node.proxy("nftables", COUNTED):
        dial(node, WEB, 5)
    with node.proxy("iptables", COUNTED) as proxy:
        dial(node, WEB, 2)
        proxy.process.kill()
        proxy.process.wait()
    with node.proxy("iptables", COUNTED) as proxy:
        expect_connections(proxy, {"one forwarded": 7, "endpoints": 7})


@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_failures_are_told_from_refusals_by_the_rules(node: Room, mode: str) -> None:
    node.node.run("ip", "route", "add", "192.0.2.99", "via", CLIENT)
    with node.proxy(mode, COUNTED) as proxy:
        refused(node, CLOSED, 3)
        refused(node, EMPTY, 2)
        refused_datagrams(node, MUTE, 4)
        with pytest.raises(OSError, match=r"timed out|unreachable"):
            dial(node, SILENT, 1)
        expect_counts(proxy, {
            "closed forwarded": 3, "closed refused": 3, "empty rejected": 2, "mute rejected": 4,
            "silent forwarded": 1, "silent unanswered": 1, "endpoints": 4,
        })  # fmt: skip


def test_relays_tell_failures_of_endpoints_from_a_lack_of_them(node: Room) -> None:
    node.node.run("ip", "route", "add", "192.0.2.99", "via", CLIENT)
    with node.proxy("userspace", COUNTED) as proxy:
        refused(node, EMPTY, 2)
        refused_datagrams(node, MUTE, 4)
        refused_datagrams(node, MUTE, 1)
        abandoned(node, CLOSED, 2)
        abandoned(node, SILENT, 1)
        expect_counts(proxy, {
            "empty rejected": 2, "mute rejected": 2, "closed forwarded": 8, "closed refused": 8,
            "silent forwarded": 4, "silent unanswered": 4, "endpoints": 12,
        })  # fmt: skip
        top = json.loads(node.kproxy("top", "--once", "-o", "json", "--filter", "counted").stdout)
        shown = {one["name"]: one for one in top["services"]}
        assert [shown[name]["failed"] for name in ("closed", "silent", "one")] == [8, 4, 0]
        assert [shown[name]["rejected"] for name in ("empty", "mute", "closed")] == [2, 2, 0]
        (endpoint,) = shown["closed"]["endpoints"]
        assert [endpoint[reason] for reason in ("refused", "unanswered", "reset")] == [8, 0, 0]
    with node.proxy("userspace", COUNTED) as proxy:
        abandoned(node, CLOSED, 1)
        expect_counts(proxy, {
            "empty rejected": 2, "mute rejected": 2, "closed forwarded": 12, "closed refused": 4,
            "silent forwarded": 4, "endpoints": 16,
        })  # fmt: skip


def handshakes(proxy: Proxy, number: int) -> dict[str, float]:
    """Return the histogram of the late Service, and of its endpoint, once it has *number* handshakes."""
    deadline = time.monotonic() + PATIENCE
    while True:
        result: dict[str, dict[str, float]] = {"service": {}, "endpoint": {}}
        for kind, series, labels, value in re.findall(
            r'^kproxy_(service|endpoint)_handshake_duration_seconds_(\w+)\{(.*service="late".*)\} ([\d.]+)$',
            proxy._get(10249, "/metrics")[1], re.MULTILINE,
        ):  # fmt: skip
            bound = re.search(r'le="([^"]+)"', labels)
            result[kind][bound[1] if bound else series] = float(value)
        if result["service"].get("count") == number or time.monotonic() > deadline:
            assert result["service"] == result["endpoint"]
            return result["service"]
        time.sleep(1)


def test_handshakes_of_relays_are_counted_with_their_duration(node: Room) -> None:
    with late_endpoints(node.node, {"198.18.0.1": Lateness(0.02)}):
        begun = time.monotonic()
        with node.proxy("userspace", COUNTED) as proxy:
            dial(node, LATE, 5)
            found = handshakes(proxy, 5)
            assert list(found) == ["0.00025", "0.001", "0.004", "0.016", "0.064", "0.256", "1", "+Inf",
                                   "count", "sum"]  # fmt: skip
            assert list(found.values())[:4] == [0] * 4
            assert found["+Inf"] == found["count"] == 5
            assert 0.02 <= found["sum"] / 5 < time.monotonic() - begun
        with node.proxy("userspace", COUNTED) as proxy:
            assert handshakes(proxy, 5) == found
            assert node.kproxy("switch", "iptables").returncode == 0
            dial(node, LATE, 1)
            assert handshakes(proxy, 5) == found
            assert node.kproxy("switch", "userspace").returncode == 0
            dial(node, LATE, 2)
            assert handshakes(proxy, 7)["0.016"] == 0
            refused(node, EMPTY, 1)
            abandoned(node, CLOSED, 1)
            assert handshakes(proxy, 7)["count"] == 7


@pytest.mark.parametrize(
    ("mode", "other"), [("nftables", "iptables"), ("iptables", "nftables"), ("userspace", "iptables")])
def test_rejections_end_with_the_first_endpoint_and_begin_again_after_the_last(
    node: Room, mode: str, other: str
) -> None:
    endpoints = SLICE.format(
        service="empty", at=0, ports="[{name: http, port: 8080}]", family="IPv4",
        here=PODS["here"][0], elsewhere=PODS["elsewhere"][0]).replace("shop", "counted")
    with node.proxy(mode, COUNTED) as proxy:
        refused(node, EMPTY, 2)
        expect_counts(proxy, {"empty rejected": 2})
        (node.manifests / "filled.yaml").write_text(endpoints)
        await_endpoints(node, "empty", "here", "elsewhere")
        dial(node, EMPTY, 3)
        expect_connections(proxy, {"empty rejected": 2, "empty forwarded": 3, "endpoints": 3})
        (node.manifests / "filled.yaml").unlink()
        await_endpoints(node, "empty")
        refused(node, EMPTY, 1)
        expect_connections(proxy, {"empty rejected": 3, "empty forwarded": 3, "endpoints": 3})
    with node.proxy(mode, COUNTED) as proxy:
        refused(node, EMPTY, 1)
        expect_connections(proxy, {"empty rejected": 4, "empty forwarded": 3, "endpoints": 3})
        assert node.kproxy("switch", other).returncode == 0
        expect_connections(proxy, {"empty rejected": 4, "empty forwarded": 3, "endpoints": 3})
        refused(node, EMPTY, 2)
        expect_connections(proxy, {"empty rejected": 6, "empty forwarded": 3, "endpoints": 3})


def test_off_has_no_series(node: Room) -> None:
    with node.proxy("nftables", {"trafficMetrics": "off"}) as proxy:
        dial(node, WEB, 1)
        assert "kproxy_service_connections" not in proxy._get(10249, "/metrics")[1]


def test_top_shows_the_connections_and_follows_them(node: Room) -> None:
    with node.proxy("nftables", COUNTED):
        dial(node, WEB, 6)
        time.sleep(1.1)
        done = node.kproxy("top", "--once", "-o", "json", "--sort", "connections", "--filter", "counted")
        found = json.loads(done.stdout)
        first = found["services"][0]
        assert (first["service_port"], first["forwarded"], first["rejected"]) == ("counted/one:http", 6, 0)
        assert sum(endpoint["forwarded"] for endpoint in first["endpoints"]) == 6
        assert found["status"]["mode"] == "nftables"
        text = node.kproxy("top", "--once").stdout
        assert "counted/one:http" in text
        assert watched(node, "counted/one:http", "q") == 0


def watched(node: Room, text: str, keys: str) -> int:
    """Run ``kproxy top`` in a terminal until it shows *text*, press *keys*, and return its exit status."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    process = subprocess.Popen(
        ["ip", "netns", "exec", node.node.name, KPROXY, "top"], stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "TERM": "xterm"})
    try:
        seen = b""
        while text.encode() not in seen:
            assert select.select([ours], [], [], PATIENCE)[0], seen.decode()
            seen += os.read(ours, 65536)
        os.write(ours, keys.encode())
        return process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)
