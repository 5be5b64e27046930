"""Reads UDP flows from the kernel's connection tracking, and deletes stale ones of UDP and TCP.

linux/netfilter/nf_conntrack_common.h. Since Linux 5.8 the kernel filters its listing; an older kernel
lists every flow of the family, which costs time and changes nothing else.
"""

import errno
import itertools
import os
import struct
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from typing import Final, NamedTuple, TypeVar

from kproxy_core.host.conntrack import table as ctnetlink
from kproxy_core.host.errors import doing
from kproxy_core.host.netlink.messages import Request, attribute, attributes, nested
from kproxy_core.model.address import Address, Family, Protocol
from kproxy_core.plan.stale_flows import Socket

T = TypeVar("T")

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
        return ctnetlink.flows(
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

    def is_stale(flow: ctnetlink.TrackedFlow) -> bool:
        if flow.protocol != Protocol.UDP or flow.port not in numbers:
            return False
        by = ctnetlink.answered_by(family, flow)
        return is_stale_flow(_socket(flow.destination, flow.port), _socket(by.address, by.port))

    each: Iterable[int | None] = ports if len(ports) <= _MAX_PORT_DUMPS else [None]
    return _delete(family, "UDP flows", [_filter(Protocol.UDP, port) for port in each], is_stale)


def delete_stale_syns(family: Family, is_stale_syn: Callable[[Socket], bool]) -> int:
    """Delete the TCP connections of *family* to stale destinations that nothing has answered or translated.

    Return their number. The client's next SYN starts a new connection. Takes as long as the kernel's walk
    through its hash table; acts and raises as `delete_stale_udp`.
    """

    def is_stale(flow: ctnetlink.TrackedFlow) -> bool:
        if flow.protocol != Protocol.TCP or not is_stale_syn(_socket(flow.destination, flow.port)):
            return False
        by = ctnetlink.answered_by(family, flow)
        if (by.address, by.port) != (flow.destination, flow.port):
            return False
        info = attributes(flow.data, flow.start, flow.end).get(ctnetlink.PROTOINFO, b"")
        return ctnetlink.tcp_state(info) == ctnetlink.TCP_SYN_SENT

    return _delete(family, "TCP connections", [_filter(Protocol.TCP) + ctnetlink.UNREPLIED], is_stale)


def _delete(
    family: Family, what: str, filters: Iterable[bytes], is_stale: Callable[[ctnetlink.TrackedFlow], bool]
) -> int:
    """Delete the stale flows among those that one of *filters* selects; return their number."""
    deleted = problem = 0
    with doing(f"delete stale {family.label} {what}"), ctnetlink.open_socket() as sock:

        def sweep(listed: Iterator[ctnetlink.TrackedFlow]) -> None:
            # Deletions during the listing do not confuse the kernel's walk.
            nonlocal deleted, problem
            requests = (_deletion(flow, family) for flow in listed if is_stale(flow))
            while batch := tuple(itertools.islice(requests, _BATCH)):
                # ENOENT: the flow expired, or another has taken its place.
                errors = [code for _, code in sock.exchange(batch)]
                deleted += len(batch) - len(errors)
                problem = next((code for code in errors if code != errno.ENOENT), problem)

        for wanted in filters:
            ctnetlink.flows(family, sweep, wanted)
        if problem:
            raise OSError(problem, os.strerror(problem))
        return deleted


def _deletion(flow: ctnetlink.TrackedFlow, family: Family) -> Request:
    rest = attributes(flow.data, flow.start, flow.end)
    # Without its tuple a request would delete every flow.
    payload = ctnetlink.header(family) + flow.data[flow.start : flow.start + flow.size] + b"".join(
        attribute(kind, rest[kind]) for kind in (ctnetlink.ZONE, ctnetlink.ID) if kind in rest
    )
    return Request(ctnetlink.DELETE, 0, payload)


def _flows(
    listed: Iterable[ctnetlink.TrackedFlow], family: Family, wanted: Container[Address]
) -> Iterator[Flow]:
    for flow in listed:
        if flow.protocol == Protocol.UDP and flow.destination in wanted:
            by = ctnetlink.answered_by(family, flow)
            kind, status = _FIRST.unpack_from(flow.data, flow.start + flow.size + by.size)
            if kind != ctnetlink.STATUS:  # A zone precedes it.
                status = attributes(flow.data, flow.start, flow.end)[ctnetlink.STATUS]
            yield Flow(
                flow.source, _socket(flow.destination, flow.port), _socket(by.address, by.port),
                bool(int.from_bytes(status, "big") & _DST_NAT),
            )  # fmt: skip


def _socket(address: Address, port: bytes) -> Socket:
    return address, int.from_bytes(port, "big")


def _filter(protocol: Protocol, port: int | None = None) -> bytes:
    """Encode a filter for *protocol*, and for one destination port unless *port* is None."""
    fields = [attribute(ctnetlink.PROTO_NUM, bytes([protocol]))]
    flags = _FILTER_PROTO_NUM
    if port is not None:
        fields.append(attribute(ctnetlink.PROTO_DST_PORT, port.to_bytes(2, "big")))
        flags |= _FILTER_PROTO_DST_PORT
    wanted = nested(ctnetlink.TUPLE_ORIG, nested(ctnetlink.TUPLE_PROTO, *fields))
    return wanted + nested(ctnetlink.FILTER, attribute(_FILTER_ORIG_FLAGS, _FLAGS.pack(flags)))
