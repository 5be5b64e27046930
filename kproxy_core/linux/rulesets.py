"""Access to nf_tables for callers that report errors as the node's (HostError)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kproxy_core.linux.errors import doing
from kproxy_core.linux.programs import OwnProcesses
from kproxy_core.model.address import Address, Family, format_address
from kproxy_core.nft import listing
from kproxy_core.nft.listing import TableName
from kproxy_core.nft.messages import Command
from kproxy_core.nft.objects import Chain, Table
from kproxy_core.nft.transaction import RulesetSocket

KUBE_PROXY_TABLE: Final = "kube-proxy"
"""The table of each IP family of kube-proxy's nftables mode."""
MARKER: Final = "kproxy-marker"
"""A chain without rules or hook in that table, where kproxy serves in place of kube-proxy: programs such as
Calico's Felix take any chain there as a sign that Services are served by nf_tables."""


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


def has_marker(family: Family) -> bool:
    """Return whether `MARKER` exists. Raises HostError."""
    return chain_exists(family, KUBE_PROXY_TABLE, MARKER)


def has_kube_proxy(family: Family) -> bool:
    """Return whether kube-proxy's table exists, with more in it than `MARKER`. Raises HostError."""
    with ruleset(f"look up table {family.ip} {KUBE_PROXY_TABLE}") as connection:
        found = connection.tables(family).get(KUBE_PROXY_TABLE)
    return found is not None and (found.chains != 1 or not has_marker(family))


def marker_creation(family: Family) -> list[Command]:
    """Return the commands that create `MARKER`, with its table where there is none."""
    table = Table(family, KUBE_PROXY_TABLE)
    return [table.create(), *table.write([Chain(MARKER)])]


def marker_changes(family: Family, *, wanted: bool) -> list[Command]:
    """Return the commands that create or delete `MARKER`; none if it is as *wanted*. Raises HostError.

    Its table is deleted with it, unless kube-proxy has that.
    """
    if has_marker(family) is wanted:
        return []
    if wanted:
        return marker_creation(family)
    table = Table(family, KUBE_PROXY_TABLE)
    return list(table.remove([Chain(MARKER)])) if has_kube_proxy(family) else [table.delete()]


_RECENT: Final = Path("/proc/thread-self/net/xt_recent")


def is_recent(name: str, source: Address) -> bool | None:
    """Return whether the list *name* of the match ``recent`` holds *source*; None if it can't be read."""
    try:
        lines = (_RECENT / name).read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    # The kernel writes IPv6 addresses in full.
    text = format_address(source) if len(source) == 4 else source.hex(":", 2)
    return any(f"src={text} " in line for line in lines)
