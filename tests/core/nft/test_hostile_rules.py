"""Chains as any program may have written them: each packet has an end, and sets hold what they list."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_core.model.address import Family, Protocol, parse_address
from kproxy_core.netlink.messages import attribute, nested, text_attribute
from kproxy_core.nft.elements import Element
from kproxy_core.nft.expressions import BaseChain, Elements, HeldSet
from kproxy_core.nft.interpret import OF_ANY_PROGRAM, End, Fate, Limits, Program
from kproxy_core.nft.packet import NO_INTERFACE, Flow, Interface, Node, Packet, Seen
from kproxy_core.nft.rules import Expression, HeldRule, Verdict

SEEN = Seen(
    Packet.of(Family.IPV6, Protocol.UDP, Flow(parse_address("2001:db8::1"), None, None, 53)),
    Interface("eth0", 2), NO_INTERFACE, is_from_node=False)
NAMES = (
    "payload", "meta", "ct", "fib", "immediate", "bitwise", "byteorder", "cmp", "range", "lookup", "counter",
    "reject", "queue", "objref", "match", "target", "exthdr", "limit", "log", "of a newer kernel",
)  # fmt: skip
XT_NAMES = (
    "comment", "conntrack", "addrtype", "mark", "tcp", "udp", "statistic", "REJECT", "NFQUEUE", "MARK",
)  # fmt: skip

numbers = st.sampled_from([*range(41), 0xFFFFFFFF]).map(lambda number: number.to_bytes(4, "big"))
verdicts = st.tuples(st.integers(-6, 5), st.sampled_from(["c", "d", "e", "none"])).map(lambda given: nested(
    2, attribute(1, given[0].to_bytes(4, "big", signed=True)), text_attribute(2, given[1])))
values = st.one_of(
    numbers, st.binary(max_size=160), st.sampled_from(XT_NAMES).map(str.encode),
    st.binary(max_size=16).map(lambda value: attribute(1, value)), verdicts)
expressions = st.builds(
    Expression, st.sampled_from(NAMES), st.dictionaries(st.integers(1, 7), values, max_size=7))
rules = st.lists(st.builds(
    HeldRule, st.integers(1, 99), st.lists(expressions, max_size=5).map(tuple), st.just(b"")), max_size=4)


class Written:
    """Chains without sets, of which ``c`` is at the hook. Chain ``e`` is the last to which others jump."""

    def __init__(self, chains: dict[str, list[HeldRule]], elements: Sequence[Element]) -> None:
        self._chains = chains
        self._elements = elements

    def base_chains(self) -> list[BaseChain]:
        return [BaseChain("inet", "t", "c", "filter", "forward", 0, True, None)]

    def rules(self, family: str, table: str, chain: str) -> list[HeldRule]:
        return self._chains.get(chain, [])

    def held_set(self, family: str, table: str, name: str) -> HeldSet | None:
        return HeldSet(4, False, (), Elements(lambda: self._elements)) if self._elements else None


def ends(ruleset: Written, limits: Limits = OF_ANY_PROGRAM) -> Sequence[End]:
    return Program(ruleset, limits).interpret(SEEN, Node(lambda address, mark: None)).ends


def without_jumps(found: list[HeldRule]) -> list[HeldRule]:
    """Return the rules without any verdict: the kernel refuses loops."""
    return [rule._replace(expressions=tuple(
        each for each in rule.expressions if each.name not in ("immediate", "lookup"))) for rule in found]


elements = st.lists(st.builds(
    Element, st.sampled_from([b"", b"full"]) | st.binary(min_size=4, max_size=4),
    st.none() | st.binary(max_size=8) | st.builds(Verdict, st.integers(-6, 5)), st.just(b""), st.booleans(),
), max_size=3)


@given(rules, rules, elements)
def test_every_ruleset_has_an_answer(
    base: list[HeldRule], other: list[HeldRule], held: list[Element]
) -> None:
    jumps = [rule._replace(expressions=tuple(
        each for each in rule.expressions if b"c\0" not in each.attributes.get(2, b""))) for rule in base]
    found = ends(Written({"c": jumps, "d": without_jumps(other)}, held))
    assert found
    assert len(found) == 1 or not any(end.is_certain for end in found)


def jump(chain: str) -> HeldRule:
    verdict = nested(2, attribute(1, (-3).to_bytes(4, "big", signed=True)), text_attribute(2, chain))
    return HeldRule(1, (Expression("immediate", {1: bytes(4), 2: verdict}),), b"")


@pytest.mark.parametrize(("most", "fate"), [(30, Fate.DROPPED), (29, Fate.UNKNOWN)])
def test_a_packet_meets_so_many_rules_and_no_more(most: int, fate: Fate) -> None:
    """Each of four chains leads twice to the next one: 2 + 4 + 8 + 16 rules."""
    chains = {"c": [jump("d")] * 2, "d": [jump("e")] * 2, "e": [jump("f")] * 2, "f": [jump("none")] * 2}
    found = ends(Written(chains, ()), Limits(rules=most))
    assert {end.fate for end in found} == {Fate.DELIVERED, fate}


def test_rules_of_any_program_meet_an_end() -> None:
    names = ["c", *(f"c{number}" for number in range(40))]
    chains = {one: [jump(other)] * 2 for one, other in pairwise(names)}
    (unknown,) = (end for end in ends(Written(chains, ())) if end.fate is Fate.UNKNOWN)
    assert unknown.doubts[0] == "more than 10,000 rules"


def draw(register: int) -> Expression:
    return Expression("numgen", {1: register.to_bytes(4, "big"), 2: (4096).to_bytes(4, "big")})


@pytest.mark.parametrize("chain", [
    [HeldRule(1, (draw(8), draw(9)), b"")],
    [HeldRule(1, (draw(8), Expression("meta", {2: bytes([0, 0, 0, 3]), 3: bytes([0, 0, 0, 8])})), b"")] * 3,
], ids=["in one rule", "in several"])
def test_numbers_are_not_drawn_without_end(chain: list[HeldRule]) -> None:
    """All of them would be millions."""
    assert len(ends(Written({"c": chain}, ()))) < 20_000


@given(st.lists(st.integers(0, 60), max_size=8, unique=True), st.integers(0, 63))
def test_an_interval_holds_its_values(unordered: list[int], value: int) -> None:
    edges = sorted(unordered)
    held = HeldSet(1, True, (), Elements(lambda: [
        Element(bytes([edge]), is_end=bool(at % 2)) for at, edge in enumerate(edges)]))
    inside = any(first <= value and (value < behind) for first, behind in zip(
        edges[::2], [*edges[1::2], 256], strict=False))
    assert (held.find(bytes([value])) is not None) is inside


@pytest.mark.parametrize(("value", "held"), [
    (b"\x0a\0\0\1\0\x50\0\0", True), (b"\x0a\0\0\1\0\x51\0\0", False), (b"\x0a\0\1\1\0\x50\0\0", False),
])
def test_a_concatenation_holds_what_is_within_each_part(value: bytes, held: bool) -> None:
    element = Element(b"\x0a\0\0\0\0\x10\0\0", last=b"\x0a\0\0\xff\0\x50\0\0")
    assert (HeldSet(8, True, (4, 2), Elements(lambda: [element])).find(value) is not None) is held
