"""From a Service, its slices and the node to plans: the rows of the rules about service ports."""

from typing import Any, NamedTuple

import pytest

from kproxy_conformance.builders import (
    addresses,
    cidrs,
    destinations,
    endpoint,
    endpoint_slice,
    node_view,
    plans,
    port_spec,
    service,
)
from kproxy_core.model.address import Family, Protocol
from kproxy_core.model.service import Endpoint, Service
from kproxy_core.plan.endpoints import endpoints_of
from kproxy_core.plan.quarantine import Quarantined, Sentence
from kproxy_core.plan.removals import EXTERNAL_IPS, removals
from kproxy_core.plan.service_plan import (
    Frontend,
    ServicePlan,
    count_ready_local,
    plan_service,
    serving_destinations,
)

NODE = node_view("node1")
BOTH = "10.96.0.1 fd00:96::1"


def plan(node: Any = NODE, *slices: Any, **fields: Any) -> ServicePlan:
    """The plan of a Service with one port, which has a node port if *fields* have `node_port`."""
    port = "80@30080" if fields.pop("node_port", False) else "80"
    (only,) = plans(node, service("web", port, **fields), *slices).values()
    return only


# The service ports


def test_every_port_is_a_service_port_by_name_and_protocol() -> None:
    found = plans(NODE, service("shop/web", "http:80", "dns:53/UDP", "dns:53/TCP", "sig:90/SCTP"))
    assert [(key.port_name, key.protocol) for key in found] == [
        ("http", Protocol.TCP), ("dns", Protocol.UDP), ("dns", Protocol.TCP), ("sig", Protocol.SCTP),
    ]
    assert {str(key) for key in found} == {"shop/web:http", "shop/web:dns", "shop/web:sig"}


def test_a_family_without_a_cluster_ip_has_none_despite_other_addresses() -> None:
    six = node_view(family=Family.IPV6)
    assert plans(six, service("web", "80@30080", ip="10.96.0.1", external_ips="2001:db8::1")) == {}


def test_each_family_sees_its_own_addresses() -> None:
    external, balancer = "192.0.2.1 2001:db8::1 192.0.2.1", "2001:db8::2"
    four, six = (
        plan(node_view(family=f), ip=BOTH, external_ips=external, load_balancer_ips=balancer) for f in Family
    )
    assert (four.cluster_ip, six.cluster_ip) == addresses(BOTH)
    assert (four.external_ips, six.external_ips) == (addresses("192.0.2.1"), addresses("2001:db8::1"))
    assert (four.load_balancer_ips, six.load_balancer_ips) == ((), addresses("2001:db8::2"))


def test_an_address_is_served_in_one_way_only() -> None:
    found = plan(external_ips="10.96.0.1 192.0.2.1 192.0.2.2", load_balancer_ips="192.0.2.1 10.96.0.1")
    assert found.load_balancer_ips == addresses("192.0.2.1")
    assert found.external_ips == addresses("192.0.2.2")
    assert len(list(found.frontends())) == len(set(found.frontends())) == 3


def test_the_source_ranges_of_a_load_balancer_ip_hold_if_it_is_an_external_ip_too() -> None:
    found = plan(
        external_ips="192.0.2.1", load_balancer_ips="192.0.2.1", source_ranges="203.0.113.0/24")
    assert (found.external_ips, found.load_balancer_ips) == ((), addresses("192.0.2.1"))
    assert found.source_ranges == cidrs("203.0.113.0/24")


def test_the_frontends_are_the_sockets_that_clients_dial() -> None:
    everything = plan(node_port=True, external_ips="192.0.2.1", load_balancer_ips="192.0.2.2")
    assert list(everything.frontends()) == [
        Frontend(addresses("10.96.0.1")[0], Protocol.TCP, 80),
        Frontend(addresses("192.0.2.1")[0], Protocol.TCP, 80),
        Frontend(addresses("192.0.2.2")[0], Protocol.TCP, 80),
        Frontend(None, Protocol.TCP, 30080),
    ]


# The slices and ports of each


def test_ports_match_by_name_and_protocol_never_by_number() -> None:
    found = plans(
        NODE,
        service("web", "a:80", "b:81/UDP"),
        endpoint_slice("web", "10.0.0.1", ports=["b:80/TCP", "a:81", "b:9/UDP", "c:80"]),
    )
    assert [p.cluster for p in found.values()] == [destinations("10.0.0.1:81"), destinations("10.0.0.1:9")]


