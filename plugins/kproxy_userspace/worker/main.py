"""A relay worker: a process with one event loop, which does what it is told over a socket.

Started as a fresh interpreter that imports nothing it does not need, so it is small. Every worker listens on
the same ports (SO_REUSEPORT), and the kernel spreads the clients.
"""

import gc
import os
import random
import resource
import signal
import socket
import sys
import time
from typing import NamedTuple

from kproxy_userspace.names import Endpoint
from kproxy_userspace.worker import wire
from kproxy_userspace.worker.balancer import Balancer
from kproxy_userspace.worker.counters import Counts, open_counts
from kproxy_userspace.worker.events import READ, Events
from kproxy_userspace.worker.pipes import Pipes
from kproxy_userspace.worker.tcp import Connection, Listener
from kproxy_userspace.worker.udp import UdpRelay

_STALE_SECONDS = 30.0
"""How often affinity entries that nobody used in time are dropped."""

_DESCRIPTORS = 1 << 19
"""kube-proxy asked for 64000."""


class Settings(NamedTuple):
    """What a worker is started with."""

    udp_idle_seconds: float
    drain_seconds: float
    """How long a connection to an endpoint that is gone may go on; negative: for ever."""


class Worker:
    """The relays of one process."""

    def __init__(self, control: socket.socket, counts: Counts, settings: Settings) -> None:
        self._control = control
        self._counts = counts
        self._settings = settings
        self._events = Events()
        self._pipes = Pipes()
        self._relays: dict[int, Listener | UdpRelay] = {}

    def run(self) -> None:
        """Serve until the proxy ends."""
        self._events.watch(self._control.fileno(), self, READ)
        self._events.timeouts(_STALE_SECONDS).call(self._forget_stale)
        self._events.run()
        # Else whoever reads until the end would take what came so far for everything.
        for who in set(self._events.watched.values()):
            if isinstance(who, Connection):
                who.reset()

    def ready(self, fd: int, mask: int) -> None:
        """Take in what the proxy says, and answer."""
        try:
            commands = wire.as_commands(wire.receive(self._control))
            failed: wire.Answer = []
            for command in commands:
                try:
                    self._obey(command)
                except OSError as error:
                    failed.append((command.relay, str(error)))
        except wire.PeerGone:
            self._events.stopped = True
            return

        def answer(_: int) -> None:
            try:
                wire.send(self._control, failed)
            except wire.PeerGone:
                self._events.stopped = True

        # Only when what was closed is closed indeed, which is after the events of now.
        self._events.timeouts(0.0).call(answer)

    def _obey(self, command: wire.Command) -> None:
        if isinstance(command, wire.Close):
            relay = self._relays.pop(command.relay, None)
            if relay is not None:
                gone = relay.balancer.set((), 0) if command.gone else []
                relay.close()
                self._leave(relay, gone)
            return
        known = self._relays.get(command.relay)
        if known is None:
            known = self._relays[command.relay] = self._open(command)
        gone = known.balancer.set(command.endpoints, command.affinity_seconds)
        if gone:
            self._leave(known, gone)

    def _open(self, command: wire.Serve) -> Listener | UdpRelay:
        sock = listening_socket(command.udp, command.address, command.port)
        try:
            balancer = Balancer(random.shuffle)
            if command.udp:
                return UdpRelay(sock, balancer, self._events, self._settings.udp_idle_seconds, self._counts)
            return Listener(sock, balancer, self._events, self._pipes, self._counts)
        except OSError:
            sock.close()
            raise

    def _leave(self, relay: Listener | UdpRelay, gone: list[Endpoint]) -> None:
        """Deal with what goes on with endpoints that are gone: kube-proxy leaves TCP connections alone."""
        if isinstance(relay, UdpRelay):
            relay.drop_flows(gone)
            return
        connections = [c for endpoint in gone for c in relay.connections.get(endpoint, ())]
        seconds = self._settings.drain_seconds

        def reset_all(_: int = 0) -> None:
            for connection in connections:
                connection.reset()

        if seconds == 0:
            reset_all()
        elif seconds > 0 and connections:
            self._events.timeouts(seconds).call(reset_all)

    def _forget_stale(self, _: int) -> None:
        now = time.monotonic()
        for relay in self._relays.values():
            relay.balancer.forget_stale(now)
        self._events.timeouts(_STALE_SECONDS).call(self._forget_stale)


def listening_socket(udp: bool, address: str, port: int) -> socket.socket:
    """A socket bound to *address* and *port*, beside those of other workers. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM if udp else socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if not udp:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock


def _allow_descriptors() -> None:
    """Two for each connection: as many as this process may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (max(hard, _DESCRIPTORS), hard):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            return
        except (OSError, ValueError):
            continue


def main(arguments: list[str]) -> None:
    """``worker SOCKET COUNTS UDP_IDLE_SECONDS DRAIN_SECONDS``: descriptors of what the proxy shares."""
    _allow_descriptors()
    # Signals for the whole process group are for the proxy; it tells us by closing the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = socket.socket(fileno=int(arguments[0]))
    counts = open_counts(int(arguments[1]))
    os.close(int(arguments[1]))
    worker = Worker(control, counts, Settings(float(arguments[2]), float(arguments[3])))
    # Connections hold no cycles for long, and a collection over ten thousand of them would be felt.
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)
    worker.run()


if __name__ == "__main__":
    main(sys.argv[1:])
