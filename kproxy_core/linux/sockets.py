"""Sockets of the calling thread's network namespace, and their end (linux/sock_diag.h, linux/inet_diag.h)."""

import errno
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from kproxy_core.linux.errors import HostError, doing
from kproxy_core.model.address import Address
from kproxy_core.netlink.messages import (
    NETLINK_SOCK_DIAG,
    SOCK_DIAG_BY_FAMILY,
    NetlinkRequest,
    Span,
    decoding,
)
from kproxy_core.netlink.sockets import NetlinkSocket

_SOCK_DESTROY: Final = 21
_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)
_ESTABLISHED: Final = 1 << 1
"""TCP_ESTABLISHED, which is the state of connected UDP sockets too."""

_REQUEST = struct.Struct("=BBxxI48s")
"""inet_diag_req_v2: family, protocol, states, socket."""
_MESSAGE = struct.Struct("=B3x48s")
"""Beginning of inet_diag_msg: family, socket."""
_REMOTE = struct.Struct(">2xH16x16s")
"""Within inet_diag_sockid: the other side's port and address."""
_COOKIE = struct.Struct("=40xQ")
_NOBODY: Final = bytes(40) + b"\xff" * 8
"""An inet_diag_sockid that matches no socket: without a cookie, any socket with its addresses would match."""


class UdpSocket(NamedTuple):
    family: int
    """AF_INET or AF_INET6, which may have an IPv4-mapped peer."""
    identity: bytes
    """inet_diag_sockid"""

    @property
    def cookie(self) -> int:
        """The number that identifies the socket until the machine is restarted (SO_COOKIE)."""
        return int(_COOKIE.unpack(self.identity)[0])

    @property
    def peer(self) -> tuple[Address, int]:
        """The remote address and port; IPv4-mapped addresses have 16 bytes."""
        return peer_of(self.family, self.identity)


def peer_of(family: int, identity: bytes) -> tuple[Address, int]:
    """Return the remote address and port of a socket, given as in `destroy_tcp_sockets`."""
    port, address = _REMOTE.unpack_from(identity)
    return Address(address[:4] if family == socket.AF_INET else address), port


def connected_udp_sockets() -> list[UdpSocket]:
    """Return all connected UDP sockets of both families. Raises HostError."""
    found: list[UdpSocket] = []
    with doing("list UDP sockets"), NetlinkSocket.open(NETLINK_SOCK_DIAG) as sock:
        for family in _FAMILIES:
            request = _REQUEST.pack(family, socket.IPPROTO_UDP, _ESTABLISHED, bytes(48))
            found += sock.dump(SOCK_DIAG_BY_FAMILY, request, lambda spans: [*parse(spans)])
    return found


def parse(answers: Iterable[Span]) -> Iterator[UdpSocket]:
    """Yield the socket in each of *answers*. Raises Malformed."""
    with decoding("a socket"):
        for data, start, _ in answers:
            yield UdpSocket(*_MESSAGE.unpack_from(data, start))


def destroy_udp_sockets(sockets: Iterable[UdpSocket]) -> int:
    """Destroy *sockets*: receiving fails with ECONNABORTED, sending with EDESTADDRREQ.

    Return how many still existed. Raises HostError, after destroying all others, if one cannot be destroyed.
    """
    return _destroy("UDP sockets", [_destruction(family, identity) for family, identity in sockets])


def destroy_tcp_sockets(sockets: Iterable[tuple[int, bytes]]) -> int:
    """Destroy connected *sockets*, given by family and inet_diag_sockid: their processes get ECONNABORTED.

    The peers get resets. Returns and raises as `destroy_udp_sockets`.
    """
    return _destroy("TCP sockets", [
        _destruction(family, identity, socket.IPPROTO_TCP) for family, identity in sockets])


def _destroy(what: str, requests: Sequence[NetlinkRequest]) -> int:
    if not requests:
        return 0
    with doing(f"destroy {what}"), NetlinkSocket.open(NETLINK_SOCK_DIAG) as sock:
        refused = sock.exchange(requests)
    for refusal in refused:
        if refusal.code not in (errno.ENOENT, errno.ESTALE):  # Closed or reconnected since.
            raise HostError(f"cannot destroy {what}", refusal.error)
    return len(requests) - len(refused)


def udp_destruction_problem() -> str:
    """Return why the kernel cannot destroy UDP sockets; "" if it can. Destroys none."""
    try:
        connected_udp_sockets()  # Without udp_diag, the answer below would be the same.
        with NetlinkSocket.open(NETLINK_SOCK_DIAG) as sock:
            refused = sock.exchange([_destruction(family, _NOBODY) for family in _FAMILIES])
    except (HostError, OSError) as error:
        return str(error)
    codes = {refusal.code for refusal in refused} - {errno.ENOENT}
    if errno.EOPNOTSUPP in codes:
        return "the kernel has no CONFIG_INET_DIAG_DESTROY"
    return ", ".join(os.strerror(code) for code in sorted(codes))


def _destruction(family: int, identity: bytes, protocol: int = socket.IPPROTO_UDP) -> NetlinkRequest:
    return NetlinkRequest(_SOCK_DESTROY, 0, _REQUEST.pack(family, protocol, _ESTABLISHED, identity))
