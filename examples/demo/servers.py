"""The shop's programs: servers that answer with their name and the client's address."""

import asyncio
import json
import socket
import threading
from typing import Any, cast

from examples.demo.network import Pod
from kproxy_conformance.network.namespaces import Namespace

BACKLOG = 512


def _answer(name: str, peer: Any) -> bytes:
    return json.dumps({"by": name, "seen": peer[0].removeprefix("::ffff:")}).encode() + b"\n"


class _Stream(asyncio.Protocol):
    """Answers a connection at once, and again whenever it receives data."""

    def __init__(self, name: str) -> None:
        self._name = name

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self.data_received(b"")

    def data_received(self, data: bytes) -> None:
        self._transport.write(_answer(self._name, self._transport.get_extra_info("peername")))


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, name: str) -> None:
        self._name = name

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        self._transport.sendto(_answer(self._name, addr), addr)


class Servers:
    """All servers of all pods, in one background thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._listening: dict[str, list[asyncio.Server]] = {}
        threading.Thread(target=self._loop.run_forever, name="servers", daemon=True).start()

    def serve(self, host: Namespace, pod: Pod) -> None:
        """Listen on every port of *pod*, in both families."""
        for port in pod.tcp:
            listener = host.socket(socket.AF_INET6, socket.SOCK_STREAM)
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(("::", port))
            self._stream(pod.name, listener)
        for port in pod.udp:
            datagrams = host.socket(socket.AF_INET, socket.SOCK_DGRAM)
            datagrams.bind(("0.0.0.0", port))
            self._datagrams(pod.name, datagrams)

    def serve_at(self, address: str, pod: Pod) -> dict[int, int]:
        """Serve for *pod* at *address* of this machine. Return the ports there, by the pod's ports."""
        found = {}
        for kind, ports, serve in (
            (socket.SOCK_STREAM, pod.tcp, self._stream), (socket.SOCK_DGRAM, pod.udp, self._datagrams),
        ):  # fmt: skip
            for port in ports:
                sock = socket.socket(socket.AF_INET, kind)
                sock.bind((address, 0))
                found[port] = sock.getsockname()[1]
                serve(pod.name, sock)
        return found

    def _stream(self, name: str, listener: socket.socket) -> None:
        starting = self._loop.create_server(lambda: _Stream(name), sock=listener, backlog=BACKLOG)
        server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        self._listening.setdefault(name, []).append(server)

    def _datagrams(self, name: str, sock: socket.socket) -> None:
        opening = self._loop.create_datagram_endpoint(lambda: _Datagrams(name), sock=sock)
        asyncio.run_coroutine_threadsafe(opening, self._loop).result()

    def stop_accepting(self, name: str) -> None:
        """Let the pod *name* refuse new connections, and keep its established ones."""
        for server in self._listening.pop(name):
            self._loop.call_soon_threadsafe(server.close)
