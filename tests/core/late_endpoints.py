"""Endpoints that answer SYNs after a known time. Not every kernel has netem."""

import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

from tests.core.namespaces import Namespace

NETWORK = "198.18.0.0/24"
_NEAR, _FAR = "late", "late-far"
"""A pair of veth devices: endpoints are at the far end."""
_NEAR_ADDRESS = "02:00:00:00:00:01"
_NEIGHBOUR = "02:00:00:00:00:02"
"""Not the address of the far end: the kernel would process what arrives there."""
_ETH_P_IP = 0x0800
_SYN, _SYN_ACK = 0x02, 0x12
_INFO = struct.Struct("=68xI28xI")
"""tcpi_rtt and tcpi_total_retrans of struct tcp_info (linux/tcp.h)."""


class Lateness(NamedTuple):
    seconds: float
    lost: int = 0
    """First SYNs of each connection that are not answered."""


class _Endpoints:
    """Answers the SYNs that arrive at the far end. No packet that follows is answered."""

    def __init__(self, device: socket.socket, late: Mapping[str, Lateness]) -> None:
        self._device = device
        self._late = late
        self._seen: dict[bytes, int] = {}
        """SYNs by connection."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._device.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            with suppress(TimeoutError):
                packet = self._device.recv(2048)
                if packet[0] == 0x45 and packet[9] == socket.IPPROTO_TCP and packet[33] == _SYN:
                    self._answer(packet[12:20], packet[20:])

    def _answer(self, addresses: bytes, segment: bytes) -> None:
        seconds, lost = self._late[socket.inet_ntoa(addresses[4:])]
        connection = addresses + segment[:4]
        seen = self._seen[connection] = self._seen.get(connection, 0) + 1
        if seen == lost + 1:
            time.sleep(seconds)
            to = bytes.fromhex(_NEAR_ADDRESS.replace(":", ""))
            self._device.sendto(_answer(addresses, segment), (_FAR, _ETH_P_IP, 0, 0, to))


def _answer(addresses: bytes, segment: bytes) -> bytes:
    """Return the packet that accepts the connection of the SYN *segment*, and echoes its timestamp."""
    source, target, sequence = struct.unpack_from("!HHI", segment)
    stamp = segment.index(b"\x08\x0a", 20) + 2
    options = b"\x01\x01\x08\x0a" + struct.pack("!I", 1) + segment[stamp:stamp + 4]
    answered = addresses[4:] + addresses[:4]
    fields = target, source, 1, (sequence + 1) & 0xFFFFFFFF, 8 << 4, _SYN_ACK, 65535
    pseudo = answered + struct.pack("!HH", socket.IPPROTO_TCP, 32)
    check = _checksum(pseudo + struct.pack("!HHIIBBHHH", *fields, 0, 0) + options)
    segment = struct.pack("!HHIIBBHHH", *fields, check, 0) + options
    ip = (0x45, 0, 20 + len(segment), 0, 0, 64, socket.IPPROTO_TCP)
    check = _checksum(struct.pack("!BBHHHBBH", *ip, 0) + answered)
    return struct.pack("!BBHHHBBH", *ip, check) + answered + segment


def _checksum(data: bytes) -> int:
    """Return the Internet checksum (RFC 1071)."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _open_device() -> socket.socket:
    device = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM)
    device.bind((_FAR, _ETH_P_IP))
    device.settimeout(0.1)
    return device


@contextmanager
def late_endpoints(where: Namespace, late: Mapping[str, Lateness]) -> Iterator[None]:
    """Accept connections to these addresses of `NETWORK`, to which *where* gets a route."""
    where.ip(
        f"link add {_NEAR} address {_NEAR_ADDRESS} type veth peer name {_FAR}",
        f"link set {_NEAR} up", f"link set {_FAR} up", f"route add {NETWORK} dev {_NEAR}",
        *(f"neighbour add {address} lladdr {_NEIGHBOUR} dev {_NEAR} nud permanent" for address in late),
    )  # fmt: skip
    answering = _Endpoints(where.inside(_open_device), late)
    try:
        yield
    finally:
        answering.close()


def handshake_of(client: socket.socket) -> tuple[int, int]:
    """Return the round trip of a connection that was just made, in microseconds, and the SYNs sent again."""
    return _INFO.unpack(client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
