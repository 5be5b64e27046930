"""The kernel's announcements of new, changed and ended flows (linux/netfilter/nfnetlink_conntrack.h)."""

import enum
from collections.abc import Iterator
from typing import NamedTuple, Self

from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink.messages import (
    NETLINK_NETFILTER,
    NFGENMSG,
    NLM_F_CREATE,
    NLM_F_EXCL,
    attributes,
    messages,
)
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.model.address import Address

_GROUPS = (1, 2, 3)
"""NFNLGRP_CONNTRACK_NEW, _UPDATE and _DESTROY."""
_RECEIVE_SPACE = 8 << 20
_NEW, _DELETE = 0x100, 0x102
_ORIGINAL, _REPLY, _STATUS, _PROTOCOL_INFO = 1, 2, 3, 4
_ADDRESSES, _NUMBERS = 1, 2
_SOURCE_NAT = 1 << 4
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
    """One announcement."""

    change: Change
    protocol: int
    original: Direction
    """As the sender's packets were before any translation."""
    reply: Direction
    """Its source is the endpoint, its destination the sender as the endpoint sees it."""
    status: int
    tcp_state: int
    """See enum tcp_conntrack; 0: not told."""

    @property
    def is_masqueraded(self) -> bool:
        return bool(self.status & _SOURCE_NAT)

    @property
    def is_answered(self) -> bool:
        return bool(self.status & _SEEN_REPLY)


class FlowEvents:
    """The announcements since it was opened, in this thread's network namespace."""

    def __init__(self, *, only_new: bool = False) -> None:
        """Raises HostError without CAP_NET_ADMIN."""
        try:
            self._socket = NetlinkSocket.open(
                NETLINK_NETFILTER, groups=_GROUPS[:1] if only_new else _GROUPS, receive_space=_RECEIVE_SPACE)
        except OSError as error:
            raise HostError("cannot watch connection tracking, which takes CAP_NET_ADMIN", error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> Iterator[FlowEvent]:
        """Yield what has been announced and not read. Announcements may be lost on a busy node."""
        while True:
            try:
                data = self._socket.receive()
            except OSError:  # ENOBUFS: some were dropped.
                continue
            if not data:
                return
            yield from parse(data)


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
        yield FlowEvent(
            change, original[0], original[1], reply[1], int.from_bytes(found.get(_STATUS, b""), "big"),
            _tcp_state(found.get(_PROTOCOL_INFO)),
        )


def _direction(value: bytes | None) -> tuple[int, Direction] | None:
    if value is None:
        return None
    parts = attributes(value, 0, len(value))
    addresses, numbers = (
        attributes(part, 0, len(part)) for part in (parts.get(_ADDRESSES, b""), parts.get(_NUMBERS, b"")))
    source, destination = addresses.get(1) or addresses.get(3), addresses.get(2) or addresses.get(4)
    if source is None or destination is None or 2 not in numbers or 3 not in numbers:
        return None
    ports = (int.from_bytes(numbers[at], "big") for at in (2, 3))
    source_port, port = ports
    return numbers[1][0], Direction(Address(source), source_port, Address(destination), port)


def _tcp_state(value: bytes | None) -> int:
    if value is None:
        return 0
    tcp = attributes(value, 0, len(value)).get(1, b"")
    return attributes(tcp, 0, len(tcp)).get(1, b"\0")[0]
