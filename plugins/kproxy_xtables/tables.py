"""The tables of one IP family, read by iptables-save and written by iptables-restore."""

import re
from collections.abc import Collection, Iterable, Iterator

from kproxy_core.contract import Family, HostError, SyncFailed, Unsupported
from kproxy_core.linux import programs
from kproxy_core.linux.programs import Done, OwnProcesses, ProgramFailed, ProgramUnfinished
from kproxy_core.linux.rulesets import chain_exists, ruleset, table_exists
from kproxy_core.nft.objects import DORMANT, OWNER, Table
from kproxy_xtables.rules import ChainKey, SavedChain, read_saved
from kproxy_xtables.variant import NoVariant, Variant, find_variant, has_legacy_tables

LOCK_TIMEOUT = 5
"""Timeout in seconds of a program that waits for the xtables lock."""
CHAINS_PER_CALL = 750
"""Limit for the chains that one call of iptables-nft-restore names. Its time is quadratic in them (1.8.9)."""


# Tables over netlink: a program takes longer, and creates tables when it reads.

def owned_tables(family: Family, names: Collection[str]) -> list[str]:
    """Return those of the tables *names* that another process owns: only it can change them.

    Raises HostError.
    """
    return _flagged(family, names, OWNER)


def dormant_tables(family: Family, names: Collection[str]) -> list[str]:
    """Return those of the tables *names* that another program made dormant, which iptables does not show.

    Raises HostError.
    """
    return _flagged(family, names, DORMANT)


def _flagged(family: Family, names: Collection[str], flag: int) -> list[str]:
    with ruleset("read the flags of tables") as connection:
        found = connection.tables(family)
    return [name for name in names if name in found and found[name].flags & flag]


def used_matches(family: Family, table: str) -> set[str]:
    """Return the names of the matches of iptables in the rules of an existing *table*. Raises HostError."""
    with ruleset(f"read the rules of table {table}") as connection:
        return connection.matches(family, table)


def count_chains(family: Family, name: str) -> int:
    """Return the number of chains in the table *name*; 0 if it does not exist. Raises HostError."""
    with ruleset(f"read table {name}") as connection:
        found = connection.tables(family).get(name)
    return found.chains if found is not None else 0


def wake_tables(family: Family, names: Collection[str], own: OwnProcesses) -> None:
    """Wake the dormant tables *names*, which iptables can't. *own* gets the socket. Raises HostError."""
    with ruleset("activate dormant tables", own) as connection:
        connection.run([Table(family, name).wake() for name in names])


# Tables through the programs of iptables.

_TABLES = ("filter", "nat", "mangle")
_BASE_CHAINS = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")
_ALL_TABLES = (*_TABLES, "raw", "security")
_FAILED_LINE = re.compile(r"line:? (\d+)")
_RESOURCE_PROBLEM = 4
_LOCKED = "xtables lock"
_NOT_PERMITTED = "Permission denied"
_INCOMPATIBLE = "incompatible"
_OWN_MATCHES = frozenset({
    "addrtype", "comment", "conntrack", "mark", "physdev", "recent", "sctp", "set", "statistic", "tcp", "udp",
})
"""Matches in our own rules: a mode does not start without them."""


class Busy(HostError):
    """Another program held the xtables lock for `LOCK_TIMEOUT`. Nothing was changed."""


class Unusable(HostError):
    """A table can't be read: its interface or family is missing in this kernel, or access is denied."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.is_denied = _NOT_PERMITTED in problem


class Unreadable(Unusable):
    """Another program made a table unusable for the programs of iptables, but not for nf_tables."""


class RestoreFailed(HostError):
    """iptables-restore failed. Each table is unchanged, or changed as requested."""

    def __init__(self, problem: str, line: str = "") -> None:
        """*problem* is the program's message, *line* the rejected line of the input, if named."""
        super().__init__(f"{problem}: {line}" if line else problem)
        self.line = line


