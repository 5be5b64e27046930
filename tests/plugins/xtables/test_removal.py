"""Selection and order of the chains and rules that are deleted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_xtables.removal import Removal, describe, plan_removal, restore_inputs
from kproxy_xtables.rules import NEW_CONNECTIONS, TO_THIS_NODE, ChainKey, Jump, missing_jumps, parse_jump


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ('-m comment --comment "kubernetes a b" -j X', ("X", "kubernetes a b", "")),
        (f'{NEW_CONNECTIONS} -m comment --comment "a b" -j X', ("X", "a b", NEW_CONNECTIONS)),
        (f'-m comment --comment "a b" {NEW_CONNECTIONS} -j X', ("X", "a b", NEW_CONNECTIONS)),
        (f'{TO_THIS_NODE} -m comment --comment "a b" -j X', ("X", "a b", TO_THIS_NODE)),
        ('-d 192.0.2.1/32 -m comment --comment "a b" -j X', None),
        ('-m comment --comment "a b" -j X --more', None),
        ('-m comment --comment "a -j X"', None),
        ("-j X", None),
    ],
)
def test_a_rule_with_other_matches_is_not_a_jump(rule: str, expected: tuple[str, str, str] | None) -> None:
    at = ("nat", "PREROUTING")
    assert parse_jump(at, rule) == (Jump(*at, *expected) if expected else None)


def test_a_jump_is_found_in_any_order_of_words() -> None:
    jump = Jump("filter", "INPUT", "X", "a b", NEW_CONNECTIONS)
    assert jump.command == f'-I INPUT {NEW_CONNECTIONS} -m comment --comment "a b" -j X'
    assert jump._replace(at_end=True).command.startswith("-A INPUT ")
    assert missing_jumps([jump], {("filter", "INPUT"): [jump.spec]}) == []
    reordered = f'-m comment --comment "a b" {NEW_CONNECTIONS} -j X'
    assert missing_jumps([jump], {("filter", "INPUT"): [reordered]}) == []
    assert missing_jumps([jump], {("filter", "FORWARD"): [jump.spec]}) == [jump]


def key(chain: str) -> ChainKey:
    return "nat", chain


def own(at: ChainKey, rule: str) -> bool:
    return '"ours"' in rule


def nobody(at: ChainKey) -> bool:
    return False


OUR_JUMP = '-m comment --comment "ours" -j A'
A, B, C = key("A"), key("B"), key("C")


def test_our_chains_are_deleted_with_the_jumps_to_them() -> None:
    held = {A: ["-j B"], B: [], key("INPUT"): [OUR_JUMP, "-j ACCEPT"], key("THEIRS"): ["-j RETURN"]}
    removal = plan_removal(held, {A, B, C}, own, nobody)
    assert removal == Removal([("nat", "INPUT", OUR_JUMP)], [A, B], [], [])
    assert list(restore_inputs(removal, 100)) == [
        f"*nat\n:A - [0:0]\n:B - [0:0]\n-D INPUT {OUR_JUMP}\n-X A\n-X B\nCOMMIT\n"
    ]
    assert list(describe(removal, ("B",))) == [
        f"rule in INPUT of table nat: {OUR_JUMP}", "chain A of table nat", "1 chains B* of table nat",
    ]  # fmt: skip


def test_a_chain_with_a_foreign_jump_is_kept_with_all_it_needs() -> None:
    theirs = key("THEIRS")
    held = {A: ["-j B"], B: ["-g C"], C: [], theirs: ["-d 192.0.2.1/32 -j B"], key("INPUT"): [OUR_JUMP]}
    removal = plan_removal(held, {A, B, C}, own, nobody)
    assert removal.chains == [A]
    assert removal.kept == ["chain B of table nat is kept: a rule in THEIRS jumps to it"]


def test_our_rule_in_a_foreign_chain_is_foreign() -> None:
    removal = plan_removal({A: [], key("THEIRS"): [OUR_JUMP]}, {A}, own, nobody)
    assert (removal.rules, removal.chains) == ([], [])


def test_chains_of_one_name_in_two_tables_are_two_chains() -> None:
    held = {A: [], ("filter", "THEIRS"): ["-j A"]}
    assert plan_removal(held, {A}, own, nobody).chains == [A]


def test_unreachable_chains_of_another_mode_do_not_keep_ours() -> None:
    held = {A: [], B: ["-j A"], C: ["-j A"], key("INPUT"): ["-j C"]}
    dead = plan_removal({A: [], B: ["-j A"]}, {A}, own, lambda at: at in (B, C))
    assert (dead.chains, dead.emptied, dead.kept) == ([A], [B], [])
    first, second = restore_inputs(dead, 100)
    assert (first, second) == ("*nat\n:B - [0:0]\nCOMMIT\n", "*nat\n:A - [0:0]\n-X A\nCOMMIT\n")
    alive = plan_removal(held, {A}, own, lambda at: at in (B, C))
    assert (alive.chains, alive.emptied, alive.kept) == ([], [], [])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30), st.integers(1, 12))
def test_no_deleted_chain_is_jumped_to(edges: list[tuple[int, int]], per_call: int) -> None:
    """In a loop, which the kernel accepts where no packet reaches it, no order of deletions does."""
    held: dict[ChainKey, list[str]] = {key(f"C{n}"): [] for n in range(10)}
    for one, other in edges:
        held[key(f"C{one}")].append(f"-j C{other}")
    removal = plan_removal(dict(reversed(held.items())), held.keys(), own, nobody)
    assert sorted(removal.chains) == sorted(held)
    left = dict(held)
    for text in restore_inputs(removal, per_call):
        for line in text.splitlines():
            if line.startswith(":"):
                left[key(line[1:].split()[0])] = []
        for line in text.splitlines():
            if line.startswith("-X"):
                del left[key(line[3:])]
                assert not any(f"-j {line[3:]}" in rules for rules in left.values())
    assert left == {}
