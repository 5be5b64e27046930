"""Which iptables this node uses: the programs of nf_tables or those of the legacy interface.

Two sets of rules in one kernel contradict each other without a word, so everybody on a node
must use the same one. The evidence is weighed as the iptables-wrappers of Kubernetes do
(kubernetes-sigs/iptables-wrappers): kubelet's own chains first, then who has more rules.
"""

import re
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from kproxy_core.host import programs
from kproxy_core.host.errors import HostError
from kproxy_core.host.programs import ProgramFailed
from kproxy_core.model.address import Family

PROGRAM = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}

KUBELET_CHAINS = (":KUBE-IPTABLES-HINT ", ":KUBE-KUBELET-CANARY ")
"""What kubelet creates in mangle for others to find (KEP-3178)."""

OLDEST = (1, 6, 2)
"""The first version with ``--random-fully`` and with ``-w`` for iptables-restore."""

_VERSION = re.compile(r"v(\d+(?:\.\d+)+)(.*)")

Version = tuple[int, ...]


class NoVariant(HostError):
    """No iptables is installed, or only one that is too old."""


class Variant(NamedTuple):
    """One set of programs."""

    nft: bool
    """Over nf_tables; else the legacy interface, whose tables are replaced as a whole."""
    infix: str
    """What its programs have in their names: ``-nft``, ``-legacy``, or "" for the only or default ones."""
    version: Version

    def program(self, family: Family, action: str = "") -> str:
        """The name of a program; *action*: ``save`` or ``restore``."""
        return f"{PROGRAM[family]}{self.infix}{'-' if action else ''}{action}"

    def __str__(self) -> str:
        return f"iptables {'.'.join(map(str, self.version))} ({'nf_tables' if self.nft else 'legacy'})"


def find_variants() -> list[Variant]:
    """Every iptables that is installed, each once."""
    kinds: dict[bool, Variant] = {}
    for infix in ("-nft", "-legacy", ""):
        variant = probe(infix)
        if variant is not None:
            kinds.setdefault(variant.nft, variant)
    return list(kinds.values())


def find_variant() -> Variant:
    """The iptables that this node uses. Raises NoVariant."""
    found = {variant.nft: variant for variant in find_variants()}
    if not found:
        raise NoVariant("iptables is not installed")
    if len(found) == 2:

        def save(kind: str, table: str) -> Iterable[str]:
            arguments = ("-t", table) if table else ()
            for family in Family:
                try:
                    yield from programs.lines(found[kind == "nft"].program(family, "save"), *arguments)
                except ProgramFailed:  # This kernel lacks the family or the interface.
                    continue

        default = probe("")
        chosen = found[prefers_nft(save, default is None or default.nft)]
    else:
        (chosen,) = found.values()
    if chosen.version < OLDEST:
        raise NoVariant(f"{chosen} is too old: {'.'.join(map(str, OLDEST))} is needed")
    return chosen


def prefers_nft(save: Callable[[str, str], Iterable[str]], default_is_nft: bool) -> bool:
    """Decide between two installed variants.

    *save* returns what a variant's programs save of both families: its arguments are ``nft``
    or ``legacy``, and a table ("": all that exist; naming a legacy table would create it).
    *default_is_nft* decides where nothing is found: what plain ``iptables`` is.
    """
    if _has_kubelet_chains(save("nft", "mangle")):
        return True
    legacy = list(save("legacy", ""))
    if _has_kubelet_chains(legacy):
        return False
    legacy_rules = _count(legacy)
    if legacy_rules == 0 and default_is_nft:
        return True
    enough = max(legacy_rules, 1)  # Many more need not be read.
    return sum(1 for _ in islice(filter(_is_rule, save("nft", "")), enough)) == enough


def _has_kubelet_chains(lines: Iterable[str]) -> bool:
    return any(line.startswith(KUBELET_CHAINS) for line in lines)


def _count(lines: Iterable[str]) -> int:
    return sum(map(_is_rule, lines))


def _is_rule(line: str) -> bool:
    return line.startswith("-")


def probe(infix: str) -> Variant | None:
    """The variant whose programs have *infix* in their names, if they are installed."""
    program = f"{PROGRAM[Family.IPV4]}{infix}"
    if not all(programs.find(name) for name in (program, f"{program}-save", f"{program}-restore")):
        return None
    try:
        said = programs.run(program, "--version").stdout
    except ProgramFailed:
        return None
    found = _VERSION.search(said)
    if found is None:
        return None
    version: Version = tuple(map(int, found[1].split(".")))
    return Variant("nf_tables" in found[2], infix, version)
