"""The kernel's connection tracking: its table, announcements, failed connections, volumes and limits
(linux/netfilter/nfnetlink_conntrack.h).
"""

import contextlib
import enum
import errno
import itertools
import operator
import os
import socket
import struct
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from msgspec import Struct

from kproxy_core.linux import sysctl
from kproxy_core.linux.errors import HostError, doing
from kproxy_core.model.address import FAMILY_BY_AF, Address, Family, Protocol, family_of
from kproxy_core.model.service import Destination
from kproxy_core.netlink.messages import (
    NETLINK_NETFILTER,
    NFGENMSG,
    NLA_F_NESTED,
    NLM_F_CREATE,
    NLM_F_EXCL,
    Malformed,
    NetlinkRequest,
    Span,
    attribute,
    attributes,
    decoding,
    messages,
    nested,
)
from kproxy_core.netlink.sockets import (
    ACCEPT,
    DROP,
    JUMP_IF_EQUAL,
    LOAD_WORD,
    Announcements,
    NetlinkSocket,
    NotificationThread,
)
from kproxy_core.netlink.sockets import Instruction as Do
from kproxy_core.plan.quarantine import Answer, Answers, Attempt
from kproxy_core.plan.service_plan import Frontend
from kproxy_core.plan.stale_flows import Socket

T = TypeVar("T")

GET: Final = 0x101
DELETE: Final = 0x102
GET_STATS: Final = 0x105
"""Requests. The announcement of an ended flow has the kind of `DELETE`."""
_NEW: Final = 0x100
"""The announcement of a new or a changed flow."""

TUPLE_ORIG: Final = 1
TUPLE_REPLY: Final = 2
STATUS: Final = 3
PROTOINFO: Final = 4
_TIMEOUT: Final = 7
_COUNTERS_ORIG, _COUNTERS_REPLY = 9, 10
ID: Final = 12
ZONE: Final = 18
FILTER: Final = 25
_STATUS_MASK: Final = 26
"""Attributes of a flow (CTA_*)."""
_TUPLE_IP: Final = 1
TUPLE_PROTO: Final = 2
"""Attributes of a tuple."""
PROTO_NUM: Final = 1
PROTO_SRC_PORT: Final = 2
PROTO_DST_PORT: Final = 3
"""Attributes of the protocol in a tuple."""
_PROTOINFO_TCP: Final = 1
_PROTOINFO_TCP_STATE: Final = 1

TCP_SYN_SENT: Final = 1
_TCP_TIME_WAIT: Final = 7
TCP_CLOSED: Final = 8
"""States of `tcp_state`: TCP_CONNTRACK_SYN_SENT and _TIME_WAIT, and after a reset TCP_CONNTRACK_CLOSE."""
SEEN_REPLY: Final = 1 << 1
_ASSURED: Final = 1 << 2
_DST_NAT: Final = 1 << 5
"""Bits of `STATUS`, a big-endian number (IPS_*)."""
UNREPLIED: Final = attribute(STATUS, bytes(4)) + attribute(_STATUS_MASK, SEEN_REPLY.to_bytes(4, "big"))
"""Filter of `dump_flows`: flows without any reply."""

_REPLIED: Final = (
    attribute(STATUS, SEEN_REPLY.to_bytes(4, "big")) + attribute(_STATUS_MASK, SEEN_REPLY.to_bytes(4, "big")))
"""The opposite filter."""

_NFNLGRP_NEW, _NFNLGRP_UPDATE, _NFNLGRP_DESTROY = 1, 2, 3
"""Groups of announcements (NFNLGRP_CONNTRACK_*)."""

# The kernel writes the attributes of both tuples in one fixed order, so one unpack a flow is enough to skip
# most of a table.
_TUPLE = {family: struct.Struct(f"=H2x8s{family.size}s4x{family.size}s4x4sB7x2s6x2s") for family in Family}
"""Size of the attribute, headers of the addresses and of the first, source, destination, header of the
protocol number, protocol number, source port, destination port."""
_BOTH_TUPLES = {
    family: struct.Struct(f"=4x8s{n}x4x{n}s4x4sB7x2x6x2s2x" f"4x8x{n}s4x{n}x4x4x1x7x2s")
    for family in Family for n in (family.size,)
}
"""Of the first tuple its headers, the destination, the header and number of the protocol, and the destination
port; of the second the source and its port."""
_HEADS = struct.Struct("=HHHH")
_NESTED_IP = _TUPLE_IP | NLA_F_NESTED
_TUPLE_HEAD = {
    Family.IPV4: _HEADS.pack(20, _NESTED_IP, 8, 1),
    Family.IPV6: _HEADS.pack(44, _NESTED_IP, 20, 3),
}
_NUMBER_HEAD = _HEADS.pack(0, 0, 5, PROTO_NUM)[4:]


# The table. It is read as a stream of undecoded flows: it may hold hundreds of thousands of them.

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
    return NetlinkSocket.open(NETLINK_NETFILTER)


def header(family: Family) -> bytes:
    """Return the bytes with which the payload of a request about *family* begins."""
    return NFGENMSG.pack(family.af, 0, 0)


