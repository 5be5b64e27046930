"""TCP and UDP relaying, and the resources that relays share."""

import contextlib
import errno
import fcntl
import os
import socket
import struct
import time
from collections.abc import Collection
from functools import partial
from typing import NamedTuple

from kproxy_core.linux.relay.balancer import Balancer
from kproxy_core.linux.relay.counts import MADE, RESET, Counter, Counts, FrontendCounts, failure_of
from kproxy_core.linux.relay.events import BROKEN, EDGE, READ, WRITE, Events
from kproxy_core.linux.relay.orders import Endpoint

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors that mean a shortage of file descriptors or memory."""

PIPE_SIZE = 1 << 19
"""Limit in bytes for one call of splice(2). The default of pipe-max-size allows it to every user."""

DIAL_SECONDS = (0.25, 0.5, 1.0, 2.0)
"""Timeouts of the attempts to reach an endpoint (kube-proxy 1.25, proxysocket.go)."""

BACKLOG = 4096

LONGEST = 65535
"""Size in bytes of the longest datagram. kube-proxy truncated datagrams at 4096."""


# Resources that the relays of one worker share.

_MOST_SPARE = 64
_LONGEST_INTERVAL = 30.0


class HalfClosed:
    """The half-closed connections of one worker: one peer has sent FIN, the other may never do so.

    Idle ones are reset.
    """

    def __init__(self, events: Events, seconds: float) -> None:
        """Reset a half-closed connection that has moved no byte for *seconds*."""
        self._seconds = seconds
        self._timer = events.timeouts(min(seconds / 4, _LONGEST_INTERVAL))
        self._is_scheduled = False
        self._idle: dict[Connection, tuple[int, float]] = {}
        """Bytes moved at the last check, and the time since which no more were moved."""

    def add(self, connection: "Connection") -> None:
        """Start the timeout of *connection*, unless it is running."""
        if connection not in self._idle:
            self._idle[connection] = connection.moved, time.monotonic()
            self._schedule()

    def discard(self, connection: "Connection") -> None:
        self._idle.pop(connection, None)

    def _schedule(self) -> None:
        if self._idle and not self._is_scheduled:
            self._is_scheduled = True
            self._timer.call(self._check)

    def _check(self) -> None:
        self._is_scheduled = False
        now = time.monotonic()
        for connection, (moved, since) in list(self._idle.items()):
            if connection.moved != moved:
                self._idle[connection] = connection.moved, now
            elif now - since >= self._seconds:
                connection.time_out()  # It discards itself.
        self._schedule()


class Pipe(NamedTuple):
    read: int
    write: int


class Pipes:
    """Pipes for splice(2), lent only while they hold bytes: idle connections need none."""

    def __init__(self) -> None:
        self._spare: list[Pipe] = []

    def take(self) -> Pipe:
        """Return an empty pipe. Raises OSError if the process has no more descriptors."""
        if self._spare:
            return self._spare.pop()
        pipe = Pipe(*os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
        with contextlib.suppress(OSError):  # At the user's limit of pipe memory, 64 KiB are enough.
            fcntl.fcntl(pipe.write, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        return pipe

    def give_back(self, pipe: Pipe, *, empty: bool = True) -> None:
        """Take *pipe* back. One that still holds bytes is closed."""
        if empty and len(self._spare) < _MOST_SPARE:
            self._spare.append(pipe)
        else:
            os.close(pipe.read)
            os.close(pipe.write)


class DialSockets:
    """Sockets to dial with. One is kept in reserve, so that every accepted client can be served."""

    def __init__(self) -> None:
        self._reserve: dict[int, socket.socket] = {}

    def reserve(self, family: int) -> None:
        """Ensure that there is a reserve. Raises OSError if the process has no more descriptors."""
        if family not in self._reserve:
            self._reserve[family] = self._make(family)

    def take(self, family: int) -> socket.socket:
        """Return the reserve, or else a new socket. Raises OSError."""
        return self._reserve.pop(family, None) or self._make(family)

    @staticmethod
    def _make(family: int) -> socket.socket:
        return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, 0)


class Resources(NamedTuple):
    """Parts of a worker that all its relays share."""

    events: Events
    counts: Counts
    pipes: Pipes
    sockets: DialSockets
    half_closed: HalfClosed


# TCP.

_ACCEPTED_AT_ONCE = 64
_CHUNK = 16 << 10
_BUDGET = 2 << 20
"""Limit in bytes for what a direction moves before others run."""

_KEEPALIVE_SECONDS = 60
_PAUSE = 0.1
"""Delay in seconds after descriptors or memory ran out."""

_RESET = struct.pack("ii", 1, 0)
_SPLICE = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK

# Plain integers, because these are used for each message.
_CONNECTIONS, _ACCEPTED = int(Counter.CONNECTIONS), int(Counter.ACCEPTED)
_BYTES_UP, _BYTES_DOWN = int(Counter.BYTES_TO_ENDPOINTS), int(Counter.BYTES_TO_CLIENTS)


class TcpListener:
    """The socket of one service port in one worker, and its connections."""

    def __init__(self, sock: socket.socket, balancer: Balancer, shared: Resources) -> None:
        self.balancer = balancer
        self.shared = shared
        self.counts = shared.counts
        self.events = shared.events
        self.connections: set[Connection] = set()
        """Established connections."""
        self.counted: FrontendCounts | None = None
        """None: connections are not counted."""
        self.family = int(sock.family)
        self._sock = sock
        sock.setblocking(False)
        # Accepted sockets inherit these.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)
        sock.listen(BACKLOG)
        self.events.watch(sock.fileno(), self, READ)

    def ready(self, fd: int, mask: int) -> None:
        self._accept()

    def _accept(self) -> bool:
        """Accept some of the waiting clients. Return whether there may be more."""
        sock = self._sock
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                self.shared.sockets.reserve(self.family)
                client, address = sock.accept()
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno in EXHAUSTED:  # Clients wait in the backlog.
                    self.counts[Counter.SHORTAGES] += 1
                    self.events.epoll.modify(sock.fileno(), 0)
                    self.events.timeouts(_PAUSE).call(self._accept_again)
                    return False
                continue  # This client disconnected; accept(2) lists many reasons.
            Connection(self, client, *address[:2]).dial()
        return True

    def _accept_again(self) -> None:
        if self._sock.fileno() >= 0:  # It was not closed in the meantime.
            self.events.epoll.modify(self._sock.fileno(), READ)

    def close(self) -> None:
        for _ in range(BACKLOG // _ACCEPTED_AT_ONCE):
            if not self._accept():
                break
        self.events.close(self._sock)


class Direction:
    """The bytes from one socket of a connection to the other: small messages are copied, large ones spliced.

    A read that fills the whole buffer indicates bulk data, which from then on never enters the process. A
    small message costs two system calls and no pipe.
    """

    __slots__ = (
        "_bulk", "_connection", "_counter", "_data", "_filled", "_pipe", "_source", "_target", "ended",
        "moved",
    )  # fmt: skip

    def __init__(
        self, connection: "Connection", source: socket.socket, target: socket.socket, counter: int
    ) -> None:
        self._connection = connection
        self._counter = counter
        self._source = source
        self._target = target
        self._data: bytes | memoryview = b""
        self._pipe: Pipe | None = None
        self._filled = 0
        self._bulk = False
        self.ended = False
        """The source has sent FIN, which was forwarded."""
        self.moved = 0
        """Bytes read so far."""

    def pump(self) -> None:
        """Move bytes until one side blocks. Raises OSError if a side is broken."""
        source, target = self._source, self._target
        counts = self._connection.listener.counts
        budget = _BUDGET
        while not self.ended:
            if self._data:
                sent = target.send(self._data)
                if sent < len(self._data):
                    self._data = memoryview(self._data)[sent:]
                    continue
                self._data = b""
            elif self._filled and self._pipe is not None:
                self._filled -= os.splice(self._pipe.read, target.fileno(), self._filled, flags=_SPLICE)
                if self._filled:
                    continue
            if budget <= 0:
                self._connection.listener.events.again.append(partial(self._connection.pump, self))
                return
            if self._bulk and self._has_pipe():
                moved = self._fill(source.fileno())
            else:
                try:
                    self._data = source.recv(_CHUNK)
                except BlockingIOError:
                    return
                moved = len(self._data)
                self._bulk = moved == _CHUNK
            if moved < 0:
                return
            if moved == 0:
                self.ended = True
                self.release()
                target.shutdown(socket.SHUT_WR)
            counts[self._counter] += moved
            self.moved += moved
            budget -= moved

    def _has_pipe(self) -> bool:
        """Take a pipe if possible. Without descriptors for one, bytes are copied."""
        if self._pipe is None:
            try:
                self._pipe = self._connection.listener.shared.pipes.take()
            except OSError:
                return False
        return True

    def _fill(self, source: int) -> int:
        """Return the number of bytes in the pipe, 0 at the end of the stream, -1 if none have arrived."""
        assert self._pipe is not None
        try:
            self._filled = os.splice(source, self._pipe.write, PIPE_SIZE, flags=_SPLICE)
        except BlockingIOError:
            self._bulk = False
            self.release()
            return -1
        return self._filled

    def release(self) -> None:
        if self._pipe is not None:
            self._connection.listener.shared.pipes.give_back(self._pipe, empty=not self._filled)
            self._pipe = None


class Connection:
    """A client, its endpoint, and both directions between them."""

    __slots__ = (
        "_attempt", "_began", "_client", "_counted", "_directions", "_host", "_port", "_server",
        "_writable", "endpoint", "listener",
    )  # fmt: skip

    def __init__(self, listener: TcpListener, client: socket.socket, host: str, port: int) -> None:
        self.listener = listener
        self._client: socket.socket | None = client
        self._host = host
        self._port = port
        self._counted = listener.counted
        self._server: socket.socket | None = None
        self.endpoint: Endpoint | None = None
        self._attempt = 0
        self._began = 0
        """Time of the attempt; monotonic nanoseconds."""
        self._directions: tuple[Direction, ...] = ()
        """To the endpoint and to the client, while the connection is established."""
        listener.counts[_CONNECTIONS] += 1
        listener.counts[_ACCEPTED] += 1
        self._writable = False
        """The client's socket is also watched for space to write, which only bulk data needs."""

    def dial(self) -> None:
        """Try the next endpoint. Give up after as many attempts as there are timeouts."""
        listener = self.listener
        while self._attempt < len(DIAL_SECONDS):
            try:
                server = listener.shared.sockets.take(listener.family)
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    break
                listener.counts[Counter.SHORTAGES] += 1
                listener.events.timeouts(_PAUSE).call(partial(self._dial_again, self._attempt))
                return
            self._began = time.monotonic_ns()
            endpoint = listener.balancer.choose(
                self._host, self._began / 1e9, is_retry=self._attempt > 0, port=self._port)
            if endpoint is None:
                server.close()
                break
            result = server.connect_ex(endpoint)
            self._server, self.endpoint = server, endpoint
            if result == errno.EADDRNOTAVAIL:  # No local port is free; the endpoint has not seen an attempt.
                listener.counts[Counter.SHORTAGES] += 1
                self._hang_up()
                self._attempt += 1
                continue
            if self._counted is not None:
                self._counted[endpoint][MADE] += 1
            if result not in (0, errno.EINPROGRESS):
                self._dial_next(result)
                return
            timeouts = listener.events.timeouts(DIAL_SECONDS[self._attempt])
            timeouts.call(partial(self._dial_timed_out, self._attempt))
            listener.events.watch(server.fileno(), self, READ | WRITE | EDGE)
            return
        listener.counts[Counter.GIVEN_UP] += 1
        self.reset()

    def ready(self, fd: int, mask: int) -> None:
        """Move bytes after an event of the client's socket or the server's."""
        if not self._directions:
            self._dialed(mask)
            return
        reading, writing = self._directions
        if self._server is not None and fd == self._server.fileno():
            reading, writing = writing, reading
        if mask & BROKEN and reading.ended:  # Reading from this peer would not show the error any more.
            self._broken()
            return
        if mask & (READ | BROKEN):
            self.pump(reading)
        if mask & WRITE:
            self.pump(writing)

    def pump(self, direction: Direction) -> None:
        """Move bytes in one direction. Close the connection when both have ended."""
        if self._client is None:
            return
        try:
            direction.pump()
        except BlockingIOError:
            if direction is self._directions[1] and not self._writable:
                self._writable = True
                self.listener.events.epoll.modify(self._client.fileno(), READ | WRITE | EDGE)
            return
        except OSError:
            self._broken()
            return
        if not direction.ended:
            return
        if all(each.ended for each in self._directions):
            self.close()
        else:
            self.listener.shared.half_closed.add(self)

    @property
    def moved(self) -> int:
        """Bytes moved so far, in both directions."""
        return sum(direction.moved for direction in self._directions)

    def time_out(self) -> None:
        """Reset the connection because it was half-closed and idle for too long."""
        self.listener.counts[Counter.HALF_CLOSED_TIMEOUTS] += 1
        self.reset()

    def _broken(self) -> None:
        """Forward a reset by either peer."""
        self._count_failure(RESET)
        self.reset()

    def reset(self) -> None:
        """Close the connection so that both peers see a reset."""
        for sock in (self._client, self._server):
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.close()

    def close(self) -> None:
        self.listener.shared.half_closed.discard(self)
        self._hang_up()
        client, self._client = self._client, None
        if client is not None:
            self.listener.events.close(client)
            self.listener.counts[_CONNECTIONS] -= 1
        for direction in self._directions:
            direction.release()
        self._directions = ()  # They refer to the connection: the cycle would wait for the collector.
        self.listener.connections.discard(self)

    def _hang_up(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            self.listener.events.close(server)

    def _dialed(self, mask: int) -> None:
        server, client, endpoint = self._server, self._client, self.endpoint
        if server is None or client is None or endpoint is None:
            return
        if mask & BROKEN and (error := server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
            self._dial_next(error)
            return
        if not mask & WRITE:
            return
        if self._counted is not None:
            self._counted.shake(endpoint, time.monotonic_ns() - self._began)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        client.setblocking(False)
        up, down = Direction(self, client, server, _BYTES_UP), Direction(self, server, client, _BYTES_DOWN)
        self._directions = up, down
        self.listener.connections.add(self)
        self.pump(up)
        if self._client is not None:
            self.listener.events.watch(client.fileno(), self, READ | EDGE)
            if mask & READ:
                self.pump(down)

    def _dial_timed_out(self, attempt: int) -> None:
        """Try the next endpoint unless *attempt* has ended, perhaps by an event that is not handled yet."""
        server = self._server
        if self._directions or self._client is None or server is None or self._attempt != attempt:
            return
        try:
            server.getpeername()
        except OSError:  # Not connected.
            self._dial_next(server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def _dial_again(self, attempt: int) -> None:
        """Continue *attempt*, which had no file descriptor."""
        if self._client is not None and self._server is None and self._attempt == attempt:
            self.dial()

    def _dial_next(self, error: int) -> None:
        """Try the next endpoint after *error*; see `failure_of`."""
        self._count_failure(failure_of(error))
        self._hang_up()
        self.listener.counts[Counter.DIAL_FAILURES] += 1
        self._attempt += 1
        self.dial()

    def _count_failure(self, place: int) -> None:
        """Count the failure of the attempt or the connection; see `counts`."""
        if self._counted is not None and self.endpoint is not None:
            self._counted[self.endpoint][place] += 1


# UDP.

_AT_ONCE = 64
"""Limit for the datagrams of one socket before other events are handled."""

_BUFFER = 1 << 20
"""Size in bytes of a relay's receive buffer, if the kernel allows it, so that bursts are not lost."""

_ANSWER_SECONDS = 5.0
"""Timeout in seconds of an answer, as in resolvers: a client that awaits one is not idle."""

_IP_PKTINFO = 8
_LINK_LOCAL = b"\xfe\x80"
_PKTINFO6 = 20
"""Size in bytes of struct in6_pktinfo."""

_DATAGRAMS_UP, _DATAGRAMS_DOWN = int(Counter.DATAGRAMS_TO_ENDPOINTS), int(Counter.DATAGRAMS_TO_CLIENTS)


class FlowKey(NamedTuple):
    """A client and the local address that it sends to, from which it expects replies."""

    client: tuple[str, int]
    local: bytes
    """As in struct in_pktinfo or in6_pktinfo; a link-local address with the index of its interface."""


class UdpRelay:
    """The socket of one UDP service port in one worker, and a flow for each client until it is idle."""

    def __init__(
        self, sock: socket.socket, balancer: Balancer, shared: Resources, idle_seconds: float
    ) -> None:
        self.balancer = balancer
        self.counts = shared.counts
        self.events = shared.events
        self.flows: dict[FlowKey, ClientFlow] = {}
        self.timeouts = self.events.timeouts(idle_seconds)
        self.counted: FrontendCounts | None = None
        """None: flows are not counted."""
        self.family = sock.family
        self._unspecified = bytes(4 if self.family == socket.AF_INET else 16)
        self._local = slice(4, 8) if self.family == socket.AF_INET else slice(16)
        """Position of the address in struct in_pktinfo (ipi_spec_dst) or in6_pktinfo."""
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
            key = FlowKey(sender, self._local_address(control[0][2]) if control else self._unspecified)
            flow = self.flows.get(key) or self._new_flow(key)
            if flow is not None:
                flow.send(data)

    def reply(self, data: bytes, key: FlowKey) -> None:
        """Send an endpoint's answer to its client, from the address that the client had sent to."""
        if self.family == socket.AF_INET:
            control = [(socket.IPPROTO_IP, _IP_PKTINFO, bytes(4) + key.local + bytes(4))]
        else:
            control = [(socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, key.local.ljust(_PKTINFO6, b"\0"))]
        with contextlib.suppress(OSError):  # Datagrams may be lost, all of them once this socket is closed.
            self._sock.sendmsg([data], control, 0, key.client)
            self.counts[_DATAGRAMS_DOWN] += 1

    def _local_address(self, packet: bytes) -> bytes:
        """Return the address in *packet*, as `FlowKey` has it."""
        if self.family == socket.AF_INET6 and packet.startswith(_LINK_LOCAL):
            return packet
        return packet[self._local]

    def drop_flows(self, removed: Collection[Endpoint]) -> None:
        """Move each client of a *removed* endpoint to another one with its next datagram."""
        for flow in [flow for flow in self.flows.values() if flow.endpoint in removed]:
            flow.retire()

    def close(self) -> None:
        for flow in list(self.flows.values()):
            flow.close()
        self.events.close(self._sock)

    def _new_flow(self, key: FlowKey) -> "ClientFlow | None":
        endpoint = self.balancer.choose(key.client[0], time.monotonic(), port=key.client[1])
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
        flow = self.flows[key] = ClientFlow(self, key, upstream, endpoint)
        if self.counted is not None:
            self.counted[endpoint][MADE] += 1
        return flow


class ClientFlow:
    """The flow of one client of a UDP service port, with a socket of its own to its endpoint."""

    __slots__ = ("_asked", "_key", "_last", "_relay", "_sock", "endpoint")

    def __init__(self, relay: UdpRelay, key: FlowKey, sock: socket.socket, endpoint: Endpoint) -> None:
        self._relay = relay
        self._key = key
        self._sock: socket.socket | None = sock
        self.endpoint = endpoint
        self._last = time.monotonic()
        self._asked = False
        """An answer may still arrive."""
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
            self._relay.counts[_DATAGRAMS_UP] += 1
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
        """Deliver only answers that may still arrive. The client's next datagram starts another flow."""
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
