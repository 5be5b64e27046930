"""``kproxy doctor`` beside a running proxy: stale flows, lost routes, and packets that are not tracked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.core.cli.sides import ENDPOINT, UDP_PORT, VIP, Sides
from tests.core.cli.test_trace_sides import serving
from tests.core.processes import kproxy

CHECKS = {"stale-flow", "route", "notrack"}
Json = dict[str, Any]


def found(made: Sides) -> dict[str, Json]:
    """Return the findings of these checks."""
    answer = json.loads(kproxy("doctor", "-o", "json", node=made.node).stdout)
    return {each["check"]: each for each in answer["findings"] if each["check"] in CHECKS}


def track(made: Sides, family: str, port: int, answers: str, answers_port: int) -> None:
    """Make connection tracking know a flow from a pod to the VIP that *answers* answers."""
    pod = "fd00:244:2::2" if family == "ip6" else "10.244.2.2"
    made.node.run(
        "conntrack", "-I", "-p", "udp", "-s", pod,
        "-d", VIP[family], "--sport", str(port), "--dport", str(UDP_PORT), "--reply-src", answers,
        "--reply-dst", pod, "--reply-port-src", str(answers_port), "--reply-port-dst", str(port),
        "--timeout", "100", "-u", "SEEN_REPLY")


@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_udp_flows_to_no_endpoint_are_found_and_the_command_deletes_them(tmp_path: Path, mode: str) -> None:
    (tmp_path / "more.yaml").write_text("""
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: more, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints: [{addresses: ["10.244.3.8"], conditions: {ready: false, serving: true, terminating: true}}]
ports: [{name: dns, port: 8080, protocol: UDP}]
""")
    with serving(tmp_path, mode) as made:
        for family in VIP:
            for sender in ("veth", "bridge", "outside"):
                assert made.dial(sender, family, UDP_PORT, udp=True) == "answered"
        track(made, "ip", 4000, "10.244.3.8", 8080)
        assert found(made) == {}
        track(made, "ip", 4001, "10.244.3.9", 8080)
        track(made, "ip", 4002, "10.244.3.9", 8080)
        track(made, "ip6", 4003, VIP["ip6"], UDP_PORT)
        # A sender that keeps its port keeps its entry.
        assert made.dial("veth", "ip", UDP_PORT, udp=True, source_port=4001) == "silence"
        stale = found(made)["stale-flow"]
        assert stale["evidence"] == [
            "tracked flows to 10.96.0.10:53/UDP of shop/web:dns: 2, to 10.244.3.9:8080, which does not serve",
            "tracked flows to [fd00:96::10]:53/UDP of shop/web:dns: 1, not translated: they began before the "
            "rules"]
        for command in stale["remedy"].split("; "):
            made.node.run(*command.split())
        assert found(made) == {}
        assert made.dial("veth", "ip", UDP_PORT, udp=True, source_port=4001) == "answered"


ROUTES: dict[str, tuple[Callable[[Sides], object], str]] = {
    "blackhole": (
        lambda made: made.node.ip(*(f"route add blackhole {each}" for each in ENDPOINT.values())),
        "no route leads to them"),
    "no carrier": (
        lambda made: made.endpoint.ip("link set eth0 down"),
        "their route leads to pod3, which is down or has no carrier"),
}


@pytest.mark.parametrize("name", ROUTES)
def test_endpoints_without_a_way_are_found(tmp_path: Path, name: str) -> None:
    act, why = ROUTES[name]
    with serving(tmp_path, "nftables") as made:
        assert found(made) == {}
        act(made)
        assert made.dial("veth", "ip") != "answered"
        assert found(made)["route"]["evidence"] == [f"{why}: {', '.join(ENDPOINT.values())}"]


@pytest.mark.parametrize("rule", ["tcp dport 80 notrack", f"ip daddr {VIP['ip']} tcp dport 80 notrack"])
def test_packets_to_services_that_are_not_tracked_are_found(tmp_path: Path, rule: str) -> None:
    with serving(tmp_path, "nftables") as made:
        made.node.nft(
            f"table inet raw {{ chain p {{ type filter hook prerouting priority raw; {rule}; }}; }}")
        assert made.dial("veth", "ip") != "answered"
        finding = found(made)["notrack"]
        assert f"rule: {rule}" in finding["evidence"]
        assert kproxy("status", node=made.node).returncode == 1
        made.node.ip(f"address add {VIP['ip']}/32 dev lo")
        assert ("notrack" in found(made)) == ("daddr" not in rule), "NodeLocal DNSCache has such rules"
