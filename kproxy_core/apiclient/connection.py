"""One connection to the API server: requests one after the other, bodies as they arrive.

Smaller than http.client and quicker where it counts: a change that the server
sends is one wake-up and one recv() away from the watch that waits for it.
"""

import contextlib
import errno
import os
import select
import socket
import threading
from typing import TYPE_CHECKING, Any

import kproxy_core
from kproxy_core.apiclient.access import Access
from kproxy_core.apiclient.framing import MAX_HEAD, Body, Head, ProtocolError, parse_head
from kproxy_core.apiclient.proxies import Proxy

if TYPE_CHECKING:
    import ssl  # 4 MB that a plain connection does without
    import zlib

CONNECT_TIMEOUT = 10.0
"""Seconds of silence that are too much while connecting."""

CONTENT_TYPE = "application/json"
"""What is asked for."""

_USER_AGENT = f"kproxy/{kproxy_core.__version__}"

_PIECE = 128 << 10
"""Bytes taken at once, so that what a burst left in the kernel is one batch."""

KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_PROBES = 15, 10, 3
"""Seconds of silence before a peer is probed, seconds between probes, and how many may go unanswered."""

PEER_TIMEOUT = KEEPALIVE_IDLE + KEEPALIVE_INTERVAL * KEEPALIVE_PROBES
"""Seconds after which a peer that vanished is noticed, and by the kernel: no timer runs here for that."""


class Aborted(OSError):
    """The connection was closed from this side."""


class Unreachable(OSError):
    """No connection can be made; the cause is chained."""


class Response:
    """The answer to one request."""

    def __init__(self, connection: "Connection", head: Head, start: bytes) -> None:
        self.status = head.status
        self.headers = head.headers
        self._connection = connection
        self._persistent = head.persistent
        self._body: Body = head.body()
        self._unzip = _decoder(head)
        self._payload = self._decoded(self._body.feed(start)) if start else b""

    def read(self) -> bytes:
        """The next bytes of the body: all that have arrived; b"" at its end.

        Raises OSError, ProtocolError.
        """
        payload, self._payload = self._payload, b""
        while not payload and not self._body.ended:
            data = self._connection.receive()
            if data:
                payload = self._decoded(self._body.feed(data))
            else:
                self._persistent = False
                self._body.close()
        if not payload and self._unzip is not None and not self._unzip.eof:
            raise ProtocolError("a compressed body without its end")
        return payload

    def _decoded(self, data: bytes) -> bytes:
        if self._unzip is None:
            return data
        from zlib import error as bad_data

        try:
            return self._unzip.decompress(data)
        except bad_data as error:
            raise ProtocolError(f"bad compressed body: {error}") from error

    def read_all(self) -> bytes:
        """The rest of the body. Raises OSError, ProtocolError."""
        return b"".join(iter(self.read, b""))

    @property
    def reusable(self) -> bool:
        """The connection can carry another request."""
        return self._body.ended and self._persistent


def _decoder(head: Head) -> "zlib._Decompress | None":
    """What takes the compression off a body; None: it has none. Raises ProtocolError if it is unknown."""
    coding = head.headers.get("content-encoding", "identity").strip().lower()
    if coding == "identity":
        return None
    if coding != "gzip":
        raise ProtocolError(f"unknown content coding {coding!r}")
    from zlib import MAX_WBITS, decompressobj

    return decompressobj(MAX_WBITS | 16)  # 16: gzip


