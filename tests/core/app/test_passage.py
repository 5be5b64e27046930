"""What becomes of packets on a node without rules of nf_tables, by the place of their translation."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from kproxy_core.app.explain import Case
from kproxy_core.app.passage import Passage, passage
from kproxy_core.app.programs import Program as Writer
from kproxy_core.contract.values import KernelSide, Question, Translation
from kproxy_core.model.address import Address, Family, Protocol, format_address, parse_address
from kproxy_core.model.service import Destination
from kproxy_core.nft.expressions import BaseChain, HeldSet
from kproxy_core.nft.interpret import Program
from kproxy_core.nft.packet import LOOPBACK, RTN_LOCAL, RTN_UNICAST, RTN_UNREACHABLE, Interface, Place, Route
from kproxy_core.nft.rules import HeldRule
from kproxy_core.plan.fate import EndpointShare, Fate, Origin, Outcome, Packet
from tests.core.app.test_explain import known

OWN, POD, REMOTE = map(parse_address, ("192.0.2.1", "10.1.0.9", "198.51.100.5"))
VIP = parse_address("10.96.0.10")
RULES, SOCKET, RELAY, VIRTUAL_SERVER = (
    Translation.RULES, Translation.SOCKET, Translation.RELAY, Translation.VIRTUAL_SERVER)
OFF = "net.ipv4.ip_forward is 0: this node forwards no packets"


class NoRules:
    def base_chains(self) -> Sequence[BaseChain]:
        return []

    def rules(self, family: str, table: str, chain: str) -> Sequence[HeldRule]:
        return []

    def held_set(self, family: str, table: str, name: str) -> HeldSet | None:
        return None


class Kernel(NamedTuple):
    """A node with one uplink; virtual servers and relays make ClusterIPs its own."""

    forwards: bool
    own: frozenset[Address] = frozenset((OWN,))

    def leaving(self, destination: Address, mark: int) -> Route:
        if destination in self.own:
            return Route(RTN_LOCAL, LOOPBACK)
        return Route(RTN_UNICAST, Interface("eth0", 2))

    def forwarded(self, destination: Address, mark: int) -> Route:
        found = self.leaving(destination, mark)
        return found if self.forwards or found.type == RTN_LOCAL else Route(RTN_UNREACHABLE, None, OFF)

    def arrived(self, destination: Address, source: Address, interface: str, mark: int) -> Route:
        return self.forwarded(destination, mark)

    def towards(self, address: Address) -> Interface | None:
        return Interface("veth1", 5) if format_address(address).startswith("10.1.") else Interface("eth0", 2)

    def addresses(self, interface: Interface) -> Sequence[Address]:
        return [OWN]

    def ports(self, interface: Interface) -> frozenset[str]:
        return frozenset()

    def filters_bridge(self, interface: Interface, family: Family) -> bool:
        return False

    def is_recent(self, name: str, source: Address) -> bool | None:
        return None

    def chain_names(self, family: str, table: str) -> frozenset[str]:
        return frozenset()

    def writer(self, place: Place) -> Writer | None:
        return None

    def rule_text(self, place: Place) -> str:
        return ""


def found(
    origin: Origin, endpoints: Sequence[Address], translation: Translation, kernel: Kernel
) -> Passage:
    source = {Origin.POD: POD, Origin.NODE: OWN, Origin.OUTSIDE: parse_address("203.0.113.7")}[origin]
    plans = known()
    question = Question(
        Packet(origin, source, VIP, Protocol.TCP, 80), plans.node, None, None, frozenset({OWN}))
    choices = tuple(EndpointShare(Destination(each, 8080), 1 / len(endpoints), False) for each in endpoints)
    fate = Fate(Outcome.FORWARDED, "the policy", choices)
    side = KernelSide((), fate, translation=translation)
    return passage(Case(question, plans, False), side, Program(NoRules()), kernel)


@pytest.mark.parametrize(("origin", "endpoints", "translation", "forwards", "outcome", "because"), [
    # With RULES, those of iptables-legacy.
    (Origin.POD, [REMOTE], RULES, True, "forwarded", "the policy"),
    (Origin.POD, [REMOTE], RULES, False, "dropped", OFF),
    (Origin.OUTSIDE, [OWN], RULES, False, "forwarded", "the policy"),
    (Origin.NODE, [REMOTE], RULES, False, "forwarded", "the policy"),
    (Origin.POD, [REMOTE], SOCKET, True, "forwarded", "the policy"),
    (Origin.POD, [REMOTE], SOCKET, False, "dropped", OFF),
    (Origin.POD, [REMOTE, OWN], SOCKET, False, "depends", f"50.0% dropped: {OFF}; 50.0% forwarded"),
    (Origin.NODE, [REMOTE], SOCKET, False, "forwarded", "the policy"),
    (Origin.POD, [REMOTE], RELAY, False, "forwarded", "the policy"),
    (Origin.OUTSIDE, [REMOTE], VIRTUAL_SERVER, False, "forwarded", "the policy"),
])  # fmt: skip
def test_packets_are_followed_from_the_place_of_their_translation(
    origin: Origin, endpoints: Sequence[Address], translation: Translation, outcome: str, because: str, *,
    forwards: bool,
) -> None:
    is_local = translation in (RELAY, VIRTUAL_SERVER)
    kernel = Kernel(forwards, frozenset((OWN, *([VIP] if is_local else []))))
    told = found(origin, endpoints, translation, kernel)
    assert (told.outcome, told.because) == (outcome, because)


def test_a_virtual_server_of_an_address_that_the_node_lacks_gets_nothing() -> None:
    told = found(Origin.POD, [REMOTE], VIRTUAL_SERVER, Kernel(True))
    assert (told.outcome, told.because) == ("not touched", "it is sent on as it came")


@pytest.mark.parametrize("translation", [RULES, SOCKET])
def test_packets_to_many_endpoints_are_followed_to_some(translation: Translation) -> None:
    endpoints = [Address(bytes((10, 200, number // 250, number % 250))) for number in range(4_100)]
    told = found(Origin.POD, endpoints, translation, Kernel(True))
    assert (told.outcome, told.caveat) == (
        "forwarded", "packets are followed to 10 of 4,100 endpoints")


def test_shares_are_those_of_the_endpoints_that_are_followed() -> None:
    endpoints = [OWN, *(Address(bytes((10, 200, 0, number))) for number in range(99))]
    told = found(Origin.POD, endpoints, SOCKET, Kernel(False))
    assert [(way.outcome, way.share) for way in told.ways] == [("forwarded", 0.1), ("dropped", 0.9)]
