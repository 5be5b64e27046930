"""Messages of nf_tables: their kinds, and transactions (linux/netfilter/nf_tables.h, nfnetlink.h). Pure."""

import errno
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

from kproxy_core.netlink.messages import NLM_F_ACK, NetlinkRequest, message

T = TypeVar("T")

KIND: Final = 10 << 8
"""NFNL_SUBSYS_NFTABLES, with which the kinds of messages begin."""
GETTABLE, GETCHAIN, GETRULE, GETSET = KIND | 1, KIND | 4, KIND | 7, KIND | 10
NEWSETELEM, GETSETELEM, DELSETELEM = KIND | 12, KIND | 13, KIND | 14
GETOBJ, GETFLOWTABLE = KIND | 19, KIND | 23
TABLE_NAME: Final = 1
"""The attribute with the table's name in messages about tables, chains, rules and sets."""
TABLE_OWNER: Final = 7
"""NFTA_TABLE_OWNER, since Linux 5.12: the netlink port that alone may change a table."""
FAMILIES: Final = {1: "inet", 2: "ip", 3: "arp", 5: "netdev", 7: "bridge", 10: "ip6"}
"""nft's names of the families of tables (NFPROTO_*)."""
ABSENT: Final = (errno.ENOENT, errno.EINVAL, errno.EPROTONOSUPPORT)
"""No such object, a kernel without nf_tables, a kernel without netfilter's netlink (nfnetlink.c)."""
_BATCH_BEGIN, _BATCH_END = 16, 17
_BATCH: Final = struct.pack(">BBH", 0, 0, KIND >> 8)


def unless_absent(ask: Callable[[], T]) -> T | None:
    """Return what *ask* returns; None if the kernel has no such object. Raises other OSErrors of *ask*."""
    try:
        return ask()
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise


def transaction(requests: Sequence[NetlinkRequest], *, commit: bool = True) -> tuple[bytes, int]:
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


class Command(NamedTuple):
    """A change of one object: as nft writes it, and as the kernel takes it."""

    text: str
    request: NetlinkRequest


def commands_text(commands: Iterable[Command]) -> str:
    """Return *commands* as input for ``nft -f``."""
    return "".join(f"{command.text}\n" for command in commands)
