"""Which chains and rules of a mode's can go from the tables, and in which order. Pure.

Modes share chains, and others' rules may lead to them: what is somebody's goes by what it holds and by
who leads to it, never by its name alone.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from kproxy_xtables.tables import SavedChain

ChainKey = tuple[str, str]
"""Table and chain."""

Held = Mapping[ChainKey, list[str]]
"""Rules by chain, without ``-A CHAIN``."""

BUILT_IN_CHAINS = frozenset({"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"})

_GENERAL = r"(?:-m conntrack --ctstate NEW |-m state --state NEW |-m addrtype --dst-type LOCAL )*"
_JUMP = re.compile(rf'{_GENERAL}-m comment --comment "([^"]*)" {_GENERAL}-j (\S+)')
_LEADS = re.compile(r"(?:^|.* )-[jg] (\S+)")


class Jump(NamedTuple):
    """A rule that leads all packets, or all new ones, to a chain, and says in a comment why."""

    comment: str
    target: str


def jump(rule: str) -> Jump | None:
    """The *rule* if it is a jump with nothing but a comment; any version of kube-proxy's are."""
    found = _JUMP.fullmatch(rule)
    return Jump(found[1], found[2]) if found else None


class Removal(NamedTuple):
    """What goes from the tables of one family."""

    rules: list[tuple[str, str, str]]
    """Table, chain and rule: in the kernel's own chains."""
    chains: list[ChainKey]
    """Those that lead to others before them."""
    emptied: list[ChainKey]
    """Chains of other modes that lead to these; no packet gets there any more."""
    kept: list[str]
    """What stays although it is the mode's, with the reason."""


def speaking_of_kubernetes(chains: Iterable[SavedChain]) -> dict[ChainKey, list[str]]:
    """All *chains*, with those of their rules that may be of interest here."""
    held: dict[ChainKey, list[str]] = {}
    for saved in chains:
        lines = [line for line in saved.lines if "KUBE-" in line or "kubernetes " in line]
        held[saved.table, saved.name] = saved._replace(lines=lines).rules
    return held


def plan_removal(
    held: Held,
    ours: Collection[ChainKey],
    is_own: Callable[[ChainKey, str], bool],
    others: Callable[[ChainKey], bool],
) -> Removal:
    """Decide about the chains that are *ours*, which includes none that another mode uses.

    *is_own* tells whether a rule in one of the kernel's own chains is this mode's. *others* tells which
    chains are those of other modes: they are nobody's unless something leads to them.
    """
    rules = [
        (*key, rule)
        for key, found in held.items() if key[1] in BUILT_IN_CHAINS
        for rule in found if is_own(key, rule)
    ]  # fmt: skip
    gone = set(rules)
    leads = {
        key: [(key[0], target) for rule in found if (*key, rule) not in gone and (target := _target(rule))]
        for key, found in held.items()
    }
    users = {
        target: key for key in held if key not in ours and not others(key)
        for target in leads[key]
    }  # fmt: skip
    used = _reached(leads, users)
    chains = [key for key in held if key in ours and key not in used]
    going = set(chains)
    return Removal(
        rules=rules,
        chains=_referrers_first(chains, leads),
        emptied=[
            key for key in held
            if key not in ours and others(key) and key not in used and not going.isdisjoint(leads[key])
        ],
        kept=[
            f"chain {key[1]} of table {key[0]} stays: a rule in {users[key][1]} leads to it"
            for key in sorted(users) if key in ours and key in held
        ],
    )  # fmt: skip


def inputs(removal: Removal, chains_per_call: int) -> Iterator[str]:
    """The inputs for iptables-restore. With the first nothing leads to the chains any more."""
    rules, emptied, chains = removal.rules, removal.emptied, removal.chains
    for start in range(0, len(emptied), chains_per_call):
        yield _text((), emptied[start : start + chains_per_call], ())
    for start in range(0, len(chains) or bool(rules), chains_per_call):
        yield _text(rules if start == 0 else (), (), chains[start : start + chains_per_call])


def described(removal: Removal, counted: Collection[str] = ()) -> Iterator[str]:
    """One line for each object; chains whose names begin with one of *counted* are counted."""
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


def _target(rule: str) -> str:
    found = _LEADS.fullmatch(rule)
    return found[1] if found else ""


def _reached(leads: Mapping[ChainKey, list[ChainKey]], start: Iterable[ChainKey]) -> set[ChainKey]:
    reached: set[ChainKey] = set()
    waiting = list(start)
    while waiting:
        key = waiting.pop()
        if key not in reached:
            reached.add(key)
            waiting += leads.get(key, ())
    return reached


def _referrers_first(chains: list[ChainKey], leads: Mapping[ChainKey, list[ChainKey]]) -> list[ChainKey]:
    """*chains* so that none comes after one that it leads to: the kernel has no loops."""
    referrers = dict.fromkeys(chains, 0)
    for key in chains:
        for target in leads[key]:
            if target in referrers:
                referrers[target] += 1
    ordered = [key for key, count in referrers.items() if not count]
    for key in ordered:
        for target in leads[key]:
            if target in referrers:
                referrers[target] -= 1
                if not referrers[target]:
                    ordered.append(target)
    return ordered


def _text(
    rules: Iterable[tuple[str, str, str]], emptied: Iterable[ChainKey], chains: Iterable[ChainKey]
) -> str:
    """One input. Declaring a chain empties it, and only an empty one can be deleted."""
    tables: dict[str, tuple[list[str], list[str]]] = {}

    def of(table: str) -> tuple[list[str], list[str]]:
        return tables.setdefault(table, ([], []))

    for table, chain, rule in rules:
        of(table)[1].append(f"-D {chain} {rule}\n")
    for table, chain in emptied:
        of(table)[0].append(f":{chain} - [0:0]\n")
    for table, chain in chains:
        of(table)[0].append(f":{chain} - [0:0]\n")
        of(table)[1].append(f"-X {chain}\n")
    return "".join(
        f"*{table}\n{''.join(declared + lines)}COMMIT\n" for table, (declared, lines) in tables.items()
    )
