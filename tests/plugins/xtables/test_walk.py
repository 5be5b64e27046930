"""The way of packets through iptables rules."""

from collections.abc import Container

import pytest
from msgspec.structs import replace

from kproxy_conformance.builders import node_view
from kproxy_core.contract.values import Question
from kproxy_core.model.address import Address, Protocol, format_socket, parse_address
from kproxy_core.model.node import LocalSource
from kproxy_core.plan.fate import Origin, Outcome, Packet
from kproxy_xtables.walk import Ruleset, Walk

PACKET = Packet(
    Origin.OUTSIDE, parse_address("198.51.100.7"), parse_address("10.96.0.1"), Protocol.TCP, 80)
QUESTION = Question(PACKET, node_view(), None, None)
SERVICES = ["-m comment --comment services -j SERVICES"]
DNAT = "-p tcp -m tcp -j DNAT --to-destination 10.1.1.1:8080"


def walk_of(chains: dict[str, list[str]], bridged: Container[Address | None] = ()) -> Walk:
    rules = {("nat", chain): rules for chain, rules in chains.items()}
    return Walk(Ruleset(rules), QUESTION, bridged=bridged)


def ends(walk: Walk) -> list[tuple[float, str]]:
    """Return the share and the end of each way through hook prerouting."""
    passed = walk.enter(walk.start())
    found = [(end.branch, end.fate.value) for end in walk.ends]
    found += [
        (branch, format_socket(flow.destination, flow.port)) for branch in passed
        if (flow := branch.seen.packet.flow).destination is not None and flow.port is not None]
    return [(round(branch.chance.share, 3), text) for branch, text in found]


