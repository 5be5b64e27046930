"""The table of the kernel's connection tracking, as ctnetlink lists it.

linux/netfilter/nfnetlink_conntrack.h. It is read as a stream, and what comes out of it is as the kernel wrote
it: a table may have hundreds of thousands of flows.
"""

import errno
import os
import socket
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from kproxy_core.host.netlink import messages as netlink
from kproxy_core.model.address import Address, Family

GET: Final = 0x101
DELETE: Final = 0x102

TUPLE_ORIG: Final = 1
STATUS: Final = 3
PROTOINFO: Final = 4
ID: Final = 12
ZONE: Final = 18
FILTER: Final = 25
TUPLE_PROTO: Final = 2
PROTO_NUM: Final = 1
PROTO_DST_PORT: Final = 3


class Listed(NamedTuple):
    """A flow in a message: a piece of data that begins with the tuple of its first packet."""

    data: bytes
    start: int
    end: int
    size: int
    """Of that tuple; the one of the answers comes after it (see `answered_by`)."""
    source: Address
    destination: Address
    protocol: int
    port: bytes
    """That the first packet was sent to, in network order."""


class AnsweredBy(NamedTuple):
    """Who answers."""

    size: int
    """Of the tuple that says so."""
    address: Address
    port: bytes
    """In network order."""


def header(family: Family) -> bytes:
    """What a request begins with."""
    return _HEADER.pack(socket.AF_INET if family is Family.IPV4 else socket.AF_INET6, 0, 0)


def flows(sock: socket.socket, family: Family, wanted: bytes = b"") -> Iterator[Listed]:
    """All flows of *family*, or those that *wanted* asks for, if the kernel filters.

    Raises OSError, also if the kernel writes flows in another way: better nothing than something wrong.
    """
    unpack, tuple_head = _TUPLE[family].unpack_from, _TUPLE_HEAD[family]
    request = netlink.message(GET, netlink.NLM_F_DUMP, header(family) + wanted)
    for data, start, end in netlink.dump(sock, request):
        start += _HEADER.size
        size, head, source, to, number_head, protocol, _, to_port = unpack(data, start)
        if head != tuple_head or number_head != _NUMBER_HEAD:
            raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))
        yield Listed(data, start, end, size, source, to, protocol, to_port)


def answered_by(family: Family, flow: Listed) -> AnsweredBy:
    """Who answers: not where it was sent to, if that is translated."""
    size, _, by, _, _, _, port, _ = _TUPLE[family].unpack_from(flow.data, flow.start + flow.size)
    return AnsweredBy(size, Address(by), port)


_HEADER = struct.Struct("=BBH")
# A flow begins with its original tuple, then comes the one of its answers. The kernel writes both
# field by field in one order, so most of a table is passed over with one unpack a flow. Fields:
# size of the attribute, header of the addresses and of the first, source, destination, header
# of the protocol number, that, source port, destination port.
_TUPLE = {family: struct.Struct(f"=H2x8s{family.size}s4x{family.size}s4x4sB7x2s6x2s") for family in Family}
_HEADS = struct.Struct("=HHHH")
_NESTED_IP = 1 | netlink.NLA_F_NESTED
_TUPLE_HEAD = {
    Family.IPV4: _HEADS.pack(20, _NESTED_IP, 8, 1),
    Family.IPV6: _HEADS.pack(44, _NESTED_IP, 20, 3),
}
_NUMBER_HEAD = _HEADS.pack(0, 0, 5, PROTO_NUM)[4:]