def dump_flows(family: Family, collect: Callable[[Iterator[TrackedFlow]], T], wanted: bytes = b"") -> T:
    """Return what *collect* makes of all flows of *family*; see `NetlinkSocket.dump`.

    *wanted* are the attributes of a filter, which kernels before 5.8 ignore. Raises OSError, also if the
    kernel encodes flows in an unknown way (Malformed): no result is better than a wrong one.
    """
    with open_socket() as sock:
        return sock.dump(GET, header(family) + wanted, lambda spans: collect(decode(spans, family)))


def answered_by(family: Family, flow: TrackedFlow) -> AnsweredBy:
    """Return the source of the replies: the destination itself, unless that was translated.

    Raises Malformed.
    """
    try:  # `decoding` takes as long as the rest.
        size, _, by, _, _, _, port, _ = _TUPLE[family].unpack_from(flow.data, flow.start + flow.size)
    except struct.error as error:
        raise Malformed(f"a reply tuple: {error}") from error
    return AnsweredBy(size, Address(by), port)


def tcp_state(info: bytes) -> int:
    """Return the state (enum tcp_conntrack) in the attribute `PROTOINFO`; 0 if it has none."""
    for kind in (_PROTOINFO_TCP, _PROTOINFO_TCP_STATE):
        info = attributes(info, 0, len(info)).get(kind, b"")
    return info[0] if info else 0


class Progress(NamedTuple):
    """How far a flow has come."""

    id: bytes
    is_answered: bool
    tcp_state: int
    """enum tcp_conntrack (nf_conntrack_tcp.h); 0 for other protocols."""


def progress_of(flow: TrackedFlow) -> Progress:
    """Return the progress of a listed *flow*. Raises Malformed."""
    found = attributes(flow.data, flow.start, flow.end)
    return Progress(
        found.get(ID, b""), bool(_number(found.get(STATUS, b"")) & SEEN_REPLY),
        tcp_state(found.get(PROTOINFO, b"")))


def decode(spans: Iterator[Span], family: Family) -> Iterator[TrackedFlow]:
    """Yield the flow in each of *spans*. Raises Malformed."""
    unpack, tuple_head = _TUPLE[family].unpack_from, _TUPLE_HEAD[family]
    for data, start, end in spans:
        start += NFGENMSG.size
        try:
            size, head, source, to, number_head, protocol, _, to_port = unpack(data, start)
        except struct.error as error:
            raise Malformed(f"a flow: {error}") from error
        if head != tuple_head or number_head != _NUMBER_HEAD:
            raise Malformed("a flow whose tuple has another layout")
        yield TrackedFlow(data, start, end, size, source, to, protocol, to_port)


# Announcements of new, changed and ended flows.

class FlowEventType(enum.Enum):
    """The reason for an announcement."""

    NEW = "new"
    UPDATED = "updated"
    ENDED = "ended"


class FlowTuple(NamedTuple):
    """The packets of a flow in one direction."""

    source: Address
    source_port: int
    destination: Address
    port: int


class FlowEvent(NamedTuple):
    change: FlowEventType
    protocol: int
    original: FlowTuple
    """The sender's packets before any translation."""
    reply: FlowTuple
    """Its source is the endpoint, its destination the sender as the endpoint sees it."""
    is_answered: bool


def flow_events(*, only_new: bool = False) -> Announcements[FlowEvent]:
    """Follow flows from now on. Raises HostError without CAP_NET_ADMIN."""
    groups = (_NFNLGRP_NEW,) if only_new else (_NFNLGRP_NEW, _NFNLGRP_UPDATE, _NFNLGRP_DESTROY)
    with doing("watch connection tracking, which requires CAP_NET_ADMIN"):
        return Announcements(groups, parse)


def parse(data: bytes) -> Iterator[FlowEvent]:
    """Yield the TCP, UDP and SCTP flows in one datagram. Raises Malformed."""
    for kind, flags, _, start, end in messages(data):
        if kind not in (_NEW, DELETE):
            continue
        found = attributes(data, start + NFGENMSG.size, end)
        original, reply = _flow_tuple(found.get(TUPLE_ORIG)), _flow_tuple(found.get(TUPLE_REPLY))
        if original is None or reply is None:
            continue
        is_new = flags & (NLM_F_CREATE | NLM_F_EXCL)
        new_or_updated = FlowEventType.NEW if is_new else FlowEventType.UPDATED
        status = int.from_bytes(found.get(STATUS, b""), "big")
        yield FlowEvent(
            FlowEventType.ENDED if kind == DELETE else new_or_updated, original[0], original[1], reply[1],
            bool(status & SEEN_REPLY))


def find_flow(protocol: int, original: FlowTuple) -> FlowTuple | None:
    """Return the replies of the flow that *original* belongs to; None without one.

    Raises HostError. Flows in other zones than 0 are not found.
    """
    family = family_of(original.destination)
    first, second = (1, 2) if family is Family.IPV4 else (3, 4)
    tuple_ = nested(
        TUPLE_ORIG,
        nested(_TUPLE_IP, attribute(first, original.source), attribute(second, original.destination)),
        nested(
            TUPLE_PROTO, attribute(PROTO_NUM, bytes([protocol])),
            attribute(PROTO_SRC_PORT, original.source_port.to_bytes(2, "big")),
            attribute(PROTO_DST_PORT, original.port.to_bytes(2, "big"))))
    with doing("look up a tracked flow"), open_socket() as sock:
        try:
            data, start, end = sock.request_one(GET, header(family) + tuple_)
        except FileNotFoundError:
            return None
        found = _flow_tuple(attributes(data, start + NFGENMSG.size, end).get(TUPLE_REPLY))
        return found[1] if found is not None else None


