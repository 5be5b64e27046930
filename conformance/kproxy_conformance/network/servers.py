"""Echo servers of the nodes and pods. Each answers with the addresses of both ends, as it sees them.

A connection gets a line of JSON when it is accepted and after each piece of data; a datagram is answered
with one, unless it is an answer itself: two servers would answer each other for ever.
"""

import json
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable

from kproxy_conformance.network.addresses import SERVERS
from kproxy_conformance.network.topology import Topology

PORTS = (8080, 8081, 8082, 9053)

_ANSWER = b'{"address": '
"""The beginning of every answer."""

_IP_PKTINFO = 8
_IPV6_FREEBIND = 78
_PKTINFO4 = struct.Struct("=I4s4s")
_PKTINFO6 = struct.Struct("=16sI")

_Handler = Callable[[socket.socket], None]


class EchoServers:
    """TCP and UDP servers on `PORTS` of every serving host, in one thread."""

    def __init__(self, topology: Topology) -> None:
        self.astray: list[str] = []
        """Answers to datagrams that reached a server instead of the client."""
        self._selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = os.pipe()
        self._selector.register(self._wake_r, selectors.EVENT_READ, None)
        for host in dict.fromkeys(topology[name] for name in SERVERS):  # A pod may share the node's.
            with host.entered():
                for port in PORTS:
                    self._listen_tcp(port)
                    self._listen_udp(socket.AF_INET, port)
                    self._listen_udp(socket.AF_INET6, port)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="echo")
        self._thread.start()

    def close(self) -> None:
        os.write(self._wake_w, b"x")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    def _register(self, sock: socket.socket, handler: _Handler) -> None:
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, handler)

    def _listen_tcp(self, port: int) -> None:
        sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("::", port))
        sock.listen(512)
        self._register(sock, self._accept)

    def _listen_udp(self, family: socket.AddressFamily, port: int) -> None:
        sock = socket.socket(family, socket.SOCK_DGRAM)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_FREEBIND, 1)
            sock.bind(("::", port))
        else:
            sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
            sock.bind(("0.0.0.0", port))
        self._register(sock, self._answer_datagram)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                assert isinstance(key.fileobj, socket.socket)
                try:
                    key.data(key.fileobj)
                except OSError:
                    if key.data == self._read_line:
                        self._drop(key.fileobj)

    def _accept(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._register(sock, self._read_line)
        try:
            sock.sendall(_stream_answer(sock))
        except OSError:
            self._drop(sock)

    def _read_line(self, sock: socket.socket) -> None:
        if sock.recv(4096):
            sock.sendall(_stream_answer(sock))
        else:
            self._drop(sock)

    def _answer_datagram(self, sock: socket.socket) -> None:
        """Answer one datagram from the very address that it was sent to."""
        received, ancillary, _, peer = sock.recvmsg(2048, 256)
        port = sock.getsockname()[1]
        level, kind, data = ancillary[0]
        if level == socket.IPPROTO_IP:
            target = _PKTINFO4.unpack(data)[2]
            control = _PKTINFO4.pack(0, target, bytes(4))
            address = socket.inet_ntop(socket.AF_INET, target)
        else:
            target = _PKTINFO6.unpack(data)[0]
            control = _PKTINFO6.pack(target, 0)
            address = socket.inet_ntop(socket.AF_INET6, target)
        if received.startswith(_ANSWER):
            text = received.decode().strip()
            self.astray.append(f"{peer[0]} port {peer[1]} to {address} port {port}: {text}")
            return
        sock.sendmsg([_answer(address, port, *peer[:2])], [(level, kind, control)], 0, peer)

    def _drop(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        sock.close()


def _answer(address: str, port: int, client: str, client_port: int) -> bytes:
    def plain(text: str) -> str:
        return text.removeprefix("::ffff:").partition("%")[0]

    body = {"address": plain(address), "port": port, "client": plain(client), "client_port": client_port}
    return json.dumps(body).encode() + b"\n"


def _stream_answer(sock: socket.socket) -> bytes:
    return _answer(*sock.getsockname()[:2], *sock.getpeername()[:2])
