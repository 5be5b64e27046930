"""The kernel's table of tracked connections: listed, looked up, and stale flows deleted
(linux/netfilter/nfnetlink_conntrack.h).

Functions act on the network namespace of the calling thread. The kernel walks through its hash table for each
listing: 10 ms for 262,144 buckets, in which other Python threads run.
"""

import errno
import itertools
import os
import socket
import struct
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from typing import Final, NamedTuple, TypeVar

from kproxy_core.linux import sysctl
from kproxy_core.linux.errors import HostError, doing
from kproxy_core.model.address import FAMILY_BY_AF, Address, Family, Protocol, Socket, family_of
from kproxy_core.model.service import Destination
from kproxy_core.netlink.messages import (
    NETLINK_NETFILTER,
    NFGENMSG,
    NLA_F_NESTED,
    Malformed,
    NetlinkRequest,
    Span,
    attribute,
    attributes,
    decoding,
    nested,
)
from kproxy_core.netlink.sockets import NetlinkSocket

T = TypeVar("T")

_GET: Final = 0x101
DELETE: Final = 0x102
_GET_STATS: Final = 0x105
"""Requests (IPCTNL_MSG_CT_*)."""

TUPLE_ORIG: Final = 1
TUPLE_REPLY: Final = 2
STATUS: Final = 3
PROTOINFO: Final = 4
_TIMEOUT: Final = 7
_ID: Final = 12
_ZONE: Final = 18
_FILTER: Final = 25
_STATUS_MASK: Final = 26
"""Attributes of a flow (CTA_*)."""
_TUPLE_IP: Final = 1
_TUPLE_PROTO: Final = 2
"""Attributes of a tuple."""
_PROTO_NUM: Final = 1
_PROTO_SRC_PORT: Final = 2
_PROTO_DST_PORT: Final = 3
"""Attributes of the protocol in a tuple."""
_PROTOINFO_TCP: Final = 1
_PROTOINFO_TCP_STATE: Final = 1

_TCP_SYN_SENT: Final = 1
_TCP_TIME_WAIT: Final = 7
TCP_CLOSED: Final = 8
"""States of `tcp_state`: TCP_CONNTRACK_SYN_SENT and _TIME_WAIT, and after a reset TCP_CONNTRACK_CLOSE."""
SEEN_REPLY: Final = 1 << 1
_ASSURED: Final = 1 << 2
_DST_NAT: Final = 1 << 5
"""Bits of `STATUS`, a big-endian number (IPS_*)."""

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
_NUMBER_HEAD = _HEADS.pack(0, 0, 5, _PROTO_NUM)[4:]


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


def load_module() -> None:
    """Have the kernel load its module for connection tracking, as it does at any request. Raises OSError."""
    with open_socket() as sock:
        sock.request(_GET_STATS, 0, bytes(4))


def header(family: Family) -> bytes:
    """Return the bytes with which the payload of a request about *family* begins."""
    return NFGENMSG.pack(family.af, 0, 0)


def dump_flows(family: Family, collect: Callable[[Iterator[TrackedFlow]], T], wanted: bytes = b"") -> T:
    """Return what *collect* makes of all flows of *family*; see `NetlinkSocket.dump`.

    *wanted* are the attributes of a filter, which kernels before 5.8 ignore. Raises OSError, also if the
    kernel encodes flows in an unknown way (Malformed): no result is better than a wrong one.
    """
    with open_socket() as sock:
        return sock.dump(_GET, header(family) + wanted, lambda spans: collect(decode(spans, family)))


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
        found.get(_ID, b""), bool(_number(found.get(STATUS, b"")) & SEEN_REPLY),
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


ACCT_SYSCTL = "net.netfilter.nf_conntrack_acct"


def accounting_enabled() -> bool:
    """Return whether the kernel counts new connections of this thread's network namespace."""
    try:
        return sysctl.read(ACCT_SYSCTL.replace(".", "/")) == "1"
    except HostError:
        return False


# Filters of `dump_flows`, applied since Linux 5.8. An older kernel lists every flow of the family, which
# costs time and changes nothing else.

