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

from kproxy_core.linux import messages as netlink
from kproxy_core.linux import sysctl
from kproxy_core.linux.errors import HostError, doing
from kproxy_core.linux.messages import (
    NFGENMSG,
    NLA_F_NESTED,
    NLM_F_CREATE,
    NLM_F_EXCL,
    Request,
    Span,
    attribute,
    attributes,
    messages,
    nested,
)
from kproxy_core.linux.netlink import (
    ACCEPT,
    DROP,
    JUMP_IF_EQUAL,
    LOAD_WORD,
    Announcements,
    NetlinkSocket,
    NotificationWatch,
)
from kproxy_core.linux.netlink import Instruction as Do
from kproxy_core.model.address import FAMILY_BY_AF, Address, Family, Protocol
from kproxy_core.model.service import Destination
from kproxy_core.plan.service_plan import Frontend
from kproxy_core.plan.stale_flows import Socket

# The kernel's connection tracking table, as ctnetlink lists it (linux/netfilter/nfnetlink_conntrack.h).
#
# It is read as a stream of undecoded flows: a table may hold hundreds of thousands of them.

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


# The kernel's announcements of new, changed and ended flows (linux/netfilter/nfnetlink_conntrack.h).

_GROUPS = (1, 2, 3)
"""NFNLGRP_CONNTRACK_NEW, _UPDATE and _DESTROY."""
_NEW, _DELETE = 0x100, 0x102
_ORIGINAL, _REPLY, _STATUS = 1, 2, 3
_ADDRESSES, _NUMBERS = 1, 2
_SEEN_REPLY = 1 << 1


class Change(enum.Enum):
    """The reason for an announcement."""

    NEW = "new"
    UPDATED = "updated"
    ENDED = "ended"


class Direction(NamedTuple):
    """The packets of a flow in one direction."""

    source: Address
    source_port: int
    destination: Address
    port: int


class FlowEvent(NamedTuple):
    change: Change
    protocol: int
    original: Direction
    """The sender's packets before any translation."""
    reply: Direction
    """Its source is the endpoint, its destination the sender as the endpoint sees it."""
    is_answered: bool


def flow_events(*, only_new: bool = False) -> Announcements[FlowEvent]:
    """Follow the flows from now on. Raises HostError without CAP_NET_ADMIN."""
    return Announcements(_GROUPS[:1] if only_new else _GROUPS, parse, "watch connection tracking")


def parse(data: bytes) -> Iterator[FlowEvent]:
    """Yield the TCP, UDP and SCTP flows in one datagram."""
    for kind, flags, _, start, end in messages(data):
        if kind not in (_NEW, _DELETE):
            continue
        found = attributes(data, start + NFGENMSG.size, end)
        original, reply = _direction(found.get(_ORIGINAL)), _direction(found.get(_REPLY))
        if original is None or reply is None:
            continue
        is_new = flags & (NLM_F_CREATE | NLM_F_EXCL)
        change = Change.ENDED if kind == _DELETE else Change.NEW if is_new else Change.UPDATED
        status = int.from_bytes(found.get(_STATUS, b""), "big")
        yield FlowEvent(change, original[0], original[1], reply[1], bool(status & _SEEN_REPLY))


def _direction(value: bytes | None) -> tuple[int, Direction] | None:
    if value is None:
        return None
    parts = attributes(value)
    addresses, numbers = (attributes(parts.get(kind, b"")) for kind in (_ADDRESSES, _NUMBERS))
    source, destination = addresses.get(1) or addresses.get(3), addresses.get(2) or addresses.get(4)
    if source is None or destination is None or 2 not in numbers or 3 not in numbers:
        return None
    source_port, port = (int.from_bytes(numbers[at], "big") for at in (2, 3))
    return numbers[1][0], Direction(Address(source), source_port, Address(destination), port)


# Classic BPF programs by which a socket drops announcements of ended flows before they wake its reader.
#
# Offsets are those of ctnetlink (net/netfilter/nf_conntrack_netlink.c): the netlink header of 16 bytes,
# that of nfnetlink, and the tuples of both directions without padding between them. Where a tuple is laid
# out otherwise, as in a zone, the values compared differ, and the announcement is received.

