"""Choice of the iptables variant that this node uses: nf_tables or the legacy interface.

Rules of both variants are in force at once and can contradict each other, so all programs on a node must use
the same one. The choice follows kubernetes-sigs/iptables-wrappers: the variant with kubelet's chains, else
the one with more rules.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from kproxy_core.host import programs
from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink import nf_tables
from kproxy_core.host.netlink.messages import NETLINK_NETFILTER, text_attribute
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.host.programs import ProgramFailed, ProgramUnfinished
from kproxy_core.model.address import Family

PROGRAM = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}

KUBELET_CHAINS = (":KUBE-IPTABLES-HINT ", ":KUBE-KUBELET-CANARY ")
"""Chains that kubelet creates in mangle to show which variant it uses (KEP-3178)."""

_GET_CHAIN: Final = nf_tables.KIND | 4
_CHAIN_TABLE, _CHAIN_NAME = 1, 3
"""linux/netfilter/nf_tables.h"""

OLDEST = (1, 6, 2)
"""The first version with ``--random-fully`` and with ``-w`` for iptables-restore."""

_VERSION = re.compile(r"v(\d+(?:\.\d+)+)(.*)")

Version = tuple[int, ...]


class NoVariant(HostError):
    """iptables is not installed, or too old."""


class Variant(NamedTuple):
    """One set of iptables programs."""

    nft: bool
    """The programs use nf_tables, not the legacy interface, which replaces a table as a whole."""
    infix: str
    """Part of the program names: ``-nft``, ``-legacy``, or "" for the default programs."""
    version: Version

    def program(self, family: Family, action: str = "") -> str:
        """Return the name of a program. *action* is ``save``, ``restore`` or ""."""
        return f"{PROGRAM[family]}{self.infix}{'-' if action else ''}{action}"

    def __str__(self) -> str:
        return f"iptables {'.'.join(map(str, self.version))} ({'nf_tables' if self.nft else 'legacy'})"


def find_variants() -> list[Variant]:
    """Return the installed variants. Raises ProgramUnfinished."""
    kinds: dict[bool, Variant] = {}
    for infix in ("-nft", "-legacy", ""):
        variant = probe(infix)
        if variant is not None:
            kinds.setdefault(variant.nft, variant)
    return list(kinds.values())


def find_variant() -> Variant:
    """Return the variant that this node uses. Raises NoVariant or ProgramUnfinished."""
    found = {variant.nft: variant for variant in find_variants()}
    if not found:
        raise NoVariant("iptables is not installed")
    if len(found) == 2:

        def save(kind: str, table: str) -> Iterable[str]:
            if kind == "nft" and table:  # The program would read the rules of all tables.
                yield from _kubelet_chains(table)
                return
            arguments = ("-t", table) if table else ()
            for family in Family:
                try:
                    yield from programs.lines(found[kind == "nft"].program(family, "save"), *arguments)
                except ProgramUnfinished:  # The rules are unknown, so any choice might be wrong.
                    raise
                except ProgramFailed:  # This kernel lacks the family or the interface.
                    continue

        default = probe("")
        chosen = found[prefers_nft(save, default is None or default.nft)]
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


def prefers_nft(save: Callable[[str, str], Iterable[str]], default_is_nft: bool) -> bool:
    """Choose between two installed variants.

    *save* returns the rules of both families as iptables-save prints them, for ``nft`` or ``legacy`` and one
    table, or all existing tables for "". Naming a legacy table would create it. Without any rules the variant
    of plain ``iptables`` wins: *default_is_nft*.
    """
    if _has_kubelet_chains(save("nft", "mangle")):
        return True
    legacy = list(save("legacy", ""))
    if _has_kubelet_chains(legacy):
        return False
    legacy_rules = sum(map(_is_rule, legacy))
    if legacy_rules == 0 and default_is_nft:
        return True
    enough = max(legacy_rules, 1)  # No need to read more.
    return sum(1 for _ in islice(filter(_is_rule, save("nft", "")), enough)) == enough


def _kubelet_chains(table: str) -> Iterator[str]:
    """Yield those of `KUBELET_CHAINS` that exist in nf_tables, as iptables-save prints their beginnings."""
    with suppress(OSError), NetlinkSocket.open(NETLINK_NETFILTER) as sock:
        for family in Family:
            for line in KUBELET_CHAINS:
                name = text_attribute(_CHAIN_NAME, line.strip(": "))
                with suppress(FileNotFoundError):
                    sock.request(_GET_CHAIN, 0, nf_tables.payload(
                        family, text_attribute(_CHAIN_TABLE, table), name))
                    yield line


def _has_kubelet_chains(lines: Iterable[str]) -> bool:
    return any(line.startswith(KUBELET_CHAINS) for line in lines)


def _is_rule(line: str) -> bool:
    return line.startswith("-")


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
    version: Version = tuple(map(int, found[1].split(".")))
    return Variant("nf_tables" in found[2], infix, version)


@cache
def _version(program: str, _path: Path, _changed: int) -> str:
    """Return the version that *program* prints. A new one is another path, or the same with another time."""
    return programs.output(program, "--version")
