"""The way of a packet through a cluster: senders, the nodes that decide, and the answer put together."""

from typing import Any

import msgspec
import pytest

from kproxy_conformance.builders import addresses, cidrs, endpoint, endpoint_slice, service
from kproxy_core.app.errors import NoAnswer
from kproxy_core.app.explain import parse_target
from kproxy_core.fleet.explain import (
    Policies,
    Sender,
    deciding,
    explained,
    meant,
    on_any_node,
    sender_at,
    services_of,
)
from kproxy_core.fleet.lags import Answered, Json
from kproxy_core.fleet.objects import NetworkPolicy, Pod
from kproxy_core.model.address import Family, parse_address
from kproxy_core.model.node import NodeObject
from kproxy_core.model.service import ServiceName
from tests.core.fleet.answered_packets import ADDRESSES, NODE_ADDRESSES, held, says

NODES = [
    NodeObject(name, addresses=addresses(address), pod_cidrs=cidrs(f"10.1.{number}.0/24"))
    for number, (name, address) in enumerate(ADDRESSES.items(), 1)
]


def pod(
    name: str, node: str, address: str, *, host: bool = False, phase: str = "Running", **labels: str
) -> Pod:  # fmt: skip
    namespace, _, name = name.partition("/")
    return msgspec.convert({
        "metadata": {"namespace": namespace, "name": name, "labels": labels},
        "spec": {"nodeName": node, "hostNetwork": host},
        "status": {"phase": phase, "podIPs": [{"ip": each} for each in address.split()]}}, Pod)


CART = pod("shop/cart", "a", "10.1.1.9 fd00::9", app="cart")

SENDERS = {
    "a node": ("192.0.2.2", [], "node b", "b"),
    "a pod": ("10.1.1.9", [CART], "pod shop/cart on node a", "a"),
    "a pod outside of the nodes' networks": (
        "172.16.0.1", [pod("x/y", "c", "172.16.0.1")], "pod x/y on node c", "c"),
    "a pod on the host's network": ("192.0.2.3", [pod("x/y", "c", "192.0.2.3", host=True)], "node c", "c"),
    "a pod that has ended": (
        "10.1.2.9", [pod("x/y", "a", "10.1.2.9", phase="Succeeded")], "address 10.1.2.9 on node b", "b"),
    "in the network of a node": ("10.1.3.9", [], "address 10.1.3.9 on node c", "c"),
    "elsewhere": ("198.51.100.1", [], "address 198.51.100.1", ""),
}


@pytest.mark.parametrize("name", SENDERS)
def test_an_address_is_a_node_s_a_pod_s_or_in_the_network_of_one(name: str) -> None:
    text, pods, what, node = SENDERS[name]
    sender = sender_at(parse_address(text), NODES, pods)
    assert (str(sender), sender.node) == (what, node)
    assert sender.addresses == (parse_address(text),)


OUTSIDE, NODE_B, FROM_CART = Sender("outside"), Sender.of_node(NODES[1]), Sender.of_pod(CART)
DECIDING = {
    "the pod's": (FROM_CART, "10.96.0.1:80", "a"),
    "the node itself": (NODE_B, "shop/web", "b"),
    "the node that is dialled": (OUTSIDE, "192.0.2.3:30080", "c"),
    "the node that a pod of another one dials": (FROM_CART, "192.0.2.3:30080", "c"),
    "any": (OUTSIDE, "203.0.113.1:80", ""),
    "any, for node ports": (OUTSIDE, "node:30080", ""),
    "any, for a Service": (OUTSIDE, "shop/web", ""),
    "the sender's, for its own node port": (NODE_B, "node:30080", "b"),
}


@pytest.mark.parametrize("name", DECIDING)
def test_the_node_that_decides_is_the_sender_s_or_the_one_that_is_dialled(name: str) -> None:
    sender, to, node = DECIDING[name]
    assert deciding(sender, parse_target(to), NODES) == node


