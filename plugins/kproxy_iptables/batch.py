"""Operations encoded as input of iptables-restore, split into calls of limited size. Pure.

One call is one transaction per table. The time of iptables-nft-restore 1.8.9 grows with the square of the
chains in one call. Chains to which nothing jumps yet are therefore written first, in calls of their own. That
is safe at every moment: a chain is replaced as a whole, and written before the chains that jump to it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kproxy_iptables import names
from kproxy_iptables.names import FILTER, MANGLE, NAT


@dataclass(slots=True)
class Section:
    """Changes of one table in one call."""

    chains: list[str] = field(default_factory=list)
    """Created, or emptied if they exist."""
    lines: list[str] = field(default_factory=list)
    """Commands like ``-A CHAIN ...``, without line ends."""

    def text(self, table: str, before: str = "", stale: Sequence[str] = ()) -> str:
        """Return input for iptables-restore; "" if nothing changes.

        *before* are complete lines to put first. *stale* chains are deleted, and emptied for that.
        """
        declared = "".join(map(_declaration, (*stale, *self.chains)))
        lines = _lines((*self.lines, *(f"-X {chain}" for chain in stale)))
        return f"*{table}\n{before}{declared}{lines}COMMIT\n" if before or declared or lines else ""


@dataclass(slots=True)
class References:
    """Changes outside the chains of service ports, and the chains to delete."""

    filter: Section = field(default_factory=Section)
    nat: Section = field(default_factory=Section)
    mangle: Section = field(default_factory=Section)
    filter_deletes: list[str] = field(default_factory=list)
    """Deletions of drop and reject rules, executed after the rules that forward are in place."""
    stale: list[str] = field(default_factory=list)
    """Chains of service ports to which nothing jumps any more."""

    def section(self, table: str) -> Section:
        return {FILTER: self.filter, NAT: self.nat, MANGLE: self.mangle}[table]

    @property
    def operations(self) -> int:
        """Number of chains and rules written or deleted."""
        written = sum(len(s.chains) + len(s.lines) for s in (self.filter, self.nat, self.mangle))
        return written + len(self.filter_deletes) + len(self.stale)


def inputs(
    chains: Iterable[tuple[str, str]], references: Callable[[], References], *, mark_masq: Iterable[str] = (),
    chains_per_call: int,
) -> Iterator[str]:
    """Yield the inputs of iptables-restore, in order.

    *chains* of service ports are (name, rules as text); *references* is called after the last of them.
    *mark_masq* are the rules of KUBE-MARK-MASQ, to which all of them jump, if that chain must be written.
    """
    first = _lines([f"-A {names.MARK_MASQ} {rule}" for rule in mark_masq])
    declared = [_declaration(names.MARK_MASQ)] if first else []
    bodies = [first] if first else []
    count = 0
    for chain, body in chains:
        if count == chains_per_call:
            yield f"*{NAT}\n{''.join(declared)}{''.join(bodies)}COMMIT\n"
            declared, bodies, count = [], [], 0
        declared.append(_declaration(chain))
        bodies.append(body)
        count += 1
    last = references()
    nat = last.nat.text(NAT, "".join(declared) + "".join(bodies), last.stale)
    refusals = Section(lines=last.filter_deletes).text(FILTER)
    text = last.mangle.text(MANGLE) + last.filter.text(FILTER) + nat + refusals
    if text:
        yield text


def deletions(stale: Sequence[str], chains_per_call: int) -> Iterator[str]:
    """Yield the inputs that delete *stale* chains of service ports, each before those that it jumps to."""
    stale = [chain for prefix in names.SERVICE_PREFIXES for chain in stale if chain.startswith(prefix)]
    for start in range(0, len(stale), chains_per_call):
        yield Section().text(NAT, stale=stale[start : start + chains_per_call])


def _declaration(chain: str) -> str:
    return f":{chain} - [0:0]\n"


def _lines(lines: Iterable[str]) -> str:
    return "".join([f"{line}\n" for line in lines])
