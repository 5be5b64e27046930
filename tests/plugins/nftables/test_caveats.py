"""The caveats of the nftables mode."""

import pytest
from msgspec.structs import replace

from kproxy_conformance.builders import endpoint, endpoint_slice, full_update, node_view, plans, service
from kproxy_core.contract.values import Caveat
from kproxy_core.model.address import Family
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import Service
from kproxy_nftables.hooks import kproxy_caveats

NO_INTERFACE = "node ports are not served on local addresses that no interface has"


@pytest.mark.parametrize(("node", "expected"), [
    (node_view(anywhere=True, node_port_addresses="192.0.2.1"), []),
    (node_view(node_port_addresses="192.0.2.1"), ["IPv4 node ports are served on 192.0.2.1 only"]),
    (node_view(node_port_addresses="192.0.2.1 192.0.2.9"),
     ["IPv4 node ports are served on 192.0.2.1, 192.0.2.9 only"]),
    (node_view(), ["IPv4 node ports are not served"]),
], ids=["anywhere", "primary", "networks", "nowhere"])  # fmt: skip
def test_node_ports_are_served_on_chosen_addresses_and_never_on_loopback(
    node: NodeView, expected: list[str]
) -> None:
    update = full_update(node, plans(node, service("shop/web", "http:80@30080")))
    of_node = [caveat.what for caveat in kproxy_caveats(update) if caveat.service_port is None]
    assert of_node == expected + ([f"IPv4 {NO_INTERFACE}"] if expected else [])
    [of_port] = [caveat for caveat in kproxy_caveats(update) if caveat.service_port is not None]
    assert of_port.what == "node port 30080 is not served on 127.0.0.1"
    assert str(of_port.service_port) == "shop/web:http"
    assert of_port.lost


def test_ipv6_loopback_has_its_own_name() -> None:
    node = node_view(family=Family.IPV6, anywhere=True)
    update = full_update(node, plans(node, service("shop/web", "80@30080", ip="fd00::1")))
    assert [caveat.what for caveat in kproxy_caveats(update)] == ["node port 30080 is not served on ::1"]


def test_sctp_connections_to_removed_endpoints_are_kept() -> None:
    node = node_view(node_port_addresses="192.0.2.1", removed_endpoints="reset")
    update = full_update(node, plans(node, service("shop/web", "80", "dns:53/UDP", "sig:81/SCTP")))
    [caveat] = kproxy_caveats(update)
    assert (str(caveat.service_port), caveat.lost) == ("shop/web:sig", True)


def test_a_node_without_node_ports_has_no_caveats() -> None:
    node = node_view(node_port_addresses="192.0.2.1")
    everything = service("shop/web", "80", "dns:53/UDP", "81/SCTP", affinity=10, external_local=True,
                         internal_local=True, load_balancer_ips="203.0.113.1", source_ranges="198.51.0.0/16")
    assert list(kproxy_caveats(full_update(node, plans(node, everything)))) == []
    assert list(kproxy_caveats(full_update(node, {}))) == []


ENDS = Caveat("connections to node ports on 127.0.0.1 end with the kproxy process", lost=False)


@pytest.mark.parametrize(("of", "endpoints", "expected"), [
    (service("web", "80@30080"), "10.244.2.1", []),
    (service("web", "53/UDP@30080"), "10.244.2.1", []),
    (service("web", "80/SCTP@30080"), "10.244.2.1", [("node port 30080 is not served on 127.0.0.1", True)]),
    (service("web", "80@30080", external_local=True), "10.244.2.1",
     [("node port 30080 reaches endpoints on this node only if dialled on 127.0.0.1", True)]),
    (service("web", "80@30080", external_local=True), "10.244.1.1@node1",
     [("node port 30080 reaches endpoints on this node only if dialled on 127.0.0.1", False)]),
])
def test_relays_serve_loopback(of: Service, endpoints: str, expected: list[tuple[str, bool]]) -> None:
    node = replace(node_view(anywhere=True), relays_node_ports=True)
    address, _, on = endpoints.partition("@")
    protocol = of.ports[0].protocol.name
    pieces = endpoint_slice("web", endpoint(address, node=on), ports=(f"8080/{protocol}",))
    found = kproxy_caveats(full_update(node, plans(node, of, pieces)))
    assert [(caveat.what, caveat.lost) for caveat in found if caveat.service_port] == expected
    assert [caveat for caveat in found if not caveat.service_port] == [ENDS]