def test_a_port_without_a_name_matches_one_without_a_name() -> None:
    nameless = endpoint_slice("web", "10.0.0.1", ports=["8080"])
    assert plan(NODE, nameless).cluster == destinations("10.0.0.1:8080")
    named = endpoint_slice("web", "10.0.0.1", ports=["http:8080"])
    assert plan(NODE, named).cluster == ()


def test_all_slices_count_and_endpoints_are_in_the_order_of_their_addresses() -> None:
    found = plan(
        NODE,
        endpoint_slice("web", "10.0.0.2", "10.0.0.10", name="s"),
        endpoint_slice("web", "10.0.0.1", name="t", ports=["9090"]),
    )
    assert found.cluster == destinations("10.0.0.1:9090 10.0.0.2:8080 10.0.0.10:8080")


def test_ipv6_endpoints_are_in_the_order_of_their_addresses_too() -> None:
    piece = endpoint_slice("web", "fd00::2", "fd00::10", "fd00::1")
    found = plan(node_view(family=Family.IPV6), piece, ip="fd00:96::1")
    assert found.cluster == destinations("[fd00::1]:8080 [fd00::2]:8080 [fd00::10]:8080")


def test_one_address_with_two_ports_of_the_same_name_is_two_endpoints() -> None:
    found = plan(
        NODE,
        endpoint_slice("web", "10.0.0.1", name="s", ports=["8080"]),
        endpoint_slice("web", "10.0.0.1", name="t", ports=["9090"]),
    )
    assert found.cluster == destinations("10.0.0.1:8080 10.0.0.1:9090")


GOING = endpoint("10.0.0.1", "node2", ready=False, serving=True, terminating=True)
STAYING = endpoint("10.0.0.1", "node1")


@pytest.mark.parametrize("first", [GOING, STAYING], ids=["terminating first", "terminating last"])
def test_of_two_entries_for_one_address_the_terminating_one_never_wins(first: Endpoint) -> None:
    last = STAYING if first is GOING else GOING
    found = plan(
        NODE,
        endpoint_slice("web", first, name="s"),
        endpoint_slice("web", last, name="t"),
        node_port=True, external_local=True,
    )
    assert found.local == destinations("10.0.0.1:8080")


# Policies (spec: traffic policy predicates)


class Policy(NamedTuple):
    """A Service with one endpoint here and one elsewhere, and which of them each list holds."""

    what: str
    fields: dict[str, Any]
    cluster: bool
    local: bool
    external_local: bool


POLICIES = [
    Policy("nothing external, Cluster", {}, True, False, False),
    Policy("nothing external, internal Local", {"internal_local": True}, False, True, False),
    Policy("nothing external, external Local", {"external_local": True}, True, False, False),
    Policy("node port, internal Local", {"internal_local": True, "node_port": True}, True, True, False),
    Policy("node port, external Local", {"external_local": True, "node_port": True}, True, True, True),
    Policy("node port, both Local",
           {"external_local": True, "internal_local": True, "node_port": True}, True, True, True),
    Policy("external IP, external Local",
           {"external_local": True, "external_ips": "192.0.2.1"}, True, True, True),
    Policy("external IP of the other family, external Local",
           {"external_local": True, "external_ips": "2001:db8::1"}, True, False, False),
    Policy("load balancer, external Local",
           {"external_local": True, "load_balancer_ips": "192.0.2.1"}, True, True, True),
    Policy("load balancer of the other family, internal Local",
           {"internal_local": True, "load_balancer_ips": "2001:db8::1"}, False, True, False),
]


@pytest.mark.parametrize("row", POLICIES, ids=lambda row: row.what)
def test_policies_decide_which_lists_are_made(row: Policy) -> None:
    here, there = endpoint("10.0.0.1", "node1"), endpoint("10.0.0.2", "node2")
    found = plan(NODE, endpoint_slice("web", here, there), **row.fields)
    assert found.cluster == (destinations("10.0.0.1:8080 10.0.0.2:8080") if row.cluster else ())
    assert found.local == (destinations("10.0.0.1:8080") if row.local else ())
    assert found.external_policy_local == row.external_local


class Fate(NamedTuple):
    """Return the fate of traffic: forward, reject or drop."""

    what: str
    endpoints: list[Endpoint]
    fields: dict[str, Any]
    internal: str
    external: str