_FILTER_ORIG_FLAGS: Final = 1
_FILTER_REPLY_FLAGS: Final = 2
_IPV4_SRC: Final = 1
_FILTER_IP_SRC: Final = 1
_FILTER_PROTO_NUM: Final = 1 << 3
_FILTER_PROTO_SRC_PORT: Final = 1 << 4
_FILTER_PROTO_DST_PORT: Final = 1 << 5
_FLAGS = struct.Struct("=I")

UNREPLIED: Final = attribute(STATUS, bytes(4)) + attribute(_STATUS_MASK, SEEN_REPLY.to_bytes(4, "big"))
"""Flows without any reply."""
_REPLIED: Final = (
    attribute(STATUS, SEEN_REPLY.to_bytes(4, "big")) + attribute(_STATUS_MASK, SEEN_REPLY.to_bytes(4, "big")))
"""Flows with one."""


def _filter(protocol: Protocol, port: int | None = None) -> bytes:
    """Encode a filter for *protocol*, and for one destination port unless *port* is None."""
    fields = [attribute(_PROTO_NUM, bytes([protocol]))]
    flags = _FILTER_PROTO_NUM
    if port is not None:
        fields.append(attribute(_PROTO_DST_PORT, port.to_bytes(2, "big")))
        flags |= _FILTER_PROTO_DST_PORT
    wanted = nested(TUPLE_ORIG, nested(_TUPLE_PROTO, *fields))
    return wanted + nested(_FILTER, attribute(_FILTER_ORIG_FLAGS, _FLAGS.pack(flags)))


def _answered_from(family: Family, endpoint: Destination) -> bytes:
    """Encode a filter for TCP connections that *endpoint* may answer.

    By its address, but for IPv6 by its port alone: the kernel compares IPv6 addresses the wrong way round
    (ctnetlink_filter_match_tuple in Linux 6.18).
    """
    proto = [attribute(_PROTO_NUM, bytes([Protocol.TCP]))]
    flags, parts = _FILTER_PROTO_NUM, []
    if family is Family.IPV4:
        flags |= _FILTER_IP_SRC
        parts.append(nested(_TUPLE_IP, attribute(_IPV4_SRC, endpoint.address)))
    else:
        flags |= _FILTER_PROTO_SRC_PORT
        proto.append(attribute(_PROTO_SRC_PORT, endpoint.port.to_bytes(2, "big")))
    return nested(TUPLE_REPLY, *parts, nested(_TUPLE_PROTO, *proto)) + nested(
        _FILTER, attribute(_FILTER_REPLY_FLAGS, _FLAGS.pack(flags)))


# One flow.

class FlowTuple(NamedTuple):
    """The packets of a flow in one direction."""

    source: Address
    source_port: int
    destination: Address
    port: int


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
            _TUPLE_PROTO, attribute(_PROTO_NUM, bytes([protocol])),
            attribute(_PROTO_SRC_PORT, original.source_port.to_bytes(2, "big")),
            attribute(_PROTO_DST_PORT, original.port.to_bytes(2, "big"))))
    with doing("look up a tracked flow"), open_socket() as sock:
        try:
            data, start, end = sock.request_one(_GET, header(family) + tuple_)
        except FileNotFoundError:
            return None
        found = flow_tuple(attributes(data, start + NFGENMSG.size, end).get(TUPLE_REPLY))
        return found[1] if found is not None else None


def flow_tuple(value: bytes | None) -> tuple[int, FlowTuple] | None:
    """Return the protocol and the packets in the attribute of a tuple; None unless it has ports."""
    if value is None:
        return None
    parts = attributes(value)
    addresses, numbers = (attributes(parts.get(kind, b"")) for kind in (_TUPLE_IP, _TUPLE_PROTO))
    source, destination = addresses.get(1) or addresses.get(3), addresses.get(2) or addresses.get(4)
    if source is None or destination is None or not numbers.keys() >= {_PROTO_SRC_PORT, _PROTO_DST_PORT}:
        return None
    source_port, port = (int.from_bytes(numbers[kind], "big") for kind in (_PROTO_SRC_PORT, _PROTO_DST_PORT))
    with decoding("a flow"):
        return numbers[_PROTO_NUM][0], FlowTuple(Address(source), source_port, Address(destination), port)


