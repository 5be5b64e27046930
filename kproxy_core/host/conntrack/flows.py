"""Reads UDP flows from the kernel's connection tracking, and deletes stale ones.

linux/netfilter/nf_conntrack_common.h. Since Linux 5.8 the kernel leaves out what is not asked for; an older
one sends every flow of the family, which costs time and changes nothing else.
"""

import errno
import itertools
import socket
import struct
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

from kproxy_core.host.conntrack import table as ctnetlink
from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink import messages as netlink
from kproxy_core.host.netlink.messages import attribute, nested
from kproxy_core.model.address import Address, Family
from kproxy_core.model.address import Protocol as IpProtocol
from kproxy_core.plan.stale_flows import Socket

T = TypeVar("T")

_FILTER_ORIG_FLAGS: Final = 1
_FILTER_PROTO_NUM: Final = 1 << 3
_FILTER_PROTO_DST_PORT: Final = 1 << 5

_DST_NAT: Final = 1 << 5
"""IPS_DST_NAT: a rule of nat has decided where the flow goes."""

_FIRST = struct.Struct("=2xH4s")
"""Kind and value of an attribute of four bytes."""
_FLAGS = struct.Struct("=I")

_MAX_PORT_DUMPS: Final = 2
"""Asking for one port at a time pays only while few walks through the table replace one."""
_BATCH: Final = 64
"""Flows deleted at once: the answers fit into a socket's buffer even if all fail."""


class Stale(Protocol):
    """Says which flows must go; `StaleFlows` does."""

    @property
    def ports(self) -> frozenset[int]:
        """The destination ports of all that may have to."""

    def is_stale(self, destination: Socket, answered_by: Socket) -> bool:
        """Whether the flow to *destination*, whose answers come from *answered_by*, must."""


class Flow(NamedTuple):
    """A UDP flow."""

    source: Address
    """Of its first datagram."""
    destination: Socket
    """What that was sent to."""
    answered_by: Socket
    translated: bool
    """By a rule of nat, and not by somebody else who knows where it goes."""


def read_udp_flows(family: Family, to: Container[Address], collect: Callable[[Iterable[Flow]], T]) -> T:
    """What *collect* makes of the flows of *family* to these addresses; it may be called again.

    Acts on the network namespace of the calling thread, and takes as long as `delete_stale_udp`.
    Raises HostError.
    """
    try:
        with netlink.open_socket(netlink.NETLINK_NETFILTER) as sock:
            return netlink.uninterrupted(lambda: collect(_flows(sock, family, to)))
    except OSError as error:
        raise HostError(f"can't list {family.label} UDP flows", error) from error


def delete_stale_udp(family: Family, stale: Stale) -> int:
    """Delete the UDP flows of *family* that are *stale*; returns how many there were.

    Acts on the network namespace of the calling thread. Takes as long as the kernel's walk through its
    hash table (10 ms for 262,144 buckets, other Python threads run meanwhile), and 3 us for each
    UDP flow that has one of the ports in question.

    Raises HostError if flows can't be listed, or some can't be deleted; all others are gone then.
    """
    ports: frozenset[int | None] = frozenset(stale.ports)
    if not ports:
        return 0
    if len(ports) > _MAX_PORT_DUMPS:
        ports = frozenset([None])
    try:
        with (
            netlink.open_socket(netlink.NETLINK_NETFILTER) as listing,
            netlink.open_socket(netlink.NETLINK_NETFILTER) as deleting,
        ):
            deletion = _Deletion(deleting)
            for port in ports:
                netlink.uninterrupted(partial(_sweep, listing, deletion, family, port, stale))
            netlink.raise_for(deletion.error)
            return deletion.count
    except OSError as error:
        raise HostError(f"can't delete stale {family.label} UDP flows", error) from error


