"""Questions about packets: the decision, the endpoints left out, near names, and the verdict."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from kproxy_conformance.builders import (
    addresses,
    destinations,
    endpoint,
    endpoint_slice,
    node_view,
    plans,
    port_spec,
    service,
)
from kproxy_core.app.errors import NoAnswer
from kproxy_core.app.explain import (
    Case,
    InterfaceTowards,
    Json,
    answer,
    cases,
    decide_case,
    parse_sender,
    parse_target,
    with_relay,
)
from kproxy_core.cli.explain import as_text
from kproxy_core.contract.values import KernelObject, KernelSide
from kproxy_core.model.address import Address, Family, Protocol, parse_address
from kproxy_core.model.node import LocalSource, NodeView
from kproxy_core.model.service import Endpoint, EndpointSlice, Service, ServiceName, ServicePortKey
from kproxy_core.plan.endpoints import Candidates, endpoints_of
from kproxy_core.plan.fate import EndpointShare, Fate, Outcome
from kproxy_core.plan.last_resort import LastResort
from kproxy_core.plan.quarantine import Sentence
from kproxy_core.plan.service_plan import Frontend, ServicePlan

NODE = node_view(
    "node1", zone="a", pods="10.1.0.0/16", node_port_addresses="192.0.2.10", ip="192.0.2.10",
    service_cidrs="10.96.0.0/16",
)  # fmt: skip


@dataclass
class Known:
    """The plans of one node."""

    node: NodeView = NODE
    plans: dict[ServicePortKey, ServicePlan] = field(default_factory=dict)
    pieces: dict[ServicePortKey, Candidates] = field(default_factory=dict)
    all_slices: tuple[EndpointSlice, ...] = ()
    addresses: frozenset[Address] = frozenset()
    now: float = 0.0
    resort: LastResort | None = None
    problem: str = ""
    """Of relays."""
    unserved: Mapping[ServicePortKey, str] = field(default_factory=dict)
    pending: Mapping[ServicePortKey, ServicePlan | None] = field(default_factory=dict)
    loopback: Address | None = None
    """The address of loopback where the mode serves node ports."""

    def serve(self, made: Service, *pieces: EndpointSlice) -> None:
        found = plans(self.node, made, *pieces)
        self.all_slices = pieces
        self.plans |= found
        for port, key in zip(made.ports, found, strict=True):
            self.pieces[key] = endpoints_of(port, {piece.name.name: piece for piece in pieces})

    def owner(self, frontend: Frontend) -> ServicePlan | None:
        return next((plan for plan in self.plans.values() if frontend in plan.frontends()), None)

    def candidates(self, key: ServicePortKey) -> Candidates:
        return self.pieces[key]

    def slices(self, service: ServiceName) -> tuple[EndpointSlice, ...]:
        return self.all_slices

    def last_resort(self, service: ServiceName) -> LastResort | None:
        return self.resort

    def origin(self, service: ServiceName) -> str:
        return f"file {service.name}.yaml"

    def relay_problem(self, key: ServicePortKey) -> str:
        return self.problem

    def serves_on_loopback(self, node: NodeView, address: Address, protocol: Protocol) -> bool:
        return address == self.loopback

    def wants_relays(self, family: Family, protocol: Protocol) -> bool:
        return True


def known(*endpoints: Endpoint | str, **options: object) -> Known:
    made = Known()
    made.serve(
        service("shop/web", "http:80@30080", external_ips="203.0.113.1", load_balancer_ips="203.0.113.2",
                **options),  # type: ignore[arg-type]
        endpoint_slice("shop/web", *endpoints, ports=["http:8080"]),
    )  # fmt: skip
    return made


HERE, THERE = endpoint("10.1.1.1", "node1"), endpoint("10.1.2.1", "node2")


def asked(
    of: Known, to: str, sender: str = "", origin: str = "",
    interface_towards: InterfaceTowards | None = None,
) -> list[Case]:  # fmt: skip
    return cases({Family.IPV4: of}, parse_target(to), parse_sender(sender, origin), interface_towards, of)


def only(of: Known, to: str, sender: str) -> Json:
    (case,) = asked(of, to, sender)
    return answer(case, None, mode="test", live=False)


FATES: dict[str, tuple[dict[str, object], str, str, str, str]] = {
    # service options, target, sender: outcome, endpoints with * where the client is hidden
    "pod to ClusterIP": ({}, "10.96.0.1:80", "10.1.9.9", "forwarded", "10.1.1.1 10.1.2.1"),
    "node to ClusterIP": ({}, "10.96.0.1:80", "node", "forwarded", "10.1.1.1* 10.1.2.1*"),
    "hairpin": ({}, "10.96.0.1:80", "10.1.1.1", "forwarded", "10.1.1.1* 10.1.2.1"),
    "no hairpin on another node": ({}, "10.96.0.1:80", "10.1.2.1", "forwarded", "10.1.1.1 10.1.2.1"),
    "outside to node port": ({}, "node:30080", "198.51.100.1", "forwarded", "10.1.1.1* 10.1.2.1*"),
    "pod to external IP": ({}, "203.0.113.1:80", "pod", "forwarded", "10.1.1.1* 10.1.2.1*"),
    "internal Local": ({"internal_local": True}, "10.96.0.1:80", "pod", "forwarded", "10.1.1.1"),
    "external Local, outside": ({"external_local": True}, "node:30080", "outside", "forwarded", "10.1.1.1"),
    "external Local, pod": (
        {"external_local": True}, "node:30080", "pod", "forwarded", "10.1.1.1 10.1.2.1"),
    "external Local, node": (
        {"external_local": True}, "node:30080", "node", "forwarded", "10.1.1.1* 10.1.2.1*"),
    "admitted": (
        {"source_ranges": "198.51.100.0/24"}, "203.0.113.2:80", "198.51.100.1", "forwarded",
        "10.1.1.1* 10.1.2.1*"),
    "not admitted": ({"source_ranges": "198.51.100.0/24"}, "203.0.113.2:80", "pod", "dropped", ""),
    "ranges are for load balancers": (
        {"source_ranges": "198.51.100.0/24"}, "203.0.113.1:80", "outside", "forwarded",
        "10.1.1.1* 10.1.2.1*"),
    "another port of a ClusterIP": ({}, "10.96.0.1:81", "pod", "refused", ""),
    "an unused ClusterIP": ({}, "10.96.0.9:80", "pod", "dropped", ""),
    "another protocol": ({}, "node:30080/udp", "outside", "not touched", ""),
    "nobody": ({}, "198.51.100.9:80", "pod", "not touched", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", FATES)
def test_a_packet_s_fate_follows_from_policies_and_sender(name: str) -> None:
    options, to, sender, outcome, expected = FATES[name]
    found = only(known(HERE, THERE, **options), to, sender)
    assert found["outcome"] == outcome
    assert " ".join(
        e["endpoint"].removesuffix(":8080") + "*" * e["masqueraded"] for e in found["endpoints"]) == expected


ORIGINS = {
    # way of recognising pods, interface to which the route to the sender leads (None: not asked): origin
    "a pod behind the interface": (LocalSource(interface="br0"), "10.9.9.9", "br0", "pod"),
    "a pod behind one of the interfaces": (LocalSource(interface_prefix="veth"), "10.9.9.9", "veth7", "pod"),
    "an endpoint behind another": (LocalSource(interface_prefix="veth"), "10.1.1.1", "br0", "outside"),
    "no route": (LocalSource(interface_prefix="veth"), "10.1.1.1", "", "outside"),
    "an endpoint, on another machine": (LocalSource(interface="br0"), "10.1.1.1", None, "pod"),
    "another address, on another machine": (LocalSource(interface="br0"), "10.9.9.9", None, "outside"),
    "pods not recognised": (None, "10.1.1.1", "br0", "outside"),
    "another address of the node": (NODE.local_source, "192.0.2.20", None, "node"),
    "the node's address among the pods'": (NODE.local_source, "10.1.0.1", None, "node"),
    "the node, with an interface for pods": (LocalSource(interface="br0"), "192.0.2.10", "lo", "node"),
    "the address that is dialled": (NODE.local_source, "10.96.0.1", None, "node"),
    "loopback": (NODE.local_source, "127.0.0.9", None, "node"),
}  # fmt: skip


@pytest.mark.parametrize("name", ORIGINS)
def test_a_sender_s_origin_follows_from_its_address_and_the_way_to_it(name: str) -> None:
    local, sender, interface, origin = ORIGINS[name]
    of = known(HERE)
    of.node, of.addresses = replace(NODE, local_source=local), frozenset(addresses("192.0.2.20 10.1.0.1"))
    (case,) = asked(of, "10.96.0.1:80", sender, "", None if interface is None else lambda _: interface)
    assert case.question.packet.origin.value == origin


SECOND = "192.0.2.20"
SEEN = {
    # endpoints, target, sender: those that see the node; the sentence about the source
    "outside, on the node": (["192.0.2.10"], "203.0.113.1:80", "198.51.100.1", "", "kept: endpoints see"),
    "outside, on the node's second address": (
        [SECOND], "203.0.113.1:80", "198.51.100.1", "", "kept: endpoints see"),
    "outside, ClusterIP": (["192.0.2.10"], "10.96.0.1:80", "198.51.100.1", "", "kept: endpoints see"),
    "pod, external IP": (["192.0.2.10"], "203.0.113.1:80", "10.1.9.9", "", "kept: endpoints see"),
    "one here, one elsewhere": (
        ["192.0.2.10", "192.0.2.11"], "203.0.113.1:80", "198.51.100.1", "192.0.2.11:8080",
        "masqueraded to .*; kept by 192.0.2.10:8080, which is on the node's own network"),
    "the node": (["192.0.2.10"], "203.0.113.1:80", "node", "192.0.2.10:8080", "kept, except by"),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_packets_that_end_on_the_node_keep_their_source(name: str) -> None:
    ends, to, sender, hidden, sentence = SEEN[name]
    of = known(*(endpoint(address, "node1") for address in ends))
    of.addresses = frozenset(addresses(f"192.0.2.10 {SECOND}"))
    found = only(of, to, sender)
    assert " ".join(each["endpoint"] for each in found["endpoints"] if each["masqueraded"]) == hidden
    assert re.match(sentence, found["source"]), found["source"]


def test_without_endpoints_packets_are_refused_and_without_local_ones_dropped() -> None:
    assert only(known(), "10.96.0.1:80", "pod")["outcome"] == "refused"
    found = only(known(THERE, external_local=True), "node:30080", "outside")
    assert (found["outcome"], found["not_chosen"]) == ("dropped", [
        {"endpoint": "10.1.2.1:8080", "because": "on node node2, and the policy is Local"}])


LEFT_OUT = {
    "not ready": endpoint("10.1.1.2", ready=False),
    "terminating, and not serving any more": endpoint(
        "10.1.1.2", ready=False, serving=False, terminating=True),
    "terminating; a ready endpoint exists": endpoint(
        "10.1.1.2", ready=False, serving=True, terminating=True),
    "its hints assign it to zone b; this node is in a": endpoint("10.1.1.2", zones="b"),
    "its hints assign it to node node2": endpoint("10.1.1.2", nodes="node2"),
}  # fmt: skip


@pytest.mark.parametrize("because", LEFT_OUT)
def test_the_reason_is_given_for_each_endpoint_that_is_not_chosen(because: str) -> None:
    used = endpoint("10.1.1.1", "node1", zones="a", nodes="node1")
    found = only(known(used, LEFT_OUT[because]), "10.96.0.1:80", "pod")
    assert found["not_chosen"] == [{"endpoint": "10.1.1.2:8080", "because": because}]


def test_slices_are_told_as_the_api_server_has_them() -> None:
    made = Known()
    made.serve(
        service("shop/web", "http:80", "admin:81"),
        endpoint_slice("shop/web", endpoint("10.1.1.1", "node1", zones="a"), name="web-1", weight=50,
                       ports=["http:8080", "admin:8081"]),
        endpoint_slice("shop/web", endpoint("10.1.1.2", ready=False, terminating=True), name="web-2",
                       ports=["admin:8081"]),
    )  # fmt: skip
    found = only(made, "10.96.0.1:81", "pod")["slices"]
    assert found[0] == {"name": "web-1", "weight": 50, "endpoints": [{
        "endpoint": "10.1.1.1:8081", "node": "node1", "ready": True, "serving": True, "terminating": False,
        "for_zones": ["a"], "for_nodes": []}]}
    assert (found[1]["endpoints"][0]["ready"], found[1]["endpoints"][0]["terminating"]) == (False, True)
    assert [len(each["endpoints"]) for each in only(made, "10.96.0.1:80", "pod")["slices"]] == [1, 0]
    assert only(made, "10.96.0.1:82", "pod")["slices"] == []


def test_the_last_resort_counts_as_ready_and_its_age_is_told() -> None:
    of = known(endpoint("10.1.1.1", "node1"), endpoint("10.1.2.1", "node2"), internal_local=True)
    down = endpoint_slice(
        "shop/web", *(endpoint(where, node, ready=False) for where, node in (
            ("10.1.1.1", "node1"), ("10.1.1.3", "node1"), ("10.1.2.1", "node2"))), ports=["http:8080"])
    of.pieces = {key: endpoints_of(port_spec("http:8080"), {"a": down}) for key in of.pieces}
    of.now, of.resort = 112.0, LastResort(100.0, 130.0, frozenset(addresses("10.1.1.1 10.1.2.1")))
    found = only(of, "10.96.0.1:80", "pod")
    assert [each["endpoint"] for each in found["endpoints"]] == ["10.1.1.1:8080"]
    assert found["not_chosen"] == [
        {"endpoint": "10.1.1.3:8080", "because": "not ready"},
        {"endpoint": "10.1.2.1:8080", "because": "on node node2, and the policy is Local"},
    ]
    assert found["last_resort"] == {"seconds": 12.0, "left": 18.0}
    assert "last resort for 12 s: no endpoint is ready (18 s left)" in as_text({"packets": [found]})


def test_a_service_says_what_happens_to_connections_to_endpoints_that_it_has_lost() -> None:
    assert only(known(HERE), "10.96.0.1:80", "pod")["removed_endpoints"] == "keep"
    found = only(known(HERE, removed_endpoints="reset"), "10.96.0.1:80", "pod")
    assert found["removed_endpoints"] == "reset"


def test_an_endpoint_in_quarantine_is_told_with_its_attempts() -> None:
    of = known("10.1.2.1", "10.1.2.2")
    (where,) = destinations("10.1.2.2:8080")
    of.plans = {
        key: replace(plan, cluster=plan.cluster[:1], quarantined=((where, Sentence(100.0, 5)),))
        for key, plan in of.plans.items()
    }
    of.now = 112.3
    assert only(of, "10.96.0.1:80", "pod")["not_chosen"] == [
        {"endpoint": "10.1.2.2:8080",
         "because": "in quarantine for 12 s: 5 of 5 attempts unanswered"}]


def test_weights_are_shares_and_those_of_zero_a_reason() -> None:
    made = Known()
    made.serve(service("shop/web", hash_by="client"), *(
        endpoint_slice("shop/web", f"10.1.1.{n}", name=f"web-{n}", weight=weight)
        for n, weight in ((1, 60), (2, 20), (3, 0))))
    found = only(made, "10.96.0.1:80", "pod")
    assert found["because"] == "internal traffic policy Cluster; a hash of the client's address decides"
    assert {each["endpoint"]: round(each["share"], 2) for each in found["endpoints"]} == {
        "10.1.1.1:8080": 0.75, "10.1.1.2:8080": 0.25}
    assert found["not_chosen"] == [{"endpoint": "10.1.1.3:8080", "because": "weight 0: no new connections"}]


def test_a_service_is_asked_about_at_all_its_frontends_by_senders_of_every_origin() -> None:
    found = asked(known(HERE), "shop/web")
    assert {case.question.packet.port for case in found} == {80, 30080}
    assert len(found) == 4 * 3


ERRORS = {
    "shop/wbe": "near names: shop/web",
    "other/web": "near names: shop/web",
    "shop/web:https": "has no port 'https', but 'http'",
    "wbe": "no Service wbe .*; near names: shop/web",
    "web:https": "Service web has no port 'https', but 'http' [(]80/TCP[)]",
    "web:81": "Service web has no port '81', but 'http'",
    "web:80/udp": "Service web has no port '80/UDP', but 'http'",
    "web:80/icmp": "'icmp' is not tcp, udp or sctp",
    "10.96.0.7": "no Service has a frontend at 10.96.0.7",
    "10.96.0.1:": "is not a target",
    "10.96.0.1:80/icmp": "'icmp' is not tcp, udp or sctp",
    "10.96.0.1:70000": "70000 is not a port",
    "10.96.0.999:80": "is not an IP address",
    "[fd00::1]:80": "IPv6 is not served",
}


@pytest.mark.parametrize("to", ERRORS)
def test_a_question_without_answer_names_a_remedy(to: str) -> None:
    with pytest.raises(NoAnswer, match=ERRORS[to]):
        asked(known(HERE), to)


@pytest.mark.parametrize(
    "to", ["web", "web:http", "web:80", "shop/web", "shop/web:80", "shop/web:http/tcp", "web:80/TCP"])
def test_the_namespace_and_the_port_may_be_left_out(to: str) -> None:
    assert [case.question for case in asked(known(HERE), to)] == [
        case.question for case in asked(known(HERE), "shop/web")]


def test_an_address_without_a_port_means_all_its_frontends() -> None:
    assert {case.question.packet.port for case in asked(known(HERE), "10.96.0.1")} == {80}
    node = asked(known(HERE), "192.0.2.10")
    assert {case.question.packet.port for case in node} == {30080}


@pytest.mark.parametrize("problem", ["", "shop/web:http is not served on 127.0.0.1:30080: it is in use"])
def test_a_relay_serves_a_node_port_on_loopback_unless_it_does_not_listen(problem: str) -> None:
    of = known(HERE)
    of.node, of.problem = replace(NODE, relays_node_ports=True), problem
    (case,) = asked(of, "127.0.0.1:30080")
    found = with_relay(case, side(Fate(Outcome.UNTOUCHED, "")), of.wants_relays)
    assert found.fate is not None
    assert found.fate.outcome is (Outcome.UNTOUCHED if problem else Outcome.FORWARDED)
    told = answer(case, found, mode="test", live=True)
    assert told["outcome"] == "forwarded"
    assert told["kernel"]["verdict"] == ("differs" if problem else "agrees")
    assert told["kernel"]["objects"][-1]["text"] == problem or not problem


@pytest.mark.parametrize(("requested", "to", "outcome"), [
    (True, "127.0.0.1:30080", "forwarded"), (True, "127.0.0.2:30080", "not touched"),
    (True, "127.0.0.1:30081", "not touched"), (True, "127.0.0.1:30080/udp", "not touched"),
    (False, "127.0.0.1:30080", "not touched"),
])  # fmt: skip
def test_a_mode_tells_whether_it_serves_node_ports_on_loopback(
    requested: bool, to: str, outcome: str
) -> None:
    of = known(HERE)
    of.node = replace(NODE, node_ports_on_loopback=requested)
    of.loopback = parse_address("127.0.0.1")
    for sender in ("", "node", "127.0.0.1", "192.0.2.10"):
        (case,) = asked(of, to, sender)
        told = answer(case, None, mode="test", live=False)
        assert (told["origin"], told["outcome"]) == ("node", outcome)
    for sender in ("pod", "outside", "10.1.1.1"):
        with pytest.raises(NoAnswer, match="only the node can send them here"):
            asked(of, to, sender)


def test_the_nearest_frontends_of_an_address_are_named() -> None:
    assert only(known(HERE), "10.96.0.1:81", "pod")["near"] == "10.96.0.1 serves 80/TCP of shop/web:http"
    assert "no Service has it" in only(known(HERE), "10.96.0.9:80", "pod")["near"]


def test_senders_are_checked() -> None:
    assert parse_sender("pod") == parse_sender("", "pod")
    for wrong in (("pod", "node"), ("elsewhere", ""), ("", "mars")):
        with pytest.raises(NoAnswer):
            parse_sender(*wrong)


def side(fate: Fate | None, deviation: str = "") -> KernelSide:
    return KernelSide((KernelObject("chain a", "rule"),), fate, deviation=deviation)


def forwarded(text: str, *, hidden: bool = False, shares: Sequence[float] = (0.5, 0.5)) -> Fate:
    ends = zip(destinations(text), shares, strict=True)
    return Fate(Outcome.FORWARDED, "", tuple(EndpointShare(where, share, hidden) for where, share in ends))


BOTH = "10.1.1.1:8080 10.1.2.1:8080"
VERDICTS = {
    "the same": (forwarded(BOTH), "agrees", ""),
    "another order": (forwarded("10.1.2.1:8080 10.1.1.1:8080"), "agrees", ""),
    "masqueraded": (forwarded(BOTH, hidden=True), "differs", "sees an address of the node"),
    "one missing": (forwarded("10.1.1.1:8080", shares=[1.0]), "differs", "10.1.2.1:8080 is missing"),
    "a stranger": (forwarded(f"{BOTH} 10.1.3.1:80", shares=[0.5, 0.5, 0.0]), "differs", "should not"),
    "unfair": (forwarded(BOTH, shares=[0.9, 0.1]), "differs", "90.0%"),
    "a hole": (forwarded(BOTH, shares=[0.5, 0.25]), "differs", "25% of new connections find no endpoint"),
    "refused": (Fate(Outcome.REFUSED, ""), "differs", "is refused, and should be forwarded"),
    "uncertain": (None, "cannot be told", "not every rule"),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_the_kernel_is_judged(name: str) -> None:
    fate, verdict, difference = VERDICTS[name]
    (case,) = asked(known(HERE, THERE), "10.96.0.1:80", "10.1.9.9")
    assert decide_case(case).outcome is Outcome.FORWARDED
    found = answer(case, side(fate), mode="test", live=True)["kernel"]
    assert found["verdict"] == verdict
    assert difference in "; ".join(found["differences"])
    if fate is not None and verdict == "differs":
        meant = answer(case, side(fate, "by design"), mode="test", live=True)["kernel"]
        assert (meant["verdict"], meant["differences"][0]) == ("deviates by design", "by design")


def test_an_endpoint_that_is_remembered_must_be_one_that_may_be_chosen() -> None:
    (case,) = asked(known(HERE, THERE, affinity=60), "10.96.0.1:80", "10.1.9.9")
    (pinned,) = destinations("10.1.3.1:80")
    found = answer(case, KernelSide((), forwarded(BOTH), pinned), mode="test", live=True)
    assert found["affinity"] == {"seconds": 60, "remembered": "10.1.3.1:80"}
    assert "pinned to 10.1.3.1:80" in found["kernel"]["differences"][0]
