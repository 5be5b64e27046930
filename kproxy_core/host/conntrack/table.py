"""The kernel's connection tracking table, as ctnetlink lists it (linux/netfilter/nfnetlink_conntrack.h).

It is read as a stream of undecoded flows: a table may hold hundreds of thousands of them.
"""

import errno
import os
import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeVar

from kproxy_core.host.netlink import messages as netlink
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.model.address import Address, Family

T = TypeVar("T")

GET: Final = 0x101
DELETE: Final = 0x102
GET_STATS: Final = 0x105

TUPLE_ORIG: Final = 1
STATUS: Final = 3
PROTOINFO: Final = 4
ID: Final = 12
ZONE: Final = 18
FILTER: Final = 25
_STATUS_MASK: Final = 26
TUPLE_PROTO: Final = 2
PROTO_NUM: Final = 1
_PROTOINFO_TCP: Final = 1
_TCP_STATE: Final = 1
PROTO_DST_PORT: Final = 3

TCP_SYN_SENT: Final = 1
TCP_CLOSED: Final = 8
"""States of `tcp_state`: TCP_CONNTRACK_SYN_SENT, and after a reset TCP_CONNTRACK_CLOSE."""
SEEN_REPLY: Final = 1 << 1
"""A bit of the attribute `STATUS`, a big-endian number."""
UNREPLIED: Final = netlink.attribute(STATUS, bytes(4)) + netlink.attribute(
    _STATUS_MASK, SEEN_REPLY.to_bytes(4, "big"))
"""A filter for `flows`: those without any reply."""


class TrackedFlow(NamedTuple):
    """A flow as listed: ``data[start:end]`` begins with the tuple of its first packet."""

    data: bytes
    start: int
    end: int
    size: int
    """Bytes of that tuple; the reply tuple follows it (see `answered_by`)."""
    source: Address
    destination: Address
    protocol: int
    port: bytes
    """Destination port of the first packet, in network order."""


class AnsweredBy(NamedTuple):
    size: int
    """Bytes of the reply tuple."""
    address: Address
    port: bytes
    """In network order."""


def open_socket() -> NetlinkSocket:
    """Open a socket to connection tracking. Raises OSError."""
    return NetlinkSocket.open(netlink.NETLINK_NETFILTER)


def header(family: Family) -> bytes:
    """Return the bytes with which the payload of a request about *family* begins."""
    return netlink.NFGENMSG.pack(family.af, 0, 0)


def flows(family: Family, collect: Callable[[Iterator[TrackedFlow]], T], wanted: bytes = b"") -> T:
    """Return what *collect* makes of all flows of *family*; see `NetlinkSocket.dump`.

    *wanted* are the attributes of a filter, which kernels before 5.8 ignore. Raises OSError, also if the
    kernel encodes flows in an unknown way: no result is better than a wrong one.
    """
    with open_socket() as sock:
        return sock.dump(GET, header(family) + wanted, lambda spans: collect(decode(spans, family)))


def answered_by(family: Family, flow: TrackedFlow) -> AnsweredBy:
    """Return the source of the replies: the destination itself, unless that was translated."""
    size, _, by, _, _, _, port, _ = _TUPLE[family].unpack_from(flow.data, flow.start + flow.size)
    return AnsweredBy(size, Address(by), port)


def tcp_state(info: bytes) -> int:
    """Return the state (enum tcp_conntrack) in the attribute `PROTOINFO`; 0 if it has none."""
    for kind in (_PROTOINFO_TCP, _TCP_STATE):
        info = netlink.attributes(info, 0, len(info)).get(kind, b"")
    return info[0] if info else 0


def decode(spans: Iterator[netlink.Span], family: Family) -> Iterator[TrackedFlow]:
    unpack, tuple_head = _TUPLE[family].unpack_from, _TUPLE_HEAD[family]
    for data, start, end in spans:
        start += netlink.NFGENMSG.size
        size, head, source, to, number_head, protocol, _, to_port = unpack(data, start)
        if head != tuple_head or number_head != _NUMBER_HEAD:
            raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))
        yield TrackedFlow(data, start, end, size, source, to, protocol, to_port)


# A flow begins with its original tuple, followed by the reply tuple. The kernel writes the fields of both
# in one fixed order, so one unpack a flow is enough to skip most of a table. Fields: size of the attribute,
# header of the addresses and of the first, source, destination, header of the protocol number, protocol
# number, source port, destination port.
_TUPLE = {family: struct.Struct(f"=H2x8s{family.size}s4x{family.size}s4x4sB7x2s6x2s") for family in Family}
_HEADS = struct.Struct("=HHHH")
_NESTED_IP = 1 | netlink.NLA_F_NESTED
_TUPLE_HEAD = {
    Family.IPV4: _HEADS.pack(20, _NESTED_IP, 8, 1),
    Family.IPV6: _HEADS.pack(44, _NESTED_IP, 20, 3),
}
_NUMBER_HEAD = _HEADS.pack(0, 0, 5, PROTO_NUM)[4:]
