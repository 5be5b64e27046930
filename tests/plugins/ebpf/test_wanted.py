"""The frontends that programs translate, and those that they leave to the rules."""

import pytest
from msgspec.structs import replace

from kproxy_conformance.builders import (
    addresses,
    destinations,
    endpoint,
    endpoint_slice,
    full_update,
    node_view,
    plans,
    service,
)
from kproxy_core.model.address import Family, Protocol, parse_address
from kproxy_core.model.service import Destination, EndpointSlice, Service, ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_ebpf.applied import contents
from kproxy_ebpf.batch import MASQUERADES_PODS, SHORT_CIRCUITS, address_key, frontend_key, node_port_key
from kproxy_ebpf.names import ENDPOINTS, OWN_ADDRESSES
from kproxy_ebpf.wanted import FrontendElement, Group, node_addresses, of_node, wanted

NODE = node_view("node1", pods="10.244.1.0/24", node_port_addresses="192.0.2.1")
REMOTE = "10.244.2.1"


def groups(plans: dict[ServicePortKey, ServicePlan]) -> list[Group]:
    return [group for plan in plans.values() for group in wanted(plan)]


def internal(address: str) -> FrontendElement:
    return FrontendElement(frontend_key(parse_address(address), Protocol.TCP, 80), 0)


def external(address: str) -> FrontendElement:
    return FrontendElement(frontend_key(parse_address(address), Protocol.TCP, 80), MASQUERADES_PODS)


NODE_PORT = FrontendElement(node_port_key(Family.IPV4, Protocol.TCP, 30080), MASQUERADES_PODS)


def remote() -> tuple[Destination, ...]:
    return destinations(f"{REMOTE}:8080")


def test_all_frontends_of_a_service_port_share_one_group() -> None:
    found = groups(
        plans(
            NODE,
            service("web", "80@30080", external_ips="198.51.100.1", load_balancer_ips="203.0.113.1"),
            endpoint_slice("web", REMOTE),
        )
    )
    frontends = (internal("10.96.0.1"), external("198.51.100.1"), external("203.0.113.1"), NODE_PORT)
    assert found == [Group("cluster", frontends, remote())]


def test_internal_policy_local_separates_the_cluster_ip() -> None:
    found = groups(
        plans(
            NODE,
            service("web", "80@30080", internal_local=True),
            endpoint_slice("web", endpoint("10.244.1.1", "node1"), endpoint(REMOTE, "node2")),
        )
    )
    local = destinations("10.244.1.1:8080")
    assert found == [
        Group("local", (internal("10.96.0.1"),), local),
        Group("cluster", (NODE_PORT,), local + remote()),
    ]


def test_external_policy_local_does_not_concern_local_sockets() -> None:
    found = groups(
        plans(NODE, service(external_ips="198.51.100.1", external_local=True), endpoint_slice("web", REMOTE))
    )
    assert [group.endpoints for group in found] == [remote()]
    flags = [frontend.flags for group in found for frontend in group.frontends]
    assert flags == [0, SHORT_CIRCUITS[Family.IPV4]]


@pytest.mark.parametrize(
    ("what", "found"),
    [
        (service("web", "80/SCTP"), endpoint_slice("web", REMOTE, ports=("8080/SCTP",))),
        (service(), endpoint_slice("web", endpoint(REMOTE, ready=False))),
        (service(internal_local=True), endpoint_slice("web", endpoint(REMOTE, "node2"))),
    ],
    ids=["SCTP", "no ready endpoint", "internal policy Local without a local endpoint"],
)
def test_frontends_left_to_the_rules(what: Service, found: EndpointSlice) -> None:
    assert groups(plans(NODE, what, found)) == []


def test_a_load_balancer_ip_with_source_ranges_is_left_to_the_rules() -> None:
    found = groups(
        plans(
            NODE,
            service(
                load_balancer_ips="203.0.113.1", external_ips="198.51.100.1", source_ranges="192.0.2.0/24"
            ),
            endpoint_slice("web", REMOTE),
        )
    )
    assert [group.frontends for group in found] == [(internal("10.96.0.1"), external("198.51.100.1"))]


def test_loopback_serves_node_ports_to_the_node_alone() -> None:
    node = node_view(node_port_addresses="192.0.2.1", anywhere=True)
    values = {key[-4:]: value for key, value in node_addresses(node).items()}
    assert values == {parse_address("192.0.2.1"): b"\0\0\0\0", parse_address("127.0.0.1"): b"\1\0\0\0"}


def test_addresses_of_the_node_are_kept_by_family() -> None:
    held = frozenset(addresses("10.96.0.1 fd00:96::1 192.0.2.1"))
    for view, own in ((NODE, "10.96.0.1 192.0.2.1"), (node_view(family=Family.IPV6), "fd00:96::1")):
        update = replace(full_update(view, {}), addresses=held)
        assert of_node(update)[OWN_ADDRESSES].keys() == {address_key(each) for each in addresses(own)}


def test_an_endpoint_is_in_as_many_slots_as_its_weight() -> None:
    (group,) = groups(plans(
        NODE, service(), endpoint_slice("web", "10.244.2.1", weight=75),
        endpoint_slice("web", "10.244.2.2", name="web-2", weight=25)))
    assert group.endpoints == destinations("10.244.2.1:8080 10.244.2.1:8080 10.244.2.1:8080 10.244.2.2:8080")


def test_rules_hash_the_source_which_is_unknown_when_a_socket_connects() -> None:
    assert groups(plans(NODE, service(hash_by="client"), endpoint_slice("web", REMOTE))) == []


def test_udp_sockets_keep_an_endpoint_of_weight_zero_and_clients_with_affinity_of_tcp_do_not() -> None:
    def remembered(port: str, affinity: int) -> set[bytes]:
        slices = [endpoint_slice("web", f"10.244.2.{n}", ports=[port], name=f"web-{n}", weight=n - 1)
                  for n in (1, 2)]
        made = plans(NODE, service("web", port, affinity=affinity), *slices)
        return {key[15:16] for key in contents(made.values())[ENDPOINTS]}

    assert remembered("53/UDP", 0) == {b"\1", b"\2"}
    assert remembered("80/TCP", 60) == {b"\2"}
