"""The kernel's tables as iptables-save and iptables-restore know them."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kproxy_core.host import programs
from kproxy_core.host.errors import HostError
from kproxy_core.host.programs import Done, OwnProcesses, ProgramFailed
from kproxy_core.model.address import Family
from kproxy_xtables.variant import Variant

LOCK_PATIENCE = 5
"""Seconds that a program waits for the xtables lock."""
CHAINS_PER_CALL = 750
"""How many chains iptables-nft-restore takes best at once: its time grows with their square (1.8.9)."""

_FAILED_LINE = re.compile(r"line:? (\d+)")
_RESOURCE_PROBLEM = 4
_NOT_ALLOWED = "Permission denied"


class Busy(HostError):
    """Another program held the xtables lock all the time; nothing was changed."""


class Refused(HostError):
    """iptables-restore failed; each table is either as it was or as it should be."""

    def __init__(self, problem: str, line: str = "") -> None:
        """*problem* in the program's words; *line* of its input is the one to blame, as far as it said so."""
        super().__init__(f"{problem}: {line}" if line else problem)
        self.line = line


class SavedChain(NamedTuple):
    """One chain as iptables-save prints it."""

    table: str
    name: str
    lines: list[str]
    """Its rules, each an ``-A`` command with its line end."""

    @property
    def rules(self) -> list[str]:
        """Its rules, without ``-A CHAIN`` and line end."""
        start = len("-A  ") + len(self.name)
        # libxt_nfacct prints one blank too many.
        return [line[start:-1].replace("--nfacct-name  ", "--nfacct-name ") for line in self.lines]


def read_saved(lines: Iterable[str]) -> Iterator[SavedChain]:
    """The chains of each table: those with rules as they come, then those without."""
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


class Tables:
    """The tables of one family."""

    def __init__(self, family: Family, variant: Variant, own: OwnProcesses | None = None) -> None:
        """*own* is told of every process."""
        self.family = family
        self.variant = variant
        self.program = variant.program(family)
        self._own = own
        # The legacy interface replaces a whole table in each call: the fewer, the better.
        self.chains_per_call = CHAINS_PER_CALL if variant.nft else 1_000_000_000
        """How many chains are best given to `restore` at once."""

    def save(self, table: str = "") -> Iterator[SavedChain]:
        """What is there, in all tables that exist or in one, which legacy programs create by being asked.

        Raises ProgramFailed.
        """
        only = ("-t", table) if table else ()
        return read_saved(programs.lines(self.variant.program(self.family, "save"), *only, own=self._own))

    def restore(self, text: str) -> None:
        """Give *text* to iptables-restore; each of its tables changes as a whole or not at all.

        Raises Busy, Refused or ProgramFailed.
        """
        program = self.variant.program(self.family, "restore")
        done = programs.run(
            program, "-w", str(LOCK_PATIENCE), "--noflush", "--counters", stdin=text, own=self._own
        )
        if done.returncode == 0:
            return
        problem = programs.complaint(done)
        if done.returncode == _RESOURCE_PROBLEM and not self.variant.nft:
            raise Busy(f"{program}: {problem}")
        raise Refused(programs.failure(done), _blamed(text, problem))

    def has_chain(self, table: str, chain: str) -> bool:
        """Whether *chain* exists, without reading any other. Raises HostError if that can't be told.

        Legacy programs create *table* by being asked.
        """
        done = self._list(table, chain)
        if done.returncode == _RESOURCE_PROBLEM:
            raise Busy(f"{self.program}: {programs.complaint(done)}")
        return done.returncode == 0

    def rules(self, table: str, chain: str) -> list[str]:
        """The rules of one chain, without ``-A CHAIN``. Raises ProgramFailed."""
        done = self._list(table, chain)
        if done.returncode:
            raise ProgramFailed(programs.failure(done))
        start = f"-A {chain} "
        return [line.removeprefix(start) for line in done.stdout.splitlines() if line.startswith(start)]

    def missing(self) -> bool:
        """Whether this kernel lacks the interface or the family; then there can be no rules either."""
        problem = self.problem()
        return bool(problem) and _NOT_ALLOWED not in problem

    def problem(self) -> str:
        """Why the nat table of this family can't be used; "" if it can."""
        try:
            done = self._list("nat", "POSTROUTING")
        except ProgramFailed as error:
            return str(error)
        return (programs.complaint(done) or "no nat table") if done.returncode else ""

    def _list(self, table: str, chain: str) -> Done:
        return programs.run(
            self.program, "-w", str(LOCK_PATIENCE), "-t", table, "-S", chain, own=self._own
        )


def _blamed(text: str, problem: str) -> str:
    """The rule that was refused. The legacy program only says which table, by the line of its COMMIT."""
    found = _FAILED_LINE.search(problem)
    lines = text.splitlines()
    number = int(found[1]) - 1 if found else -1
    return lines[number] if 0 <= number < len(lines) and lines[number].startswith("-") else ""