def _flow_tuple(value: bytes | None) -> tuple[int, FlowTuple] | None:
    if value is None:
        return None
    parts = attributes(value)
    addresses, numbers = (attributes(parts.get(kind, b"")) for kind in (_TUPLE_IP, TUPLE_PROTO))
    source, destination = addresses.get(1) or addresses.get(3), addresses.get(2) or addresses.get(4)
    if source is None or destination is None or not numbers.keys() >= {PROTO_SRC_PORT, PROTO_DST_PORT}:
        return None
    source_port, port = (int.from_bytes(numbers[kind], "big") for kind in (PROTO_SRC_PORT, PROTO_DST_PORT))
    with decoding("a flow"):
        return numbers[PROTO_NUM][0], FlowTuple(Address(source), source_port, Address(destination), port)


# Socket filters (classic BPF) that drop announcements of ended flows before they wake their reader.

_SET, _SET_X, _A_TO_X = 0x00, 0x01, 0x07
_LOAD_HALF, _LOAD_BYTE, _LOAD_BYTE_BEHIND_X = 0x28, 0x30, 0x50
_JUMP_IF_EQUAL_X = 0x1D
_FIND, _FIND_WITHIN = Do(LOAD_WORD, 0, 0, 0xFFFFF00C), Do(LOAD_WORD, 0, 0, 0xFFFFF010)
"""SKF_AD_NLATTR, SKF_AD_NLATTR_NEST: the offset of attribute X behind, or within, offset A; 0: none."""

_FAMILY, _ATTRIBUTES = 16, 20
"""Offsets of the address family and of the first attribute."""
_TCP_AND_STATE = 1
"""CTA_PROTOINFO_TCP, and the CTA_PROTOINFO_TCP_STATE within."""

RESETS: Final = (
    Do(_SET, 0, 0, _ATTRIBUTES), Do(_SET_X, 0, 0, PROTOINFO), _FIND, Do(JUMP_IF_EQUAL, 8, 0, 0),
    Do(_SET_X, 0, 0, _TCP_AND_STATE), _FIND_WITHIN, Do(JUMP_IF_EQUAL, 5, 0, 0),
    _FIND_WITHIN, Do(JUMP_IF_EQUAL, 3, 0, 0),
    Do(_A_TO_X, 0, 0, 0), Do(_LOAD_BYTE_BEHIND_X, 0, 0, 4), Do(JUMP_IF_EQUAL, 1, 0, TCP_CLOSED),
    DROP, ACCEPT,
)  # fmt: skip
"""Filter: TCP connections that a reset has ended."""


def _unless_equal(pairs: Iterable[tuple[int, int, int]]) -> list[Do]:
    """Return the steps that accept if two values differ. *pairs*: the kind of load, and both offsets."""
    return [
        step for load, one, other in pairs
        for step in (Do(load, 0, 0, one), Do(_A_TO_X, 0, 0, 0), Do(load, 0, 0, other),
                     Do(_JUMP_IF_EQUAL_X, 1, 0, 0), ACCEPT)
    ] + [DROP]  # fmt: skip


_IPV4 = _unless_equal([(LOAD_WORD, 40, 84), (_LOAD_HALF, 68, 112)])
_IPV6 = _unless_equal([*((LOAD_WORD, at, at + 56) for at in (52, 56, 60, 64)), (_LOAD_HALF, 92, 160)])
"""Address and port of the dialled socket and of the one that answers.

Offsets are those of ctnetlink (net/netfilter/nf_conntrack_netlink.c): the netlink header of 16 bytes, that of
nfnetlink, and the tuples of both directions without padding. With another layout of a tuple, as in a zone,
the values differ, and the announcement is received.
"""

TRANSLATED: Final = (
    Do(_LOAD_BYTE, 0, 0, _FAMILY), Do(JUMP_IF_EQUAL, 0, len(_IPV4), socket.AF_INET), *_IPV4, *_IPV6,
)  # fmt: skip
"""Filter: flows that another socket answers than the one dialled."""


# UDP flows, and the deletion of stale ones of UDP and TCP. Since Linux 5.8 the kernel filters its listing; an
# older kernel lists every flow of the family, which costs time and changes nothing else.

_FILTER_ORIG_FLAGS: Final = 1
_FILTER_REPLY_FLAGS: Final = 2
_IPV4_SRC: Final = 1
_FILTER_IP_SRC: Final = 1
_FILTER_PROTO_NUM: Final = 1 << 3
_FILTER_PROTO_SRC_PORT: Final = 1 << 4
_FILTER_PROTO_DST_PORT: Final = 1 << 5

_FIRST = struct.Struct("=2xH4s")
"""Kind and value of an attribute of four bytes."""
_FLAGS = struct.Struct("=I")

_MAX_PORT_DUMPS: Final = 2
"""Port-by-port listings are faster than one full listing only while they are few."""
_BATCH: Final = 64
"""Flows deleted at once while the table is being read."""


