"""The way of packets through rules: as it is predicted, and as the kernel decides."""

from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_core.model.address import Family, Protocol, parse_address
from kproxy_core.nft.expressions import CERTAIN, BaseChain, Chance, HeldSet
from kproxy_core.nft.interpret import Fate, Program
from kproxy_core.nft.packet import NO_INTERFACE, RTN_UNICAST, Flow, Interface, Node, Packet, Route, Seen
from kproxy_core.nft.rules import DROP, Expression, HeldRule
from tests.core.nft.packet_judge import Judge, Probe, compare, judging
from tests.core.nft.random_rules import iptables_rules, nft_rules, probes

FAMILIES = pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
CLIENT, SERVER, VIP = "10.0.1.2", "10.0.2.2", "10.0.9.9"


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with judging() as made:
        yield made


@FAMILIES
@pytest.mark.parametrize("kind", ["nft", "iptables", "both"])
def test_random_rules_do_what_is_predicted(judge: Judge, family: Family, kind: str) -> None:
    for seed in range(12):
        random = Random(seed)
        nft = "" if kind == "iptables" else nft_rules(random, family, is_certain=False)
        iptables = "" if kind == "nft" else iptables_rules(random, family, is_certain=False)
        if judge.load(family, nft, iptables):
            found = compare(judge, probes(random, family, 40))
            assert not found.problems, (seed, nft, iptables, found.problems)


def probe_to(destination: str = VIP, port: int = 80, *, is_from_node: bool = False) -> Probe:
    source = "10.0.2.1" if is_from_node else CLIENT
    flow = Flow(parse_address(source), parse_address(destination), 20000, port)
    return Probe(Family.IPV4, Protocol.TCP, flow, is_from_node, 1)


class Case(NamedTuple):
    rules: str
    ends: Sequence[tuple[Fate, tuple[str, ...]]]
    """Each with what it depends on."""
    probe: Probe = probe_to()
    iptables: str = ""


def chain(hook: str, priority: int, *rules: str, kind: str = "filter", table: str = "t") -> str:
    body = "; ".join(rules)
    return f"table ip {table} {{ chain c {{ type {kind} hook {hook} priority {priority}; {body}; }}; }}\n"


