"""Attributes of nf_tables' tables, over netlink: a program takes longer, and creates tables when it reads."""

import re
import struct
from collections.abc import Collection, Iterable
from functools import partial

from kproxy_core.host.errors import doing
from kproxy_core.host.netlink import nf_tables
from kproxy_core.host.netlink.messages import (
    NETLINK_NETFILTER,
    NFGENMSG,
    Request,
    Span,
    attribute,
    attributes,
    text,
    text_attribute,
)
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.host.programs import OwnProcesses
from kproxy_core.model.address import Family

_NEWTABLE = nf_tables.KIND
_FLAGS, _USE = 2, 3
_DORMANT, _OWNER = 1, 2
"""NFT_TABLE_F_DORMANT, NFT_TABLE_F_OWNER (linux/netfilter/nf_tables.h)"""
_MATCH = re.compile(
    re.escape(struct.pack("=HH8s", 10, 1, b"match"))  # NFTA_EXPR_NAME
    + b".." + struct.pack("=H", 2) + b".." + struct.pack("=H", 1)  # NFTA_EXPR_DATA, NFTA_MATCH_NAME
    + rb"([\w-]+)\0", re.DOTALL)  # fmt: skip
"""An expression of nft_compat in a rule."""


def owned_tables(family: Family, names: Collection[str]) -> list[str]:
    """Return those of the tables *names* that belong to a process, which alone may change them.

    Raises HostError.
    """
    with doing("read the flags of tables"), NetlinkSocket.open(NETLINK_NETFILTER) as sock:
        flags = sock.dump(nf_tables.GETTABLE, nf_tables.payload(family), partial(_numbers_by_name, _FLAGS))
    return [name for name in names if flags.get(name, 0) & _OWNER]


def used_matches(family: Family, table: str) -> set[str]:
    """Return the names of the matches of iptables in the rules of an existing *table*. Raises HostError."""
    of_table = nf_tables.payload(family, text_attribute(nf_tables.TABLE_NAME, table))
    with doing(f"read the rules of table {table}"), NetlinkSocket.open(NETLINK_NETFILTER) as sock:
        return sock.dump(nf_tables.GETRULE, of_table, _matches)


def _matches(answers: Iterable[Span]) -> set[str]:
    found: set[str] = set()
    scanned = b""
    for data, _, _ in answers:  # Several rules are in one piece of data.
        if data is not scanned:
            scanned = data
            found.update(name.decode("ascii", "replace") for name in _MATCH.findall(data))
    return found


def dormant_tables(family: Family, names: Collection[str]) -> list[str]:
    """Return those of the tables *names* that another program switched off, which iptables does not show.

    Raises HostError.
    """
    with doing("read the flags of tables"), NetlinkSocket.open(NETLINK_NETFILTER) as sock:
        flags = sock.dump(nf_tables.GETTABLE, nf_tables.payload(family), partial(_numbers_by_name, _FLAGS))
    return [name for name in names if flags.get(name, 0) & _DORMANT]


def count_chains(family: Family, name: str) -> int:
    """Return the number of chains in the table *name*; 0 if it does not exist. Raises HostError."""
    with doing(f"read table {name}"), NetlinkSocket.open(NETLINK_NETFILTER) as sock:
        found = sock.dump(nf_tables.GETTABLE, nf_tables.payload(family), partial(_numbers_by_name, _USE))
    return found.get(name, 0)


def wake_tables(family: Family, names: Collection[str], own: OwnProcesses) -> None:
    """Switch the tables *names* on, which iptables can't. Remember the socket in *own*. Raises HostError."""
    awake = attribute(_FLAGS, bytes(4))
    data, last = nf_tables.transaction([
        Request(_NEWTABLE, 0, nf_tables.payload(family, text_attribute(nf_tables.TABLE_NAME, name), awake))
        for name in names
    ])  # fmt: skip
    with doing("activate dormant tables"), NetlinkSocket.open(NETLINK_NETFILTER) as sock:
        with own.starting():
            own.remember(sock.port)
        for refusal in sock.transact(data, last):
            raise refusal.error


def _numbers_by_name(attribute_of_table: int, answers: Iterable[Span]) -> dict[str, int]:
    tables = [attributes(data, start + NFGENMSG.size, end) for data, start, end in answers]
    return {
        text(each[nf_tables.TABLE_NAME]): int.from_bytes(each.get(attribute_of_table, b""), "big")
        for each in tables
    }  # fmt: skip