class Connection:
    """A connection to the API server, made when it is needed and kept as long as it can be.

    Used by one thread; only `abort` may be called by another.
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        self._socket: socket.socket | None = None
        self._response: Response | None = None
        self._buffer = memoryview(bytearray(_PIECE))
        self._timeout = CONNECT_TIMEOUT
        self._aborted = False
        self._lock = threading.Lock()

    def get(self, target: str, timeout: float, compressed: bool = False) -> Response:
        """Ask for *target* (path and query) and wait for the head of the answer.

        *timeout*: seconds of silence that are too much. *compressed*: the body
        may come so. What the previous response still holds is lost.

        Raises OSError, ProtocolError.
        """
        kept = self._response is not None and self._response.reusable
        self._response = None
        request = self._request(target, compressed)
        if kept:
            # The server may have closed an idle connection just now; that is no failure yet.
            with contextlib.suppress(ConnectionError):
                return self._exchange(request, timeout)
        self.close()
        self._connect()
        return self._exchange(request, timeout)

    def receive(self) -> bytes:
        """What has arrived, at least a byte; b"" if the server closed the connection."""
        if self._socket is None:
            raise ConnectionError("not connected")
        size = self._socket.recv_into(self._buffer)
        if size and self._access.tls is not None:
            size = self._drain(self._socket, size)
        return self._buffer[:size].tobytes()

    def _drain(self, secure: socket.socket, size: int) -> int:
        """Take what else has arrived: TLS gives one record a time, of 16 kB or much less.

        Returns the size of what is in the buffer now. A problem, or the end,
        comes up again when the next bytes are wanted.
        """
        secure.settimeout(0)
        try:
            while size < len(self._buffer):
                more = secure.recv_into(self._buffer[size:])
                if not more:
                    break
                size += more
        except OSError:
            pass
        finally:
            secure.settimeout(self._timeout)
        return size

    def set_timeout(self, seconds: float) -> None:
        """From now on, so many *seconds* of silence are too much."""
        self._timeout = seconds
        if self._socket is not None:
            self._socket.settimeout(seconds)

    def close(self) -> None:
        """Close the connection; the next request makes a new one."""
        self._response = None
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            self._socket = None

    def abort(self) -> None:
        """End for good: what is under way fails at once, and so does every further request."""
        with self._lock:
            self._aborted = True
            if self._socket is not None:
                # Not SSLSocket's own, which would make the reading thread take the rest for plain text.
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _request(self, target: str, compressed: bool) -> bytes:
        access = self._access
        authorization = access.authorization() if access.authorization else ""
        # A proxy is asked for plain HTTP, and never sees what goes by TLS.
        proxy = access.proxy if access.tls is None else None
        origin = f"http://{access.authority}" if proxy else ""
        return (f"GET {origin}{access.base_path}{target} HTTP/1.1\r\n"
                f"Host: {access.authority}\r\n"
                f"User-Agent: {_USER_AGENT}\r\n"
                f"Accept: {CONTENT_TYPE}\r\n"
                + ("Accept-Encoding: gzip\r\n" if compressed and access.compression else "")
                + (f"Authorization: {authorization}\r\n" if authorization else "")
                + (f"Proxy-Authorization: {proxy.authorization}\r\n" if proxy and proxy.authorization else "")
                + "\r\n").encode("latin-1")

    def _exchange(self, request: bytes, timeout: float) -> Response:
        assert self._socket is not None
        self.set_timeout(timeout)
        self._socket.sendall(request)
        data = self.receive()
        while (end := data.find(b"\r\n\r\n")) < 0:
            more = self.receive()
            if not more:
                raise ConnectionResetError("the server closed the connection instead of answering")
            if len(data) > MAX_HEAD:
                raise ProtocolError("endless response head")
            data += more
        self._response = Response(self, parse_head(data[:end]), data[end + 4:])
        return self._response

    def _connect(self) -> None:
        access = self._access
        via = access.proxy or access
        problem: Exception | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(
                via.host, via.port, type=socket.SOCK_STREAM):
            plain = self._new_socket(family, kind, protocol)
            try:
                self._begin(plain, address)
                if access.tls is not None:
                    if access.proxy is not None:
                        _open_tunnel(plain, access.proxy, access.authority)
                    self._secure(plain, access.tls)
            except (OSError, ProtocolError) as error:
                self.close()
                problem = error
            else:
                return
        where = f" through the proxy {access.proxy.authority}" if access.proxy else ""
        raise Unreachable(f"can't connect to {access.authority}{where}: {problem}") from problem

    def _begin(self, plain: socket.socket, address: Any) -> None:
        """Connect. It begins under the lock: what has not begun can't be shut down by `abort`."""
        plain.settimeout(0)
        with self._lock:
            if self._aborted:
                plain.close()
                raise Aborted("closed from this side")
            self._socket = plain
            problem = plain.connect_ex(address)
        plain.settimeout(CONNECT_TIMEOUT)
        if problem == errno.EINPROGRESS:
            poll = select.poll()
            poll.register(plain, select.POLLOUT)
            if not poll.poll(CONNECT_TIMEOUT * 1000):
                raise TimeoutError("timed out")
            problem = plain.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            raise OSError(problem, os.strerror(problem))

    def _new_socket(self, family: int, kind: int, protocol: int) -> socket.socket:
        plain = socket.socket(family, kind, protocol)
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PEER_TIMEOUT * 1000),
        ):
            plain.setsockopt(level, option, value)
        return plain

    def _secure(self, plain: socket.socket, tls: "ssl.SSLContext") -> None:
        with self._lock:
            # The handshake comes after, so that `abort` always finds the socket in use.
            secure = tls.wrap_socket(plain, server_hostname=self._access.server_name or self._access.host,
                                     do_handshake_on_connect=False)
            self._socket = secure
        secure.do_handshake()


def _open_tunnel(plain: socket.socket, proxy: Proxy, authority: str) -> None:
    """Have *proxy* connect *plain* to *authority* (RFC 9110, section 9.3.6).

    Raises OSError, ProtocolError.
    """
    login = f"Proxy-Authorization: {proxy.authorization}\r\n" if proxy.authorization else ""
    plain.sendall(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\nUser-Agent: {_USER_AGENT}\r\n"
                  f"{login}\r\n".encode("latin-1"))
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        # Nothing comes after the head: in TLS, the client speaks first.
        more = plain.recv(MAX_HEAD)
        if not more:
            raise ConnectionResetError("the proxy closed the connection instead of answering")
        data += more
        if len(data) > MAX_HEAD or b"\r\n\r\n" in data[:-4]:
            break
    end = data.find(b"\r\n\r\n")
    head = parse_head(data[:end if end >= 0 else MAX_HEAD])
    if not 200 <= head.status < 300:
        raise ConnectionRefusedError(f"the proxy answers with status {head.status}")
