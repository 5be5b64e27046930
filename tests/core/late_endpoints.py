"""Endpoints behind a TUN device that answer SYNs after a known time. Not every kernel has netem."""

import fcntl
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from tests.core.namespaces import Namespace

NETWORK = "198.18.0.0/24"
_DEVICE = "late"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
_SYN, _SYN_ACK = 0x02, 0x12
_INFO = struct.Struct("=68xI28xI")
"""tcpi_rtt and tcpi_total_retrans of struct tcp_info (linux/tcp.h)."""


class Lateness(NamedTuple):
    seconds: float
    lost: int = 0
    """First SYNs of each connection that are not answered."""


class _Endpoints:
    """Answers the SYNs that are routed to the device. No packet that follows is answered."""

    def __init__(self, device: int, late: Mapping[str, Lateness]) -> None:
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
        os.close(self._device)

    def _run(self) -> None:
        while not self._ended.is_set():
            if select.select([self._device], [], [], 0.1)[0]:
                packet = os.read(self._device, 2048)
                if packet[0] == 0x45 and packet[9] == socket.IPPROTO_TCP and packet[33] == _SYN:
                    self._answer(packet[12:20], packet[20:])

    def _answer(self, addresses: bytes, segment: bytes) -> None:
        seconds, lost = self._late[socket.inet_ntoa(addresses[4:])]
        connection = addresses + segment[:4]
        seen = self._seen[connection] = self._seen.get(connection, 0) + 1
        if seen == lost + 1:
            time.sleep(seconds)
            os.write(self._device, _answer(addresses, segment))


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


def _open_device() -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


@contextmanager
def late_endpoints(where: Namespace, late: Mapping[str, Lateness]) -> Iterator[None]:
    """Accept connections to these addresses of `NETWORK`, to which *where* gets a route."""
    answering = _Endpoints(where.inside(_open_device), late)
    try:
        where.ip(f"link set {_DEVICE} up", f"route add {NETWORK} dev {_DEVICE}")
        yield
    finally:
        answering.close()


def handshake_of(client: socket.socket) -> tuple[int, int]:
    """Return the round trip of a connection that was just made, in microseconds, and the SYNs sent again."""
    return _INFO.unpack(client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
