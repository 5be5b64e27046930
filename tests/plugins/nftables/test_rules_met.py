"""The table in plugins/kproxy_nftables/README.md of the rules that a connection's first packet meets."""

import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kproxy_conformance.builders import endpoint, endpoint_slice, node_view, plans, service
from kproxy_conformance.network.namespaces import Namespace
from kproxy_core.contract.values import BackendSettings, Scope, Update
from kproxy_core.model.address import Family
from kproxy_nftables.backend import NftablesBackend
from tests.plugins.nftables import rules_met

PAGE = Path(__file__).resolve().parents[3] / "plugins" / "kproxy_nftables" / "README.md"
KUBE_PROXY = Path(__file__).with_name("kube-proxy.nft")

POD, OUTSIDE, NODE = "10.244.1.9", "198.51.100.9", ""
"""Senders. The node's own packets have no address to bind to."""
PACKETS = {
    "pod to ClusterIP": (POD, "10.96.0.1", 80),
    "node to ClusterIP": (NODE, "10.96.0.1", 80),
    "outside to load balancer": (OUTSIDE, "203.0.113.1", 80),
    "outside to node port": (OUTSIDE, "192.0.2.1", 30001),
    "pod to ClusterIP with affinity": (POD, "10.96.0.2", 80),
    "pod to ClusterIP without endpoints": (POD, "10.96.0.3", 80),
    "pod to another node": (POD, "10.244.3.1", 8080),
    "node to another host": (NODE, "198.51.100.9", 443),
}
"""Sender, destination and port by the name in the table."""


@pytest.fixture
def hosts() -> Iterator[tuple[Namespace, Namespace]]:
    """A node, and all hosts around it in one namespace."""
    with ExitStack() as stack:
        node, around = (stack.enter_context(closing(Namespace(name))) for name in ("node", "around"))
        node.add_veth("eth0", around, "eth0")
        node.add_address("192.0.2.1/24", "eth0")
        for address in ("192.0.2.2/24", f"{POD}/32", f"{OUTSIDE}/32", "10.244.2.1/32"):
            around.add_address(address, "eth0")
        node.add_route("default", via="192.0.2.2")
        around.add_route("default", via="192.0.2.1")
        with node.entered():
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="ascii")
        yield node, around


def program(*, affinity: bool) -> None:
    """Write the rules for the Services of `PACKETS`."""
    node = node_view("node1", pods="10.244.0.0/16", node_port_addresses="192.0.2.1", ip="192.0.2.1",
                     service_cidrs="10.96.0.0/16")
    wanted = plans(
        node,
        service("web", "80/UDP@30001", ip="10.96.0.1", load_balancer_ips="203.0.113.1"),
        endpoint_slice("web", endpoint("10.244.2.1"), ports=("8080/UDP",)))
    wanted |= plans(node, service("none", "80/UDP", ip="10.96.0.3"))
    wanted |= plans(node, service("odd", "80/UDP", ip="10.96.0.4"),
                    endpoint_slice("odd", endpoint("10.96.5.5"), ports=("8080/UDP",)))
    if affinity:
        wanted |= plans(node, service("sticky", "80/UDP", ip="10.96.0.2", affinity=60),
                        endpoint_slice("sticky", endpoint("10.244.2.1"), ports=("8080/UDP",)))
    backend = NftablesBackend(BackendSettings(families=(Family.IPV4,)))
    backend.sync(Update(Family.IPV4, Scope.RESYNC, node, dict(wanted), wanted))
    backend.close()


def count(hosts: tuple[Namespace, Namespace], table: str, packet: str) -> tuple[int, int]:
    """Return the rules that *packet* meets in *table*, and the maps and sets that these name."""
    node, around = hosts
    source, destination, port = PACKETS[packet]
    with rules_met.tracing(table) as met, \
            (around if source else node).socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        if source:
            sender.bind((source, 0))
        rules = met(sender, destination, port)
    return len(rules), sum(len(re.findall(r"@[a-z]", rule)) for rule in rules)


def told(packet: str) -> list[str]:
    """Return the cells of the table after the name of *packet*."""
    row = re.search(rf"^\| {packet} \|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert row, f"{PAGE} has no row for {packet}"
    return [cell.strip() for cell in row[1].split("|")]


@pytest.mark.parametrize("packet", PACKETS)
def test_the_documentation_counts_the_rules_that_a_packet_meets(
    hosts: tuple[Namespace, Namespace], packet: str,
) -> None:
    with hosts[0].entered():
        program(affinity="affinity" in packet)
        ours = count(hosts, "kproxy", packet)
        rules_met.nft(f"delete table ip kproxy\n{KUBE_PROXY.read_text(encoding='utf-8')}")
        theirs = count(hosts, "kube-proxy", packet)
    assert told(packet) == [f"{rules}, {lookups}" for rules, lookups in (ours, theirs)]
    assert ours[0] <= theirs[0]


def test_an_endpoint_in_a_service_network_is_not_checked(hosts: tuple[Namespace, Namespace]) -> None:
    _, around = hosts
    with hosts[0].entered():
        program(affinity=False)
        with rules_met.tracing("kproxy") as met, around.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.bind((POD, 0))
            translated = met(sender, "10.96.0.4", 80)
            untranslated = met(sender, "10.96.5.5", 80)
    assert any("dnat" in rule for rule in translated)
    assert not any("@service-cidrs" in rule for rule in translated)
    assert untranslated[-1] == "ip daddr @service-cidrs drop"
