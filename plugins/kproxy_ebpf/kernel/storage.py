"""The values that programs keep for sockets, read from outside (linux/inet_diag.h, linux/sock_diag.h)."""

import socket
import struct
from typing import Final

from kproxy_core.host.errors import doing
from kproxy_core.host.netlink.messages import (
    NETLINK_SOCK_DIAG,
    SOCK_DIAG_BY_FAMILY,
    Span,
    attribute_spans,
    attributes,
    nested,
)
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.model.address import Address

_NO_LISTENERS: Final = 0xFFF & ~(1 << 10)
"""The states of sockets but TCP_LISTEN."""
_REQUEST = struct.Struct("=BBxxIH46x")
"""inet_diag_req_v2: family, protocol, states, and of the socket the local port, in network order."""
_STORAGES_WANTED: Final = nested(2)
"""INET_DIAG_REQ_SK_BPF_STORAGES: of all maps, since Linux 5.7. Takes CAP_BPF."""
_MESSAGE = struct.Struct("=B7x16s48x")
"""inet_diag_msg: family and local address."""
_STORAGES, _VALUE = 20, 3
"""INET_DIAG_SK_BPF_STORAGES, SK_DIAG_BPF_STORAGE_MAP_VALUE"""


def stored_values(protocol: int, port: int) -> list[tuple[Address, bytes]]:
    """Return what programs keep for sockets with the local *port*, as (local address, value).

    Sockets of the calling thread's network namespace only. The kernel tells those of TCP sockets. Raises
    HostError.
    """
    found: list[tuple[Address, bytes]] = []
    with doing("read what programs keep for sockets"), NetlinkSocket.open(NETLINK_SOCK_DIAG) as sock:
        for family in (socket.AF_INET, socket.AF_INET6):
            request = _REQUEST.pack(family, protocol, _NO_LISTENERS, socket.htons(port))
            found += sock.dump(SOCK_DIAG_BY_FAMILY, request + _STORAGES_WANTED, lambda answers: [
                stored for answer in answers for stored in _decode(answer)])
    return found


def _decode(answer: Span) -> list[tuple[Address, bytes]]:
    data, start, end = answer
    family, address = _MESSAGE.unpack_from(data, start)
    source = Address(address[:4] if family == socket.AF_INET else address)
    return [
        (source, attributes(data, first, last)[_VALUE])
        for kind, at, until in attribute_spans(data, start + _MESSAGE.size, end) if kind == _STORAGES
        for _, first, last in attribute_spans(data, at, until)
    ]
