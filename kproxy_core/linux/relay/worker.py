"""The relay worker's program: one event loop that obeys orders from a socket."""

import ctypes
import gc
import os
import random
import resource
import signal
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from kproxy_core.linux.relay import orders, wire
from kproxy_core.linux.relay.balancer import Balancer, Clients
from kproxy_core.linux.relay.counts import Counts, FrontendCounts, Tally, open_counts
from kproxy_core.linux.relay.events import READ, WRITE, Events
from kproxy_core.linux.relay.orders import Endpoint, WorkerSettings
from kproxy_core.linux.relay.relays import (
    Connection,
    DialSockets,
    HalfClosed,
    Pipes,
    Resources,
    TcpListener,
    UdpRelay,
)

_EXPIRY_SECONDS = 30.0
"""Interval in seconds at which expired affinity entries are dropped."""

_DESCRIPTORS = 1 << 19
"""Desired limit of file descriptors. kube-proxy used 64000."""

_VERSION_3 = 0x20080522
_NET_BIND_SERVICE = 1 << 10
_SETS = struct.Struct("=6I")
"""Effective, permitted and inheritable sets of the capabilities 0 to 31, then of the others."""
_PR_SET_NO_NEW_PRIVS = 38


def drop_capabilities() -> None:
    """Keep at most CAP_NET_BIND_SERVICE, which the ports of Services may need. Raises OSError.

    A worker handles the bytes of clients (linux/capability.h).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("=Ii", _VERSION_3, 0)
    sets = ctypes.create_string_buffer(_SETS.size)
    _check(libc.capget(header, sets))
    kept = _SETS.unpack(sets.raw)[1] & _NET_BIND_SERVICE
    _check(libc.capset(header, _SETS.pack(kept, kept, 0, 0, 0, 0)))
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class RelayWorker:
    """Serves the relays of one worker process, as ordered by the proxy.

    A worker is a new interpreter that imports little, so it is small. All workers listen on the same ports
    (SO_REUSEPORT), and the kernel distributes the clients.
    """

    def __init__(self, control: socket.socket, counts: Counts, settings: WorkerSettings) -> None:
        self._control = wire.Channel(control)
        self._settings = settings
        self._events = Events()
        half_closed = HalfClosed(self._events, settings.half_closed)
        self._shared = Resources(self._events, counts, Pipes(), DialSockets(), half_closed)
        self._tally = Tally()
        self._relays: dict[int, TcpListener | UdpRelay] = {}
        self._closed: dict[int, list[TcpListener]] = {}
        """Closed relays that have connections."""
        self._clients = WeakValueDictionary[int, Clients]()
        """Clients with affinity, by service port."""

    def run(self) -> None:
        """Serve until the proxy closes the control socket."""
        self._events.watch(self._control.fileno(), self, READ)
        self._events.timeouts(_EXPIRY_SECONDS).call(self._forget_expired)
        self._events.run()
        # Not closed: a client that reads until end of file must not mistake a part for the whole.
        for receiver in set(self._events.watched.values()):
            if isinstance(receiver, Connection):
                receiver.reset()

    def ready(self, fd: int, mask: int) -> None:
        """Obey the commands of the messages that have arrived, and answer each message."""
        try:
            if mask & WRITE:
                self._flush()
            messages = self._control.receive()
        except OSError:
            self._events.stopped = True
            return
        for message in messages:
            answer = [each for command in wire.as_commands(message) for each in self._obey(command)]
            # Sockets are closed after the current events, and the answer must not be earlier.
            self._events.timeouts(0.0).call(partial(self._send, answer))

    def _send(self, answer: list[tuple[Any, ...]]) -> None:
        try:
            self._control.send(answer)
            if self._control.has_unsent:  # Relays do not wait for a proxy that does not read.
                self._events.epoll.modify(self._control.fileno(), READ | WRITE)
        except OSError:
            self._events.stopped = True

    def _flush(self) -> None:
        self._control.flush()
        if not self._control.has_unsent:
            self._events.epoll.modify(self._control.fileno(), READ)

    def _obey(self, command: orders.Command) -> Iterable[tuple[Any, ...]]:
        """Return the answer to one command: the requested values, or a failed relay with the reason."""
        match command:
            case orders.ReportCounts():
                return self._tally.report()
            case orders.Recall(client):
                now = time.monotonic()
                kept = ((number, each.balancer.kept(client, now)) for number, each in self._relays.items())
                return [(number, endpoint) for number, endpoint in kept if endpoint is not None]
            case orders.ReportConnected():
                return {(number, each.endpoint) for number, each in self._connections()}
            case orders.Reset(relay_number, endpoints):
                gone = frozenset(map(tuple, endpoints))
                found = [each for number, each in self._connections()
                         if number == relay_number and each.endpoint in gone]
                for connection in found:
                    connection.reset()
                return [(len(found),)]
            case orders.Serve():
                try:
                    self._serve(command)
                except OSError as error:
                    return [(command.relay, str(error))]
            case orders.Close() if relay := self._relays.pop(command.relay, None):
                removed = relay.balancer.set_endpoints((), None) if command.endpoints_removed else []
                relay.close()
                self._leave(relay, removed)
                if isinstance(relay, TcpListener) and relay.connections:
                    self._closed.setdefault(command.relay, []).append(relay)
        return []

    def _connections(self) -> list[tuple[int, Connection]]:
        """Return the open TCP connections of all relays, with the relays' numbers."""
        listeners = [(number, each) for number, each in self._relays.items() if isinstance(each, TcpListener)]
        listeners += [(number, each) for number, relays in self._closed.items() for each in relays]
        return [(number, each) for number, listener in listeners for each in listener.connections]

    def _serve(self, order: orders.Serve) -> None:
        relay = self._relays.get(order.relay)
        if relay is None:
            relay = self._relays[order.relay] = self._open(order)
        relay.counted = None if order.frontend is None else FrontendCounts(self._tally, order.frontend)
        clients = None
        if order.affinity_seconds:
            clients = self._clients.setdefault(order.service_port, Clients(0))
            clients.seconds = order.affinity_seconds
        if removed := relay.balancer.set_endpoints(order.endpoints, clients, order.resting, order.hash_by):
            self._leave(relay, removed)

    def _open(self, order: orders.Serve) -> TcpListener | UdpRelay:
        sock = listening_socket(order.udp, order.address, order.port)
        try:
            balancer = Balancer(random.shuffle)
            if order.udp:
                return UdpRelay(sock, balancer, self._shared, self._settings.udp_idle)
            return TcpListener(sock, balancer, self._shared)
        except OSError:
            sock.close()
            raise

    def _leave(self, relay: TcpListener | UdpRelay, removed: list[Endpoint]) -> None:
        """End traffic to *removed* endpoints, as configured. kube-proxy leaves TCP connections alone."""
        gone = frozenset(removed)
        if isinstance(relay, UdpRelay):
            relay.drop_flows(gone)
        elif (seconds := self._settings.drain) >= 0:
            for connection in [each for each in relay.connections if each.endpoint in gone]:
                if seconds:
                    self._events.timeouts(seconds).call(connection.reset)
                else:
                    connection.reset()

    def _forget_expired(self) -> None:
        now = time.monotonic()
        for clients in self._clients.values():
            clients.forget_expired(now)
        for number, relays in list(self._closed.items()):
            self._closed[number] = [relay for relay in relays if relay.connections]
            if not self._closed[number]:
                del self._closed[number]
        self._events.timeouts(_EXPIRY_SECONDS).call(self._forget_expired)


def listening_socket(udp: bool, address: str, port: int) -> socket.socket:
    """Return a socket that shares *address* and *port* with those of other workers. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM if udp else socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if not udp:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.startswith("127.") or address == "::1":
            # With route_localnet, hosts on the link could reach it. Before Linux 5.7 this needs CAP_NET_RAW.
            with suppress(PermissionError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock


def _allow_descriptors() -> None:
    """Raise the limit of file descriptors as far as possible: a connection needs two."""
    with suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        for limit in (hard, max(hard, _DESCRIPTORS)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def main(arguments: list[str]) -> None:
    """Run a worker. *arguments* are the descriptors of control socket and counts, then `WorkerSettings`."""
    _allow_descriptors()
    drop_capabilities()
    # Signals to the process group are meant for the proxy, which ends workers by closing the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = socket.socket(fileno=int(arguments[0]))
    counts = open_counts(int(arguments[1]))
    os.close(int(arguments[1]))
    worker = RelayWorker(control, counts, WorkerSettings(*map(float, arguments[2:])))
    # Connections hold no cycles for long, and a collection over ten thousand of them would add latency.
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)
    worker.run()