SENT, DROPPED = (Fate.SENT, ()), (Fate.DROPPED, ())
CASES = {
    "no rules": Case("", [SENT]),
    "translated at the priority of translations, whatever that of the chain": Case(
        chain("prerouting", 10, f"dnat to {SERVER}", kind="nat")
        + chain("prerouting", 0, f"ip daddr {SERVER} drop", table="u"), [DROPPED]),
    "translated once": Case(
        chain("prerouting", -10, "dnat to 10.0.2.3", kind="nat")
        + chain("prerouting", -20, f"dnat to {SERVER}", kind="nat", table="u")
        + chain("forward", 0, f"ip daddr != {SERVER} drop", table="v"), [SENT]),
    "not tracked, not translated": Case(
        chain("prerouting", -300, "notrack")
        + chain("prerouting", 0, f"dnat to {SERVER}", kind="nat", table="u")
        + chain("forward", 0, f"ct state untracked ip daddr {VIP} drop", table="v"), [DROPPED]),
    "a drop instead of a translation": Case(chain("prerouting", -105, "drop", kind="nat"), [DROPPED]),
    "the same interface until the end of hook output": Case(
        chain("output", -100, f"dnat to {CLIENT}", kind="nat")
        + chain("output", 0, 'oifname "c0" drop', table="u")
        + chain("postrouting", 0, 'oifname "s0" drop', table="v"), [SENT], probe_to(is_from_node=True)),
    "a node's packet to itself": Case(
        chain("output", 0, "meta mark set 7")
        + chain("input", 0, "meta mark 7 ct status confirmed drop", table="u"),
        [DROPPED], probe_to("10.0.1.1", is_from_node=True)),
    "either order at the priority of translations": Case(
        chain("prerouting", -100, f"ip daddr {VIP} drop") + chain(
            "prerouting", 0, f"dnat to {SERVER}", kind="nat", table="u"),
        [(Fate.DROPPED, ("the order at priority -100",)), (Fate.SENT, ("the order at priority -100",))]),
    "a meter": Case(
        chain("forward", 0, "ct state new meter m { ip saddr limit rate over 1/second } drop"),
        [(Fate.DROPPED, ("dynset with limit in rule 1 of chain c",)),
         (Fate.SENT, ("dynset with limit in rule 1 of chain c",))]),
    "a limit that decides nothing": Case(
        chain("forward", 0, "limit rate 1/second counter", "drop"), [DROPPED]),
    "a share": Case(
        chain("forward", 0, "numgen random mod 4 vmap { 0 : drop, 1 : drop }"),
        [(Fate.DROPPED, ("numgen in rule 1 of chain c",)), (Fate.SENT, ("numgen in rule 1 of chain c",))]),
    "a random number of too many": Case(
        chain("forward", 0, "numgen random mod 4097 vmap { 0 : drop }"),
        [(fate, ("numgen, looked up in set __map0 in rule 1 of chain c",))
         for fate in (Fate.DROPPED, Fate.SENT)]),
    "a random number that decides nothing": Case(
        chain("forward", 0, "numgen random mod 2 vmap { 0 : drop, 1 : drop }"), [DROPPED]),
    "a set that packets fill": Case(
        "table ip t { set s { type ipv4_addr; flags dynamic; size 9; }; "
        "chain c { type filter hook forward priority 0; ip saddr @s drop; }; }",
        [(Fate.DROPPED, ("set s, which packets fill in rule 1 of chain c",)),
         (Fate.SENT, ("set s, which packets fill in rule 1 of chain c",))]),
    "a limit in an element": Case(
        f"table ip t {{ set s {{ type ipv4_addr; limit rate 1/second; elements = {{ {CLIENT} }}; }}; "
        "chain c { type filter hook forward priority 0; ip saddr @s drop; }; }",
        [(Fate.DROPPED, ("limit in set s in rule 1 of chain c",)),
         (Fate.SENT, ("limit in set s in rule 1 of chain c",))]),
    "a counter in an element": Case(
        f"table ip t {{ set s {{ type ipv4_addr; counter; elements = {{ {CLIENT} counter }}; }}; "
        "chain c { type filter hook forward priority 0; ip saddr @s drop; }; }", [DROPPED]),
    "a named limit": Case(
        'table ip t { limit l { rate 1/second; }; '
        'chain c { type filter hook forward priority 0; limit name "l" drop; }; }',
        [(Fate.DROPPED, ("limit in rule 1 of chain c",)), (Fate.SENT, ("limit in rule 1 of chain c",))]),
    "a named counter": Case(
        'table ip t { counter l { }; '
        'chain c { type filter hook forward priority 0; counter name "l" drop; }; }', [DROPPED]),
    "an unknown field": Case(
        chain("forward", 0, "meta cpu 0 drop"),
        [(Fate.DROPPED, ("meta cpu in rule 1 of chain c",)),
         (Fate.SENT, ("meta cpu in rule 1 of chain c",))]),
    "a queue that no program reads": Case("", [
        (Fate.QUEUED, ("queue in rule 1 of chain FORWARD",)),
        (Fate.SENT, ("queue in rule 1 of chain FORWARD",))],
        iptables="*filter\n-A FORWARD -j NFQUEUE --queue-num 3\nCOMMIT\n"),
    "states of iptables": Case("", [DROPPED], iptables=(
        "*filter\n-A FORWARD -m state --state RELATED,ESTABLISHED -j ACCEPT\n-A FORWARD -j DROP\nCOMMIT\n")),
    "marks of iptables": Case("", [DROPPED], iptables=(
        "*mangle\n-A PREROUTING -j MARK --set-xmark 0x5/0xff\n-A PREROUTING -j CONNMARK --save-mark\n"
        "-A PREROUTING -j MARK --set-xmark 0x0/0xff\n-A FORWARD -j CONNMARK --restore-mark\nCOMMIT\n"
        "*filter\n-A FORWARD -m mark --mark 0x4/0x6 -j DROP\nCOMMIT\n")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_packet_ends_where_it_is_predicted(judge: Judge, name: str) -> None:
    case = CASES[name]
    assert judge.load(Family.IPV4, case.rules, case.iptables)
    (result,) = judge.predict([case.probe])
    assert [(end.fate, end.doubts) for end in result.ends] == list(case.ends)
    assert not compare(judge, [case.probe]).problems


def test_chains_of_the_device_by_which_a_packet_arrives_are_followed(judge: Judge) -> None:
    assert judge.load(Family.IPV4, (
        "table netdev t { chain c { type filter hook ingress device c0 priority 0; ip daddr 10.0.9.9 drop; };"
        "chain o { type filter hook ingress device s0 priority 0; drop; }; }"))
    for to, fate in (("10.0.9.9", Fate.DROPPED), ("10.0.9.8", Fate.SENT)):
        (result,) = judge.predict([probe := probe_to(to)])
        assert [(end.fate, end.is_certain) for end in result.ends] == [(fate, True)]
        assert [chain.name for chain in result.unread] == ["o"]
        assert bool(judge.send([probe]).passed) is (fate is Fate.SENT)


class Written:
    """One chain at hook ``forward``."""

    def __init__(self, *rules: Sequence[Expression]) -> None:
        self._rules = [HeldRule(number, tuple(rule), b"") for number, rule in enumerate(rules, 1)]

    def base_chains(self) -> list[BaseChain]:
        return [BaseChain("ip", "t", "c", "filter", "forward", 0, False, None)]

    def rules(self, family: str, table: str, chain: str) -> list[HeldRule]:
        return self._rules

    def held_set(self, family: str, table: str, name: str) -> HeldSet | None:
        return None


def test_what_an_unknown_expression_does_is_never_certain() -> None:
    flow = Flow(parse_address(CLIENT), parse_address(SERVER), 1, 2)
    seen = Seen(Packet.of(Family.IPV4, Protocol.TCP, flow), Interface("c0", 2), NO_INTERFACE, False)
    node = Node(lambda address, mark: Route(RTN_UNICAST, Interface("s0", 3)))
    newer = Expression("of a newer kernel", {})
    found = Program(Written([newer, *DROP.expressions])).interpret(seen, node).ends
    assert {end.fate for end in found} == {Fate.DROPPED, Fate.SENT, Fate.UNKNOWN}
    assert all(end.doubts == ("of a newer kernel in rule 1 of chain c",) for end in found)
    assert not any(end.is_certain for end in found)


# Chances.


@given(st.lists(st.integers(0, 4), max_size=6))
def test_ways_that_meet_again_depend_on_nothing(doubts: list[int]) -> None:
    def joined(chance: Chance, left: Sequence[int]) -> Chance:
        if not left:
            return chance
        first, rest = f"doubt {left[0]}", left[1:]
        yes, no = (joined(chance.given(first, matched=matched), rest) for matched in (True, False))
        return yes.or_else(no)

    assert joined(CERTAIN, doubts).is_certain


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=6))
def test_shares_of_ways_that_meet_again_are_added(parts: list[float]) -> None:
    whole = sum(parts)
    chances = [CERTAIN.times(part / whole, "random") for part in parts]
    found = chances[0]
    for other in chances[1:]:
        found = found.or_else(other)
    assert found.is_certain
    assert found.doubts == ()