# TCP connections, by their handshakes.

_ANY_FAMILY: Final = NFGENMSG.pack(socket.AF_UNSPEC, 0, 0)


class TcpFlow(NamedTuple):
    """A TCP connection."""

    id: bytes
    client: Address
    dialled: Socket
    endpoint: Destination
    """The socket that answers; `dialled` itself unless that was translated."""
    is_answered: bool
    """Something has answered the SYN."""
    is_assured: bool
    """The handshake was completed."""
    timeout: int
    """Seconds until the kernel forgets it without another packet, rounded down."""

    @property
    def family(self) -> Family:
        return family_of(self.client)

    @property
    def is_translated(self) -> bool:
        return self.dialled != self.endpoint


def tcp_flows(spans: Iterable[Span], to: Container[Destination] | None = None) -> Iterator[TcpFlow]:
    """Yield the TCP connections in *spans*, of any family, to these endpoints; None: to all.

    Raises Malformed.
    """
    for span in spans:
        family = family_in(span)
        if family is None:
            raise Malformed("a flow of an unknown address family")
        for flow in decode(iter([span]), family):
            if flow.protocol == Protocol.TCP:
                by = answered_by(family, flow)
                endpoint = Destination(by.address, _number(by.port))
                if to is None or endpoint in to:
                    yield _tcp_flow(flow, endpoint)


def _is_translated(flow: TrackedFlow, by: AnsweredBy) -> bool:
    return (by.address, by.port) != (flow.destination, flow.port)


def _tcp_flow(flow: TrackedFlow, endpoint: Destination) -> TcpFlow:
    found = attributes(flow.data, flow.start, flow.end)
    status = _number(found.get(STATUS, b""))
    return TcpFlow(
        found.get(_ID, b""), flow.source, _socket(flow.destination, flow.port), endpoint,
        bool(status & SEEN_REPLY), bool(status & _ASSURED), _number(found.get(_TIMEOUT, b"")))


def read_unanswered(family: Family) -> list[TcpFlow]:
    """Return the translated TCP connections of *family* that nothing has answered. Raises HostError."""
    def unanswered(flows: Iterator[TrackedFlow]) -> Iterator[TcpFlow]:
        for flow in flows:
            by = answered_by(family, flow)
            if flow.protocol == Protocol.TCP and _is_translated(flow, by):
                found = _tcp_flow(flow, Destination(by.address, _number(by.port)))
                if not found.is_answered:
                    yield found

    with doing(f"list {family.label} connections"):
        return dump_flows(family, lambda flows: list(unanswered(flows)), UNREPLIED)


def read_unanswered_to(endpoints: Container[Destination], most: int) -> list[TcpFlow]:
    """Return TCP connections to *endpoints* of both families that nothing has answered, *most* at most.

    Takes as long as the kernel's walk, and 5 us for each connection returned. Raises HostError.
    """
    return _read_handshakes(_ANY_FAMILY + UNREPLIED, endpoints, most, is_answered=False)


def read_answered_by(endpoints: Container[Destination], most: int) -> list[TcpFlow]:
    """Return TCP connections that *endpoints* of both families have answered, *most* at most.

    Raises as `read_unanswered_to`. Each connection of the table takes 2 us until *most* are found.
    """
    return _read_handshakes(_ANY_FAMILY + _REPLIED, endpoints, most, is_answered=True)


def read_answered_by_one(endpoint: Destination, most: int) -> list[TcpFlow]:
    """As `read_answered_by`, for one endpoint: the kernel lists few connections of others."""
    family = family_of(endpoint.address)
    payload = header(family) + _REPLIED + _answered_from(family, endpoint)
    return _read_handshakes(payload, frozenset([endpoint]), most, is_answered=True)


