"""The kernel's accounting objects (linux/netfilter/nfnetlink_acct.h), which some rules count with.

A kernel without them has the same rules, which then count nothing.
"""

import logging
import struct
from collections.abc import Iterator
from typing import NamedTuple

from kproxy_core.host.netlink import messages as netlink
from kproxy_iptables import names

log = logging.getLogger("kproxy.iptables")

_NEW, _GET = 7 << 8, 7 << 8 | 1
_NAME, _PACKETS = 1, 2
_CREATE = 0x400
_HEADER = struct.pack(">BBH", 0, 0, 0)
"""nfgenmsg"""
_PRESENT = (0, 16, 17)
"""Made, or there: EBUSY, EEXIST."""
_PATIENCE = 2.0
"""Seconds."""


class Answer(NamedTuple):
    """What the kernel says to one request."""

    error: int
    """An error number; 0: none."""
    attributes: dict[int, bytes]


def ensure_counters() -> frozenset[str]:
    """Create the accounting objects that are missing; returns those that exist now."""
    present: set[str] = set()
    try:
        for name in names.COUNTERS:
            if any(answer.error in _PRESENT for answer in _ask(_NEW, netlink.NLM_F_ACK | _CREATE, name)):
                present.add(name)
    except OSError as error:
        log.info("this kernel does not count with nfacct", extra={"fields": {"error": str(error)}})
    return frozenset(present)


def read_packets(name: str) -> int | None:
    """How many packets the object *name* has counted; None if it is not there."""
    try:
        for answer in _ask(_GET, 0, name):
            if _PACKETS in answer.attributes:
                return int.from_bytes(answer.attributes[_PACKETS], "big")
    except OSError:
        pass
    return None


def _ask(kind: int, flags: int, name: str) -> Iterator[Answer]:
    request = netlink.message(kind, flags, _HEADER + netlink.attribute(_NAME, name.encode() + b"\0"))
    with netlink.open_socket(netlink.NETLINK_NETFILTER) as connection:
        connection.settimeout(_PATIENCE)
        connection.send(request)
        data = connection.recv(netlink.RECEIVE_SIZE)
    for of, _, _, start, end in netlink.messages(data):
        if of == netlink.NLMSG_ERROR:
            yield Answer(netlink.error_code(data, start), {})
        else:
            yield Answer(0, netlink.attributes(data, start + len(_HEADER), end))