REMOTE = endpoint("10.0.0.2", "node2")
LOCAL = endpoint("10.0.0.1", "node1")
INTERNAL, EXTERNAL = {"internal_local": True}, {"external_local": True}
FATES = [
    Fate("no endpoints", [], {}, "reject", "reject"),
    Fate("no endpoints, both Local", [], INTERNAL | EXTERNAL, "reject", "reject"),
    Fate("endpoints", [REMOTE], {}, "forward", "forward"),
    Fate("internal Local, none local", [REMOTE], INTERNAL, "drop", "forward"),
    Fate("external Local, none local", [REMOTE], EXTERNAL, "forward", "drop"),
    Fate("both Local, none local", [REMOTE], INTERNAL | EXTERNAL, "drop", "drop"),
    Fate("both Local, one local", [LOCAL], INTERNAL | EXTERNAL, "forward", "forward"),
]


@pytest.mark.parametrize("row", FATES, ids=lambda row: row.what)
def test_traffic_is_forwarded_rejected_or_dropped(row: Fate) -> None:
    found = plan(NODE, endpoint_slice("web", *row.endpoints), node_port=True, **row.fields)

    def fate(can_forward: bool) -> str:
        return "forward" if can_forward else "drop" if found.has_endpoints else "reject"

    assert fate(found.has_internal_endpoints) == row.internal
    assert fate(found.has_external_endpoints) == row.external


# Source ranges


@pytest.mark.parametrize(
    ("ranges", "node_ip", "expected"),
    [
        ("", "", ""),
        ("203.0.113.0/24", "", "203.0.113.0/24"),
        ("203.0.113.0/24 2001:db8::/32", "", "203.0.113.0/24"),
        ("2001:db8::/32", "", ""),
        ("203.0.113.0/24 0.0.0.0/0", "", ""),
        ("203.0.113.0/24 ::/0", "", "203.0.113.0/24"),
        ("203.0.113.0/24", "203.0.113.7", "203.0.113.0/24 192.0.2.1/32"),
        ("203.0.113.0/24", "198.51.100.7", "203.0.113.0/24"),
    ],
    ids=["none", "one", "other family too", "only the other family", "a /0", "a /0 of the other family",
         "the node is inside", "the node is outside"],
)
def test_source_ranges_of_the_family_count_and_a_zero_prefix_lets_everybody_in(
    ranges: str, node_ip: str, expected: str
) -> None:
    found = plan(node_view(ip=node_ip), source_ranges=ranges, load_balancer_ips="192.0.2.1 2001:db8::9")
    assert found.source_ranges == cidrs(expected)


def test_source_ranges_without_a_load_balancer_ip_restrict_nothing() -> None:
    assert plan(source_ranges="203.0.113.0/24", external_ips="192.0.2.1", node_port=True).source_ranges == ()


# Counts, and the flows that may continue


def test_ready_local_addresses_of_all_slices_with_ports_are_counted_once() -> None:
    first = endpoint_slice(
        "web", endpoint("10.0.0.1", "node1"), endpoint("10.0.0.2", "node1"), endpoint("10.0.0.3", "node2"),
        ports=["a:8080", "b:8081"], name="s",
    )
    second = endpoint_slice(
        "web", endpoint("10.0.0.4", "node1"),
        endpoint("10.0.0.5", "node1", ready=False, serving=True, terminating=True),
        ports=["b:8081"], name="t",
    )
    unrelated = endpoint_slice("web", endpoint("10.0.0.6", "node1"), ports=["other:9090"], name="u")
    portless = endpoint_slice("web", endpoint("10.0.0.7", "node1"), ports=[], name="v")
    assert count_ready_local({"s": first, "t": second}, NODE) == 3
    assert count_ready_local({"s": first, "u": unrelated, "v": portless}, NODE) == 3
    assert count_ready_local({"s": first}, node_view(name="")) == 0
    assert count_ready_local(None, NODE) == 0


def test_flows_may_keep_any_serving_endpoint_despite_policies() -> None:
    piece = endpoint_slice(
        "dns", endpoint("10.0.0.1", "node2"),
        endpoint("10.0.0.2", ready=False, serving=True, terminating=True),
        endpoint("10.0.0.3", ready=False), ports=["53/UDP"],
    )
    stay = serving_destinations(endpoints_of(port_spec("53/UDP"), {"s": piece}))
    assert stay == set(destinations("10.0.0.1:53 10.0.0.2:53"))


