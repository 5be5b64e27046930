"""Values stored for sockets, and destruction of sockets (linux/inet_diag.h, linux/sock_diag.h)."""

import logging
import socket
import struct
from collections.abc import Mapping
from typing import Final, NamedTuple

from kproxy_core.contract import Address, Family, Frontend, HostError, IsRemoved
from kproxy_core.linux.errors import doing
from kproxy_core.linux.namespaces import in_network_namespaces
from kproxy_core.linux.sockets import (
    UdpSocket,
    connected_udp_sockets,
    destroy_tcp_sockets,
    destroy_udp_sockets,
    peer_of,
)
from kproxy_core.netlink.messages import (
    NETLINK_SOCK_DIAG,
    SOCK_DIAG_BY_FAMILY,
    Span,
    attribute_spans,
    attributes,
    decoding,
    nested,
)
from kproxy_core.netlink.sockets import NetlinkSocket
from kproxy_ebpf.batch import (
    PRESENT,
    address_key,
    cookie_key,
    frontend_family,
    parse_endpoint,
    parse_frontend,
    parse_peer,
)
from kproxy_ebpf.kernel import bpf

log = logging.getLogger("kproxy.ebpf")

_NO_LISTENERS: Final = 0xFFF & ~(1 << 10)
"""All states of sockets but TCP_LISTEN."""
_CONNECTED: Final = 1 << 1 | 1 << 2 | 1 << 4 | 1 << 5 | 1 << 8
"""TCP_ESTABLISHED, _SYN_SENT, _FIN_WAIT1, _FIN_WAIT2 and _CLOSE_WAIT: a process may await data, or send some.
"""
_REQUEST = struct.Struct("=BBxxIH46x")
"""inet_diag_req_v2: family, protocol, states, and the socket's local port in network order."""
_STORAGES_WANTED: Final = nested(2)
"""INET_DIAG_REQ_SK_BPF_STORAGES: of all maps, since Linux 5.7. Takes CAP_BPF."""
_MESSAGE = struct.Struct("=B3x48s20x")
"""inet_diag_msg: family and identity (inet_diag_sockid)."""
_STORAGES, _VALUE = 20, 3
"""INET_DIAG_SK_BPF_STORAGES, SK_DIAG_BPF_STORAGE_MAP_VALUE"""


def stored_values(protocol: int, port: int) -> list[tuple[Address, bytes]]:
    """Return the values that programs store for TCP sockets with the local *port*, as (local address, value).

    Only of sockets in the calling thread's network namespace. Raises HostError.
    """
    return [(one.source, one.value) for one in _stored(protocol, _NO_LISTENERS, port)]


class _Stored(NamedTuple):
    """What a program stores for a socket."""

    family: int
    identity: bytes
    value: bytes

    @property
    def source(self) -> Address:
        address = self.identity[4:20]
        return Address(address[:4] if self.family == socket.AF_INET else address)


def _stored(protocol: int, states: int, port: int = 0) -> list[_Stored]:
    """Return what programs store for sockets in these *states* with a local *port*; 0: any."""
    found: list[_Stored] = []
    with doing("read what programs keep for sockets"), NetlinkSocket.open(NETLINK_SOCK_DIAG) as sock:
        for family in (socket.AF_INET, socket.AF_INET6):
            request = _REQUEST.pack(family, protocol, states, socket.htons(port))
            found += sock.dump(SOCK_DIAG_BY_FAMILY, request + _STORAGES_WANTED, lambda answers: [
                stored for answer in answers for stored in decode(answer)])
    return found


def decode(answer: Span) -> list[_Stored]:
    """Return the stored values in an *answer* about one socket. Raises Malformed."""
    data, start, end = answer
    with decoding("a socket"):
        family, identity = _MESSAGE.unpack_from(data, start)
        return [
            _Stored(family, identity, attributes(data, first, last)[_VALUE])
            for kind, at, until in attribute_spans(data, start + _MESSAGE.size, end) if kind == _STORAGES
            for _, first, last in attribute_spans(data, at, until)
        ]


def reset_connections(family: Family, is_removed: IsRemoved) -> int:
    """Destroy the node's TCP sockets that programs sent to removed endpoints. Return their number.

    Programs leave sockets of pods to the rules (`batch.RESETS`). Raises HostError.
    """
    return destroy_tcp_sockets(
        (one.family, one.identity) for one in _stored(socket.IPPROTO_TCP, _CONNECTED)
        if _is_connected_to_removed(one, family, is_removed))


def _is_connected_to_removed(one: _Stored, family: Family, is_removed: IsRemoved) -> bool:
    pair = parse_peer(one.value)
    if pair is None or frontend_family(pair[0]) is not family:
        return False
    address, port = peer_of(one.family, one.identity)
    endpoint = parse_endpoint(pair[1], family)
    if (address_key(address), port) != (address_key(endpoint.address), endpoint.port):
        return False  # It was connected again, to another address.
    return is_removed(Frontend(*parse_frontend(pair[0])), endpoint)


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
