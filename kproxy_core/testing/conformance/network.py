"""A node with pods, another node, and a client. Servers answer with their name and the client's address.

    client ── 198.51.100.0/24 ── node ── 172.30.0.0/24 ── away (pod far)
                               │      │
                             near   other

Everything is dual-stack; `features.ADDRESSES` has the numbers.
"""

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kproxy_core.model.address import Family
from kproxy_core.testing.conformance.features import ADDRESSES
from kproxy_core.testing.conformance.namespaces import Namespace

PORT = 8080
"""The TCP and UDP port of pods."""

V4, V6 = ADDRESSES[Family.IPV4], ADDRESSES[Family.IPV6]
GATEWAY = {Family.IPV4: "10.1.1.1", Family.IPV6: "fd00:10:1:1::1"}
"""The node's addresses for its pods."""
PODS = {
    "near": (V4.near[0], V6.near[0]),
    "other": (V4.near[1], V6.near[1]),
    "far": (V4.far, V6.far),
}
NAMES = (
    {address: name for name, pair in PODS.items() for address in pair}
    | dict.fromkeys((*V4.clients[:1], *V6.clients[:1]), "client")
    | dict.fromkeys((*V4.clients[1:], *V6.clients[1:]), "second client")
    | dict.fromkeys((V4.node, V6.node, *GATEWAY.values()), "node")
)
"""The owners of addresses, by name."""

_UP = ("link set lo up", "link set eth0 up")


def node_only() -> Namespace:
    """Return a node without a network."""
    node = Namespace("node")
    node.ip("link set lo up", f"address add {V4.node}/32 dev lo", f"address add {V6.node}/128 dev lo nodad")
    routes, address = Path("/proc/net/ipv6_route"), socket.inet_pton(socket.AF_INET6, V6.node).hex()
    with node.entered():
        until = time.monotonic() + 1
        # The route to it, and the local one, which the kernel adds a moment later.
        while routes.read_text(encoding="ascii").count(address) < 2 and time.monotonic() < until:
            time.sleep(0.001)
    return node


class Network:
    """The namespaces, by name: ``node``, ``near``, ``other``, ``away`` and ``client``."""

    def __init__(self) -> None:
        with contextlib.ExitStack() as stack:
            self.hosts: dict[str, Namespace] = {}
            for name in ("node", "near", "other", "away", "client"):
                self.hosts[name] = Namespace(name)
                stack.callback(self.hosts[name].close)
            self._build()
            self.servers = Servers()
            stack.callback(self.servers.close)
            for name, addresses in PODS.items():
                self.servers.serve(name, self.hosts["away" if name == "far" else name], addresses)
            self.close = stack.pop_all().close

    def _build(self) -> None:
        node, away, client = self.hosts["node"], self.hosts["away"], self.hosts["client"]
        node.forward()
        links = [("lan", away), ("wan", client), ("near", self.hosts["near"]), ("other", self.hosts["other"])]
        node.ip(
            "link set lo up",
            *(f"link add {name} type veth peer name eth0 netns {peer.path}" for name, peer in links),
            *(f"link set {name} up" for name, _ in links),
        )
        for pod in ("near", "other"):
            four, six = PODS[pod]
            self.hosts[pod].ip(
                *_UP,
                f"address add {four}/32 dev eth0",
                f"address add {six}/128 dev eth0 nodad",
                f"route add {GATEWAY[Family.IPV4]} dev eth0",
                f"route add {GATEWAY[Family.IPV6]} dev eth0",
                f"route add default via {GATEWAY[Family.IPV4]}",
                f"route add default via {GATEWAY[Family.IPV6]}",
            )
        away.ip(
            *_UP,
            "address add 172.30.0.2/24 dev eth0",
            "address add fd00:172:30::2/64 dev eth0 nodad",
            f"address add {V4.far}/32 dev lo",
            f"address add {V6.far}/128 dev lo nodad",
            f"route add default via {V4.node}",
            f"route add default via {V6.node}",
        )
        client.ip(
            *_UP,
            *(f"address add {address}/24 dev eth0" for address in V4.clients),
            *(f"address add {address}/64 dev eth0 nodad" for address in V6.clients),
            "route add default via 198.51.100.1",
            "route add default via 2001:db8:51::1",
        )
        # Last, because its links carry nothing before the others are up.
        node.ip(
            f"address add {V4.node}/24 dev lan",
            f"address add {V6.node}/64 dev lan nodad",
            "route add default via 172.30.0.2",
            "route add default via fd00:172:30::2",
            "address add 198.51.100.1/24 dev wan",
            "address add 2001:db8:51::1/64 dev wan nodad",
            "route add 10.1.2.0/24 via 172.30.0.2",
            "route add fd00:10:1:2::/64 via fd00:172:30::2",
            *(f"address add {gateway} dev {pod}" for pod in ("near", "other")
              for gateway in (f"{GATEWAY[Family.IPV4]}/32", f"{GATEWAY[Family.IPV6]}/128 nodad")),
            *(f"route add {address} dev {pod}" for pod in ("near", "other") for address in PODS[pod]),
        )  # fmt: skip


class Servers:
    """Every pod's TCP and UDP server, in one thread.

    Answers a connection with a line, ``NAME ADDRESS``: its name and the client's address. Then it echoes.
    Answers each datagram with such a line.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake, wake = socket.socketpair()
        self._selector.register(wake, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._serve, name="kproxy-kit-servers", daemon=True)
        self._sockets = [self._wake, wake]
        self._started = False

    def serve(self, name: str, host: Namespace, addresses: tuple[str, ...]) -> None:
        """Listen on `PORT` of these addresses of *host*. Call it before any client dials."""
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = host.socket(family, socket.SOCK_STREAM)
            datagrams = host.socket(family, socket.SOCK_DGRAM)
            self._sockets += [listener, datagrams]
            for sock in (listener, datagrams):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind((address, PORT))
                sock.setblocking(False)
            listener.listen(64)
            self._selector.register(listener, selectors.EVENT_READ, (name, "listener"))
            self._selector.register(datagrams, selectors.EVENT_READ, (name, "datagrams"))

    def start(self) -> None:
        self._started = True
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and close every connection."""
        if self._started:
            self._wake.send(b"!")
            self._thread.join()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._wake.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                name, kind = key.data
                assert isinstance(key.fileobj, socket.socket)
                with contextlib.suppress(OSError):
                    self._answer(key.fileobj, name, kind)

    def _answer(self, sock: socket.socket, name: str, kind: str) -> None:
        if kind == "listener":
            connection, peer = sock.accept()
            connection.sendall(_line(name, peer))
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, (name, "connection"))
        elif kind == "datagrams":
            _, peer = sock.recvfrom(2048)
            sock.sendto(_line(name, peer), peer)
        else:
            try:
                data = sock.recv(2048)
            except OSError:
                data = b""
            if data:
                sock.send(data)
            else:
                self._selector.unregister(sock)
                sock.close()


def _line(name: str, peer: tuple[str, int]) -> bytes:
    return f"{name} {peer[0]}\n".encode()


@contextlib.contextmanager
def network() -> Iterator[Network]:
    made = Network()
    try:
        made.servers.start()
        yield made
    finally:
        made.close()
