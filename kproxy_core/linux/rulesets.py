"""Access to nf_tables for callers that report errors as the node's (HostError)."""

from collections.abc import Iterator
from contextlib import contextmanager

from kproxy_core.linux.errors import doing
from kproxy_core.linux.programs import OwnProcesses
from kproxy_core.model.address import Family
from kproxy_core.nft import listing
from kproxy_core.nft.listing import TableName
from kproxy_core.nft.transaction import RulesetSocket


@contextmanager
def ruleset(what: str, own: OwnProcesses | None = None) -> Iterator[RulesetSocket]:
    """Open a socket to do *what*; its changes are those of *own*.

    Turns an OSError into a HostError: cannot do *what*.
    """
    with doing(what), RulesetSocket.open() as connection:
        if own is not None:
            with own.starting():
                own.remember(connection.socket.port)
        yield connection


def all_tables() -> list[TableName]:
    """Return the tables of all families; none in a kernel without nf_tables. Raises HostError."""
    with doing("list the tables of nf_tables"):
        return listing.tables()


def table_exists(family: Family, table: str) -> bool:
    """Return whether *table* exists, which it does not in a kernel without nf_tables. Raises HostError."""
    with doing(f"look up table {family.ip} {table}"):
        return listing.has_table(family, table)


def chain_exists(family: Family, table: str, chain: str) -> bool:
    """Return whether *chain* exists, as `table_exists` does. Raises HostError."""
    with doing(f"look up table {family.ip} {table}"):
        return listing.has_chain(family, table, chain)