class Tables:
    """The tables of one IP family in one variant of iptables."""

    def __init__(
        self, family: Family, variant: Variant, own: OwnProcesses | None = None, *,
        lock_timeout: int = LOCK_TIMEOUT,
    ) -> None:
        """Remember each process that is started in *own*. *lock_timeout*: seconds to wait for the lock."""
        self.family = family
        self.variant = variant
        self.program = variant.program(family)
        self._own = own or OwnProcesses()
        self._lock_timeout = str(lock_timeout)
        # Every call of a legacy program replaces the whole table, so one call is best.
        self.chains_per_call = CHAINS_PER_CALL if variant.nft else 1_000_000_000
        """Limit for the chains of one `restore`."""

    def check(self) -> None:
        """Return if the nat table can be used. Raises Busy, Unusable or ProgramUnfinished."""
        try:
            done = self._list("nat", "POSTROUTING")
        except ProgramUnfinished:
            raise
        except ProgramFailed as error:
            raise Unusable(str(error)) from error
        if done.returncode:
            raise _read_error(programs.complaint(done) or "no nat table")

    def check_foreign_rules(self) -> None:
        """Return if other programs leave the tables usable for iptables. Raises Unreadable, or HostError."""
        if not self.variant.nft:
            return
        existing = [name for name in _ALL_TABLES if table_exists(self.family, name)]
        if owned := owned_tables(self.family, [name for name in existing if name in _TABLES]):
            raise Unreadable(f"table {self.family.ip} {owned[0]} belongs to another process (flag owner)")
        matches: set[str] = set()
        for name in existing:
            matches |= used_matches(self.family, name)
            for chain in _BASE_CHAINS if name in _TABLES else ():
                if chain_exists(self.family, name, chain):
                    done = self._list(name, chain)
                    if done.returncode and _INCOMPATIBLE in (problem := programs.complaint(done)):
                        raise Unreadable(problem)
        for match in sorted(matches - _OWN_MATCHES):
            done = programs.run(self.program, "-m", match, "--help", own=self._own)
            if done.returncode:
                raise Unreadable(programs.complaint(done).partition("\n")[0])

    def is_missing(self) -> bool:
        """Return whether this kernel lacks the interface or the family, so that no rules can exist."""
        try:
            self.check()
        except Unusable as error:
            return not error.is_denied
        except HostError:
            return False
        return False

    def save(self, table: str = "") -> Iterator[SavedChain]:
        """Yield the chains of all existing tables, or of one *table*, which a legacy program creates.

        Raises ProgramFailed.
        """
        return read_saved(self.variant.saved(self.family, table, self._own))

    def chains(self, table: str = "") -> dict[ChainKey, list[str]]:
        """Return the chains of `save` with their rules. Raises ProgramFailed."""
        return {(saved.table, saved.name): saved.rules for saved in self.save(table)}

    def restore(self, text: str) -> None:
        """Give *text* to iptables-restore. Each table changes completely or not at all.

        Raises Busy, RestoreFailed or ProgramFailed.
        """
        program = self.variant.program(self.family, "restore")
        done = programs.run(
            program, "-w", self._lock_timeout, "--noflush", "--counters", stdin=text, own=self._own
        )
        if done.returncode == 0:
            return
        problem = programs.complaint(done)
        if done.returncode == _RESOURCE_PROBLEM and not self.variant.nft:
            raise Busy(f"{program}: {problem}")
        raise RestoreFailed(programs.failure(done), _rejected_line(text, problem))

    def dormant(self) -> list[str]:
        """Return the dormant tables: they exist, but none of their rules is in effect. Raises HostError."""
        return dormant_tables(self.family, _TABLES) if self.variant.nft else []

    def wake(self) -> list[str]:
        """Wake dormant tables and return their names. Raises HostError."""
        if found := self.dormant():
            wake_tables(self.family, found, self._own)
        return found

    def has_chain(self, table: str, chain: str) -> bool:
        """Return whether *chain* exists without reading other chains. Raises HostError.

        A legacy program creates *table* beside existing ones.
        """
        if self.variant.nft:
            return chain_exists(self.family, table, chain)
        if not has_legacy_tables(self.family):
            return False
        done = self._list(table, chain)
        if done.returncode == _RESOURCE_PROBLEM:
            raise _read_error(f"{self.program}: {programs.complaint(done)}")
        return done.returncode == 0

    def rules(self, table: str, chain: str) -> list[str]:
        """Return the rules of one chain without ``-A CHAIN``. Raises HostError."""
        done = self._list(table, chain)
        if done.returncode:
            raise _read_error(programs.failure(done))
        start = f"-A {chain} "
        return [line.removeprefix(start) for line in done.stdout.splitlines() if line.startswith(start)]

    def _list(self, table: str, chain: str) -> Done:
        return programs.run(self.program, "-w", self._lock_timeout, "-t", table, "-S", chain, own=self._own)


def open_tables(families: Iterable[Family], own: OwnProcesses | None = None) -> dict[Family, Tables]:
    """Return the usable tables of this node's variant of iptables.

    Raises Unsupported, or SyncFailed for a problem that may pass, such as a lock that another program holds.
    """
    found: dict[Family, Tables] = {}
    try:
        variant = find_variant()
        for family in families:
            found[family] = Tables(family, variant, own)
            found[family].check()
            found[family].check_foreign_rules()
    except NoVariant as missing:
        raise Unsupported(str(missing)) from missing
    except Unreadable as error:  # For both families: another mode serves them.
        raise Unsupported(f"{variant} does not work beside rules of other programs: {error}") from error
    except Unusable as error:
        raise Unsupported(f"{variant} has no nat table for {family.label}: {error}", family) from error
    except HostError as error:
        raise SyncFailed(str(error)) from error
    return found


def _read_error(problem: str) -> Busy | Unusable:
    # The exit code alone does not tell: it is the same when the lock file can't be opened.
    if _LOCKED in problem:
        return Busy(problem)
    return Unreadable(problem) if _INCOMPATIBLE in problem else Unusable(problem)


def _rejected_line(text: str, problem: str) -> str:
    """Return the rejected rule; "" if it is unknown. A legacy program names the COMMIT line of the table."""
    found = _FAILED_LINE.search(problem)
    lines = text.splitlines()
    number = int(found[1]) - 1 if found else -1
    return lines[number] if 0 <= number < len(lines) and lines[number].startswith("-") else ""
