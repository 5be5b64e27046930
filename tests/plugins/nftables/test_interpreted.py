"""The rules of the nftables mode, which the interpreter of any rules follows as the plans say."""

from collections import defaultdict
from collections.abc import Sequence

import pytest

from kproxy_core.contract.values import Question
from kproxy_core.model.address import Address, Family
from kproxy_core.model.service import Destination
from kproxy_core.netlink.messages import NETLINK_NETFILTER
from kproxy_core.netlink.sockets import NetlinkSocket
from kproxy_core.nft import interpret as nft
from kproxy_core.nft.expressions import Ruleset
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
from kproxy_core.nft.ruleset import ListedRuleset
from kproxy_core.plan.fate import EndpointShare, Fate, Origin, Outcome, is_own
from tests.plugins.explained import decided, essence, questions, serving

POD, UPLINK = Interface("pod", 7), Interface("eth0", 2)


def followed(question: Question, ruleset: Ruleset) -> Sequence[nft.End]:
    """Return the ends of a packet, but for those that depend on what earlier packets have left in sets."""
    packet = question.packet

    def route(address: Address, mark: Number) -> Route:
        if is_own(address, question.node, question.addresses):
            return Route(RTN_LOCAL, LOOPBACK)
        return Route(RTN_UNICAST, UPLINK)

    is_from_node = packet.origin is Origin.NODE
    arrives = NO_INTERFACE if is_from_node else POD if packet.origin is Origin.POD else UPLINK
    flow = Flow(packet.source, packet.destination, 20000, packet.port)
    seen = Seen(
        Packet.of(packet.family, packet.protocol, flow), arrives, NO_INTERFACE, is_from_node=is_from_node)
    ends = nft.interpret(ruleset, seen, Node(route)).ends
    return [end for end in ends if any(
        not any(doubt.matched for doubt in case) for case in end.branch.chance.cases)]


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
        shares[where] += end.share
        choices[where] = EndpointShare(where, shares[where], bool(connection.status & Status.SRC_NAT))
    return Fate(Outcome.FORWARDED, "", tuple(choices.values()))


@pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
def test_the_rules_in_the_kernel_are_interpreted_as_the_plans_say(family: Family) -> None:
    with serving("nftables", family), NetlinkSocket.open(NETLINK_NETFILTER) as sock:
        ruleset = ListedRuleset(sock)
        for question in questions(family):
            ends = followed(question, ruleset)
            assert essence(fate_of(ends)) == essence(decided(question)), (question.packet, ends)
