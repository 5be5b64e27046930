"""The way of packets through iptables rules."""

import pytest

from kproxy_conformance.builders import node_view
from kproxy_core.model.address import Protocol, format_socket, parse_address
from kproxy_core.plan.fate import Origin, Outcome, Packet
from kproxy_xtables.walk import Ruleset, Skb, Walk

PACKET = Packet(
    Origin.OUTSIDE, parse_address("198.51.100.7"), parse_address("10.96.0.1"), Protocol.TCP, 80)
SERVICES = ["-m comment --comment services -j SERVICES"]
DNAT = "-p tcp -m tcp -j DNAT --to-destination 10.1.1.1:8080"


def ends(chains: dict[str, list[str]]) -> list[tuple[float, str]]:
    """Return the share and the end of each way through the nat table."""
    rules = {("nat", chain): rules for chain, rules in chains.items()}
    found = Walk(Ruleset(rules), node_view()).through("nat", "PREROUTING", Skb.of(PACKET))
    return [
        (round(end.share, 3), end.outcome.value if end.outcome else format_socket(*end.skb.where))
        for end in found
    ]


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
        [(0.25, "10.96.0.1:80"), (0.75, "10.1.1.1:8080")]),
    "a chain that comes back": (["-j OTHER", DNAT], [(1.0, "10.1.1.1:8080")]),
    "a goto does not come back": (["-g OTHER", DNAT], [(1.0, "10.96.0.1:80")]),
    "a mark is kept on the way back": (
        ["-j MARKING", "-m mark --mark 0x4000/0x4000 -j REJECT --reject-with icmp-port-unreachable"],
        [(1.0, "refused")]),
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
    assert ends(chains) == expected


def test_rules_of_other_tools_in_built_in_chains_are_not_followed() -> None:
    assert ends({"PREROUTING": ["-j DROP", *SERVICES], "SERVICES": [DNAT]}) == [(1.0, "10.1.1.1:8080")]


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


@pytest.mark.parametrize(("mark", "outcome"), [(0, None), (0x4000, Outcome.DROPPED)])
@pytest.mark.parametrize("for_many", [False, True])
def test_chains_of_a_firewall_decide_nothing(*, for_many: bool, mark: int, outcome: Outcome | None) -> None:
    walk = Walk(Ruleset(FIREWALLD, for_many=for_many), node_view())
    skb = Skb.of(PACKET)._replace(translated=True, mark=mark)
    assert walk.onward((("filter", "FORWARD"),), skb) == (outcome, False)


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
    rules = {("nat", "PREROUTING"): SERVICES, ("nat", "SERVICES"): [f"{rule} {DNAT}"]}
    walk = Walk(Ruleset(rules), node_view(), bridged={PACKET.source} if bridged else ())
    (end,) = walk.through("nat", "PREROUTING", Skb.of(PACKET))
    assert format_socket(*end.skb.where) == expected