_SET, _SET_X, _A_TO_X = 0x00, 0x01, 0x07
_LOAD_HALF, _LOAD_BYTE, _LOAD_BYTE_BEHIND_X = 0x28, 0x30, 0x50
_JUMP_IF_EQUAL_X = 0x1D
_FIND, _FIND_WITHIN = Do(LOAD_WORD, 0, 0, 0xFFFFF00C), Do(LOAD_WORD, 0, 0, 0xFFFFF010)
"""SKF_AD_NLATTR, SKF_AD_NLATTR_NEST: the offset of attribute X behind, or within, offset A; 0: none."""

_FAMILY, _ATTRIBUTES = 16, 20
_TCP_AND_STATE = 1
"""CTA_PROTOINFO_TCP, and the CTA_PROTOINFO_TCP_STATE within."""

RESETS: Final = (
    Do(_SET, 0, 0, _ATTRIBUTES), Do(_SET_X, 0, 0, PROTOINFO), _FIND, Do(JUMP_IF_EQUAL, 8, 0, 0),
    Do(_SET_X, 0, 0, _TCP_AND_STATE), _FIND_WITHIN, Do(JUMP_IF_EQUAL, 5, 0, 0),
    _FIND_WITHIN, Do(JUMP_IF_EQUAL, 3, 0, 0),
    Do(_A_TO_X, 0, 0, 0), Do(_LOAD_BYTE_BEHIND_X, 0, 0, 4), Do(JUMP_IF_EQUAL, 1, 0, TCP_CLOSED),
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


# Reads UDP flows from the kernel's connection tracking, and deletes stale ones of UDP and TCP.
#
# linux/netfilter/nf_conntrack_common.h. Since Linux 5.8 the kernel filters its listing; an older kernel
# lists every flow of the family, which costs time and changes nothing else.

_FILTER_ORIG_FLAGS: Final = 1
_FILTER_PROTO_NUM: Final = 1 << 3
_FILTER_PROTO_DST_PORT: Final = 1 << 5

_DST_NAT: Final = 1 << 5
"""IPS_DST_NAT: a nat rule has set the flow's destination."""

_FIRST = struct.Struct("=2xH4s")
"""Kind and value of an attribute of four bytes."""
_FLAGS = struct.Struct("=I")

_MAX_PORT_DUMPS: Final = 2
"""Port-by-port listings are faster than one full listing only while they are few."""
_BATCH: Final = 64
"""Flows deleted at once while the table is being read."""


class Flow(NamedTuple):
    source: Address
    """Source of its first datagram."""
    destination: Socket
    """Destination of its first datagram."""
    answered_by: Socket
    translated: bool
    """True if a nat rule set the destination, and not IPVS or another part of the kernel."""


def read_udp_flows(family: Family, to: Container[Address], collect: Callable[[Iterable[Flow]], T]) -> T:
    """Return what *collect* makes of the flows of *family* to these addresses; it may be called again.

    Acts on the network namespace of the calling thread, and takes as long as `delete_stale_udp`.
    Raises HostError.
    """
    with doing(f"list {family.label} UDP flows"):
        return flows(
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
            flows(family, sweep, wanted)
        if problem:
            raise OSError(problem, os.strerror(problem))
        return deleted


def _deletion(flow: TrackedFlow, family: Family) -> Request:
    rest = attributes(flow.data, flow.start, flow.end)
    # Without its tuple a request would delete every flow.
    payload = header(family) + flow.data[flow.start : flow.start + flow.size] + b"".join(
        attribute(kind, rest[kind]) for kind in (ZONE, ID) if kind in rest
    )
    return Request(DELETE, 0, payload)


def _flows(
    listed: Iterable[TrackedFlow], family: Family, wanted: Container[Address]
) -> Iterator[Flow]:
    for flow in listed:
        if flow.protocol == Protocol.UDP and flow.destination in wanted:
            by = answered_by(family, flow)
            kind, status = _FIRST.unpack_from(flow.data, flow.start + flow.size + by.size)
            if kind != STATUS:  # A zone precedes it.
                status = attributes(flow.data, flow.start, flow.end)[STATUS]
            yield Flow(
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


# Packets and bytes of translated connections, which the kernel counts with ``nf_conntrack_acct``.

SETTING = "net.netfilter.nf_conntrack_acct"


class Volume(NamedTuple):
    """Numbers of both directions. Bytes are those of IP packets, headers included."""

    packets_to_endpoint: int = 0
    bytes_to_endpoint: int = 0
    packets_from_endpoint: int = 0
    bytes_from_endpoint: int = 0

    def plus(self, other: "Volume") -> "Volume":
        return Volume._make(map(operator.add, self, other))

    def minus(self, other: "Volume") -> "Volume":
        return Volume._make(map(operator.sub, self, other))


NO_VOLUME = Volume()


class Way(NamedTuple):
    """The sockets of translated connections, as conntrack has them."""

    family: Family
    protocol: int
    destination: Address
    port: bytes
    """Dialled by the client, at `destination`. In network order."""
    endpoint: Address
    endpoint_port: bytes


Volumes = Mapping[Way, Volume]


def are_counted() -> bool:
    """Return whether new connections are counted, in the calling thread's network namespace."""
    try:
        return sysctl.read(SETTING.replace(".", "/")) == "1"
    except HostError:
        return False


def read_volumes(family: Family) -> dict[Way, Volume]:
    """Return the sums over this thread's whole table, at 4.5 us a connection. Raises HostError."""
    with doing(f"list {family.label} connections"):
        return flows(family, lambda flows: _sums(flows, family))


def ended_volumes(events: Iterator[Span], family: Family) -> dict[Way, Volume]:
    """Return the sums over the connections that *events* report as destroyed."""
    return _sums(decode(events, family), family)


def _sums(flows: Iterable[TrackedFlow], family: Family) -> dict[Way, Volume]:
    found: dict[tuple[int, Address, bytes, Address, bytes], list[int]] = {}
    for flow in flows:
        size, address, port = answered_by(family, flow)
        if address == flow.destination and port == flow.port:
            continue
        numbers = _numbers(flow, size)
        if numbers is None:
            continue  # It is older than the setting.
        way = flow.protocol, flow.destination, flow.port, address, port
        sums = found.setdefault(way, [0, 0, 0, 0])
        for at, number in enumerate(numbers):
            sums[at] += number
    return {Way(family, *way): Volume(*sums) for way, sums in found.items()}


def _numbers(flow: TrackedFlow, size: int) -> Sequence[int] | None:
    """Return the counters behind a reply tuple of *size* bytes; None without any."""
    at = flow.data.find(_COUNTER_HEADS[0], flow.start, flow.end)
    if at >= 0:
        found = _COUNTERS.unpack_from(flow.data, at)
        if found[::2] == _COUNTER_HEADS:
            return found[1::2]
    rest = attributes(flow.data, flow.start + flow.size + size, flow.end)
    if not rest.keys() >= {_ORIGINAL_COUNTERS, _REPLY_COUNTERS}:
        return None
    both = [attributes(rest[kind], 0, len(rest[kind])) for kind in (_ORIGINAL_COUNTERS, _REPLY_COUNTERS)]
    return [int.from_bytes(counters[kind], "big") for counters in both for kind in (1, 2)]


# The kernel writes the counters of both directions in a row: the attributes CTA_COUNTERS_ORIG and
# CTA_COUNTERS_REPLY, each with CTA_COUNTERS_PACKETS and CTA_COUNTERS_BYTES. Where 64 bits must be aligned, it
# adds padding.
_ORIGINAL_COUNTERS, _REPLY_COUNTERS = 9, 10
_COUNTERS = struct.Struct(">8sQ4sQ8sQ4sQ")
_NUMBER = struct.Struct("=HH")
_PACKETS, _BYTES = _NUMBER.pack(12, 1), _NUMBER.pack(12, 2)
_COUNTER_HEADS = (
    _NUMBER.pack(28, _ORIGINAL_COUNTERS | NLA_F_NESTED) + _PACKETS, _BYTES,
    _NUMBER.pack(28, _REPLY_COUNTERS | NLA_F_NESTED) + _PACKETS, _BYTES,
)  # fmt: skip


# TCP connections that connection tracking saw fail (linux/netfilter/nf_conntrack_{common,tcp}.h).

_NFNLGRP_CONNTRACK_DESTROY: Final = 3
_BUFFER: Final = 8 << 20
"""Bytes; a few seconds at 20,000 connections a second."""

_ASSURED: Final = 1 << 2
_TIMEOUT: Final = 7
_SIZE = struct.Struct("=H")


class Ended(NamedTuple):
    family: Family
    dialled: Frontend
    endpoint: Destination
    established: bool
    """False: the reset answered the SYN."""


class Unanswered(NamedTuple):
    """A TCP connection whose SYN has had no answer for a second."""

    id: bytes
    dialled: Frontend
    endpoint: Destination


class ResetWatch(NotificationWatch):
    """Reports connections as they end by a reset. An established one is reported ten seconds later."""

    def __init__(
        self, ended: Callable[[Sequence[Ended], bool], None], add_volumes: Callable[[Volumes], None] | None,
    ) -> None:
        """Both are called from a thread of their own; True: some events were lost. Raises HostError.

        *add_volumes* is told the sums over all connections that have ended. None: nothing is spent on them.
        """
        self._ended = ended
        self._add_volumes = add_volumes
        with doing("receive events of connection tracking"):
            sock = NetlinkSocket.open(
                netlink.NETLINK_NETFILTER, groups=(_NFNLGRP_CONNTRACK_DESTROY,), receive_space=_BUFFER,
                accept=RESETS if add_volumes is None else TRANSLATED)
        super().__init__("conntrack-events", sock, self._receive)

    def _receive(self, datagrams: Sequence[bytes], lost: bool) -> None:
        events = [(data, start, end) for data in datagrams for _, _, _, start, end in netlink.messages(data)]
        if self._add_volumes is not None:
            for af, family in FAMILY_BY_AF.items():
                of_family = (event for event in events if event[0][event[1]] == af)
                self._add_volumes(ended_volumes(of_family, family))
        found = list(_resets(events))
        if found or lost:
            self._ended(found, lost)


def read_unanswered(family: Family, syn_timeout: int) -> list[Unanswered]:
    """Return the connections that still have no answer a second after their last SYN.

    *syn_timeout*: seconds for which the kernel remembers a SYN. Acts on the network namespace of the calling
    thread. Raises HostError.
    """
    with doing(f"list {family.label} connections"):
        return flows(
            family, lambda flows: list(_waiting(flows, family, syn_timeout)), UNREPLIED)


def _waiting(
    flows: Iterable[TrackedFlow], family: Family, syn_timeout: int
) -> Iterator[Unanswered]:
    for flow, dialled, endpoint in _translated(flows, family):
        found = netlink.attributes(flow.data, flow.start, flow.end)
        seconds = syn_timeout - _number(found[_TIMEOUT])  # rounded up
        if seconds > 1 and not _number(found[STATUS]) & SEEN_REPLY:
            yield Unanswered(found[ID], dialled, endpoint)


def _resets(spans: Iterable[netlink.Span]) -> Iterator[Ended]:
    """Yield the translated TCP connections among destroyed ones that a reset has ended."""
    for data, start, end in spans:
        # Most connections end otherwise: look for the state first, behind the header and both tuples.
        at = start + netlink.NFGENMSG.size
        for _ in range(2):
            at += _SIZE.unpack_from(data, at)[0]
        rest = netlink.attributes(data, at, end)
        if tcp_state(rest.get(PROTOINFO, b"")) != TCP_CLOSED:
            continue
        family = FAMILY_BY_AF[data[start]]
        for _, dialled, endpoint in _translated(decode(iter([(data, start, end)]), family), family):
            assured = bool(_number(rest[STATUS]) & _ASSURED)
            yield Ended(family, dialled, endpoint, assured)


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


# The kernel's limits and timeouts for tracked connections.
#
# The rules are kube-proxy 1.36's (cmd/kube-proxy/app/conntrack.go), except that a setting which this
# process is not permitted to write does not prevent serving.

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


class Applied(NamedTuple):
    refused: Sequence[HostError]
    """Settings that differ and that this process is not permitted to write."""
    read_only_sys: bool = False
    """The hash table is too small for the limit and cannot be enlarged, which slows lookups."""


def apply(limits: ConntrackLimits, cores: int | None = None, hash_size: Path = _HASH_SIZE) -> Applied:
    """Write the settings that differ, in the calling thread's network namespace.

    *cores* defaults to this machine's. Raises HostError for errors other than a lack of permission, with
    errno ENOENT while the kernel does not track connections.
    """
    try:
        sysctl.read(_MAX)
    except HostError:  # The kernel loads its module for connection tracking at any request.
        with contextlib.suppress(OSError), open_socket() as sock:
            sock.request(GET_STATS, 0, bytes(4))
    refused: list[HostError] = []
    limit = limits.max_connections(cores or os.cpu_count() or 1)
    limited = limit > 0 and _ensure(_MAX, limit, refused)
    read_only_sys = limited and not _enlarge(hash_size, limit // 4)
    for name, value in limits.sysctls():
        _ensure(name, value, refused)
    return Applied(tuple(refused), read_only_sys)


def _ensure(name: str, value: int, refused: list[HostError]) -> bool:
    try:
        sysctl.ensure(name, value)
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
