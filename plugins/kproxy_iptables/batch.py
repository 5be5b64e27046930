"""Operations as input of iptables-restore, cut into calls that are cheap for the kernel.

One call is one transaction per table. iptables-nft-restore 1.8.9 takes time that grows
with the square of the chains in one call, so chains that nothing leads to yet go ahead in
calls of their own. That is safe at every moment: a chain of a service port is replaced as a
whole, and stands before those that lead to it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kproxy_iptables import names
from kproxy_iptables.names import FILTER, MANGLE, NAT


@dataclass(slots=True)
class Section:
    """What one call does to one table."""

    chains: list[str] = field(default_factory=list)
    """To be created, or emptied if they exist."""
    lines: list[str] = field(default_factory=list)
    """Commands like ``-A CHAIN ...``, without line ends."""

    def text(self, table: str, before: str = "", stale: Sequence[str] = ()) -> str:
        """Input for iptables-restore; "" if there is nothing to do.

        *before* are complete lines that come first. *stale* chains are deleted; only an empty chain can be.
        """
        declared = "".join(map(_declaration, (*stale, *self.chains)))
        lines = _lines((*self.lines, *(f"-X {chain}" for chain in stale)))
        return f"*{table}\n{before}{declared}{lines}COMMIT\n" if before or declared or lines else ""


@dataclass(slots=True)
class References:
    """What changes outside the chains of service ports, and which of those go."""

    filter: Section = field(default_factory=Section)
    nat: Section = field(default_factory=Section)
    mangle: Section = field(default_factory=Section)
    filter_deletes: list[str] = field(default_factory=list)
    """Refusals of what is forwarded from now on: they go after that, so that no packet meets neither."""
    stale: list[str] = field(default_factory=list)
    """Chains of service ports that nothing leads to any more."""

    def section(self, table: str) -> Section:
        return {FILTER: self.filter, NAT: self.nat, MANGLE: self.mangle}[table]

    @property
    def operations(self) -> int:
        """Lines that change something."""
        written = sum(len(s.chains) + len(s.lines) for s in (self.filter, self.nat, self.mangle))
        return written + len(self.filter_deletes) + len(self.stale)


def calls(
    chains: Iterable[tuple[str, str]],
    references: Callable[[], References],
    *,
    mark_masq: Iterable[str] = (),
    chains_per_call: int,
) -> Iterator[str]:
    """The inputs of iptables-restore, in order.

    *chains* of service ports come as (name, rules as text); *references* is asked for after the
    last of them. *mark_masq* are the rules of the chain that they all lead to, if it must be made.
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
    """The inputs that delete *stale* chains of service ports, those that lead to others first."""
    stale = [chain for prefix in names.SERVICE_PREFIXES for chain in stale if chain.startswith(prefix)]
    for start in range(0, len(stale), chains_per_call):
        yield Section().text(NAT, stale=stale[start : start + chains_per_call])


def rules_in(text: str) -> dict[str, int]:
    """How many rules an input adds, by table; several sections of one table count together."""
    counted: dict[str, int] = {}
    for section in text.split("COMMIT\n"):
        table = section[1 : section.find("\n")]
        counted[table] = counted.get(table, 0) + section.count("\n-A ") + section.count("\n-I ")
    return counted


def _declaration(chain: str) -> str:
    return f":{chain} - [0:0]\n"


def _lines(lines: Iterable[str]) -> str:
    return "".join([f"{line}\n" for line in lines])
