"""Tables of nf_tables that another program made dormant. iptables neither shows nor clears that flag."""

import errno
import socket
from collections.abc import Collection

from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink.messages import (
    NETLINK_NETFILTER,
    NFGENMSG,
    NLM_F_ACK,
    attribute,
    attributes,
    message,
    text_attribute,
)
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.host.programs import OwnProcesses
from kproxy_core.model.address import Family

_SUBSYSTEM = 10
"""NFNL_SUBSYS_NFTABLES (linux/netfilter/nfnetlink.h)"""
_NEWTABLE, _GETTABLE = _SUBSYSTEM << 8, _SUBSYSTEM << 8 | 1
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NAME, _FLAGS = 1, 2
_DORMANT = 1
"""NFT_TABLE_F_DORMANT (linux/netfilter/nf_tables.h)"""


def dormant_tables(family: Family, names: Collection[str]) -> list[str]:
    """Return the dormant ones among the tables *names*. Raises HostError."""
    try:
        with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
            return [name for name in names if _flags(sock, family, name) & _DORMANT]
    except OSError as error:
        raise HostError("cannot read the flags of tables", error) from error


def wake_tables(family: Family, names: Collection[str], own: OwnProcesses) -> None:
    """Clear the flag of the tables *names*. Remember the socket in *own*. Raises HostError."""
    header = NFGENMSG.pack(family.af, 0, 0)
    batch = NFGENMSG.pack(0, 0, socket.htons(_SUBSYSTEM))
    awake = attribute(_FLAGS, bytes(4))
    data = message(_BATCH_BEGIN, 0, batch)
    for number, name in enumerate(names, 1):
        acknowledged = NLM_F_ACK if number == len(names) else 0
        data += message(_NEWTABLE, acknowledged, header + text_attribute(_NAME, name) + awake, number)
    data += message(_BATCH_END, 0, batch, len(names) + 1)
    try:
        with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
            with own.starting():
                own.remember(sock.port)
            for refusal in sock.transact(data, len(names)):
                raise refusal.error
    except OSError as error:
        raise HostError("cannot activate dormant tables", error) from error


def _flags(sock: NetlinkSocket, family: Family, name: str) -> int:
    payload = NFGENMSG.pack(family.af, 0, 0) + text_attribute(_NAME, name)
    try:
        ((data, start, end),) = sock.request(_GETTABLE, 0, payload)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return 0
        raise
    return int.from_bytes(attributes(data, start + NFGENMSG.size, end).get(_FLAGS, b""), "big")