class _Deletion:
    """Deletes flows in batches. What can't be deleted stops no other."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.count = 0
        self.error = 0
        """Number of the last error that matters."""

    def send(self, requests: Sequence[bytes]) -> None:
        """Delete a few flows. Only the last request asks for an answer: the others answer if they fail."""
        last = len(requests) - 1
        self._sock.send(b"".join(
            netlink.message(ctnetlink.DELETE, netlink.NLM_F_ACK if number == last else 0, request, number)
            for number, request in enumerate(requests)
        ))
        self.count += len(requests)
        answered = -1
        while answered != last:
            # The kernel has answered before send() returned.
            data = self._sock.recv(netlink.RECEIVE_SIZE, socket.MSG_DONTWAIT)
            for _, _, number, start, _ in netlink.messages(data):
                answered = number
                code = netlink.error_code(data, start)
                if code:
                    self.count -= 1
                    # ENOENT: it ended by itself, or another flow has taken its place.
                    if code != errno.ENOENT:
                        self.error = code


def _sweep(
    listing: socket.socket, deletion: _Deletion, family: Family, port: int | None, stale: Stale
) -> None:
    """Go through the table once; deleting on the way does not confuse the kernel's walk."""
    requests = _stale_flows(listing, family, port, stale)
    while batch := tuple(itertools.islice(requests, _BATCH)):
        deletion.send(batch)


def _stale_flows(
    sock: socket.socket, family: Family, port: int | None, stale: Stale
) -> Iterator[bytes]:
    """What deletes each of the stale flows to *port*; None: to any."""
    ports = {number.to_bytes(2, "big") for number in stale.ports}
    for flow in _walk(sock, family, port):
        if flow.port not in ports:
            continue
        by = ctnetlink.answered_by(family, flow)
        if stale.is_stale(_socket(flow.destination, flow.port), _socket(by.address, by.port)):
            rest = netlink.attributes(flow.data, flow.start, flow.end)
            # Without its tuple a request would mean every flow there is.
            original = flow.data[flow.start : flow.start + flow.size]
            yield ctnetlink.header(family) + original + b"".join(
                attribute(kind, rest[kind]) for kind in (ctnetlink.ZONE, ctnetlink.ID) if kind in rest
            )


def _flows(sock: socket.socket, family: Family, wanted: Container[Address]) -> Iterator[Flow]:
    for flow in _walk(sock, family, None):
        if flow.destination in wanted:
            by = ctnetlink.answered_by(family, flow)
            kind, status = _FIRST.unpack_from(flow.data, flow.start + flow.size + by.size)
            if kind != ctnetlink.STATUS:  # A zone comes before it.
                status = netlink.attributes(flow.data, flow.start, flow.end)[ctnetlink.STATUS]
            yield Flow(
                flow.source, _socket(flow.destination, flow.port), _socket(by.address, by.port),
                bool(int.from_bytes(status, "big") & _DST_NAT),
            )  # fmt: skip


def _walk(sock: socket.socket, family: Family, port: int | None) -> Iterator[ctnetlink.Listed]:
    """The UDP flows to *port*, if the kernel filters; else, and without a port, all of UDP."""
    listed = ctnetlink.flows(sock, family, _filter(port))
    return (flow for flow in listed if flow.protocol == IpProtocol.UDP)


def _socket(address: Address, port: bytes) -> Socket:
    return address, int.from_bytes(port, "big")


def _filter(port: int | None) -> bytes:
    """Only UDP, and with a *port* only that destination port."""
    fields = [attribute(ctnetlink.PROTO_NUM, bytes([IpProtocol.UDP]))]
    flags = _FILTER_PROTO_NUM
    if port is not None:
        fields.append(attribute(ctnetlink.PROTO_DST_PORT, port.to_bytes(2, "big")))
        flags |= _FILTER_PROTO_DST_PORT
    wanted = nested(ctnetlink.TUPLE_ORIG, nested(ctnetlink.TUPLE_PROTO, *fields))
    return wanted + nested(ctnetlink.FILTER, attribute(_FILTER_ORIG_FLAGS, _FLAGS.pack(flags)))
