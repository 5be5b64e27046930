"""Operations encoded as input of iptables-restore, split into calls of limited size. Pure.

One call is one transaction per table. The time of iptables-nft-restore 1.8.9 is quadratic in the chains that
one call names. Therefore chains to which nothing jumps yet are written first, in calls of their own. That is
safe at every moment: a chain is replaced as a whole, and written before the chains that jump to it.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from kproxy_iptables import names
from kproxy_iptables.names import FILTER, MANGLE, NAT

_JUMP = re.compile(r" -j (KUBE-S\S+)")


@dataclass(slots=True)
class Section:
    """Changes of one table in one call."""

    chains: list[str] = field(default_factory=list)
    """Chains to create, or to flush if they exist."""
    lines: list[str] = field(default_factory=list)
    """Commands like ``-A CHAIN ...``, without line ends."""

    def text(self, table: str, before: str = "", stale: Collection[str] = ()) -> str:
        """Return input for iptables-restore; "" if nothing changes.

        *before* are complete lines to put first. *stale* chains are flushed and deleted.
        """
        declared = "".join(map(_declaration, (*stale, *self.chains)))
        lines = "".join([f"{line}\n" for line in (*self.lines, *(f"-X {chain}" for chain in stale))])
        return f"*{table}\n{before}{declared}{lines}COMMIT\n" if before or declared or lines else ""


@dataclass(slots=True)
class References:
    """Changes outside the chains of service ports, and the chains to delete."""

    sections: dict[str, Section] = field(default_factory=lambda: defaultdict(Section))
    """By table."""
    late: Section = field(default_factory=Section)
    """Deletions of drop and reject rules, executed after the rules that forward exist."""
    stale: list[str] = field(default_factory=list)
    """Chains of service ports to which nothing jumps any more."""

    @property
    def operations(self) -> int:
        """Number of chains and rules written or deleted."""
        written = sum(len(s.chains) + len(s.lines) for s in (*self.sections.values(), self.late))
        return written + len(self.stale)


def inputs(
    chains: Iterable[tuple[str, str]], references: Callable[[], References], *, chains_per_call: int
) -> Iterator[str]:
    """Yield the inputs of iptables-restore, in order.

    *chains* of the nat table are (name, rules as text); *references* is called after the last of them. A call
    names at most *chains_per_call* of them, as written or as targets, unless one chain alone names more.
    """
    declared: list[str] = []
    bodies: list[str] = []
    named: set[str] = set()
    for chain, body in chains:
        of_chain = {chain, *_JUMP.findall(body)}
        if declared and len(named) + len(of_chain - named) > chains_per_call:
            yield f"*{NAT}\n{''.join(declared)}{''.join(bodies)}COMMIT\n"
            declared, bodies, named = [], [], set()
        named |= of_chain
        declared.append(_declaration(chain))
        bodies.append(body)
    last = references()
    sections = last.sections
    text = sections[MANGLE].text(MANGLE) + sections[FILTER].text(FILTER)
    text += sections[NAT].text(NAT, "".join(declared) + "".join(bodies), last.stale)
    text += last.late.text(FILTER)
    if text:
        yield text


def deletions(stale: Collection[str], chains_per_call: int) -> Iterator[str]:
    """Yield the inputs that delete *stale* chains of service ports, each before those that it jumps to."""
    grouped = [chain for chain in stale if chain.startswith(names.GROUPED)]
    if len(stale) > chains_per_call:  # Otherwise one call flushes them all.
        for start in range(0, len(grouped), chains_per_call):
            yield Section(chains=grouped[start : start + chains_per_call]).text(NAT)
    stale = [chain for prefix in names.SERVICE_PREFIXES for chain in stale if chain.startswith(prefix)]
    for start in range(0, len(stale), chains_per_call):
        yield Section().text(NAT, stale=stale[start : start + chains_per_call])


def _declaration(chain: str) -> str:
    return f":{chain} - [0:0]\n"
