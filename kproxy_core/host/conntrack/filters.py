"""Classic BPF programs by which a socket drops announcements of ended flows before they wake its reader.

Offsets are those of ctnetlink (net/netfilter/nf_conntrack_netlink.c): the netlink header of 16 bytes, that of
nfnetlink, and the tuples of both directions without padding between them. Where a tuple is laid out
otherwise, as in a zone, the values compared differ, and the announcement is received.
"""

import socket
from collections.abc import Iterable
from typing import Final

from kproxy_core.host.conntrack import table as ctnetlink
from kproxy_core.host.netlink.sockets import ACCEPT, DROP, JUMP_IF_EQUAL, LOAD_WORD
from kproxy_core.host.netlink.sockets import Instruction as Do

_SET, _SET_X, _A_TO_X = 0x00, 0x01, 0x07
_LOAD_HALF, _LOAD_BYTE, _LOAD_BYTE_BEHIND_X = 0x28, 0x30, 0x50
_JUMP_IF_EQUAL_X = 0x1D
_FIND, _FIND_WITHIN = Do(LOAD_WORD, 0, 0, 0xFFFFF00C), Do(LOAD_WORD, 0, 0, 0xFFFFF010)
"""SKF_AD_NLATTR, SKF_AD_NLATTR_NEST: the offset of attribute X behind, or within, offset A; 0: none."""

_FAMILY, _ATTRIBUTES = 16, 20
_TCP_AND_STATE = 1
"""CTA_PROTOINFO_TCP, and the CTA_PROTOINFO_TCP_STATE within."""

RESETS: Final = (
    Do(_SET, 0, 0, _ATTRIBUTES), Do(_SET_X, 0, 0, ctnetlink.PROTOINFO), _FIND, Do(JUMP_IF_EQUAL, 8, 0, 0),
    Do(_SET_X, 0, 0, _TCP_AND_STATE), _FIND_WITHIN, Do(JUMP_IF_EQUAL, 5, 0, 0),
    _FIND_WITHIN, Do(JUMP_IF_EQUAL, 3, 0, 0),
    Do(_A_TO_X, 0, 0, 0), Do(_LOAD_BYTE_BEHIND_X, 0, 0, 4), Do(JUMP_IF_EQUAL, 1, 0, ctnetlink.TCP_CLOSED),
    DROP, ACCEPT,
)  # fmt: skip
"""Accepts TCP connections that a reset has ended."""


def _unless_equal(pairs: Iterable[tuple[int, int, int]]) -> list[Do]:
    """Accept if two values differ. *pairs*: the kind of load, and where one and the other are."""
    return [
        step for load, one, other in pairs
        for step in (Do(load, 0, 0, one), Do(_A_TO_X, 0, 0, 0), Do(load, 0, 0, other),
                     Do(_JUMP_IF_EQUAL_X, 1, 0, 0), ACCEPT)
    ] + [DROP]  # fmt: skip


# Address and port, as the client dialled them, and of the socket that answers.
_IPV4 = _unless_equal([(LOAD_WORD, 40, 84), (_LOAD_HALF, 68, 112)])
_IPV6 = _unless_equal([*((LOAD_WORD, at, at + 56) for at in (52, 56, 60, 64)), (_LOAD_HALF, 92, 160)])

TRANSLATED: Final = (
    Do(_LOAD_BYTE, 0, 0, _FAMILY), Do(JUMP_IF_EQUAL, 0, len(_IPV4), socket.AF_INET), *_IPV4, *_IPV6,
)  # fmt: skip
"""Accepts flows that are answered by another socket than the one dialled."""