def test_a_node_is_asked_about_the_sender_as_it_sees_it() -> None:
    host = Sender.of_pod(pod("x/y", "b", "192.0.2.2", host=True))
    assert OUTSIDE.word("a", ()) == "outside"
    assert (NODE_B.word("b", ()), NODE_B.word("c", ())) == ("node", "192.0.2.2")
    assert (host.word("b", ()), host.word("c", ())) == ("node", "192.0.2.2")
    assert FROM_CART.word("a", ()) == "10.1.1.9"
    assert FROM_CART.word("a", [Family.IPV6]) == "fd00::9"
    with pytest.raises(NoAnswer, match="node b has no IPv6 address"):
        NODE_B.word("c", [Family.IPV6])


WEB = service("shop/web", "http:80@30080", load_balancer_ips="203.0.113.1")
LOCAL = service("shop/web", "http:80@30080", load_balancer_ips="203.0.113.1", external_local=True)
ONE, TWO = endpoint("10.1.1.1", "a"), endpoint("10.1.2.1", "b")
BOTH = endpoint_slice("shop/web", ONE, TWO, ports=["http:8080"])
PODS = {"10.1.1.1": "web-1", "10.1.2.1": "web-2"}


def test_a_service_is_dialled_at_its_cluster_ip_from_inside_and_elsewhere_from_outside() -> None:
    packets = says("a", "shop/web", "10.1.1.9", WEB, BOTH).packets
    target = parse_target("shop/web")

    def kinds(sender: Sender) -> set[str]:
        return {packet["frontend"]["kind"] for packet in meant(packets, target, sender)}

    assert kinds(FROM_CART) == {"ClusterIP"}
    assert kinds(OUTSIDE) == {"node port", "load balancer IP"}
    assert meant(packets, parse_target("203.0.113.1"), FROM_CART) == packets
    assert meant(packets[:1], target, OUTSIDE) == packets[:1]
    assert services_of([Answered("a", packets), Answered("b", problem="x")]) == [ServiceName("shop", "web")]


def test_other_nodes_are_asked_about_the_same_frontend() -> None:
    for to in ("10.96.0.1:80", "node:30080"):
        (packet,) = says("a", to, "10.1.1.9", WEB, BOTH).packets
        assert on_any_node(packet) == f"{to}/TCP"


def asked(
    deciders: list[Answered], others: list[Answered], sender: Sender = FROM_CART, **more: Any
) -> Json:
    given = {"objects": held(WEB, BOTH, pods=PODS), "pods": {}, "policies": Policies(), "now": 0.0, **more}
    return explained(
        sender, "shop/web", deciders, {each.node: each for each in others},
        node_addresses=NODE_ADDRESSES, **given)


def problems(found: Json) -> list[str]:
    return [f"{each['node']}: {each['problem']}" for each in found["problems"]]


def test_the_way_from_the_dialling_pod_to_the_answering_ones_is_told() -> None:
    found = asked(
        [says("a", "10.96.0.1:80", "10.1.1.9", WEB, BOTH)], [says("b", "10.96.0.1:80", "pod", WEB, BOTH)])
    assert (found["from"], found["problems"]) == ("pod shop/cart on node a", [])
    (way,) = found["ways"]
    assert (way["nodes"], way["outcome"], way["kernel"]["verdict"]) == (["a"], "forwarded", "agrees")
    assert [(row["endpoint"], row["share"], row["pod"], row["node"], row["there"])
            for row in way["endpoints"]] == [
        ("10.1.1.1:8080", 0.5, "shop/web-1", "a", "ready"),
        ("10.1.2.1:8080", 0.5, "shop/web-2", "b", "ready"),
    ]
    assert found["objects"] == [{
        "service": "shop/web", "resource_version": "7", "seconds": None,
        "slices": [{"name": "web-1", "resource_version": "7", "seconds": None}]}]


LAGGING = endpoint_slice("shop/web", ONE, ports=["http:8080"])


