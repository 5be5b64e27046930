"""Tables and chains of nf_tables, over netlink: a program takes longer, and creates tables when it reads."""

import errno
from collections.abc import Collection

from kproxy_core.host.errors import HostError, doing
from kproxy_core.host.netlink import nf_tables
from kproxy_core.host.netlink.messages import (
    NETLINK_NETFILTER,
    NFGENMSG,
    Request,
    attribute,
    attributes,
    text_attribute,
)
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.host.programs import OwnProcesses
from kproxy_core.model.address import Family

_NEWTABLE, _GETTABLE, _GETCHAIN = nf_tables.KIND, nf_tables.KIND | 1, nf_tables.KIND | 4
_NAME, _FLAGS = 1, 2
_TABLE_OF_CHAIN, _CHAIN_NAME = 1, 3
_DORMANT = 1
"""NFT_TABLE_F_DORMANT (linux/netfilter/nf_tables.h)"""


def has_chain(family: Family, table: str, chain: str) -> bool:
    """Return whether *chain* exists. Raises HostError."""
    names = text_attribute(_TABLE_OF_CHAIN, table), text_attribute(_CHAIN_NAME, chain)
    try:
        with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
            return bool(sock.request(_GETCHAIN, 0, nf_tables.payload(family, *names)))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise HostError(f"cannot look for chain {chain}", error) from error


def dormant_tables(family: Family, names: Collection[str]) -> list[str]:
    """Return those of the tables *names* that another program switched off, which iptables does not show.

    Raises HostError.
    """
    with doing("read the flags of tables"), NetlinkSocket.open(NETLINK_NETFILTER) as sock:
        return [name for name in names if _flags(sock, family, name) & _DORMANT]


def wake_tables(family: Family, names: Collection[str], own: OwnProcesses) -> None:
    """Switch the tables *names* on, which iptables can't. Remember the socket in *own*. Raises HostError."""
    awake = attribute(_FLAGS, bytes(4))
    data, last = nf_tables.transaction([
        Request(_NEWTABLE, 0, nf_tables.payload(family, text_attribute(_NAME, name), awake)) for name in names
    ])  # fmt: skip
    with doing("activate dormant tables"), NetlinkSocket.open(NETLINK_NETFILTER) as sock:
        with own.starting():
            own.remember(sock.port)
        for refusal in sock.transact(data, last):
            raise refusal.error


def _flags(sock: NetlinkSocket, family: Family, name: str) -> int:
    request = nf_tables.payload(family, text_attribute(_NAME, name))
    try:
        ((data, start, end),) = sock.request(_GETTABLE, 0, request)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return 0
        raise
    return int.from_bytes(attributes(data, start + NFGENMSG.size, end).get(_FLAGS, b""), "big")
