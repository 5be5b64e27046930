"""The packets of a network namespace, counted beside the programs."""

import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kproxy_core.contract.values import Carried
from tests.core.namespaces import Namespace

_ETH_P_ALL, _ETH_P_IP, _ETH_P_IPV6 = 0x0003, 0x0800, 0x86DD


class Watched:
    """The packets between clients and a port of endpoints. A packet on its way out precedes its fragments."""

    def __init__(self, tap: socket.socket, port: int) -> None:
        self._tap = tap
        self._port = port
        self._found: Counter[tuple[str, Carried]] = Counter()

    def volumes(self) -> Counter[tuple[str, Carried]]:
        """Return packets, and bytes with the headers of IP, by the endpoint's address."""
        while True:
            try:
                packet, (_, protocol, kind, *_) = self._tap.recvfrom(1 << 17)
            except BlockingIOError:
                return self._found.copy()
            if protocol in (_ETH_P_IP, _ETH_P_IPV6):
                self._add(packet, protocol == _ETH_P_IP, is_sent=kind == socket.PACKET_OUTGOING)

    def _add(self, packet: bytes, is_v4: bool, *, is_sent: bool) -> None:
        family, first, size, head = (socket.AF_INET, 12, 4, 4 * (packet[0] & 15)) if is_v4 else (
            socket.AF_INET6, 8, 16, 40)
        address = packet[first + size * is_sent:][:size]
        if int.from_bytes(packet[head + 2 * is_sent:][:2], "big") == self._port:
            endpoint = socket.inet_ntop(family, address)
            octets, packets = (Carried.TO_ENDPOINT, Carried.PACKETS_TO_ENDPOINT) if is_sent else (
                Carried.FROM_ENDPOINT, Carried.PACKETS_FROM_ENDPOINT)
            self._found[endpoint, octets] += len(packet)
            self._found[endpoint, packets] += 1


@contextmanager
def watched(where: Namespace, port: int) -> Iterator[Watched]:
    with where.inside(_open_tap) as tap:
        yield Watched(tap, port)


def _open_tap() -> socket.socket:
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ETH_P_ALL))
    tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    tap.setblocking(False)
    return tap