def test_nodes_that_lag_are_problems_unless_the_change_is_young() -> None:
    changed = "1970-01-01T00:01:00Z"
    objects = held(WEB, BOTH, changed=changed)
    answers = ([says("a", "10.96.0.1:80", "10.1.1.9", WEB, BOTH)],
               [says("b", "10.96.0.1:80", "pod", WEB, LAGGING, version="6")])
    found = asked(*answers, objects=objects, now=100.0)
    assert problems(found) == [
        "b: knows resource version 6 of Service shop/web, and 7 is the newest",
        "b: knows an older EndpointSlice web-1: without 10.1.2.1:8080"]
    assert {each["seconds"] for each in found["problems"]} == {40.0}
    young = asked(*answers, objects=objects, now=61.0)
    assert (young["problems"], len(young["settling"])) == ([], 2)


def test_packets_that_do_not_arrive_come_first() -> None:
    down = endpoint_slice("shop/web", ONE._replace(ready=False, serving=False), ports=["http:8080"])
    found = asked(
        [says("a", "10.96.0.1:80", "10.1.1.9", WEB, down)], [], objects=held(WEB, BOTH))
    assert problems(found)[0] == (
        "a: packets to 10.96.0.1:80/TCP are refused: no endpoint is usable on any node")
    assert "knows an older EndpointSlice" in problems(found)[1]
    (row,) = found["ways"][0]["not_chosen"]
    assert (row["because"], row["node"], row["there"]) == ("not ready", "a", "not ready")


def test_what_the_kernel_does_otherwise_is_a_problem() -> None:
    drops = "nft table inet firewalld, chain filter_FORWARD, rule 12 drops it"
    found = asked([says("a", "10.96.0.1:80", "10.1.1.9", WEB, BOTH, filters=[drops])], [])
    assert problems(found) == [f"a: packets to 10.96.0.1:80/TCP: {drops}"]
    answered = says("a", "10.96.0.1:80", "10.1.1.9", WEB, BOTH)
    answered.packets[0]["kernel"].update(verdict="differs", differences=["endpoint 10.1.1.1:8080 is missing"])
    assert problems(asked([answered], [])) == [
        "a: packets to 10.96.0.1:80/TCP: the kernel differs: endpoint 10.1.1.1:8080 is missing"]


def test_an_endpoint_in_quarantine_on_its_own_node_is_a_problem() -> None:
    there = says("b", "10.96.0.1:80", "pod", WEB, BOTH)
    there.packets[0]["endpoints"].pop()
    there.packets[0]["not_chosen"].append(
        {"endpoint": "10.1.2.1:8080", "because": "in quarantine for 9 s: 4 of 4 ..."})
    found = asked([says("a", "10.96.0.1:80", "10.1.1.9", WEB, BOTH)], [there])
    assert problems(found) == ["b: endpoint 10.1.2.1:8080 is in quarantine for 9 s: 4 of 4 ..."]


def test_the_last_resort_of_the_endpoint_s_node_is_told() -> None:
    there = says("b", "10.96.0.1:80", "pod", WEB, BOTH)
    for each in there.packets[0]["slices"][0]["endpoints"]:
        each.update(ready=False, serving=False)
    resort = {**there.packets[0], "last_resort": {"seconds": 3.0, "left": 27.0}}
    there = Answered("b", [resort])
    found = asked([says("a", "10.96.0.1:80", "10.1.1.9", WEB, BOTH)], [there])
    assert found["ways"][0]["endpoints"][1]["there"] == "not ready, and used as the last resort"


def test_nodes_that_do_not_answer_are_named_last() -> None:
    found = asked([says("a", "10.96.0.1:80", "10.1.1.9", WEB, LAGGING)], [Answered("b", problem="timed out")])
    assert problems(found)[-1] == "b: timed out"
    assert found["ways"][0]["endpoints"][0]["there"] == "ready"
    gone = asked([Answered("a", problem="no kproxy pod runs here")], [])
    assert (problems(gone), gone["ways"]) == (["a: no kproxy pod runs here"], [])