WAYS = {
    "no rule matches": (["-d 10.96.0.2/32 -j DROP"], [(1.0, "10.96.0.1:80")]),
    "the first match decides": (["-d 10.96.0.1/32 -j DROP", DNAT], [(1.0, "dropped")]),
    "a negated match": (["! -s 198.51.100.0/24 -j DROP", DNAT], [(1.0, "10.1.1.1:8080")]),
    "return ends the chain": (["-p tcp -j RETURN", DNAT], [(1.0, "10.96.0.1:80")]),
    "chance": (
        ["-m statistic --mode random --probability 0.25 -j DROP", DNAT],
        [(0.25, "dropped"), (0.75, "10.1.1.1:8080")]),
    "chance that returns": (
        ["-m statistic --mode random --probability 0.25 -j RETURN", DNAT],
        [(0.75, "10.1.1.1:8080"), (0.25, "10.96.0.1:80")]),
    "a chain that comes back": (["-j OTHER", DNAT], [(1.0, "10.1.1.1:8080")]),
    "a goto does not come back": (["-g OTHER", DNAT], [(1.0, "10.96.0.1:80")]),
    "a mark is kept on the way back": (
        ["-j MARKING", "-m mark --mark 0x4000/0x4000 -j REJECT --reject-with icmp-port-unreachable"],
        [(1.0, "rejected")]),
    "a long chain": (
        [*(f"-d 10.96.1.{n}/32 -p tcp -m tcp --dport 80 -j DROP" for n in range(100)),
         "-p tcp -m tcp --dport 81 -j DROP", "-d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j OTHER", DNAT],
        [(1.0, "10.1.1.1:8080")]),
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_a_packet_takes_the_way_of_the_rules(name: str) -> None:
    rules, expected = WAYS[name]
    chains = {
        "PREROUTING": SERVICES, "SERVICES": rules, "OTHER": ["-p udp -j DROP"],
        "MARKING": ["-j MARK --set-xmark 0x4000/0x4000"],
    }  # fmt: skip
    assert ends(walk_of(chains)) == expected


def test_rules_of_other_tools_in_built_in_chains_are_not_followed() -> None:
    walk = walk_of({"PREROUTING": ["-j DROP", *SERVICES], "SERVICES": [DNAT]})
    assert ends(walk) == [(1.0, "10.1.1.1:8080")]


FIREWALLD = {
    ("filter", "FORWARD"): [
        "-m comment --comment rules -j KUBE-FORWARD",
        "-m conntrack --ctstate RELATED,ESTABLISHED,DNAT -j ACCEPT", "-m conntrack --ctstate INVALID -j DROP",
        "-j FORWARD_direct", "-j FORWARD_ZONES", "-j REJECT --reject-with icmp-host-prohibited"],
    ("filter", "FORWARD_ZONES"): ["-g FWD_public"],
    ("filter", "FWD_public"): ["-j FWD_public_pre", "-j REJECT --reject-with icmp-host-prohibited"],
    ("filter", "KUBE-FORWARD"): ["-m mark --mark 0x4000/0x4000 -j DROP"],
}
"""Of firewalld 1.3.3 with FirewallBackend=iptables, and a chain of a service proxy."""


@pytest.mark.parametrize(("mark", "outcome"), [("0x0", None), ("0x4000", Outcome.DROPPED)])
def test_chains_of_a_firewall_decide_nothing(mark: str, outcome: Outcome | None) -> None:
    chains = {**FIREWALLD, ("nat", "PREROUTING"): SERVICES, ("nat", "SERVICES"): [
        f"-j MARK --set-xmark {mark}/0x4000", DNAT]}
    walk = Walk(Ruleset(chains, for_many=True), QUESTION)
    (branch,) = walk.enter(walk.start())
    for _ in range(2):  # Such packets are followed once.
        ended = walk.rest(branch).ended
        assert (ended and ended.outcome) == outcome


@pytest.mark.parametrize(
    ("rule", "bridged", "expected"),
    [
        ("-m physdev ! --physdev-is-in", False, "10.1.1.1:8080"),
        ("-m physdev ! --physdev-is-in", True, "10.96.0.1:80"),
        ("-m physdev --physdev-is-in", False, "10.96.0.1:80"),
        ("-m physdev --physdev-is-in", True, "10.1.1.1:8080"),
    ],
)  # fmt: skip
def test_a_packet_is_on_a_bridge_port_if_its_sender_is_bridged(
    rule: str, bridged: bool, expected: str
) -> None:
    chains = {"PREROUTING": SERVICES, "SERVICES": [f"{rule} {DNAT}"]}
    assert ends(walk_of(chains, {PACKET.source} if bridged else ())) == [(1.0, expected)]


UNKNOWN = {
    "a match that decides": (["-m ttl --ttl-eq 7 -j DROP"], False),
    "a match that decides nothing": (["-m ttl --ttl-eq 7"], True),
    "a target": (["-j XYZ --to-somewhere"], False),
    "a target that other packets meet": (["-p udp -j XYZ --to-somewhere"], True),
    "another type of address": (["-m addrtype --dst-type BLACKHOLE -j DROP"], False),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_makes_the_result_uncertain_if_it_decides(name: str) -> None:
    rules, is_certain = UNKNOWN[name]
    walk = walk_of({"PREROUTING": SERVICES, "SERVICES": [*rules, DNAT]})
    walk.enter(walk.start())
    assert walk.is_certain is is_certain
    assert any("not understood" in each.text for each in walk.objects) or "other" in name


@pytest.mark.parametrize(("rule", "outcome"), [
    ("-i cali+ -j DROP", "dropped"), ("-i cali0 -j DROP", "dropped"), ("-i eth0 -j DROP", "10.1.1.1:8080"),
    ("! -i cali+ -j DROP", "10.1.1.1:8080"),
])  # fmt: skip
def test_pods_send_by_their_interface(rule: str, outcome: str) -> None:
    node = replace(node_view(), local_source=LocalSource(interface_prefix="cali"))
    asked = Question(PACKET._replace(origin=Origin.POD), node, None, None)
    rules = {("nat", "PREROUTING"): SERVICES, ("nat", "SERVICES"): [rule, DNAT]}
    assert ends(Walk(Ruleset(rules), asked)) == [(1.0, outcome)]


def test_a_client_in_a_list_is_followed_as_a_new_one_unless_it_is_pinned() -> None:
    class Listed(Ruleset):
        def is_recent(self, name: str, source: Address) -> bool:
            return name == "B"

    last = [f"-m recent --rcheck --seconds 9 --reap --name {name} --mask 255.255.255.255 --rsource -j {name}"
            for name in "AB"]
    ruleset = Listed({
        ("nat", "PREROUTING"): SERVICES, ("nat", "SERVICES"): [*last, "-j A"], ("nat", "A"): [DNAT],
        ("nat", "B"): [DNAT.replace("10.1.1.1", "10.1.1.2")]})
    new, pinned = Walk(ruleset, QUESTION), Walk(ruleset, QUESTION, is_pinned=True)
    assert ends(new) == [(1.0, "10.1.1.1:8080")]
    assert ends(pinned) == [(1.0, "10.1.1.2:8080")]
    assert [each.where for each in new.objects if each.text == "holds the sender"] == ["list B"]
