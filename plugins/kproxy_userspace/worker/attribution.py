"""Connections to endpoints by the frontend that was dialled, those of them that failed, and handshakes."""

import errno
import socket
import struct
from bisect import bisect
from functools import lru_cache

from kproxy_userspace.names import Endpoint
from kproxy_userspace.worker.wire import Count

MADE, REFUSED, UNANSWERED, RESET, _HANDSHAKES = range(5)
"""Places in `Count.numbers`. The module of `api.Failure` and `api.Handshake` is too large to import here."""

_FAILURES = {errno.ECONNREFUSED: REFUSED, errno.ECONNRESET: RESET, errno.EPIPE: RESET}

_BOUNDS = (250, 1000, 4000, 16_000, 64_000, 256_000, 1_000_000)
"""Those of `api.Handshake` in microseconds."""
_SUM = _HANDSHAKES + len(_BOUNDS) + 1

_SO_ORIGINAL_DST = 80
"""Of both families (linux/netfilter_ipv4.h, linux/netfilter_ipv6/ip6_tables.h)."""
_IN = struct.Struct("!2xH4s8x")
_IN6 = struct.Struct("!2xH4x16s4x")


class Tally:
    """Connections since the last report."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[bool, Endpoint, Endpoint], list[int]] = {}

    def count(self, udp: bool, frontend: Endpoint, endpoint: Endpoint, place: int = MADE) -> None:
        """Count a connection, or its failure, at this *place* of the numbers."""
        self._of(udp, frontend, endpoint)[place] += 1

    def shake(self, frontend: Endpoint, endpoint: Endpoint, seconds: float) -> None:
        """Count a TCP handshake that took *seconds*."""
        took = int(seconds * 1_000_000)
        numbers = self._of(False, frontend, endpoint)
        numbers[_HANDSHAKES + bisect(_BOUNDS, took)] += 1
        numbers[_SUM] += took

    def report(self) -> list[Count]:
        """Return all counts, and begin again at 0."""
        numbers, self._numbers = self._numbers, {}
        return [Count(*key, tuple(of)) for key, of in numbers.items()]

    def _of(self, *key: *tuple[bool, Endpoint, Endpoint]) -> list[int]:
        numbers = self._numbers.get(key)
        if numbers is None:
            numbers = self._numbers[key] = [0] * (_SUM + 1)
        return numbers


def failure_of(error: int) -> int:
    """Return the place of the failure of an attempt that ended with *error*; 0: it timed out."""
    return _FAILURES.get(error, UNANSWERED)


def original_destination(client: socket.socket, family: int) -> Endpoint | None:
    """Return the address and port that *client* dialled, as conntrack has them; None: it has forgotten."""
    level, form = (socket.IPPROTO_IPV6, _IN6) if family == socket.AF_INET6 else (socket.IPPROTO_IP, _IN)
    try:
        return _decode(client.getsockopt(level, _SO_ORIGINAL_DST, form.size))
    except OSError:
        return None


@lru_cache
def _decode(destination: bytes) -> Endpoint:
    is_v4 = len(destination) == _IN.size
    port, address = (_IN if is_v4 else _IN6).unpack(destination)
    return socket.inet_ntop(socket.AF_INET if is_v4 else socket.AF_INET6, address), port