class UdpFlow(NamedTuple):
    """Source and destination are those of its first datagram."""

    source: Address
    destination: Socket
    answered_by: Socket
    translated: bool
    """A nat rule set the destination (IPS_DST_NAT), and not IPVS or another part of the kernel."""


def read_udp_flows(family: Family, to: Container[Address], collect: Callable[[Iterable[UdpFlow]], T]) -> T:
    """Return what *collect* makes of the flows of *family* to these addresses; it may be called again.

    Acts on the network namespace of the calling thread, and takes as long as `delete_stale_udp`.
    Raises HostError.
    """
    with doing(f"list {family.label} UDP flows"):
        return dump_flows(
            family, lambda listed: collect(_flows(listed, family, to)), _filter(Protocol.UDP))


def delete_stale_udp(
    family: Family, ports: Collection[int], is_stale_flow: Callable[[Socket, Socket], bool]
) -> int:
    """Delete the stale UDP flows of *family* to these destination *ports*; return their number.

    *is_stale_flow* is told a flow's destination, and the source of its replies. Acts on the network namespace
    of the calling thread. Takes as long as the kernel's walk through its hash table (10 ms for 262,144
    buckets, in which other Python threads run), and 3 us for each UDP flow that has one of the ports.

    Raises HostError if flows cannot be listed, or some cannot be deleted; all others have been deleted then.
    """
    if not ports:
        return 0
    numbers = {port.to_bytes(2, "big") for port in ports}

    def is_stale(flow: TrackedFlow) -> bool:
        if flow.protocol != Protocol.UDP or flow.port not in numbers:
            return False
        by = answered_by(family, flow)
        return is_stale_flow(_socket(flow.destination, flow.port), _socket(by.address, by.port))

    each: Iterable[int | None] = ports if len(ports) <= _MAX_PORT_DUMPS else [None]
    return _delete(family, "UDP flows", [_filter(Protocol.UDP, port) for port in each], is_stale)


def delete_stale_syns(family: Family, is_stale_syn: Callable[[Socket], bool]) -> int:
    """Delete the TCP connections of *family* to stale destinations that nothing has answered or translated.

    Return their number. The client's next SYN starts a new connection. Takes as long as the kernel's walk
    through its hash table; acts and raises as `delete_stale_udp`.
    """

    def is_stale(flow: TrackedFlow) -> bool:
        if flow.protocol != Protocol.TCP or not is_stale_syn(_socket(flow.destination, flow.port)):
            return False
        by = answered_by(family, flow)
        if (by.address, by.port) != (flow.destination, flow.port):
            return False
        info = attributes(flow.data, flow.start, flow.end).get(PROTOINFO, b"")
        return tcp_state(info) == TCP_SYN_SENT

    return _delete(family, "TCP connections", [_filter(Protocol.TCP) + UNREPLIED], is_stale)


def _delete(
    family: Family, what: str, filters: Iterable[bytes], is_stale: Callable[[TrackedFlow], bool]
) -> int:
    """Delete the stale flows among those that one of *filters* selects; return their number."""
    deleted = problem = 0
    with doing(f"delete stale {family.label} {what}"), open_socket() as sock:

        def sweep(listed: Iterator[TrackedFlow]) -> None:
            # Deletions during the listing do not confuse the kernel's walk.
            nonlocal deleted, problem
            requests = (_deletion(flow, family) for flow in listed if is_stale(flow))
            while batch := tuple(itertools.islice(requests, _BATCH)):
                # ENOENT: the flow expired, or another has taken its place.
                errors = [code for _, code in sock.exchange(batch)]
                deleted += len(batch) - len(errors)
                problem = next((code for code in errors if code != errno.ENOENT), problem)

        for wanted in filters:
            dump_flows(family, sweep, wanted)
        if problem:
            raise OSError(problem, os.strerror(problem))
        return deleted


def _deletion(flow: TrackedFlow, family: Family) -> NetlinkRequest:
    rest = attributes(flow.data, flow.start, flow.end)
    # Without its tuple a request would delete every flow.
    payload = header(family) + flow.data[flow.start : flow.start + flow.size] + b"".join(
        attribute(kind, rest[kind]) for kind in (ZONE, ID) if kind in rest
    )
    return NetlinkRequest(DELETE, 0, payload)


def _flows(
    listed: Iterable[TrackedFlow], family: Family, wanted: Container[Address]
) -> Iterator[UdpFlow]:
    for flow in listed:
        if flow.protocol == Protocol.UDP and flow.destination in wanted:
            by = answered_by(family, flow)
            with decoding("a flow"):
                kind, status = _FIRST.unpack_from(flow.data, flow.start + flow.size + by.size)
            if kind != STATUS:  # A zone precedes it.
                status = attributes(flow.data, flow.start, flow.end).get(STATUS, b"")
            yield UdpFlow(
                flow.source, _socket(flow.destination, flow.port), _socket(by.address, by.port),
                bool(int.from_bytes(status, "big") & _DST_NAT),
            )  # fmt: skip


def _socket(address: Address, port: bytes) -> Socket:
    return address, int.from_bytes(port, "big")


