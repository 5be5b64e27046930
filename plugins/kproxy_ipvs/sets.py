"""The ipsets of one IP family, through one ``ipset restore`` or ``ipset save`` at a time."""

from collections.abc import Iterable, Sequence

from kproxy_core.host import programs
from kproxy_core.model.address import Family
from kproxy_ipvs.names import SETS, SetKind
from kproxy_ipvs.render import Element


def read(family: Family) -> dict[SetKind, dict[str, int]]:
    """Every set that exists, with its entries and their marks. Raises HostError."""
    kinds = {kind.full_name(family): kind for kind in SETS}
    found: dict[SetKind, dict[str, int]] = {}
    for line in programs.output("ipset", "save").splitlines():
        words = line.split()
        kind = kinds.get(words[1]) if len(words) > 2 else None
        if kind is None:
            continue
        if words[0] == "create":
            found[kind] = {}
        else:
            mark = words[words.index("skbmark") + 1] if "skbmark" in words else "0"
            found[kind][words[2]] = int(mark.partition("/")[0], 16)
    return found


def write(
    family: Family, create: Iterable[SetKind], adds: Sequence[Element], deletes: Sequence[Element]
) -> None:
    """Create sets, then add entries, then delete others; what is as it should be is no problem.

    Raises HostError; what came before the line that failed is done.
    """
    text = render(family, create, adds, deletes)
    if text:
        programs.output("ipset", "restore", "-exist", stdin=text)


def render(
    family: Family, create: Iterable[SetKind], adds: Sequence[Element], deletes: Sequence[Element]
) -> str:
    """The input of ``ipset restore``."""
    lines = [f"create {kind.create(family)}\n" for kind in create]
    for kind, entry, mark in adds:
        # Without a mask the whole mark of the packet is replaced: IPVS compares all of it.
        option = f" skbmark {mark:#x}" if mark else ""
        lines.append(f"add {kind.full_name(family)} {entry}{option}\n")
    lines += [f"del {kind.full_name(family)} {entry}\n" for kind, entry, _ in deletes]
    return "".join(lines)


def destroy(names: Iterable[str]) -> None:
    """Delete sets by their full names. Raises HostError if a rule uses one."""
    text = "".join(f"destroy {name}\n" for name in names)
    if text:
        programs.output("ipset", "restore", "-exist", stdin=text)


def existing() -> list[str]:
    """The full names of our sets that exist, of both families. Raises HostError."""
    ours = {kind.full_name(family) for kind in SETS for family in Family}
    return [name for name in programs.output("ipset", "list", "-name").splitlines() if name in ours]
