"""Reads UDP flows from the kernel's connection tracking, and deletes stale ones, over ctnetlink.

linux/netfilter/nfnetlink_conntrack.h, nf_conntrack_common.h. The table is read as a
stream. Since Linux 5.8 the kernel leaves out what is not asked for; an older one sends every
flow of the family, which costs time and changes nothing else.
"""

import errno
import itertools
import os
import socket
import struct
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

from kproxy_core.host import netlink
from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink import attribute, nested
from kproxy_core.model.address import Address, Family
from kproxy_core.model.address import Protocol as IpProtocol
from kproxy_core.plan.stale_flows import Socket

T = TypeVar("T")

_CT_GET: Final = 0x101
_CT_DELETE: Final = 0x102

_TUPLE_ORIG: Final = 1
_STATUS: Final = 3
_ID: Final = 12
_ZONE: Final = 18
_FILTER: Final = 25
_TUPLE_PROTO: Final = 2
_PROTO_NUM: Final = 1
_PROTO_DST_PORT: Final = 3
_FILTER_ORIG_FLAGS: Final = 1
_FILTER_PROTO_NUM: Final = 1 << 3
_FILTER_PROTO_DST_PORT: Final = 1 << 5

_DST_NAT: Final = 1 << 5
"""IPS_DST_NAT: a rule of nat has decided where the flow goes."""

_FIRST = struct.Struct("=2xH4s")
"""Kind and value of an attribute of four bytes."""
_FLAGS = struct.Struct("=I")
_GENERIC_HEADER = struct.Struct("=BBH")

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
            netlink.message(_CT_DELETE, netlink.NLM_F_ACK if number == last else 0, request, number)
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
    unpack = _TUPLE[family].unpack_from
    for data, start, end, size, _, to, to_port in _walk(sock, family, port):
        if to_port not in ports:
            continue
        _, _, by, _, _, _, by_port, _ = unpack(data, start + size)
        if stale.is_stale((to, int.from_bytes(to_port, "big")), (by, int.from_bytes(by_port, "big"))):
            rest = netlink.attributes(data, start, end)
            # Without its tuple a request would mean every flow there is.
            yield _header(family) + data[start : start + size] + b"".join(
                attribute(kind, rest[kind]) for kind in (_ZONE, _ID) if kind in rest
            )


def _flows(sock: socket.socket, family: Family, wanted: Container[Address]) -> Iterator[Flow]:
    unpack = _TUPLE[family].unpack_from
    for data, start, end, size, source, to, to_port in _walk(sock, family, None):
        if to in wanted:
            reply_size, _, by, _, _, _, by_port, _ = unpack(data, start + size)
            kind, status = _FIRST.unpack_from(data, start + size + reply_size)
            if kind != _STATUS:  # A zone comes before it.
                status = netlink.attributes(data, start, end)[_STATUS]
            yield Flow(
                source, (to, int.from_bytes(to_port, "big")), (by, int.from_bytes(by_port, "big")),
                bool(int.from_bytes(status, "big") & _DST_NAT),
            )  # fmt: skip


def _walk(
    sock: socket.socket, family: Family, port: int | None
) -> Iterator[tuple[bytes, int, int, int, Address, Address, bytes]]:
    """The UDP flows to *port*, or all, if the kernel filters; else all there are.

    Each as a piece of data, its start and end, the size of the tuple that it begins with, and out of that
    the source and destination addresses and the destination port.
    """
    unpack = _TUPLE[family].unpack_from
    request = netlink.message(_CT_GET, netlink.NLM_F_DUMP, _header(family) + _filter(port))
    for data, start, end in netlink.dump(sock, request):
        start += _GENERIC_HEADER.size
        size, head, source, to, number_head, protocol, _, to_port = unpack(data, start)
        if head != _TUPLE_HEAD[family] or number_head != _NUMBER_HEAD:
            # A kernel that writes flows in another way: better no clean-up than a wrong one.
            raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))
        if protocol == IpProtocol.UDP:
            yield data, start, end, size, source, to, to_port


def _header(family: Family) -> bytes:
    return _GENERIC_HEADER.pack(socket.AF_INET if family is Family.IPV4 else socket.AF_INET6, 0, 0)


def _filter(port: int | None) -> bytes:
    """Only UDP, and with a *port* only that destination port."""
    fields = [attribute(_PROTO_NUM, bytes([IpProtocol.UDP]))]
    flags = _FILTER_PROTO_NUM
    if port is not None:
        fields.append(attribute(_PROTO_DST_PORT, port.to_bytes(2, "big")))
        flags |= _FILTER_PROTO_DST_PORT
    wanted = nested(_TUPLE_ORIG, nested(_TUPLE_PROTO, *fields))
    return wanted + nested(_FILTER, attribute(_FILTER_ORIG_FLAGS, _FLAGS.pack(flags)))


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
_NUMBER_HEAD = _HEADS.pack(0, 0, 5, _PROTO_NUM)[4:]