def _filter(protocol: Protocol, port: int | None = None) -> bytes:
    """Encode a filter for *protocol*, and for one destination port unless *port* is None."""
    fields = [attribute(PROTO_NUM, bytes([protocol]))]
    flags = _FILTER_PROTO_NUM
    if port is not None:
        fields.append(attribute(PROTO_DST_PORT, port.to_bytes(2, "big")))
        flags |= _FILTER_PROTO_DST_PORT
    wanted = nested(TUPLE_ORIG, nested(TUPLE_PROTO, *fields))
    return wanted + nested(FILTER, attribute(_FILTER_ORIG_FLAGS, _FLAGS.pack(flags)))


# Connections to endpoints that were removed.

_MAX_ENDPOINT_DUMPS: Final = 12
"""As `_MAX_PORT_DUMPS`; more, because the kernel passes on few flows of each."""


def connected_to_removed(
    family: Family, is_removed: Callable[[Frontend, Destination], bool],
    endpoints: Collection[Destination] | None,
) -> set[tuple[Frontend, Destination]]:
    """Return the dialled address and port, and the endpoint, of all TCP connections to a removed endpoint.

    *endpoints* are all that are removed; None: others may be, too. Connections in TIME_WAIT are over. Acts
    on the network namespace of the calling thread. Takes as long as the kernel's walk through its hash table,
    once for each of a few *endpoints*, and 6 us for each TCP connection that it passes on. Raises HostError.
    """
    filters = {_answered_from(family, endpoint) for endpoint in endpoints or ()}
    if endpoints is None or len(filters) > _MAX_ENDPOINT_DUMPS:
        filters = {_filter(Protocol.TCP)}
    decided: dict[_Sockets, tuple[Frontend, Destination] | None] = {}
    found: set[tuple[Frontend, Destination]] = set()

    def collect(listed: Iterator[Span]) -> None:
        for data, start, end in listed:
            sockets = _sockets(family, data, start + NFGENMSG.size)
            if sockets is None:
                continue
            if sockets not in decided:
                to, port, by, by_port = sockets
                pair = Frontend(to, Protocol.TCP, _number(port)), Destination(by, _number(by_port))
                decided[sockets] = pair if is_removed(*pair) else None
            removed = decided[sockets]
            if removed is not None and removed not in found and not _is_over(data, start, end):
                found.add(removed)

    with doing(f"list {family.label} connections"), open_socket() as sock:
        for wanted in filters:
            sock.dump(GET, header(family) + wanted, collect)
    return found


_Sockets = tuple[Address, bytes, Address, bytes]
"""The dialled address and port, and those that answer."""


def _sockets(family: Family, data: bytes, at: int) -> _Sockets | None:
    """Return the sockets of a flow, whose tuples begin *at*; None if it is not TCP, or not translated."""
    try:
        head, to, number_head, protocol, port, by, by_port = _BOTH_TUPLES[family].unpack_from(data, at)
    except struct.error as error:
        raise Malformed(f"a flow: {error}") from error
    if head != _TUPLE_HEAD[family] or number_head != _NUMBER_HEAD:
        raise Malformed("a flow whose tuple has another layout")
    if protocol != Protocol.TCP or (to == by and port == by_port):
        return None
    return to, port, by, by_port


def _is_over(data: bytes, start: int, end: int) -> bool:
    info = attributes(data, start + NFGENMSG.size, end).get(PROTOINFO, b"")
    return tcp_state(info) == _TCP_TIME_WAIT


def _answered_from(family: Family, endpoint: Destination) -> bytes:
    """Encode a filter for TCP connections that *endpoint* may answer.

    By its address, but for IPv6 by its port alone: the kernel compares IPv6 addresses the wrong way round
    (ctnetlink_filter_match_tuple in Linux 6.18).
    """
    proto = [attribute(PROTO_NUM, bytes([Protocol.TCP]))]
    flags, parts = _FILTER_PROTO_NUM, []
    if family is Family.IPV4:
        flags |= _FILTER_IP_SRC
        parts.append(nested(_TUPLE_IP, attribute(_IPV4_SRC, endpoint.address)))
    else:
        flags |= _FILTER_PROTO_SRC_PORT
        proto.append(attribute(PROTO_SRC_PORT, endpoint.port.to_bytes(2, "big")))
    return nested(TUPLE_REPLY, *parts, nested(TUPLE_PROTO, *proto)) + nested(
        FILTER, attribute(_FILTER_REPLY_FLAGS, _FLAGS.pack(flags)))


# Packets and bytes of translated connections, as counted by the kernel.

ACCT_SYSCTL = "net.netfilter.nf_conntrack_acct"

_COUNTERS = struct.Struct(">8sQ4sQ8sQ4sQ")
"""Counters of both directions in a row (CTA_COUNTERS_*), each of packets and bytes. The kernel adds padding
where 64 bits must be aligned."""
_NUMBER = struct.Struct("=HH")
_PACKETS, _BYTES = _NUMBER.pack(12, 1), _NUMBER.pack(12, 2)
_COUNTER_HEADS = (
    _NUMBER.pack(28, _COUNTERS_ORIG | NLA_F_NESTED) + _PACKETS, _BYTES,
    _NUMBER.pack(28, _COUNTERS_REPLY | NLA_F_NESTED) + _PACKETS, _BYTES,
)  # fmt: skip


