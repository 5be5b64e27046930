"""UDP relaying: each client has a flow, with a socket of its own to its endpoint, until it is idle."""

import contextlib
import errno
import socket
import time
from collections.abc import Collection
from typing import NamedTuple

from kproxy_userspace.names import Endpoint
from kproxy_userspace.worker.attribution import MADE, Counted
from kproxy_userspace.worker.balancer import Balancer
from kproxy_userspace.worker.counters import Counter
from kproxy_userspace.worker.events import READ
from kproxy_userspace.worker.resources import EXHAUSTED, Resources

LONGEST = 65535
"""Bytes of the longest datagram. kube-proxy cut datagrams at 4096."""

_AT_ONCE = 64
"""Datagrams of one socket before other events are handled."""

_BUFFER = 1 << 20
"""Bytes that a relay's socket may hold, if the kernel allows it, so that bursts are not lost."""

_ANSWER_SECONDS = 5.0
"""Timeout of an answer, as of resolvers: a client that awaits one is not idle. kube-proxy lost it."""

_IP_PKTINFO = 8
_LINK_LOCAL = b"\xfe\x80"

_UP, _DOWN = int(Counter.DATAGRAMS_TO_ENDPOINTS), int(Counter.DATAGRAMS_TO_CLIENTS)


class FlowKey(NamedTuple):
    """A client and the local address that it sends to, from which it expects replies."""

    client: tuple[str, int]
    local: bytes


class UdpRelay:
    """The socket of one UDP service port in one worker, and its flows."""

    def __init__(
        self, sock: socket.socket, balancer: Balancer, shared: Resources, idle_seconds: float
    ) -> None:
        self.balancer = balancer
        self.counts = shared.counts
        self.events = shared.events
        self.flows: dict[FlowKey, Flow] = {}
        self.timeouts = self.events.timeouts(idle_seconds)
        self.counted: Counted | None = None
        """None: flows are not counted."""
        self.family = sock.family
        self._unspecified = bytes(4 if self.family == socket.AF_INET else 16)
        self._local = slice(4, 8) if self.family == socket.AF_INET else slice(16)
        """The place of the address in struct in_pktinfo (ipi_spec_dst) or in6_pktinfo."""
        self._sock = sock
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        if self.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
        else:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        self.events.watch(sock.fileno(), self, READ)

    def ready(self, fd: int, mask: int) -> None:
        for _ in range(_AT_ONCE):
            try:
                data, control, _, sender = self._sock.recvmsg(LONGEST, 64)
            except BlockingIOError:
                return
            except OSError:
                continue  # An ICMP error about an earlier reply. The socket still works.
            key = FlowKey(sender, control[0][2][self._local] if control else self._unspecified)
            flow = self.flows.get(key) or self._new_flow(key)
            if flow is not None:
                flow.send(data)

    def reply(self, data: bytes, key: FlowKey) -> None:
        """Send an endpoint's answer to its client, from the address that the client had sent to."""
        control = []
        if self.family == socket.AF_INET:
            control = [(socket.IPPROTO_IP, _IP_PKTINFO, bytes(4) + key.local + bytes(4))]
        elif not key.local.startswith(_LINK_LOCAL):
            control = [(socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, key.local + bytes(4))]
        with contextlib.suppress(OSError):  # Datagrams may be lost, all of them once this socket is closed.
            self._sock.sendmsg([data], control, 0, key.client)
            self.counts[_DOWN] += 1

    def drop_flows(self, removed: Collection[Endpoint]) -> None:
        """Give each client of a *removed* endpoint another one with its next datagram."""
        for flow in [flow for flow in self.flows.values() if flow.endpoint in removed]:
            flow.retire()

    def close(self) -> None:
        for flow in list(self.flows.values()):
            flow.close()
        self.events.close(self._sock)

    def _new_flow(self, key: FlowKey) -> "Flow | None":
        endpoint = self.balancer.choose(key.client[0], time.monotonic())
        if endpoint is None:
            return None
        try:
            upstream = socket.socket(self.family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, 0)
        except OSError as problem:  # The datagram is lost, other flows continue.
            self.counts[Counter.SHORTAGES] += problem.errno in EXHAUSTED
            return None
        if error := upstream.connect_ex(endpoint):  # EAGAIN: no local port is left.
            upstream.close()
            self.counts[Counter.SHORTAGES] += error == errno.EAGAIN or error in EXHAUSTED
            return None
        flow = self.flows[key] = Flow(self, key, upstream, endpoint)
        if self.counted is not None:
            self.counted[endpoint][MADE] += 1
        return flow


class Flow:
    """One client of one UDP service port, and its endpoint."""

    __slots__ = ("_asked", "_key", "_last", "_relay", "_sock", "endpoint")

    def __init__(self, relay: UdpRelay, key: FlowKey, sock: socket.socket, endpoint: Endpoint) -> None:
        self._relay = relay
        self._key = key
        self._sock: socket.socket | None = sock
        self.endpoint = endpoint
        self._last = time.monotonic()
        self._asked = False
        """An answer may be on its way."""
        relay.counts[Counter.FLOWS] += 1
        relay.events.watch(sock.fileno(), self, READ)
        relay.timeouts.call(self._close_if_idle)

    def send(self, data: bytes) -> None:
        if self._sock is None:
            return
        self._last = time.monotonic()
        self._asked = True
        try:
            self._sock.send(data)
            self._relay.counts[_UP] += 1
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                self.close()

    def ready(self, fd: int, mask: int) -> None:
        for _ in range(_AT_ONCE):
            if self._sock is None:
                return
            try:
                data = self._sock.recv(LONGEST)
            except BlockingIOError:
                return
            except OSError:  # Nothing listens there: the next datagram is sent to another endpoint.
                self.close()
                return
            self._last = time.monotonic()
            self._asked = False
            self._relay.reply(data, self._key)

    def retire(self) -> None:
        """Deliver only answers that are on their way. The client's next datagram starts another flow."""
        del self._relay.flows[self._key]
        self._relay.events.timeouts(_ANSWER_SECONDS).call(self.close)

    def close(self) -> None:
        if self._sock is not None:
            self._relay.events.close(self._sock)
            self._sock = None
            if self._relay.flows.get(self._key) is self:
                del self._relay.flows[self._key]
            self._relay.counts[Counter.FLOWS] -= 1

    def _close_if_idle(self) -> None:
        if self._sock is None:
            return
        timeouts = self._relay.timeouts
        if self._asked and timeouts.seconds < _ANSWER_SECONDS:
            timeouts = self._relay.events.timeouts(_ANSWER_SECONDS)
        if time.monotonic() - self._last < timeouts.seconds:
            timeouts.call(self._close_if_idle)
        else:
            self.close()
