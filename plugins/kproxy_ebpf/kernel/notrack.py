"""The tables of option ``notrack`` in the kernel, one for each IP family."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kproxy_core.contract.errors import SyncFailed
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.nft_tables import Command, commands_text, completion
from kproxy_core.linux.nftables import Connection, generation
from kproxy_core.linux.trial import problem_of
from kproxy_core.model.address import Family
from kproxy_ebpf.names import NOTRACK_TABLE
from kproxy_ebpf.skeleton import notrack_layout, notrack_table
from kproxy_nft.table import delete_table


class NotrackTables:
    """The tables of *families* for packets with *mark*; with mark 0 there are none."""

    def __init__(self, families: Sequence[Family], mark: int) -> None:
        self._families = families
        self._mark = mark
        self._intact_since: int | None = None
        """Number of the last commit to nf_tables before the tables were found intact."""

    def write(self) -> None:
        """Bring the tables to the rules, or delete those of an earlier process. Raises SyncFailed."""
        if not self._mark:
            delete_tables()
            return
        with _reporting(), Connection.to(f"write table {NOTRACK_TABLE}") as connection:
            connection.run(self._missing(connection))

    def problem(self) -> str:
        """Return what is wrong with the tables; "" if they are as `write` leaves them."""
        if not self._mark:
            return ""
        try:
            with Connection.to(f"read table {NOTRACK_TABLE}") as connection:
                commit = generation(connection.socket)
                if commit == self._intact_since:
                    return ""
                is_intact = not self._missing(connection)
        except HostError as error:
            return str(error)
        self._intact_since = commit if is_intact else None
        return "" if is_intact else f"table {NOTRACK_TABLE} was changed or deleted"

    def _missing(self, connection: Connection) -> list[Command]:
        return [
            command for family in self._families for command in _missing(connection, family, self._mark)]


def _missing(connection: Connection, family: Family, mark: int) -> list[Command]:
    """Return the commands that bring the table of *family* to the rules for *mark*. Raises OSError."""
    held = connection.read(family, NOTRACK_TABLE)
    return completion(notrack_table(family), notrack_layout(mark), {}, held)


def refusal(families: Sequence[Family]) -> str:
    """Return why the kernel refuses the rules; "" if they would work. Changes nothing."""
    return problem_of(lambda: _check(families))


def _check(families: Sequence[Family]) -> None:
    """Have the kernel check the rules. Raises HostError."""
    objects = notrack_layout(1).values()
    with Connection.to(f"check table {NOTRACK_TABLE}") as connection:
        connection.check([
            command for family in families for command in notrack_table(family).replace(objects)])


def planned_commands(family: Family, mark: int) -> str:
    """Return the commands that `NotrackTables.write` would run for *family*; "" if the kernel has its result.

    Raises SyncFailed.
    """
    with _reporting(), Connection.to(f"read table {NOTRACK_TABLE}") as connection:
        if mark:
            return commands_text(_missing(connection, family, mark))
        held = connection.read(family, NOTRACK_TABLE)
    return "" if held is None else commands_text([notrack_table(family).delete()])


def delete_tables(*, dry_run: bool = False) -> list[str]:
    """Delete the tables of both families, and return their names. Raises SyncFailed."""
    with _reporting():
        return [
            table for family in Family for table in delete_table(notrack_table(family), dry_run=dry_run)]


@contextmanager
def _reporting() -> Iterator[None]:
    """Turn a HostError into SyncFailed."""
    try:
        yield
    except HostError as error:
        raise SyncFailed(str(error)) from error
