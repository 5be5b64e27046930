"""Deviations that the iptables mode reports."""

import pytest
from msgspec.structs import replace

from kproxy_conformance.builders import endpoint_slice, full_update, node_view, plans, service
from kproxy_core.contract.values import BackendSettings, Caveat
from kproxy_core.model.address import Family
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import Service
from kproxy_iptables.hooks import kproxy_caveats

EVERYWHERE = node_view(anywhere=True, node_port_addresses="192.0.2.1")
OTHER_PORTS = "connections to other ports of ClusterIPs are not refused"


def found(node: NodeView, of: Service, *endpoints: str, **options: object) -> list[Caveat]:
    update = full_update(node, plans(node, of, endpoint_slice("shop/web", *endpoints, family=node.family)))
    return list(kproxy_caveats(update, BackendSettings((node.family,), options=options)))


@pytest.mark.parametrize(("node", "ip", "localhost", "loopback"), [
    (EVERYWHERE, "10.96.0.1", True, ""),
    (EVERYWHERE, "10.96.0.1", False, "127.0.0.1"),
    (node_view(node_port_addresses="192.0.2.1"), "10.96.0.1", True, "127.0.0.1"),
    (node_view(family=Family.IPV6, anywhere=True), "fd00::1", True, "::1"),
    (replace(node_view(family=Family.IPV6), relays_node_ports=True), "fd00::1", False, ""),
    (replace(node_view(), relays_node_ports=True), "10.96.0.1", False, "127.0.0.1"),
], ids=["served", "localhostNodePorts false", "not enabled", "IPv6", "relayed", "not relayed"])  # fmt: skip
def test_loopback_serves_ipv4_node_ports_if_enabled_and_those_of_ipv6_by_relays(
    node: NodeView, ip: str, localhost: bool, loopback: str
) -> None:
    caveats = found(node, service("shop/web", "80@30080", ip=ip), localhostNodePorts=localhost)
    of_port = [(caveat.what, caveat.lost) for caveat in caveats if caveat.service_port is not None]
    assert of_port == ([(f"node port 30080 is not served on {loopback}", True)] if loopback else [])


def test_node_port_addresses_are_reported_in_the_same_words_as_by_other_modes() -> None:
    caveats = found(node_view(node_port_addresses="192.0.2.1"), service("shop/web", "80@30080"))
    assert Caveat("IPv4 node ports are served on 192.0.2.1 only") in caveats


def test_affinity_is_limited_to_a_hundred_clients() -> None:
    [_, caveat] = found(EVERYWHERE, service("shop/web", affinity=60), "10.244.0.5")
    assert caveat.what.startswith("session affinity remembers 100 clients of each endpoint")
    assert str(caveat.service_port) == "shop/web"
    assert caveat.lost


def test_a_hash_has_no_effect() -> None:
    [_, caveat] = found(EVERYWHERE, service("shop/web", hash_by="client"), "10.244.0.5")
    assert caveat.what == (
        "the annotation kproxy.dev/hash: client has no effect, endpoints are chosen at random")
    assert (str(caveat.service_port), caveat.lost) == ("shop/web", True)


def test_a_plain_service_has_no_deviations() -> None:
    assert found(EVERYWHERE, service("shop/web")) == [Caveat(OTHER_PORTS, lost=False)]
    assert list(kproxy_caveats(full_update(EVERYWHERE, {}), BackendSettings((Family.IPV4,)))) == []
