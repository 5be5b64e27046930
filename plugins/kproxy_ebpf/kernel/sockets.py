"""Values stored for sockets, and destruction of sockets (linux/inet_diag.h, linux/sock_diag.h)."""

import logging
import socket
import struct
from collections.abc import Mapping
from typing import Final

from kproxy_core.linux.errors import HostError, doing
from kproxy_core.linux.messages import (
    NETLINK_SOCK_DIAG,
    SOCK_DIAG_BY_FAMILY,
    Span,
    attribute_spans,
    attributes,
    nested,
)
from kproxy_core.linux.namespaces import in_network_namespaces
from kproxy_core.linux.netlink import NetlinkSocket
from kproxy_core.linux.udp_sockets import UdpSocket, connected_udp_sockets, destroy_udp_sockets
from kproxy_core.model.address import Address, Family
from kproxy_ebpf.batch import PRESENT, address_key, cookie_key, parse_endpoint
from kproxy_ebpf.kernel import bpf

log = logging.getLogger("kproxy.ebpf")

_NO_LISTENERS: Final = 0xFFF & ~(1 << 10)
"""All states of sockets but TCP_LISTEN."""
_REQUEST = struct.Struct("=BBxxIH46x")
"""inet_diag_req_v2: family, protocol, states, and the socket's local port in network order."""
_STORAGES_WANTED: Final = nested(2)
"""INET_DIAG_REQ_SK_BPF_STORAGES: of all maps, since Linux 5.7. Takes CAP_BPF."""
_MESSAGE = struct.Struct("=B7x16s48x")
"""inet_diag_msg: family and local address."""
_STORAGES, _VALUE = 20, 3
"""INET_DIAG_SK_BPF_STORAGES, SK_DIAG_BPF_STORAGE_MAP_VALUE"""


def stored_values(protocol: int, port: int) -> list[tuple[Address, bytes]]:
    """Return the values that programs store for TCP sockets with the local *port*, as (local address, value).

    Only of sockets in the calling thread's network namespace. Raises HostError.
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


def destroy_connected_sockets(connected: int, definition: bpf.MapDefinition, endpoints: int) -> None:
    """Destroy the connected UDP sockets whose endpoint was removed.

    A program sees the connect() of such a socket but none of its datagrams, so it cannot move it elsewhere.
    *connected* is the map in which programs record sockets, *endpoints* that of endpoints. Spares sockets
    that were reconnected since, and namespaces that this process may not enter. Raises OSError.
    """
    noted = dict(bpf.elements(connected, definition))
    removed = {one for one in set(noted.values()) if bpf.lookup(endpoints, one, len(PRESENT)) is None}
    stale = {cookie: endpoint for cookie, endpoint in noted.items() if endpoint in removed}
    if not stale:
        return
    destroyed = 0

    def destroy() -> None:
        nonlocal destroyed
        destroyed += destroy_udp_sockets(one for one in connected_udp_sockets() if _is_stale(one, stale))

    try:
        in_network_namespaces(destroy)
    except HostError as error:
        log.warning("connected UDP sockets keep a removed endpoint", extra={"fields": {"error": str(error)}})
    if destroyed:
        log.info("destroyed connected UDP sockets", extra={"fields": {"sockets": destroyed}})
    bpf.delete_all(connected, list(stale))


def _is_stale(found: UdpSocket, stale: Mapping[bytes, bytes]) -> bool:
    endpoint, (address, port) = stale.get(cookie_key(found.cookie)), found.peer
    return endpoint is not None and (address_key(address), port) == parse_endpoint(endpoint, Family.IPV6)