class Volume(NamedTuple):
    """Packets and bytes in both directions. Bytes include IP headers."""

    packets_to_endpoint: int = 0
    bytes_to_endpoint: int = 0
    packets_from_endpoint: int = 0
    bytes_from_endpoint: int = 0

    def plus(self, other: "Volume") -> "Volume":
        return Volume._make(map(operator.add, self, other))

    def minus(self, other: "Volume") -> "Volume":
        return Volume._make(map(operator.sub, self, other))


NO_VOLUME = Volume()


class NatBinding(NamedTuple):
    """A dialled socket and the endpoint to which connections to it are translated."""

    family: Family
    protocol: int
    destination: Address
    port: bytes
    """Of `destination`, in network order."""
    endpoint: Address
    endpoint_port: bytes


Volumes = Mapping[NatBinding, Volume]


def accounting_enabled() -> bool:
    """Return whether the kernel counts new connections of this thread's network namespace."""
    try:
        return sysctl.read(ACCT_SYSCTL.replace(".", "/")) == "1"
    except HostError:
        return False


def read_volumes(family: Family) -> dict[NatBinding, Volume]:
    """Return the sums over this thread's whole table, at 4.5 us a connection. Raises HostError."""
    with doing(f"list {family.label} connections"):
        return dump_flows(family, lambda found: _sums(found, family))


def ended_volumes(events: Iterator[Span], family: Family) -> dict[NatBinding, Volume]:
    """Return the sums over the connections that *events* report as destroyed."""
    return _sums(decode(events, family), family)


def _sums(flows: Iterable[TrackedFlow], family: Family) -> dict[NatBinding, Volume]:
    found: dict[tuple[int, Address, bytes, Address, bytes], list[int]] = {}
    for flow in flows:
        size, address, port = answered_by(family, flow)
        if address == flow.destination and port == flow.port:
            continue
        numbers = _numbers(flow, size)
        if numbers is None:
            continue  # It is older than the setting.
        sockets = flow.protocol, flow.destination, flow.port, address, port
        sums = found.setdefault(sockets, [0, 0, 0, 0])
        for at, number in enumerate(numbers):
            sums[at] += number
    return {NatBinding(family, *sockets): Volume(*sums) for sockets, sums in found.items()}


def _numbers(flow: TrackedFlow, size: int) -> Sequence[int] | None:
    """Return the counters behind a reply tuple of *size* bytes; None without any."""
    at = flow.data.find(_COUNTER_HEADS[0], flow.start, flow.end)
    if 0 <= at <= flow.end - _COUNTERS.size:
        found = _COUNTERS.unpack_from(flow.data, at)
        if found[::2] == _COUNTER_HEADS:
            return found[1::2]
    rest = attributes(flow.data, flow.start + flow.size + size, flow.end)
    if not rest.keys() >= {_COUNTERS_ORIG, _COUNTERS_REPLY}:
        return None
    both = [attributes(rest[kind], 0, len(rest[kind])) for kind in (_COUNTERS_ORIG, _COUNTERS_REPLY)]
    return [_number(counters.get(kind, b"")) for counters in both for kind in (1, 2)]


# Failed TCP connections.

_BUFFER: Final = 8 << 20
"""Size in bytes; a few seconds at 20,000 connections a second."""
_SIZE = struct.Struct("=H")


class ResetConnection(NamedTuple):
    family: Family
    dialled: Frontend
    endpoint: Destination
    established: bool
    """False: the reset answered the SYN."""


class UnansweredConnection(NamedTuple):
    """A TCP connection whose SYN has had no answer for a second."""

    id: bytes
    dialled: Frontend
    endpoint: Destination


class ResetWatch(NotificationThread):
    """Reports connections as they end by a reset. An established one is reported ten seconds later."""

    def __init__(
        self, ended: Callable[[Sequence[ResetConnection], bool], None],
        add_volumes: Callable[[Volumes], None] | None,
    ) -> None:
        """Start watching. Both functions are called from the watch's thread. Raises HostError.

        *ended* takes the connections, and True if the kernel dropped events. *add_volumes* takes the sums
        over all connections that ended; None: those are not received.
        """
        self._ended = ended
        self._add_volumes = add_volumes
        with doing("receive events of connection tracking"):
            sock = NetlinkSocket.open(
                NETLINK_NETFILTER, groups=(_NFNLGRP_DESTROY,), receive_space=_BUFFER,
                accept=RESETS if add_volumes is None else TRANSLATED)
        super().__init__("conntrack-events", sock, self._receive)

    def _receive(self, datagrams: Sequence[bytes], lost: bool) -> None:
        events = [(data, start, end) for data in datagrams for _, _, _, start, end in messages(data)]
        if self._add_volumes is not None:
            for af, family in FAMILY_BY_AF.items():
                of_family = (event for event in events if _af(event) == af)
                self._add_volumes(ended_volumes(of_family, family))
        found = list(_resets(events))
        if found or lost:
            self._ended(found, lost)


def read_unanswered(family: Family, syn_timeout: int) -> list[UnansweredConnection]:
    """Return the connections without an answer a second after their last SYN.

    *syn_timeout*: the kernel's timeout of a SYN in seconds. Acts on the network namespace of the calling
    thread. Raises HostError.
    """
    with doing(f"list {family.label} connections"):
        return dump_flows(
            family, lambda found: list(_waiting(found, family, syn_timeout)), UNREPLIED)


