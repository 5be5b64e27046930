"""The tables of option ``notrack`` in the kernel, one for each IP family."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from kproxy_core.backend.errors import SyncFailed
from kproxy_core.host import programs
from kproxy_core.host.attempts import problem_of
from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink import nf_objects, nf_tables
from kproxy_core.host.netlink.messages import NETLINK_NETFILTER, NFGENMSG, Span, text_attribute
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.model.address import Family
from kproxy_ebpf.names import NOTRACK_TABLE
from kproxy_ebpf.skeleton import notrack_rules
from kproxy_nft.table import delete_table


class NotrackTables:
    """The tables of *families* for packets with *mark*; with mark 0 there are none."""

    def __init__(self, families: Sequence[Family], mark: int) -> None:
        self._families = families
        self._mark = mark
        self._written: list[bytes] = []
        """Tables and rules with their handles, as the kernel had them after the last `write`."""

    def write(self) -> None:
        """Create or replace the tables, or delete those of an earlier process.

        Raises SyncFailed, OSError.
        """
        if not self._mark:
            delete_tables()
            return
        rules = "".join(notrack_rules(family, self._mark) for family in self._families)
        with _reporting():
            programs.output("nft", "-f", "-", stdin=rules)
        self._written = self._present()

    def problem(self) -> str:
        """Return the damage since `write`; "" if there is none."""
        try:
            is_intact = self._present() == self._written
        except OSError as error:
            return f"table {NOTRACK_TABLE} cannot be read: {error.strerror}"
        return "" if is_intact else f"table {NOTRACK_TABLE} was changed or deleted"

    def _present(self) -> list[bytes]:
        """Return the tables and rules as the kernel lists them. Raises OSError."""
        found: list[Span] = []
        for family in self._families if self._mark else ():
            with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
                found += sock.request(nf_tables.GETTABLE, 0, _table(family))
                found += sock.dump(nf_tables.GETRULE, _table(family), list)
        return [data[start + NFGENMSG.size : end] for data, start, end in found]


def refusal(families: Sequence[Family]) -> str:
    """Return why the kernel or nft refuses the rules; "" if they would work. Changes nothing."""
    rules = "".join(notrack_rules(family, 1) for family in families)
    return problem_of(partial(programs.output, "nft", "--check", "-f", "-", stdin=rules))


def planned_commands(family: Family, mark: int) -> str:
    """Return the commands that `NotrackTables.write` would run for *family*; "" if the kernel has its result.

    Raises SyncFailed.
    """
    table = f"{family.ip} {NOTRACK_TABLE}"
    with _reporting():
        if not nf_objects.table_exists(family, NOTRACK_TABLE):
            return notrack_rules(family, mark) if mark else ""
        if not mark:
            return f"delete table {table}\n"
        held = programs.output("nft", "list", "table", *table.split())
    wanted = notrack_rules(family, mark)
    rule = f" mark {mark:#010x} notrack\n"  # nft prints the rest of a rule in other words.
    return "" if held.count(rule) == wanted.count(rule) else wanted


def delete_tables(*, dry_run: bool = False) -> list[str]:
    """Delete the tables of both families, and return their names. Raises SyncFailed."""
    with _reporting():
        return [table for family in Family for table in delete_table(family, NOTRACK_TABLE, dry_run=dry_run)]


def _table(family: Family) -> bytes:
    return nf_tables.payload(family, text_attribute(nf_tables.TABLE_NAME, NOTRACK_TABLE))


@contextmanager
def _reporting() -> Iterator[None]:
    """Turn a HostError into SyncFailed."""
    try:
        yield
    except HostError as error:
        raise SyncFailed(str(error)) from error
