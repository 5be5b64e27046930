"""Requests to nf_tables, encoded (linux/netfilter/nfnetlink.h)."""

import struct
from collections.abc import Sequence
from typing import Final

from kproxy_core.host.netlink.messages import NFGENMSG, NLM_F_ACK, Request, message
from kproxy_core.model.address import Family

KIND: Final = 10 << 8
"""NFNL_SUBSYS_NFTABLES, with which the kinds of messages begin."""
GETTABLE, GETCHAIN, GETRULE, GETSET, GETFLOWTABLE = KIND | 1, KIND | 4, KIND | 7, KIND | 10, KIND | 23
TABLE_NAME: Final = 1
"""The attribute with the table's name in messages about tables, chains, rules and sets."""
TABLE_OWNER: Final = 7
"""NFTA_TABLE_OWNER, since Linux 5.12: the netlink port that alone may change a table."""
FAMILIES: Final = {1: "inet", 2: "ip", 3: "arp", 5: "netdev", 7: "bridge", 10: "ip6"}
"""nft's names of the families of tables (NFPROTO_*)."""
_BATCH_BEGIN, _BATCH_END = 16, 17
_BATCH: Final = struct.pack(">BBH", 0, 0, KIND >> 8)


def payload(family: Family, *attributes: bytes) -> bytes:
    return NFGENMSG.pack(family.af, 0, 0) + b"".join(attributes)


def transaction(requests: Sequence[Request], *, commit: bool = True) -> tuple[bytes, int]:
    """Encode *requests* as one transaction. Return it with the sequence number that is acknowledged.

    Without *commit*, the kernel checks the requests and undoes them.
    """
    last = len(requests) + 1
    out = [message(_BATCH_BEGIN, 0, _BATCH, 1)]
    for number, (kind, flags, body) in enumerate(requests, 2):
        out.append(message(kind, flags | (NLM_F_ACK if number == last else 0), body, number))
    if commit:
        out.append(message(_BATCH_END, 0, _BATCH, last + 1))
    return b"".join(out), last