def test_policies_are_named_that_select_an_endpoint_or_the_dialling_pod() -> None:
    def policy(name: str, namespace: str = "shop", **spec: Any) -> NetworkPolicy:
        meta = {"namespace": namespace, "name": name}
        return msgspec.convert({"metadata": meta, "spec": spec}, NetworkPolicy)

    policies = [
        policy("from-carts", podSelector={"matchLabels": {"app": "web"}}),
        policy("deny-all", podSelector={}, policyTypes=["Ingress", "Egress"]),
        policy("carts", podSelector={"matchExpressions": [
            {"key": "app", "operator": "In", "values": ["cart"]}]}, policyTypes=["Egress"]),
        policy("elsewhere", "other", podSelector={}),
    ]
    pods = {ServiceName("shop", "web-1"): pod("shop/web-1", "a", "10.1.1.1", app="web")}
    answers = [says("a", "10.96.0.1:80", "10.1.1.9", WEB, BOTH)]
    found = asked(answers, [], pods=pods, policies=Policies(policies))
    assert [row["policies"] for row in found["ways"][0]["endpoints"]] == [["deny-all", "from-carts"], []]
    assert found["egress_policies"] == ["carts", "deny-all"]
    host = {ServiceName("shop", "web-1"): pod("shop/web-1", "a", "10.1.1.1", host=True, app="web")}
    unselected = asked(answers, [], pods=host, policies=Policies(policies))
    assert unselected["ways"][0]["endpoints"][0]["policies"] == []
    refused = asked(answers, [], policies=Policies((), "refused"))
    assert (refused["problems"], refused["policies_problem"]) == ([], "refused")


def test_nodes_with_the_same_answer_are_told_together_and_the_odd_ones_first() -> None:
    def node(name: str, made: Any, *pieces: Any) -> Answered:
        return says(name, "node:30080", "outside", made, *pieces)

    found = asked([node("a", WEB, BOTH), node("b", WEB), node("c", WEB, BOTH)], [], OUTSIDE)
    assert [(way["nodes"], way["outcome"]) for way in found["ways"]] == [
        (["b"], "refused"), (["a", "c"], "forwarded")]
    assert problems(found)[0] == (
        "b: packets to node port 30080/TCP are refused: no endpoint is usable on any node")


def test_with_policy_local_nodes_without_endpoints_are_avoided_by_design() -> None:
    def node(name: str, *endpoints: Any) -> Answered:
        piece = endpoint_slice("shop/web", *endpoints, ports=["http:8080"])
        return says(name, "203.0.113.1:80", "outside", LOCAL, piece)

    only_one = endpoint_slice("shop/web", ONE, ports=["http:8080"])
    objects = held(LOCAL, only_one)
    found = asked([node("a", ONE), node("b", ONE), node("c", ONE)], [], OUTSIDE, objects=objects)
    assert found["problems"] == []
    assert [(way["nodes"], way["outcome"]) for way in found["ways"]] == [
        (["b", "c"], "dropped"), (["a"], "forwarded")]
    nowhere = asked([node("b", ONE)], [], OUTSIDE, objects=objects)
    assert "packets to 203.0.113.1:80/TCP are dropped" in problems(nowhere)[0]


def test_shares_that_differ_between_nodes_are_not_told() -> None:
    both = endpoint_slice("shop/web", ONE, TWO, ports=["http:8080"])
    answers = [says(name, "203.0.113.1:80", "outside", LOCAL, both) for name in ("a", "b")]
    found = asked(answers, [], OUTSIDE, objects=held(LOCAL, both))
    (way,) = found["ways"]
    assert [(row["endpoint"], row["share"]) for row in way["endpoints"]] == [
        ("10.1.1.1:8080", None), ("10.1.2.1:8080", None)]
    half = [says("a", "10.96.0.1:80", "pod", WEB, both), says("b", "10.96.0.1:80", "pod", WEB, LAGGING)]
    (way,) = asked(half, [], OUTSIDE)["ways"]
    assert [row["share"] for row in way["endpoints"]] == [None, None]


def test_packets_to_no_service_have_no_endpoints() -> None:
    found = asked([says("a", "198.51.100.9:80", "10.1.1.9", WEB, BOTH)], [])
    assert problems(found) == [
        "a: packets to 198.51.100.9:80/TCP are not touched: no Service has a frontend there"]
    assert (found["ways"][0]["frontend"], found["ways"][0]["endpoints"]) == (None, [])