def _read_handshakes(
    payload: bytes, endpoints: Container[Destination], most: int, *, is_answered: bool
) -> list[TcpFlow]:
    """List up to a number of connections: their order depends on the hashes of their addresses alone."""
    def read(spans: Iterator[Span]) -> list[TcpFlow]:
        wanted = (flow for flow in tcp_flows(spans, endpoints) if flow.is_answered == is_answered)
        return list(itertools.islice(wanted, most))

    with doing("list connections"), open_socket() as sock:
        # The rest of the answer is lost with the socket.
        return sock.dump(_GET, payload, read)


def family_in(span: Span) -> Family | None:
    """Return the family of a listed or announced flow; None: neither IPv4 nor IPv6."""
    data, start, end = span
    return FAMILY_BY_AF.get(data[start]) if start < end else None


def _number(value: bytes) -> int:
    return int.from_bytes(value, "big")


# Pairs of a dialled socket and an endpoint.

_MAX_ENDPOINT_DUMPS: Final = 12
"""As `_MAX_PORT_DUMPS`; more, because the kernel passes on few flows of each."""


def find_pairs(
    family: Family, is_wanted: Callable[[Socket, Destination], bool],
    endpoints: Collection[Destination] | None,
) -> set[tuple[Socket, Destination]]:
    """Return the wanted pairs of a dialled socket and an endpoint that have a translated TCP connection.

    *endpoints* are those of all wanted pairs; None: others may be wanted, too. Connections in TIME_WAIT are
    over. Takes as long as the kernel's walk, once for each of a few *endpoints*, and 6 us for each TCP
    connection that it passes on. Raises HostError.
    """
    filters = {_answered_from(family, endpoint) for endpoint in endpoints or ()}
    if endpoints is None or len(filters) > _MAX_ENDPOINT_DUMPS:
        filters = {_filter(Protocol.TCP)}
    decided: dict[_Sockets, tuple[Socket, Destination] | None] = {}
    found: set[tuple[Socket, Destination]] = set()

    def collect(listed: Iterator[Span]) -> None:
        for data, start, end in listed:
            sockets = _sockets(family, data, start + NFGENMSG.size)
            if sockets is None:
                continue
            if sockets not in decided:
                to, port, by, by_port = sockets
                pair = _socket(to, port), Destination(by, _number(by_port))
                decided[sockets] = pair if is_wanted(*pair) else None
            wanted_pair = decided[sockets]
            if wanted_pair is not None and wanted_pair not in found and not _is_over(data, start, end):
                found.add(wanted_pair)

    with doing(f"list {family.label} connections"), open_socket() as sock:
        for wanted in filters:
            sock.dump(_GET, header(family) + wanted, collect)
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


# UDP flows, and the deletion of stale ones of UDP and TCP.

_FIRST = struct.Struct("=2xH4s")
"""Kind and value of an attribute of four bytes."""

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

    Takes as long as `delete_stale_udp`. Raises HostError.
    """
    with doing(f"list {family.label} UDP flows"):
        return dump_flows(
            family, lambda listed: collect(_flows(listed, family, to)), _filter(Protocol.UDP))


def delete_stale_udp(
    family: Family, ports: Collection[int], is_stale_flow: Callable[[Socket, Socket], bool]
) -> int:
    """Delete the stale UDP flows of *family* to these destination *ports*; return their number.

    *is_stale_flow* is told a flow's destination, and the source of its replies. Takes as long as the kernel's
    walk, and 3 us for each UDP flow that has one of the ports.

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

    Return their number. The client's next SYN starts a new connection. Takes as long as the kernel's walk;
    raises as `delete_stale_udp`.
    """

    def is_stale(flow: TrackedFlow) -> bool:
        if flow.protocol != Protocol.TCP or not is_stale_syn(_socket(flow.destination, flow.port)):
            return False
        if _is_translated(flow, answered_by(family, flow)):
            return False
        info = attributes(flow.data, flow.start, flow.end).get(PROTOINFO, b"")
        return tcp_state(info) == _TCP_SYN_SENT

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
        attribute(kind, rest[kind]) for kind in (_ZONE, _ID) if kind in rest
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
