"""Facts about the node, from configuration, Node object and interfaces."""

import logging

import pytest

from kproxy_conformance.builders import addresses, cidrs
from kproxy_core.model.address import Address, Family
from kproxy_core.model.node import LocalSource, NodeObject
from kproxy_core.sync.node_facts import NodeFacts, NodeSettings

V4, V6 = Family.IPV4, Family.IPV6
INTERFACES = frozenset(addresses("127.0.0.1 ::1 192.0.2.1 192.0.2.2 10.1.0.1 2001:db8::1"))
NODE = NodeObject(
    "node1", zone="a", addresses=addresses("192.0.2.2 192.0.2.1 2001:db8::1"),
    pod_cidrs=cidrs("10.1.0.0/24 10.9.0.0/24 fd00::/64"),
)


def facts(node: NodeObject | None = NODE, **settings: object) -> NodeFacts:
    made = NodeFacts(NodeSettings(name="node1", **settings), INTERFACES)  # type: ignore[arg-type]
    made.node = node
    return made


def only(text: str) -> Address:
    (address,) = addresses(text)
    return address


def test_zone_and_addresses_are_those_of_the_node_object() -> None:
    four, six = facts().view(V4), facts().view(V6)
    assert (four.zone, four.node_ip, six.node_ip) == ("a", only("192.0.2.2"), only("2001:db8::1"))


def test_a_bind_address_takes_the_place_of_the_address_of_its_family() -> None:
    bound = facts(bind_address=only("192.0.2.1"))
    assert (bound.view(V4).node_ip, bound.view(V6).node_ip) == (only("192.0.2.1"), only("2001:db8::1"))


def test_without_a_node_object_the_address_is_guessed_if_that_is_allowed() -> None:
    def guess(family: Family) -> Address | None:
        return only("10.1.0.1") if family is V4 else None

    assert facts(None).view(V4).node_ip is None
    assert facts(None, guess_address=guess).view(V4).node_ip == only("10.1.0.1")
    assert facts(None, guess_address=guess).view(V6).node_ip is None
    assert facts(NodeObject("node1"), guess_address=guess).view(V4).node_ip is None


@pytest.mark.parametrize(
    ("local", "four", "six"),
    [
        ((), None, None),
        (cidrs("10.1.0.0/16"), LocalSource(cidr=cidrs("10.1.0.0/16")[0]), None),
        (None, LocalSource(cidr=cidrs("10.1.0.0/24")[0]), LocalSource(cidr=cidrs("fd00::/64")[0])),
        (LocalSource(interface="br0"), LocalSource(interface="br0"), LocalSource(interface="br0")),
    ],
    ids=["nothing configured", "cluster CIDR", "the node's CIDRs", "interface"],
)
def test_sources_of_local_traffic(local: object, four: object, six: object) -> None:
    known = facts(local=local)
    assert (known.view(V4).local_source, known.view(V6).local_source) == (four, six)


def test_the_pod_networks_of_a_node_that_is_not_known_are_not_known() -> None:
    assert facts(None, local=None).view(V4).local_source is None


def test_a_new_pod_network_is_followed_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    known = facts(local=None)
    with caplog.at_level(logging.INFO):
        known.view(V4)
        known.node = NodeObject("node1", pod_cidrs=cidrs("10.2.0.0/24"))
        views = [known.view(V4) for _ in range(2)]
    assert [view.local_source for view in views] == [LocalSource(cidr=cidrs("10.2.0.0/24")[0])] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "pod network changed"]


def test_node_ports_are_served_on_all_addresses_by_default() -> None:
    known = facts()
    view = known.view(V4)
    assert view.node_ports_anywhere
    assert view.node_port_addresses == addresses("10.1.0.1 192.0.2.1 192.0.2.2")


def test_node_ports_are_served_on_the_addresses_within_the_networks() -> None:
    known = facts(node_ports=cidrs("192.0.2.0/30"))
    view = known.view(V4)
    assert (view.node_ports_anywhere, view.node_port_addresses) == (False, addresses("192.0.2.1 192.0.2.2"))


def test_primary_is_the_nodes_own_address_and_nothing_while_that_is_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = facts(None, node_ports=("primary",))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            view = known.view(V4)
            assert (view.node_ports_anywhere, view.node_port_addresses) == (False, ())
    assert [record.getMessage() for record in caplog.records] == ["node ports are not served"]
    known.node = NODE
    assert known.view(V4).node_port_addresses == addresses("192.0.2.2")


def test_primary_beside_networks_adds_the_nodes_own_address(caplog: pytest.LogCaptureFixture) -> None:
    known = facts(None, node_ports=("primary", *cidrs("10.1.0.0/16 127.0.0.0/8")))
    with caplog.at_level(logging.WARNING):
        assert known.view(V4).node_port_addresses == addresses("10.1.0.1")
        known.node = NODE
        view = known.view(V4)
    assert (view.node_port_addresses, view.node_ports_on_loopback) == (addresses("10.1.0.1 192.0.2.2"), True)
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize(("may_relay", "node_ports", "relayed"), [
    (True, "10.1.0.0/16 127.0.0.0/8", [True, False]),
    (True, "127.0.0.0/8 ::1/128", [True, True]),
    (True, "0.0.0.0/0 ::/0", [False, False]),
    (False, "127.0.0.0/8 ::1/128", [False, False]),
])
def test_node_ports_are_relayed_where_loopback_is_named_and_no_gate_forbids_it(
    may_relay: bool, node_ports: str, relayed: list[bool]
) -> None:
    known = facts(node_ports=cidrs(node_ports), may_relay=may_relay)
    assert [known.view(family).relays_node_ports for family in Family] == relayed


def test_loopback_alone_is_said_not_to_serve_other_machines(caplog: pytest.LogCaptureFixture) -> None:
    known = facts(node_ports=cidrs("127.0.0.0/8"))
    with caplog.at_level(logging.WARNING):
        view = known.view(V4)
    assert (view.node_port_addresses, view.node_ports_on_loopback) == ((), True)
    assert [record.getMessage() for record in caplog.records] == [
        "node ports are not served to other machines"]


def test_each_family_gets_its_own_service_cidrs() -> None:
    known = facts()
    known.service_cidrs = cidrs("10.96.0.0/12 fd00:96::/108 10.112.0.0/12")
    assert known.view(V4).service_cidrs == cidrs("10.96.0.0/12 10.112.0.0/12")
    assert known.view(V6).service_cidrs == cidrs("fd00:96::/108")
