"""The hooks that explained packets pass, by the place of their translation."""

from typing import Any, NamedTuple

import pytest

from kproxy_core.app.drops import Drop
from kproxy_core.app.explain import Case
from kproxy_core.app.filters import place, way
from kproxy_core.contract.values import Question, Translation
from kproxy_core.model.address import Address, Protocol, format_address, parse_address
from kproxy_core.model.service import Destination
from kproxy_core.nft.packet import Interface
from kproxy_core.plan.fate import EndpointShare, Origin, Packet
from tests.core.app.test_explain import known

OWN = parse_address("192.0.2.1")
POD, UPLINK = Interface("veth1", 5), Interface("eth0", 2)


def towards(address: Address) -> Interface:
    return POD if format_address(address).startswith("10.1.") else UPLINK


class Seen(NamedTuple):
    """What a hook sees of a packet."""

    hook: str
    destination: str
    arrived_by: str
    leaves_by: str
    is_translated: bool


def seen(
    origin: Origin, endpoint: str, translation: Translation = Translation.RULES, *, is_typical: bool = False,
) -> list[Seen]:
    source = {Origin.POD: "10.1.0.9", Origin.NODE: "192.0.2.1", Origin.OUTSIDE: "203.0.113.7"}[origin]
    packet = Packet(origin, parse_address(source), parse_address("10.96.0.10"), Protocol.TCP, 80)
    plans = known()
    question = Question(packet, plans.node, None, None, frozenset({OWN}))
    choice = EndpointShare(Destination(parse_address(endpoint), 8080), 1.0, False)
    found = way(Case(question, plans, is_typical), choice, translation, towards)
    return [
        Seen(hook, f"{format_address(each.destination or OWN)}:{each.port}",
             each.input.name if each.input else "?", each.output.name if each.output else "?",
             each.is_translated)
        for hook, each in found
    ]


VIP, ENDPOINT, HERE = "10.96.0.10:80", "198.51.100.5:8080", "192.0.2.1:8080"
RULES, SOCKET, RELAY, VIRTUAL_SERVER = (
    Translation.RULES, Translation.SOCKET, Translation.RELAY, Translation.VIRTUAL_SERVER)


@pytest.mark.parametrize(("origin", "endpoint", "translation", "expected"), [
    (Origin.POD, "198.51.100.5", RULES, [
        Seen(hook, ENDPOINT, "veth1", "eth0", True) for hook in ("prerouting", "forward", "postrouting")]),
    (Origin.OUTSIDE, "192.0.2.1", RULES, [
        Seen(hook, HERE, "eth0", "lo", True) for hook in ("prerouting", "input")]),
    (Origin.NODE, "198.51.100.5", RULES, [
        Seen(hook, ENDPOINT, "", "eth0", True) for hook in ("output", "postrouting")]),
    (Origin.NODE, "192.0.2.1", RULES, [
        Seen("output", HERE, "", "lo", True), Seen("input", HERE, "lo", "lo", True)]),
    (Origin.POD, "198.51.100.5", SOCKET, [
        Seen(hook, ENDPOINT, "veth1", "eth0", False) for hook in ("prerouting", "forward", "postrouting")]),
    (Origin.POD, "198.51.100.5", RELAY, [
        Seen(hook, ENDPOINT, "", "eth0", False) for hook in ("output", "postrouting")]),
    (Origin.POD, "198.51.100.5", VIRTUAL_SERVER, [
        Seen("prerouting", VIP, "veth1", "lo", False), Seen("input", VIP, "veth1", "lo", False),
        Seen("output", ENDPOINT, "", "eth0", False), Seen("postrouting", ENDPOINT, "", "eth0", False)]),
    (Origin.NODE, "198.51.100.5", VIRTUAL_SERVER, [
        Seen("output", VIP, "", "lo", False),
        Seen("output", ENDPOINT, "", "eth0", False), Seen("postrouting", ENDPOINT, "", "eth0", False)]),
])  # fmt: skip
def test_a_packet_passes_the_hooks_that_its_translation_leaves(
    origin: Origin, endpoint: str, translation: Translation, expected: list[Seen]
) -> None:
    assert seen(origin, endpoint, translation) == expected


def test_the_interface_of_an_example_is_not_known_without_a_route_to_pods() -> None:
    assert [each.arrived_by for each in seen(Origin.POD, "198.51.100.5", is_typical=True)] == ["veth1"] * 3
    assert {each.arrived_by for each in seen(Origin.OUTSIDE, "198.51.100.5", is_typical=True)} == {"eth0"}


@pytest.mark.parametrize(("endpoint", "masqueraded", "translation", "mark"), [
    ("198.51.100.5", False, RULES, 0), ("198.51.100.5", True, RULES, 0x4000), ("10.1.0.9", True, RULES, None),
    ("198.51.100.5", True, VIRTUAL_SERVER, None),
])  # fmt: skip
def test_what_is_masqueraded_has_the_mark_of_kube_proxy(
    endpoint: str, translation: Translation, mark: int | None, *, masqueraded: bool
) -> None:
    packet = Packet(
        Origin.POD, parse_address("10.1.0.9"), parse_address("10.96.0.10"), Protocol.TCP, 80)
    plans = known()
    question = Question(packet, plans.node, None, None, frozenset({OWN}))
    choice = EndpointShare(Destination(parse_address(endpoint), 8080), 1.0, masqueraded)
    ((_, first), *_) = way(Case(question, plans, is_typical=False), choice, translation, towards)
    assert first.mark == mark


DROP = Drop("inet", "firewalld", "filter_FORWARD", 12, 7, False, None, True, ())


@pytest.mark.parametrize(("changes", "text"), [
    ({}, "rule 12 drops it"),
    ({"rejects": True, "packets": 3}, "rule 12 rejects it (3 packets so far)"),
    ({"rule": None}, "its policy drops it"),
    ({"is_met": False, "doubts": ("match x in rule 1 of chain c",)},
     "rule 12 may drop it; not understood: match x in rule 1 of chain c"),
    ({"doubts": ("a", "b", "c", "d", "e")},
     "rule 12 drops it unless an earlier rule accepts it; not understood: a, b, c and 2 more"),
    ({"exempts": True}, "rule 12 exempts it from translation: it is not tracked"),
    ({"translates_to": (OWN, 9090)}, "rule 12 translates it to 192.0.2.1:9090"),
    ({"translates_to": (None, None), "is_met": False, "doubts": ("x",)},
     "rule 12 may translate it to another address; not understood: x"),
])  # fmt: skip
def test_a_place_is_told_in_words(changes: dict[str, Any], text: str) -> None:
    assert place(DROP._replace(**changes)) == f"nft table inet firewalld, chain filter_FORWARD, {text}"


def test_names_of_chains_cannot_end_a_line() -> None:
    assert place(DROP._replace(table="a\nb", chain="c\x1b")) == (
        "nft table inet a\\nb, chain c\\x1b, rule 12 drops it")


