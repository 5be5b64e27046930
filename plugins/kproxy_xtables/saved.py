"""Output of iptables-save as values. Pure."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class SavedChain(NamedTuple):
    table: str
    name: str
    lines: list[str]
    """Rules as ``-A`` commands with line ends."""

    @property
    def rules(self) -> list[str]:
        """The rules without ``-A CHAIN`` and line ends."""
        start = len("-A  ") + len(self.name)
        # libxt_nfacct prints one blank too many.
        return [line[start:-1].replace("--nfacct-name  ", "--nfacct-name ") for line in self.lines]


def read_saved(lines: Iterable[str]) -> Iterator[SavedChain]:
    """Yield the chains of each table: those with rules in their order, then the empty ones."""
    table = current = ""
    found: list[str] = []
    empty: dict[str, None] = {}
    for line in lines:
        if line.startswith("-A "):
            chain = line[3 : line.index(" ", 3)]
            if chain != current:
                if found:
                    yield SavedChain(table, current, found)
                current, found = chain, []
                empty.pop(chain, None)
            found.append(line)
        elif line.startswith(":"):
            empty[line[1 : line.index(" ")]] = None
        elif line.startswith("*"):
            table = line[1:].strip()
        elif line.startswith("COMMIT"):
            if found:
                yield SavedChain(table, current, found)
            for chain in empty:
                yield SavedChain(table, chain, [])
            current, found, empty = "", [], {}
