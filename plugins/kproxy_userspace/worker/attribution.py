"""Connections to endpoints by the frontend that was dialled, those of them that failed, and handshakes."""

import errno
import socket
import struct
from bisect import bisect

from kproxy_userspace.names import Endpoint
from kproxy_userspace.worker.wire import Count

REFUSED, UNANSWERED, RESET = "refused", "unanswered", "reset"
"""The values of `api.Failure`, whose module is too large to import here."""

_FAILURES = {errno.ECONNREFUSED: REFUSED, errno.ECONNRESET: RESET, errno.EPIPE: RESET}

_BOUNDS = (250, 1000, 4000, 16_000, 64_000, 256_000, 1_000_000)
"""Those of `api.Handshake` in microseconds."""
_SUM = len(_BOUNDS) + 1

_SO_ORIGINAL_DST = 80
"""Of both families (linux/netfilter_ipv4.h, linux/netfilter_ipv6/ip6_tables.h)."""
_IN = struct.Struct("!2xH4s8x")
_IN6 = struct.Struct("!2xH4x16s4x")


class Tally:
    """Connections since the last report."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[bool, Endpoint, Endpoint, str, int | None], int] = {}

    def count(self, udp: bool, frontend: Endpoint, endpoint: Endpoint, failure: str = "") -> None:
        key = udp, frontend, endpoint, failure, None
        self._numbers[key] = self._numbers.get(key, 0) + 1

    def shake(self, frontend: Endpoint, endpoint: Endpoint, seconds: float) -> None:
        """Count a TCP handshake that took *seconds*."""
        took = int(seconds * 1_000_000)
        for which, number in ((bisect(_BOUNDS, took), 1), (_SUM, took)):
            key = False, frontend, endpoint, "", which
            self._numbers[key] = self._numbers.get(key, 0) + number

    def report(self) -> list[Count]:
        """Return all counts, and begin again at 0."""
        numbers, self._numbers = self._numbers, {}
        return [Count(*key, number) for key, number in numbers.items()]


def failure_of(error: int) -> str:
    """Return the failure of an attempt to connect that ended with *error*; 0: it timed out."""
    return _FAILURES.get(error, UNANSWERED)


def dialled(client: socket.socket, otherwise: Endpoint) -> Endpoint:
    """Return the address and port that *client* dialled before a portal redirected it.

    Return *otherwise* for a client that dialled the relay itself, or that conntrack has forgotten.
    """
    level, form = socket.IPPROTO_IP, _IN
    if client.family == socket.AF_INET6:
        level, form = socket.IPPROTO_IPV6, _IN6
    try:
        port, address = form.unpack(client.getsockopt(level, _SO_ORIGINAL_DST, form.size))
    except OSError:
        return otherwise
    found = socket.inet_ntop(client.family, address), port
    return otherwise if found == client.getsockname()[:2] else found
