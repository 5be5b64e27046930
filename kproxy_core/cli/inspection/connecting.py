"""TCP connections to frontends, opened at a limited rate and closed at once."""

import contextlib
import errno
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kproxy_core.explain.traffic import ANSWERED, HUNG, REFUSED, Attempt, Target, connections, is_settled
from kproxy_core.host.conntrack.events import FlowEvent
from kproxy_core.host.netlink.announcements import Announcements
from kproxy_core.model.address import Address, Protocol, family_of, format_address, parse_address
from kproxy_core.model.endpoint import Destination
from kproxy_core.timing.token_bucket import TokenBucket

_Local = tuple[Address, int]

_REFUSALS = {errno.ECONNREFUSED, errno.ECONNRESET}
_MOST_AT_ONCE = 200


class _Connection(NamedTuple):
    target: int
    deadline: float
    local: _Local


class Connector:
    """Opens connections to targets; see `kproxy_core.explain.traffic.expectation`."""

    def __init__(
        self, targets: Sequence[Target], events: Announcements[FlowEvent] | None, *,
        rate: float, most: int, timeout: float,
    ) -> None:
        """Open *rate* connections a second, *most* for each target. *timeout*: seconds until one hangs.

        Without *events* of the connection tracking, endpoints are not known.
        """
        self._targets = targets
        self._events = events
        self._bucket = TokenBucket(1 / rate, 1)
        self._most = most
        self._timeout = timeout
        self._open: dict[socket.socket, _Connection] = {}
        self._endpoints: dict[_Local, Destination] = {}
        self._attempts: list[list[Attempt]] = [[] for _ in targets]
        self._selector = selectors.DefaultSelector()

    def run(self) -> list[list[Attempt]]:
        waiting = deque((at, connections(target, self._most)) for at, target in enumerate(self._targets))
        try:
            while waiting or self._open:
                self._wait(0.05 if waiting else 0.2)
                while waiting and len(self._open) < _MOST_AT_ONCE and self._bucket.try_take(time.monotonic()):
                    at, left = waiting.popleft()
                    if self._attempts[at] and is_settled(self._targets[at], self._attempts[at]):
                        continue
                    self._connect(at)
                    if left > 1:
                        waiting.append((at, left - 1))
        finally:
            self._selector.close()
            for sock in self._open:
                sock.close()
        return self._attempts

    def _connect(self, at: int) -> None:
        address, port = Destination.parse(self._targets[at]["frontend"])
        sock = socket.socket(family_of(address).af, socket.SOCK_STREAM)
        sock.setblocking(False)
        code = sock.connect_ex((format_address(address), port))
        local = parse_address(sock.getsockname()[0]), int(sock.getsockname()[1])
        self._open[sock] = _Connection(at, time.monotonic() + self._timeout, local)
        if code == errno.EINPROGRESS:
            self._selector.register(sock, selectors.EVENT_WRITE)
        else:
            self._end(sock, _result(code))

    def _wait(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            assert isinstance(key.fileobj, socket.socket)
            self._end(key.fileobj, _result(key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)))
        now = time.monotonic()
        for sock in [sock for sock, connection in self._open.items() if connection.deadline <= now]:
            self._end(sock, HUNG)

    def _end(self, sock: socket.socket, result: str) -> None:
        connection = self._open.pop(sock)
        with contextlib.suppress(KeyError):
            self._selector.unregister(sock)
        sock.close()
        for event in self._events.read() if self._events is not None else ():
            if event.protocol == Protocol.TCP:
                reply = event.reply
                self._endpoints[event.original[:2]] = Destination(reply.source, reply.source_port)
        endpoint = self._endpoints.pop(connection.local, None)
        self._attempts[connection.target].append(Attempt(result, endpoint, connection.local[0]))


def _result(code: int) -> str:
    if not code:
        return ANSWERED
    return REFUSED if code in _REFUSALS else os.strerror(code).lower()