def _waiting(
    flows: Iterable[TrackedFlow], family: Family, syn_timeout: int
) -> Iterator[UnansweredConnection]:
    for flow, dialled, endpoint in _translated(flows, family):
        found = attributes(flow.data, flow.start, flow.end)
        seconds = syn_timeout - _number(found.get(_TIMEOUT, b""))  # rounded up
        if seconds > 1 and not _number(found.get(STATUS, b"")) & SEEN_REPLY:
            yield UnansweredConnection(found.get(ID, b""), dialled, endpoint)


def _resets(spans: Iterable[Span]) -> Iterator[ResetConnection]:
    """Yield the translated TCP connections among destroyed ones that a reset has ended."""
    for data, start, end in spans:
        # Most connections end otherwise: look for the state first, behind the header and both tuples.
        at = start + NFGENMSG.size
        with decoding("an ended flow"):
            for _ in range(2):
                at += _SIZE.unpack_from(data, at)[0]
        rest = attributes(data, at, end)
        if tcp_state(rest.get(PROTOINFO, b"")) != TCP_CLOSED:
            continue
        family = _family((data, start, end))
        for _, dialled, endpoint in _translated(decode(iter([(data, start, end)]), family), family):
            assured = bool(_number(rest.get(STATUS, b"")) & _ASSURED)
            yield ResetConnection(family, dialled, endpoint, assured)


def _translated(
    flows: Iterable[TrackedFlow], family: Family
) -> Iterator[tuple[TrackedFlow, Frontend, Destination]]:
    """Yield the TCP connections that another socket answers than the one dialled, and both sockets."""
    for flow in flows:
        by = answered_by(family, flow)
        if flow.protocol == Protocol.TCP and (by.address, by.port) != (flow.destination, flow.port):
            dialled = Frontend(flow.destination, Protocol.TCP, _number(flow.port))
            yield flow, dialled, Destination(by.address, _number(by.port))


def _number(value: bytes) -> int:
    return int.from_bytes(value, "big")


def _af(span: Span) -> int:
    data, start, end = span
    return data[start] if start < end else socket.AF_UNSPEC


def _family(span: Span) -> Family:
    family = FAMILY_BY_AF.get(_af(span))
    if family is None:
        raise Malformed("a flow of an unknown address family")
    return family


# Handshakes, translated or not. The table is read up to a number of connections: their order depends on the
# hashes of their addresses alone.

_ANY_FAMILY: Final = NFGENMSG.pack(socket.AF_UNSPEC, 0, 0)


def read_attempts(of: Container[Destination], most: int) -> list[Attempt]:
    """Return TCP connections to endpoints *of* both families that nothing has answered, *most* at most.

    Acts on the network namespace of the calling thread. Takes 10 ms for 262,144 buckets, and 5 us for each
    connection returned. Raises HostError.
    """
    def attempts(spans: Iterator[Span]) -> Iterator[Attempt]:
        for flow, endpoint in _tcp(spans, of):
            found = attributes(flow.data, flow.start, flow.end)
            if not _number(found.get(STATUS, b"")) & SEEN_REPLY:
                yield Attempt(found.get(ID, b""), flow.source, endpoint)

    return _read_handshakes(_ANY_FAMILY + UNREPLIED, attempts, most)


def read_answers(of: Container[Destination], most: int) -> Answers:
    """Return TCP connections that endpoints *of* both families have answered, *most* at most.

    Acts and raises as `read_attempts`. Each connection of the table takes 2 us until *most* are found.
    """
    return _read_answers(_ANY_FAMILY + _REPLIED, of, most)


def read_answers_of(endpoint: Destination, most: int) -> Answers:
    """As `read_answers`, for one endpoint: the kernel lists few connections of others."""
    family = family_of(endpoint.address)
    wanted = header(family) + _REPLIED + _answered_from(family, endpoint)
    return _read_answers(wanted, frozenset([endpoint]), most)


def _read_answers(payload: bytes, of: Container[Destination], most: int) -> Answers:
    found = _read_handshakes(payload, lambda spans: _answers(spans, of), most)
    return Answers(found, len(found) < most)


class RefusalWatch(NotificationThread):
    """Reports connections to endpoints *of* both families as they are answered with a reset."""

    def __init__(
        self, of: Container[Destination], refused: Callable[[Sequence[Attempt]], None]
    ) -> None:
        """Start watching. *refused* is called from the watch's thread. Raises HostError."""
        with doing("receive events of connection tracking"):
            sock = NetlinkSocket.open(
                NETLINK_NETFILTER, groups=(_NFNLGRP_DESTROY,), receive_space=_BUFFER, accept=RESETS)

        def receive(datagrams: Sequence[bytes], _lost: bool) -> None:
            refused([
                Attempt(found.get(ID, b""), flow.source, endpoint) for data in datagrams
                for flow, endpoint in _tcp(((data, start, end) for *_, start, end in messages(data)), of)
                for found in [attributes(flow.data, flow.start, flow.end)]
                if not _number(found.get(STATUS, b"")) & _ASSURED
            ])

        super().__init__("conntrack-refusals", sock, receive)


