"""The rules of the nftables mode, and of kube-proxy, which the interpreter follows as the plans say."""

from collections import defaultdict
from collections.abc import Sequence

import pytest

from kproxy_core.contract.values import Question
from kproxy_core.model.address import Address, Family
from kproxy_core.model.node import LocalSource
from kproxy_core.model.service import Destination
from kproxy_core.netlink.messages import NETLINK_NETFILTER
from kproxy_core.netlink.sockets import NetlinkSocket
from kproxy_core.nft import interpret as nft
from kproxy_core.nft.elements import Element, PlainElement, elements_of
from kproxy_core.nft.expressions import BaseChain, Elements, HeldSet, Ruleset
from kproxy_core.nft.objects import Chain, Container, Layout
from kproxy_core.nft.packet import (
    LOOPBACK,
    NO_INTERFACE,
    RTN_LOCAL,
    RTN_UNICAST,
    Flow,
    Interface,
    Node,
    Number,
    Packet,
    Route,
    Seen,
    Status,
)
from kproxy_core.nft.rules import HeldRule, rule_expressions, type_of
from kproxy_core.nft.ruleset import ListedRuleset
from kproxy_core.plan.fate import EndpointShare, Fate, Origin, Outcome, is_own
from kproxy_nftables import skeleton
from kproxy_nftables.names import TABLE
from kproxy_nftables.settings import DEFAULTS, Settings
from kproxy_nftables.wanted import elements, node_elements, shared_elements
from tests.plugins.explained import decided, essence, questions, questions_about, serving
from tests.plugins.iptables import golden_cases
from tests.plugins.nftables.test_beside_kube_proxy import beside_kube_proxy


class WrittenRuleset:
    """A table as it would be written, with elements."""

    def __init__(self, family: Family, layout: Layout, elements: Sequence[PlainElement]) -> None:
        self._family = family
        self._layout = layout
        self._elements: dict[str, list[Element]] = defaultdict(list)
        for name, key, data in elements:
            self._elements[name].append(Element(key, data))

    def base_chains(self) -> list[BaseChain]:
        return [
            BaseChain(self._family.ip, TABLE, item.name, *item.hook[:3], drops_by_policy=False, packets=None)
            for item in self._layout.values() if isinstance(item, Chain) and item.hook is not None]

    def rules(self, family: str, table: str, chain: str) -> list[HeldRule]:
        found = self._layout[chain]
        assert isinstance(found, Chain)
        return [HeldRule(0, tuple(rule_expressions(rule)), b"") for rule in found.rules]

    def held_set(self, family: str, table: str, name: str) -> HeldSet | None:
        found = self._layout.get(name)
        if not isinstance(found, Container):
            return None
        sizes = [type_of(part).size for part in found.key]
        elements = self._elements[name] if found.constant is None else [
            each for item in found.constant for each in elements_of(item)]
        return HeldSet(
            sizes[0] if len(sizes) == 1 else sum(-(-size // 4) * 4 for size in sizes), found.interval, (),
            Elements(lambda: elements), is_filled_by_packets=found.dynamic)


UPLINK = Interface("eth0", 2)


def pod_interface(local: LocalSource | None) -> Interface:
    """Return an interface by which pods send."""
    name = (local.interface or f"{local.interface_prefix}0") if local is not None else "pod"
    return Interface(name, 7)


def followed(question: Question, ruleset: Ruleset) -> Sequence[nft.End]:
    """Return the ends of a packet, but for those that depend on what earlier packets have left in sets."""
    packet = question.packet

    def route(address: Address, mark: Number) -> Route:
        if is_own(address, question.node, question.addresses):
            return Route(RTN_LOCAL, LOOPBACK)
        return Route(RTN_UNICAST, UPLINK)

    is_from_node = packet.origin is Origin.NODE
    arrives = NO_INTERFACE if is_from_node else (
        pod_interface(question.node.local_source) if packet.origin is Origin.POD else UPLINK)
    flow = Flow(packet.source, packet.destination, 20000, packet.port)
    seen = Seen(
        Packet.of(packet.family, packet.protocol, flow), arrives, NO_INTERFACE, is_from_node=is_from_node)
    ends = nft.interpret(ruleset, seen, Node(route)).ends
    return [end for end in ends if share_of_strangers(end)]


def share_of_strangers(end: nft.End) -> float:
    """Return the share of packets that end so, of those about whose clients no set knows anything."""
    return sum(share for case, share in end.branch.chance.cases.items()
               if not any(doubt.matched for doubt in case))


def fate_of(ends: Sequence[nft.End]) -> Fate:
    choices: dict[Destination, EndpointShare] = {}
    shares: dict[Destination, float] = defaultdict(float)
    for end in ends:
        if end.fate is nft.Fate.DROPPED:
            return Fate(Outcome.DROPPED, "")
        if end.fate is nft.Fate.REJECTED:
            return Fate(Outcome.REFUSED, "")
        connection = end.seen.connection
        if connection is None or not connection.status & Status.DST_NAT:
            return Fate(Outcome.UNTOUCHED, "")
        flow = end.seen.packet.flow
        assert flow.destination is not None
        assert flow.port is not None
        where = Destination(flow.destination, flow.port)
        shares[where] += share_of_strangers(end)
        choices[where] = EndpointShare(where, shares[where], bool(connection.status & Status.SRC_NAT))
    return Fate(Outcome.FORWARDED, "", tuple(choices.values()))


@pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
def test_the_rules_in_the_kernel_are_interpreted_as_the_plans_say(family: Family) -> None:
    with serving("nftables", family), NetlinkSocket.open(NETLINK_NETFILTER) as sock:
        ruleset = ListedRuleset(sock)
        for question in questions(family):
            ends = followed(question, ruleset)
            assert essence(fate_of(ends)) == essence(decided(question)), (question.packet, ends)


SETTINGS = {
    "as-usual": DEFAULTS, "counted": Settings(counted=True),
    "with-a-flowtable": Settings(flowtable=("eth0",)), "without-hash": Settings(without_hash=True),
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
def test_the_rules_that_would_be_written_are_interpreted_as_the_plans_say(
    family: Family, settings: str
) -> None:
    asked = questions(family)
    plans = {question.plan.key: question.plan for question in asked if question.plan is not None}.values()
    node = asked[0].node
    layout = skeleton.layout(
        node, skeleton.templates_of(plans), skeleton.all_owned(plans), SETTINGS[settings])
    written = node_elements(node)
    for plan in plans:
        written += elements(plan, enumerate(plan.cluster_slots), enumerate(plan.local_slots))
        written += shared_elements(plan)
    ruleset = WrittenRuleset(family, layout, written)
    for question in asked:
        ends = followed(question, ruleset)
        assert essence(fate_of(ends)) == essence(decided(question)), (question.packet, ends)


@pytest.mark.parametrize("case", golden_cases.names())
def test_the_rules_of_kube_proxy_are_interpreted_as_the_plans_say(case: str) -> None:
    with beside_kube_proxy(case) as known, NetlinkSocket.open(NETLINK_NETFILTER) as sock:
        ruleset = ListedRuleset(sock)
        for question in questions_about(known.plans, known.node):
            ends = followed(question, ruleset)
            assert essence(fate_of(ends)) == essence(decided(question)), (question.packet, ends)
