"""Choice of the iptables variant that this node uses: nf_tables or the legacy interface.

Rules of both variants are in force at once and can contradict each other, so all programs on a node must use
the same one. The choice follows kubernetes-sigs/iptables-wrappers: the variant with kubelet's chains, else
the one with more rules.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kproxy_core.contract import Family, HostError
from kproxy_core.linux import programs
from kproxy_core.linux.programs import OwnProcesses, ProgramFailed, ProgramUnfinished
from kproxy_core.linux.rulesets import chain_exists

PROGRAM = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}

KUBELET_CHAINS = ("KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY")
"""Chains that kubelet creates in mangle to show which variant it uses (KEP-3178)."""

OLDEST = (1, 6, 2)
"""The first version with ``--random-fully`` and with ``-w`` for iptables-restore."""

_VERSION = re.compile(r"v(\d+(?:\.\d+)+)(.*)")
_LEGACY_TABLES = Path("/proc/thread-self/net")


class NoVariant(HostError):
    """iptables is not installed, or too old."""


class Variant(NamedTuple):
    """One set of iptables programs."""

    nft: bool
    """The programs use nf_tables, not the legacy interface, which replaces a table as a whole."""
    infix: str
    """Part of the program names: ``-nft``, ``-legacy``, or "" for the default programs."""
    version: tuple[int, ...]

    def program(self, family: Family, action: str = "") -> str:
        """Return the name of a program. *action* is ``save``, ``restore`` or ""."""
        return f"{PROGRAM[family]}{self.infix}{'-' if action else ''}{action}"

    def saved(self, family: Family, table: str = "", own: OwnProcesses | None = None) -> Iterator[str]:
        """Yield the lines of iptables-save for all existing tables, or for one *table*.

        A legacy program creates that table; it is not run where no table exists. Raises ProgramFailed.
        """
        if self.nft or table or has_legacy_tables(family):
            only = ("-t", table) if table else ()
            yield from programs.lines(self.program(family, "save"), *only, own=own)

    def __str__(self) -> str:
        return f"iptables {'.'.join(map(str, self.version))} ({'nf_tables' if self.nft else 'legacy'})"


def find_variants() -> list[Variant]:
    """Return the installed variants. Raises ProgramUnfinished."""
    kinds: dict[bool, Variant] = {}
    for infix in ("-nft", "-legacy", ""):
        # Plain iptables is one of the other two if both are installed.
        if len(kinds) < 2 and (variant := probe(infix)) is not None:
            kinds.setdefault(variant.nft, variant)
    return list(kinds.values())


def find_variant() -> Variant:
    """Return the variant that this node uses. Raises NoVariant or ProgramUnfinished."""
    found = {variant.nft: variant for variant in find_variants()}
    if not found:
        raise NoVariant("iptables is not installed")
    if len(found) == 2:

        def save(nft: bool) -> Iterable[str]:
            for family in Family:
                try:
                    yield from found[nft].saved(family)
                except ProgramUnfinished:  # The rules are unknown, so any choice might be wrong.
                    raise
                except ProgramFailed:  # This kernel lacks the family or the interface.
                    continue

        default = probe("")
        hinted = any(map(_kubelet_uses_nft, Family))
        chosen = found[prefers_nft(hinted, save, default is None or default.nft)]
    else:
        (chosen,) = found.values()
    if chosen.version < OLDEST:
        raise NoVariant(f"{chosen} is too old: {'.'.join(map(str, OLDEST))} is needed")
    return chosen


def find_used_and_unused() -> tuple[list[Variant], list[Variant]]:
    """Return the variant that this node uses, and the other one. Without a usable one, count all as used.

    Raises ProgramUnfinished.
    """
    found = find_variants()
    try:
        used = find_variant()
    except NoVariant:
        return found, []
    return [used], [variant for variant in found if variant != used]


def prefers_nft(
    kubelet_uses_nft: bool, save: Callable[[bool], Iterable[str]], default_is_nft: bool
) -> bool:
    """Choose between two installed variants.

    *save* returns the rules of both families in all existing tables, as iptables-save prints them, of the
    variant for nf_tables (True) or of the legacy one. Without any rules the variant of plain ``iptables``
    wins: *default_is_nft*.
    """
    if kubelet_uses_nft:
        return True
    legacy = list(save(False))
    if any(line.startswith(tuple(f":{chain} " for chain in KUBELET_CHAINS)) for line in legacy):
        return False
    legacy_rules = sum(line.startswith("-") for line in legacy)
    if legacy_rules == 0 and default_is_nft:
        return True
    enough = max(legacy_rules, 1)  # No need to read more.
    nft_rules = (line for line in save(True) if line.startswith("-"))
    return len(list(islice(nft_rules, enough))) == enough


def _kubelet_uses_nft(family: Family) -> bool:
    """Return whether nf_tables has one of `KUBELET_CHAINS`; iptables-nft-save would read all tables for that.

    False where nf_tables can't be asked.
    """
    try:
        return any(chain_exists(family, "mangle", chain) for chain in KUBELET_CHAINS)
    except HostError:
        return False


def has_legacy_tables(family: Family) -> bool:
    """Return whether the network namespace has tables of the legacy interface. True if that is unknown."""
    try:
        return bool((_LEGACY_TABLES / f"{family.ip}_tables_names").read_bytes())
    except FileNotFoundError:
        return False
    except OSError:
        return True


def probe(infix: str) -> Variant | None:
    """Return the variant whose program names contain *infix*; None if it is not installed.

    Raises ProgramUnfinished.
    """
    program = f"{PROGRAM[Family.IPV4]}{infix}"
    path = programs.find(program)
    if path is None or not all(programs.find(f"{program}-{action}") for action in ("save", "restore")):
        return None
    try:
        real = Path(path).resolve()
        said = _version(program, real, real.stat().st_mtime_ns)
    except ProgramUnfinished:
        raise
    except (ProgramFailed, OSError):
        return None
    found = _VERSION.search(said)
    if found is None:
        return None
    return Variant("nf_tables" in found[2], infix, tuple(map(int, found[1].split("."))))


@cache
def _version(program: str, _path: Path, _changed: int) -> str:
    """Return the version that *program* prints. A new one is another path, or the same with another time."""
    return programs.output(program, "--version")
