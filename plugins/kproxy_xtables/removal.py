"""Decisions about which chains and rules of a mode to delete, and in which order. Pure.

Modes share chains, and foreign rules may jump to them: ownership is decided by a chain's rules and by the
chains that jump to it, never by its name alone.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from kproxy_xtables.rules import BUILT_IN_CHAINS, ChainKey, RulesByChain, SavedChain

_TARGET = re.compile(r"(?:^|.* )-[jg] (\S+)")


class Removal(NamedTuple):
    """Rules and chains to delete from the tables of one family."""

    rules: list[tuple[str, str, str]]
    """Table, chain and rule, in built-in chains."""
    chains: list[ChainKey]
    """Each chain stands before the chains that it jumps to, except in loops."""
    emptied: list[ChainKey]
    """Unreachable chains of other modes that jump to the deleted ones, and chains of loops."""
    kept: list[str]
    """Chains of the mode that can't be deleted, with the reason."""


def kubernetes_rules(chains: Iterable[SavedChain]) -> dict[ChainKey, list[str]]:
    """Return all *chains* with only those rules that a Kubernetes component may have written."""
    held: dict[ChainKey, list[str]] = {}
    for saved in chains:
        lines = [line for line in saved.lines if "KUBE-" in line or "kubernetes " in line]
        held[saved.table, saved.name] = saved._replace(lines=lines).rules
    return held


def plan_removal(
    held: RulesByChain, ours: Collection[ChainKey], is_own: Callable[[ChainKey, str], bool],
    is_other_mode: Callable[[ChainKey], bool],
) -> Removal:
    """Decide which of the chains *ours* to delete. None of these is in use by another mode.

    *is_own* tells whether a rule in a built-in chain is this mode's. Chains for which *is_other_mode* is true
    keep ours alive only if a packet can reach them.
    """
    rules = [
        (*key, rule)
        for key, found in held.items() if key[1] in BUILT_IN_CHAINS
        for rule in found if is_own(key, rule)
    ]  # fmt: skip
    deleted = set(rules)
    targets = {
        key: [
            (key[0], jump[1]) for rule in found
            if (*key, rule) not in deleted and (jump := _TARGET.fullmatch(rule))
        ]
        for key, found in held.items()
    }  # fmt: skip
    users = {
        target: key for key in held if key not in ours and not is_other_mode(key)
        for target in targets[key]
    }  # fmt: skip
    used = _reachable(targets, users)
    chains = [key for key in held if key in ours and key not in used]
    doomed = set(chains)
    looped, ordered = _referrers_first({key: [to for to in targets[key] if to in doomed] for key in chains})
    return Removal(
        rules=rules,
        chains=looped + ordered,
        emptied=looped + [
            key for key in held
            if key not in ours and key not in used and is_other_mode(key)
            and not doomed.isdisjoint(targets[key])
        ],
        kept=[
            f"chain {key[1]} of table {key[0]} is kept: a rule in {users[key][1]} jumps to it"
            for key in sorted(users) if key in ours and key in held
        ],
    )  # fmt: skip


def restore_inputs(removal: Removal, chains_per_call: int) -> Iterator[str]:
    """Yield the inputs of iptables-restore. The first ones delete all rules that jump to the chains."""
    rules, emptied, chains = removal.rules, removal.emptied, removal.chains
    for start in range(0, len(emptied), chains_per_call):
        yield _text((), emptied[start : start + chains_per_call], ())
    for start in range(0, len(chains) or bool(rules), chains_per_call):
        yield _text(rules if start == 0 else (), (), chains[start : start + chains_per_call])


def describe(removal: Removal, counted: Collection[str] = ()) -> Iterator[str]:
    """Yield one line for each object, and one for all chains whose names begin with one of *counted*."""
    for table, chain, rule in removal.rules:
        yield f"rule in {chain} of table {table}: {rule}"
    number: Counter[ChainKey] = Counter()
    for table, chain in sorted(removal.chains):
        prefix = next((prefix for prefix in counted if chain.startswith(prefix)), "")
        if prefix:
            number[table, prefix] += 1
        else:
            yield f"chain {chain} of table {table}"
    for (table, prefix), count in number.items():
        yield f"{count} chains {prefix}* of table {table}"


def _reachable(targets: Mapping[ChainKey, list[ChainKey]], start: Iterable[ChainKey]) -> set[ChainKey]:
    reached: set[ChainKey] = set()
    waiting = list(start)
    while waiting:
        key = waiting.pop()
        if key not in reached:
            reached.add(key)
            waiting += targets.get(key, ())
    return reached


def _referrers_first(targets: Mapping[ChainKey, list[ChainKey]]) -> tuple[list[ChainKey], list[ChainKey]]:
    """Return the chains that jump into a loop, and all others, each before the *targets* that it jumps to.

    The kernel looks for loops only from built-in chains (mark_source_chains, nft_chain_validate).
    """
    sorter = TopologicalSorter(targets)
    with suppress(CycleError):
        sorter.prepare()
    targets_first: dict[ChainKey, None] = {}
    while ready := sorter.get_ready():
        targets_first.update(dict.fromkeys(ready))
        sorter.done(*ready)
    return [key for key in targets if key not in targets_first], [*targets_first][::-1]


def _text(
    rules: Iterable[tuple[str, str, str]], emptied: Iterable[ChainKey], chains: Iterable[ChainKey]
) -> str:
    """Return one input. Declaring a chain empties it; only an empty chain can be deleted."""
    declared: dict[str, list[str]] = defaultdict(list)
    lines: dict[str, list[str]] = defaultdict(list)
    for table, chain, rule in rules:
        lines[table].append(f"-D {chain} {rule}\n")
    for table, chain in (*emptied, *chains):
        declared[table].append(f":{chain} - [0:0]\n")
    for table, chain in chains:
        lines[table].append(f"-X {chain}\n")
    return "".join(
        f"*{table}\n{''.join(declared[table] + lines[table])}COMMIT\n" for table in {**lines, **declared})
