"""The kernel's announcements of new, changed and ended flows (linux/netfilter/nfnetlink_conntrack.h)."""

import enum
from collections.abc import Iterator
from typing import NamedTuple

from kproxy_core.host.netlink.announcements import Announcements
from kproxy_core.host.netlink.messages import NFGENMSG, NLM_F_CREATE, NLM_F_EXCL, attributes, messages
from kproxy_core.model.address import Address

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
