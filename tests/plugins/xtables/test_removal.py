"""Which chains and rules go, and in which order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_xtables.removal import ChainKey, Jump, Removal, described, inputs, jump, plan_removal


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ('-m comment --comment "kubernetes service portals" -j X', Jump("kubernetes service portals", "X")),
        ('-m conntrack --ctstate NEW -m comment --comment "a b" -j X', Jump("a b", "X")),
        ('-m comment --comment "a b" -m conntrack --ctstate NEW -j X', Jump("a b", "X")),
        ('-m addrtype --dst-type LOCAL -m comment --comment "a b" -j X', Jump("a b", "X")),
        ('-d 192.0.2.1/32 -m comment --comment "a b" -j X', None),
        ('-m comment --comment "a b" -j X --more', None),
        ('-m comment --comment "a -j X"', None),
        ("-j X", None),
    ],
)
def test_jumps_are_told_from_rules_that_choose(rule: str, expected: Jump | None) -> None:
    assert jump(rule) == expected


def key(chain: str) -> ChainKey:
    return "nat", chain


def own(at: ChainKey, rule: str) -> bool:
    return '"ours"' in rule


def nobody(at: ChainKey) -> bool:
    return False


OUR_JUMP = '-m comment --comment "ours" -j A'
A, B, C = key("A"), key("B"), key("C")


def test_what_is_ours_goes_with_what_leads_to_it() -> None:
    held = {A: ["-j B"], B: [], key("INPUT"): [OUR_JUMP, "-j ACCEPT"], key("THEIRS"): ["-j RETURN"]}
    removal = plan_removal(held, {A, B, C}, own, nobody)
    assert removal == Removal([("nat", "INPUT", OUR_JUMP)], [A, B], [], [])
    assert list(inputs(removal, 100)) == [
        f"*nat\n:A - [0:0]\n:B - [0:0]\n-D INPUT {OUR_JUMP}\n-X A\n-X B\nCOMMIT\n"
    ]
    assert list(described(removal, ("B",))) == [
        f"rule in INPUT of table nat: {OUR_JUMP}", "chain A of table nat", "1 chains B* of table nat",
    ]  # fmt: skip


def test_what_somebody_else_uses_stays_with_all_it_needs_and_is_told() -> None:
    theirs = key("THEIRS")
    held = {A: ["-j B"], B: ["-g C"], C: [], theirs: ["-d 192.0.2.1/32 -j B"], key("INPUT"): [OUR_JUMP]}
    removal = plan_removal(held, {A, B, C}, own, nobody)
    assert removal.chains == [A]
    assert removal.kept == ["chain B of table nat stays: a rule in THEIRS leads to it"]


def test_our_rule_in_somebody_elses_chain_is_theirs() -> None:
    removal = plan_removal({A: [], key("THEIRS"): [OUR_JUMP]}, {A}, own, nobody)
    assert (removal.rules, removal.chains) == ([], [])


def test_chains_of_one_name_in_two_tables_are_two_chains() -> None:
    held = {A: [], ("filter", "THEIRS"): ["-j A"]}
    assert plan_removal(held, {A}, own, nobody).chains == [A]


def test_dead_chains_of_another_mode_do_not_hold_ours() -> None:
    held = {A: [], B: ["-j A"], C: ["-j A"], key("INPUT"): ["-j C"]}
    dead = plan_removal({A: [], B: ["-j A"]}, {A}, own, lambda at: at in (B, C))
    assert (dead.chains, dead.emptied, dead.kept) == ([A], [B], [])
    assert list(inputs(dead, 100)) == ["*nat\n:B - [0:0]\nCOMMIT\n", "*nat\n:A - [0:0]\n-X A\nCOMMIT\n"]
    alive = plan_removal(held, {A}, own, lambda at: at in (B, C))
    assert (alive.chains, alive.emptied, alive.kept) == ([], [], [])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30), st.integers(1, 12))
def test_a_chain_outlives_those_that_lead_to_it(edges: list[tuple[int, int]], per_call: int) -> None:
    held: dict[ChainKey, list[str]] = {key(f"C{n}"): [] for n in range(10)}
    for one, other in edges:
        if one != other:
            held[key(f"C{min(one, other)}")].append(f"-j C{max(one, other)}")
    removal = plan_removal(dict(reversed(held.items())), held.keys(), own, nobody)
    assert sorted(removal.chains) == sorted(held)
    left = dict(held)
    for text in inputs(removal, per_call):
        for line in text.splitlines():
            if line.startswith(":"):
                left[key(line[1:].split()[0])] = []
        for line in text.splitlines():
            if line.startswith("-X"):
                del left[key(line[3:])]
                assert not any(f"-j {line[3:]}" in rules for rules in left.values())
    assert left == {}