def _read_handshakes(payload: bytes, read: Callable[[Iterator[Span]], Iterator[T]], most: int) -> list[T]:
    with doing("list connections"), open_socket() as sock:
        # The rest of the answer is lost with the socket.
        return sock.dump(GET, payload, lambda spans: list(itertools.islice(read(spans), most)))


def _answers(spans: Iterator[Span], of: Container[Destination]) -> Iterator[Answer]:
    for flow, endpoint in _tcp(spans, of):
        found = attributes(flow.data, flow.start, flow.end)
        if _number(found.get(STATUS, b"")) & SEEN_REPLY:
            yield Answer(found.get(ID, b""), endpoint)


def _tcp(
    spans: Iterator[Span], of: Container[Destination]
) -> Iterator[tuple[TrackedFlow, Destination]]:
    """Yield the TCP connections to endpoints *of* any family."""
    for data, start, end in spans:
        family = _family((data, start, end))
        for flow in decode(iter([(data, start, end)]), family):
            if flow.protocol == Protocol.TCP:
                by = answered_by(family, flow)
                endpoint = Destination(by.address, _number(by.port))
                if endpoint in of:
                    yield flow, endpoint


# Limits and timeouts, as in kube-proxy 1.36 (cmd/kube-proxy/app/conntrack.go), except that a setting which
# this process is not permitted to write does not prevent serving.

_MAX_SCALED = 1 << 20
_HASH_SIZE = Path("/sys/module/nf_conntrack/parameters/hashsize")
_MAX = "net/netfilter/nf_conntrack_max"
_NOT_PERMITTED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EOPNOTSUPP)


class ConntrackLimits(Struct, frozen=True, kw_only=True):
    """The configured limits. Timeouts are in seconds; 0 keeps the kernel's value."""

    max_per_core: int = 32768
    """Connections per core; 0 keeps the kernel's limit."""
    min: int = 131072
    tcp_established_timeout: float = 86400
    tcp_close_wait_timeout: float = 3600
    tcp_be_liberal: bool = False
    udp_timeout: float = 0
    udp_stream_timeout: float = 0

    def max_connections(self, cores: int) -> int:
        """Return the limit of tracked connections; 0 keeps the kernel's."""
        if not self.max_per_core:
            return 0
        scaled = self.max_per_core * cores
        return _MAX_SCALED if scaled > _MAX_SCALED else max(scaled, self.min)

    def sysctls(self) -> list[tuple[str, int]]:
        """Return names and values of the settings other than the limit."""
        wanted = [
            ("nf_conntrack_tcp_be_liberal", int(self.tcp_be_liberal)),  # never reset to 0
            ("nf_conntrack_tcp_timeout_established", int(self.tcp_established_timeout)),
            ("nf_conntrack_tcp_timeout_close_wait", int(self.tcp_close_wait_timeout)),
            ("nf_conntrack_udp_timeout", int(self.udp_timeout)),
            ("nf_conntrack_udp_timeout_stream", int(self.udp_stream_timeout)),
        ]
        return [(f"net/netfilter/{name}", value) for name, value in wanted if value > 0]


class AppliedLimits(NamedTuple):
    refused: Sequence[HostError]
    """Settings that differ and that this process is not permitted to write."""
    read_only_sys: bool = False
    """The hash table is too small for the limit and cannot be enlarged, which slows lookups."""


def apply_limits(
    limits: ConntrackLimits, cores: int | None = None, hash_size: Path = _HASH_SIZE
) -> AppliedLimits:
    """Write the settings that differ, in the calling thread's network namespace.

    A higher limit of connections is kept, as in kube-proxy 1.38 (kubernetes pull request 142035): a container
    may not be permitted to lower what the node's owner has raised. *cores* defaults to this machine's. Raises
    HostError for errors other than a lack of permission, with errno ENOENT while the kernel does not track
    connections.
    """
    try:
        sysctl.read(_MAX)
    except HostError:  # The kernel loads its module for connection tracking at any request.
        with contextlib.suppress(OSError), open_socket() as sock:
            sock.request(GET_STATS, 0, bytes(4))
    refused: list[HostError] = []
    limit = limits.max_connections(cores or os.cpu_count() or 1)
    limited = limit > 0 and _ensure(_MAX, limit, refused, sysctl.ensure_at_least)
    read_only_sys = limited and not _enlarge(hash_size, limit // 4)
    for name, value in limits.sysctls():
        _ensure(name, value, refused)
    return AppliedLimits(tuple(refused), read_only_sys)


def _ensure(
    name: str, value: int, refused: list[HostError], ensure: Callable[[str, int], bool] = sysctl.ensure
) -> bool:
    try:
        ensure(name, value)
    except HostError as error:
        if error.errno not in _NOT_PERMITTED:
            raise
        refused.append(error)
        return False
    return True


def _enlarge(hash_size: Path, wanted: int) -> bool:
    """Give the hash table at least *wanted* buckets. Return False if it remains smaller."""
    try:
        if int(hash_size.read_text(encoding="ascii")) >= wanted:
            return True
        hash_size.write_text(str(wanted), encoding="ascii")
    except OSError as error:
        if error.errno in _NOT_PERMITTED:
            return False
        raise HostError(f"cannot set the size of the conntrack table to {wanted}", error) from error
    return True