# Addresses that kube-proxy will stop serving


@pytest.mark.parametrize(("services", "ending"), [
    ([], {}),
    ([service("web", "80@30080", load_balancer_ips="192.0.2.9")], {}),
    ([service("shop/web", "http:80", "dns:53/UDP", ip=BOTH, external_ips="192.0.2.2 2001:db8::1 192.0.2.1"),
      service("shop/app", "80", external_ips="192.0.2.3")],
     {"shop/app": "192.0.2.3", "shop/web": "192.0.2.1 192.0.2.2 2001:db8::1"}),
    # The load balancer IP and the ClusterIP will be served without the field, too.
    ([service("web", "80", ip="10.96.0.1", external_ips="10.96.0.1 192.0.2.9 192.0.2.1",
              load_balancer_ips="192.0.2.9")], {"default/web": "192.0.2.1"}),
    # There is no ClusterIP in the family of the address, so nothing serves it now.
    ([service("web", "80", ip="10.96.0.1", external_ips="2001:db8::1")], {}),
])  # fmt: skip
def test_services_that_depend_on_external_ips_are_named(
    services: list[Service], ending: dict[str, str]
) -> None:
    views = [node_view(family=family) for family in Family]
    found = removals(plan for one in services for view in views for plan in plans(view, one).values())
    assert {str(removal.service): removal.addresses for removal in found} == {
        name: addresses(text) for name, text in ending.items()}
    assert [str(removal.service) for removal in found] == sorted(ending)
    assert {removal.field for removal in found} <= {EXTERNAL_IPS}
    assert (EXTERNAL_IPS.off_by_default, EXTERNAL_IPS.removed) == ("1.40", "1.43")


def test_equal_input_makes_equal_plans() -> None:
    slices = [endpoint_slice("web", "10.0.0.1", name="s"), endpoint_slice("web", "10.0.0.2", name="t")]
    assert plan(NODE, *slices) == plan(NODE, *reversed(slices))


# Quarantine

SHUT = {where: Sentence(float(since), 3) for since, where in enumerate(
    destinations("10.0.0.1:8080 10.0.0.2:8080 10.0.0.3:8080"))}  # fmt: skip


class Chosen(NamedTuple):
    endpoints: tuple[Endpoint, ...]
    cluster: str
    local: str
    quarantined: str


@pytest.mark.parametrize("row", [
    Chosen((endpoint("10.0.0.1"), endpoint("10.0.0.9")), "10.0.0.9:8080", "", "10.0.0.1:8080"),
    Chosen((endpoint("10.0.0.1"),), "10.0.0.1:8080", "", ""),
    Chosen((endpoint("10.0.0.1"), endpoint("10.0.0.2"), endpoint("10.0.0.3")),
           "10.0.0.2:8080 10.0.0.3:8080", "", "10.0.0.1:8080"),
    Chosen((endpoint("10.0.0.1", "node1"), endpoint("10.0.0.9")), "10.0.0.9:8080", "10.0.0.1:8080", ""),
    Chosen((endpoint("10.0.0.1", "node1"), endpoint("10.0.0.9", "node1")),
           "10.0.0.9:8080", "10.0.0.9:8080", "10.0.0.1:8080"),
])  # fmt: skip
def test_quarantine_leaves_each_policy_at_least_half_of_its_endpoints(row: Chosen) -> None:
    spec = service("web", "80@30080", external_local=bool(row.local))
    (found,) = plan_service(spec, {"": endpoint_slice("web", *row.endpoints)}, NODE, SHUT)
    assert found.avoids_silent
    assert found.cluster == destinations(row.cluster)
    assert found.local == destinations(row.local)
    assert found.quarantined == tuple((where, SHUT[where]) for where in destinations(row.quarantined))


@pytest.mark.parametrize(("port", "quarantined"), [("80/UDP", SHUT), ("80/SCTP", SHUT), ("80", None)])
def test_quarantine_is_for_tcp_and_on_request(port: str, quarantined: Quarantined | None) -> None:
    slices = {"": endpoint_slice("web", "10.0.0.1", "10.0.0.9", ports=[port.replace("80", "8080")])}
    (found,) = plan_service(service("web", port), slices, NODE, quarantined)
    assert (found.avoids_silent, len(found.cluster), found.quarantined) == (False, 2, ())
