"""Tables and chains of nf_tables, looked up by name."""

from typing import Final, NamedTuple

from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink import nf_tables
from kproxy_core.host.netlink.messages import (
    NETLINK_NETFILTER,
    NFGENMSG,
    Span,
    attributes,
    text,
    text_attribute,
)
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.host.nftables.connection import ABSENT
from kproxy_core.model.address import Family

_CHAIN_NAME: Final = 3


class TableName(NamedTuple):
    family: str
    """nft's name: ``ip``, ``ip6``, ``inet``, ..."""
    name: str

    def __str__(self) -> str:
        return f"{self.family} {self.name}"


def all_tables() -> list[TableName]:
    """Return the tables of all families; none in a kernel without nf_tables. Raises HostError."""
    try:
        with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
            return sock.dump(nf_tables.GETTABLE, NFGENMSG.pack(0, 0, 0), lambda found: [*map(_named, found)])
    except OSError as error:
        if error.errno in ABSENT:
            return []
        raise HostError("cannot list the tables of nf_tables", error) from error


def _named(table: Span) -> TableName:
    data, start, end = table
    name = attributes(data, start + NFGENMSG.size, end)[nf_tables.TABLE_NAME]
    return TableName(nf_tables.FAMILIES.get(data[start], "?"), text(name))


def table_exists(family: Family, table: str) -> bool:
    """Return whether *table* exists, which it does not in a kernel without nf_tables. Raises HostError."""
    return _exists(nf_tables.GETTABLE, family, table)


def chain_exists(family: Family, table: str, chain: str) -> bool:
    """Return whether *chain* exists, as `table_exists` does. Raises HostError."""
    return _exists(nf_tables.GETCHAIN, family, table, text_attribute(_CHAIN_NAME, chain))


def _exists(kind: int, family: Family, table: str, *attributes: bytes) -> bool:
    request = nf_tables.payload(family, text_attribute(nf_tables.TABLE_NAME, table), *attributes)
    try:
        with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
            return bool(sock.request(kind, 0, request))
    except OSError as error:
        if error.errno in ABSENT:
            return False
        raise HostError(f"cannot look up table {family.ip} {table}", error) from error
