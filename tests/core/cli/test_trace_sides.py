"""``kproxy trace`` sees packets of every sender from the first hook on, and says what it cannot see."""

import signal
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.core.cli.sides import ENDPOINT, FLAGS, SENDERS, UDP_PORT, VIP, Sides, sides, write
from tests.core.cli.test_trace_command import TABLE, packets
from tests.core.processes import KPROXY, running
from tests.patience import PATIENCE

Json = dict[str, Any]
FAMILIES = tuple(VIP)
NO_ENDPOINT = "which was no endpoint of the Service when the trace began"
ALL = {(sender, family) for sender in SENDERS for family in FAMILIES}
ARRIVING = {(sender, family) for sender, family in ALL if sender != "node"}


@contextmanager
def serving(directory: Path, mode: str) -> Iterator[Sides]:
    write(directory)
    with sides() as made, running(made.node, f"--mode={mode}", f"--manifests={directory}", *FLAGS) as proxy:
        proxy.await_health()
        yield made


@contextmanager
def tracing(made: Sides, *words: str, count: int = 8) -> Iterator["subprocess.Popen[str]"]:
    command = ["ip", "netns", "exec", made.node.name, KPROXY, "trace", *words, "-o", "json",
               f"--count={count}", f"--seconds={PATIENCE}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            while f"ip6 {TABLE}" not in made.node.run("nft", "list", "tables"):
                assert process.poll() is None, process.communicate()
            yield process
        finally:
            process.kill()


def traced(made: Sides, to: str = "web:http", port: int = 80, *, udp: bool = False) -> Mapping[Any, Json]:
    """Return what the trace says of one packet from each sender in each family."""
    ports = {(sender, family): 40000 + number for number, (sender, family) in enumerate(sorted(ALL))}
    with tracing(made, to) as process, ThreadPoolExecutor(len(ALL)) as threads:
        for (sender, family), source_port in ports.items():
            threads.submit(made.dial, sender, family, port, udp=udp, source_port=source_port)
        by_port = {int(packet["from"].rpartition(":")[2]): packet for packet in packets(process)}
    return {who: by_port[source_port] for who, source_port in ports.items()}


def outcomes(found: Mapping[Any, Json], outcome: str) -> set[Any]:
    return {who for who, packet in found.items() if packet["outcome"] == outcome}


AT_INTERFACES = "".join(
    f"chain {device} {{ type filter hook ingress device {device} priority 0; tcp dport 80 counter drop; }}; "
    for device in ("port1", "pod2", "uplink"))
DROPS = {
    "raw": (
        "table inet evil { chain p { type filter hook prerouting priority raw; tcp dport 80 counter drop; }; "
        "chain o { type filter hook output priority raw; tcp dport 80 counter drop; }; }", ALL, True),
    "before raw": (
        "table inet evil { chain p { type filter hook prerouting priority -450; tcp dport 80 drop; }; }",
        ARRIVING, True),
    "netdev": (f"table netdev evil {{ {AT_INTERFACES} }}", ARRIVING, True),
    "inet ingress": (f"table inet evil {{ {AT_INTERFACES} }}", ARRIVING, True),
    "bridge": (
        "table bridge evil { chain p { type filter hook prerouting priority -300; tcp dport 80 drop; }; }",
        {("bridge", family) for family in FAMILIES}, True),
    "forward": (
        "table inet evil { chain f { type filter hook forward priority 0; tcp dport 8080 drop; }; }",
        ARRIVING, False),
    "egress": (
        "table netdev evil { chain e { type filter hook egress device pod3 priority 0; "
        "tcp dport 8080 drop; }; }", ALL, False),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_drops_are_seen_at_every_place(tmp_path: Path, mode: str) -> None:
    with serving(tmp_path, mode) as made:
        before = made.node.run("nft", "-s", "list", "ruleset")
        assert outcomes(traced(made), "forwarded") == ALL
        for rules, dropped, is_early in DROPS.values():
            made.node.nft(rules)
            found = traced(made)
            made.node.nft(f"delete table {' '.join(rules.split()[1:3])}")
            assert outcomes(found, "dropped") == dropped, rules
            assert outcomes(found, "forwarded") == ALL - dropped
            for who in dropped:
                because = found[who]["because"]
                assert " evil " in because
                assert "drop" in because
                assert because.endswith(", before any rule of Services") == is_early
        assert made.node.run("nft", "-s", "list", "ruleset") == before


def test_packets_that_no_rule_drops_are_not_known_and_lead_to_the_doctor(tmp_path: Path) -> None:
    with serving(tmp_path, "nftables") as made:
        made.node.ip(*(f"route add blackhole {endpoint}" for endpoint in ENDPOINT.values()))
        found = traced(made)
        assert outcomes(found, "unknown") == ALL
        for who in ALL:
            assert found[who]["because"] == (
                "it opened no connection, and no rule of nf_tables was seen to drop it")
            assert found[who]["ask"] == "kproxy doctor"
        made.node.run("iptables-legacy", "-t", "raw", "-A", "PREROUTING", "-j", "DROP")
        found = traced(made)
        assert outcomes(found, "unknown") == ALL
        assert found["veth", "ip"]["because"] == (
            "it opened no connection and did not come to connection tracking, and no rule of nf_tables was "
            "seen to drop it; rules of legacy tables are not seen (ip raw)")


def test_a_rule_that_keeps_packets_from_being_tracked_is_named(tmp_path: Path) -> None:
    with serving(tmp_path, "nftables") as made:
        made.node.nft(
            "table inet raw { chain p { type filter hook prerouting priority raw; tcp dport 80 notrack; }; "
            "chain o { type filter hook output priority raw; tcp dport 80 notrack; }; }")
        found = traced(made)
        assert outcomes(found, "not touched") == ALL
        assert found["veth", "ip"]["because"] == (
            "not tracked, so that no rule translates it: inet raw p: tcp dport 80 notrack")


def test_another_program_s_translation_is_no_endpoint(tmp_path: Path) -> None:
    with serving(tmp_path, "nftables") as made:
        made.node.nft(
            "table ip theirs { chain p { type nat hook prerouting priority -110; "
            f"ip daddr {VIP['ip']} tcp dport 80 dnat to {ENDPOINT['ip']}:8081; }}; }}")
        found = traced(made)
        assert outcomes(found, "forwarded") == ALL
        theirs = {who for who, packet in found.items() if packet["ask"] == "kproxy explain"}
        assert theirs == {who for who in ARRIVING if who[1] == "ip"}
        assert found["veth", "ip"]["because"].startswith(
            f"{NO_ENDPOINT}: ip theirs p: ip daddr 10.96.0.10 tcp dport 80 dnat to")


def test_datagrams_of_tracked_flows_are_left_out_unless_they_lead_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("""
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: more, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints: [{addresses: ["10.244.3.8"], conditions: {ready: false}}]
ports: [{name: dns, port: 8080, protocol: UDP}]
""")
    with serving(tmp_path, "nftables") as made:
        assert outcomes(traced(made, "web:dns", UDP_PORT, udp=True), "forwarded") == ALL
        with tracing(made, "outside", "web:dns", count=1) as process:
            made.dial("veth", "ip", UDP_PORT, udp=True, count=3)
            assert made.dial("outside", "ip", UDP_PORT, udp=True) == "answered"
            assert [packet["from"].partition(":")[0] for packet in packets(process)] == ["192.0.2.2"]
        for port, endpoint, which in (
                ("4000", "10.244.3.9", NO_ENDPOINT),
                ("4001", "10.244.3.8", "which was not ready when the trace began")):
            made.node.run(
                "conntrack", "-I", "-p", "udp", "-s", "10.244.2.2", "-d", VIP["ip"], "--sport", port,
                "--dport", str(UDP_PORT), "--reply-src", endpoint, "--reply-dst", "10.244.2.2",
                "--reply-port-src", "8080", "--reply-port-dst", port, "--timeout", "100", "-u", "SEEN_REPLY")
            with tracing(made, "web:dns", count=1) as process:
                made.dial("veth", "ip", UDP_PORT, udp=True, source_port=int(port))
                (packet,) = packets(process)
            assert (packet["outcome"], packet["endpoint"]) == ("forwarded", f"{endpoint}:8080")
            assert packet["because"].startswith(f"{which}: an older entry of connection tracking")


def test_what_no_packet_means(tmp_path: Path) -> None:
    with serving(tmp_path, "nftables") as made:
        def silence(*words: str) -> str:
            done = subprocess.run(
                ["ip", "netns", "exec", made.node.name, KPROXY, "trace", *words, "--seconds=0.3"],
                capture_output=True, text=True, check=False)
            assert done.returncode == 1
            return done.stderr

        said = ("no packet to web:http was seen in 0.3 s: none came to this node's rules for IP. It was not "
                "sent, took another way, or was dropped before")
        assert silence("web:http") == f"{said}. Programs of XDP and tc are not seen\n"
        with tracing(made, "web:http") as process:
            made.dial("veth", "ip", UDP_PORT)
            process.send_signal(signal.SIGINT)
            assert process.communicate()[1].endswith(
                "none came to this node's rules for IP. It was not sent, took another way, or was dropped "
                "before. Programs of XDP and tc are not seen\n")
        with tracing(made, "outside", "web:http") as process:
            assert made.dial("veth", "ip") == "answered"
            process.send_signal(signal.SIGINT)
            assert " s: 1 came here and are not shown. They belong to" in process.communicate()[1]
        made.node.nft("table bridge b { chain c { type filter hook prerouting priority 0; }; }")
        before = made.node.run("nft", "list", "tables")
        made.node.ip(*(f"link add more{number} up type bridge" for number in range(300)))
        with tracing(made, "web:http"):
            assert made.node.run("nft", "list", "tables").count(TABLE) == 3
            assert silence("web:http") == (
                f"{said}, and not by bridge b c, which were watched. Programs of XDP and tc are not seen\n")
        assert made.node.run("nft", "list", "tables") == before
