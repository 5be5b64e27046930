"""Connections to endpoints by the frontend that was dialled, those of them that failed, and handshakes."""

import errno
import socket
import struct
from bisect import bisect
from collections.abc import Iterator

from kproxy_userspace.names import Endpoint
from kproxy_userspace.worker.wire import Count

MADE, REFUSED, UNANSWERED, RESET, _HANDSHAKES = range(5)
"""Places in `Count.numbers`. The module of `api.Failure` and `api.Handshake` is too large to import here."""

_FAILURES = {errno.ECONNREFUSED: REFUSED, errno.ECONNRESET: RESET, errno.EPIPE: RESET}

_BOUNDS = (250_000, 1_000_000, 4_000_000, 16_000_000, 64_000_000, 256_000_000, 1_000_000_000)
"""Those of `api.Handshake` in nanoseconds."""
_SUM = _HANDSHAKES + len(_BOUNDS) + 1
_NONE = (0,) * (_SUM + 1)

_SO_ORIGINAL_DST = 80
"""Of both families (linux/netfilter_ipv4.h, linux/netfilter_ipv6/ip6_tables.h)."""
_IN = struct.Struct("!2xH4s8x")
_IN6 = struct.Struct("!2xH4x16s4x")


Numbers = list[int]
"""Those of a pair of frontend and endpoint, at the places above; the sum in nanoseconds."""


class Tally:
    """Connections since the last report."""

    def __init__(self) -> None:
        self.begun: list[Counted] = []
        """Those that are not empty."""

    def report(self) -> list[Count]:
        """Return all counts, and begin again at 0. Pairs without any are dropped."""
        counts = [count for counted in self.begun for count in counted.report()]
        self.begun = [counted for counted in self.begun if counted]
        return counts


class Counted(dict[Endpoint, Numbers]):
    """The connections to one frontend, by endpoint.

    Numbers are looked up for each use, which begins them: a report may have dropped them. A dictionary finds
    them without a call of Python code, most of which is not in the processor's caches for a new connection.
    """

    __slots__ = ("_frontend", "_tally", "_udp")

    def __init__(self, tally: Tally, udp: bool, frontend: Endpoint) -> None:
        super().__init__()
        self._frontend = frontend
        self._tally = tally
        self._udp = udp

    def __missing__(self, endpoint: Endpoint) -> Numbers:
        if not self:
            self._tally.begun.append(self)
        numbers = self[endpoint] = list(_NONE)
        return numbers

    def shake(self, endpoint: Endpoint, nanoseconds: int) -> None:
        """Count a TCP handshake that took *nanoseconds*."""
        numbers = self[endpoint]
        numbers[_HANDSHAKES + bisect(_BOUNDS, nanoseconds)] += 1
        numbers[_SUM] += nanoseconds

    def report(self) -> Iterator[Count]:
        """Yield all counts, and begin again at 0. Endpoints without any are dropped."""
        for endpoint, numbers in list(self.items()):
            if any(numbers):
                numbers[_SUM] //= 1000
                yield Count(self._udp, self._frontend, endpoint, tuple(numbers))
                numbers[:] = _NONE
            else:
                del self[endpoint]


def failure_of(error: int) -> int:
    """Return the place of the failure of an attempt that ended with *error*; 0: it timed out."""
    return _FAILURES.get(error, UNANSWERED)


class OtherFrontends:
    """Finds which frontend of a service port a client has dialled, by the kernel's connection tracking.

    A client that dialled the relay itself, or that connection tracking has forgotten, is counted for the
    first frontend.
    """

    def __init__(self, tally: Tally, first: Counted, family: int, port: int) -> None:
        """*port*: that of the relay."""
        self._tally = tally
        self._first = first
        self._port = port
        self._family = family
        self._level, self._form = (
            (socket.IPPROTO_IPV6, _IN6) if family == socket.AF_INET6 else (socket.IPPROTO_IP, _IN))
        self._size = self._form.size
        self._known: dict[bytes, Counted] = {}

    def dialled_by(self, client: socket.socket) -> Counted:
        """Return the counts for the connection of *client*."""
        try:
            destination = client.getsockopt(self._level, _SO_ORIGINAL_DST, self._size)
        except OSError:
            return self._first
        return self._known.get(destination) or self._find(destination, client)

    def _find(self, destination: bytes, client: socket.socket) -> Counted:
        port, address = self._form.unpack(destination)
        found = socket.inet_ntop(self._family, address), port
        if port == self._port and found == client.getsockname()[:2]:
            return self._first
        counted = self._known[destination] = Counted(self._tally, False, found)
        return counted
