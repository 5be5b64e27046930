"""Announcements of connection tracking: flows that begin, change or end, and TCP connections that are reset
(linux/netfilter/nfnetlink_conntrack.h).
"""

import enum
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from kproxy_core.linux.conntrack import (
    DELETE,
    PROTOINFO,
    SEEN_REPLY,
    STATUS,
    TCP_CLOSED,
    TUPLE_ORIG,
    TUPLE_REPLY,
    FlowTuple,
    TcpFlow,
    family_in,
    flow_tuple,
    tcp_flows,
    tcp_state,
)
from kproxy_core.linux.conntrack_volumes import Volumes, ended_volumes
from kproxy_core.linux.errors import doing
from kproxy_core.model.address import Family
from kproxy_core.netlink.messages import (
    NETLINK_NETFILTER,
    NFGENMSG,
    NLM_F_CREATE,
    NLM_F_EXCL,
    Span,
    attributes,
    decoding,
    messages,
)
from kproxy_core.netlink.socket_filter import (
    A_TO_X,
    ACCEPT,
    DROP,
    FIND_ATTRIBUTE,
    FIND_ATTRIBUTE_WITHIN,
    Program,
    Step,
    assemble,
    if_equal,
    load,
    load_byte_behind_x,
    set_a,
    set_x,
    unless_equal,
    unless_equal_x,
)
from kproxy_core.netlink.sockets import Announcements, NetlinkSocket, NotificationThread

_NEW: Final = 0x100
"""The announcement of a new or a changed flow. That of an ended one has the kind of `DELETE`."""
_NFNLGRP_NEW, _NFNLGRP_UPDATE, _NFNLGRP_DESTROY = 1, 2, 3
"""Groups of announcements (NFNLGRP_CONNTRACK_*)."""
_BUFFER: Final = 8 << 20
"""Size in bytes; a few seconds at 20,000 connections a second."""
_SIZE = struct.Struct("=H")


class FlowEventType(enum.Enum):
    """The reason for an announcement."""

    NEW = "new"
    UPDATED = "updated"
    ENDED = "ended"


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
        original, reply = flow_tuple(found.get(TUPLE_ORIG)), flow_tuple(found.get(TUPLE_REPLY))
        if original is None or reply is None:
            continue
        is_new = flags & (NLM_F_CREATE | NLM_F_EXCL)
        new_or_updated = FlowEventType.NEW if is_new else FlowEventType.UPDATED
        status = int.from_bytes(found.get(STATUS, b""), "big")
        yield FlowEvent(
            FlowEventType.ENDED if kind == DELETE else new_or_updated, original[0], original[1], reply[1],
            bool(status & SEEN_REPLY))


# Filters that drop announcements of ended flows before they wake their reader.

_FAMILY, _ATTRIBUTES = 16, 20
"""Offsets of the address family and of the first attribute."""
_TCP_AND_STATE = 1
"""CTA_PROTOINFO_TCP, and the CTA_PROTOINFO_TCP_STATE within."""

RESETS: Final = assemble(
    set_a(_ATTRIBUTES), set_x(PROTOINFO), FIND_ATTRIBUTE, if_equal(0, "drop"),
    set_x(_TCP_AND_STATE), FIND_ATTRIBUTE_WITHIN, if_equal(0, "drop"),
    FIND_ATTRIBUTE_WITHIN, if_equal(0, "drop"),
    A_TO_X, load_byte_behind_x(4), unless_equal(TCP_CLOSED, "drop"),
    ACCEPT,
    "drop", DROP,
)
"""Filter: TCP connections that a reset has ended."""


def _unless_same(size: int, one: int, other: int) -> tuple[Step, ...]:
    """Return the steps that accept if the numbers of *size* bytes at two offsets differ."""
    return load(size, one), A_TO_X, load(size, other), unless_equal_x("accept")


TRANSLATED: Final = assemble(
    load(1, _FAMILY), unless_equal(socket.AF_INET, "IPv6"),
    *_unless_same(4, 40, 84), *_unless_same(2, 68, 112), DROP,
    "IPv6", *(step for at in (52, 56, 60, 64) for step in _unless_same(4, at, at + 56)),
    *_unless_same(2, 92, 160), DROP,
    "accept", ACCEPT,
)
"""Filter: flows that another socket answers than the one dialled, by address and port of both.

Offsets are those of ctnetlink (net/netfilter/nf_conntrack_netlink.c): the netlink header of 16 bytes, that of
nfnetlink, and the tuples of both directions without padding. With another layout of a tuple, as in a zone,
the values differ, and the announcement is received.
"""


# TCP connections that a reset ends.

class ResetWatch(NotificationThread):
    """Reports TCP connections as they end by a reset. An established one is reported ten seconds later."""

    def __init__(
        self, name: str, ended: Callable[[Sequence[TcpFlow], bool], None],
        add_volumes: Callable[[Volumes], None] | None = None,
    ) -> None:
        """Start watching, on a thread called *name*, which calls both functions. Raises HostError.

        *ended* takes the connections, and True if the kernel dropped announcements. *add_volumes* takes the
        sums over all translated connections that ended, and untranslated ones are then not reported; None:
        only resets are received.
        """
        self._ended = ended
        self._add_volumes = add_volumes
        with doing("receive events of connection tracking"):
            sock = NetlinkSocket.open(
                NETLINK_NETFILTER, groups=(_NFNLGRP_DESTROY,), receive_space=_BUFFER, accept=self._accepts)
        super().__init__(name, sock, self._receive)

    @property
    def _accepts(self) -> Program:
        return RESETS if self._add_volumes is None else TRANSLATED

    def _receive(self, datagrams: Sequence[bytes], lost: bool) -> None:
        spans = [(data, start, end) for data in datagrams for *_, start, end in messages(data)]
        if self._add_volumes is not None:
            for family in Family:
                of_family = (span for span in spans if family_in(span) is family)
                self._add_volumes(ended_volumes(of_family, family))
        found = list(tcp_flows(filter(_was_reset, spans)))
        if found or lost:
            self._ended(found, lost)


def _was_reset(span: Span) -> bool:
    """Return whether the announced flow was a TCP connection that a reset has ended. Raises Malformed."""
    data, start, end = span
    # Most connections end otherwise: look for the state first, behind the header and both tuples.
    at = start + NFGENMSG.size
    with decoding("an ended flow"):
        for _ in range(2):
            at += _SIZE.unpack_from(data, at)[0]
    return tcp_state(attributes(data, at, end).get(PROTOINFO, b"")) == TCP_CLOSED
