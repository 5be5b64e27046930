"""One connection to the API server: requests one after the other, bodies as they arrive.

Smaller than http.client and quicker where it counts: a change that the server
sends is one wake-up and one recv() away from the watch that waits for it.
"""

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

import kproxy_core
from kproxy_core.sources.access import Access
from kproxy_core.sources.framing import MAX_HEAD, Body, Head, ProtocolError, parse_head

if TYPE_CHECKING:
    import ssl  # 4 MB that a plain connection does without

CONNECT_TIMEOUT = 10.0
"""Seconds of silence that are too much while connecting."""

_PIECE = 128 << 10
"""Bytes taken at once, so that what a burst left in the kernel is one batch."""

_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # A peer that vanished is noticed within 45 s, and by the kernel: no timer runs here for that.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 45_000),
)


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
        self._payload = self._body.feed(start) if start else b""

    def read(self) -> bytes:
        """The next bytes of the body: all that have arrived; b"" at its end.

        Raises OSError, ProtocolError.
        """
        payload, self._payload = self._payload, b""
        while not payload and not self._body.ended:
            data = self._connection.receive()
            if data:
                payload = self._body.feed(data)
            else:
                self._persistent = False
                self._body.close()
        return payload

    def read_all(self) -> bytes:
        """The rest of the body. Raises OSError, ProtocolError."""
        return b"".join(iter(self.read, b""))

    @property
    def reusable(self) -> bool:
        """The connection can carry another request."""
        return self._body.ended and self._persistent


class Connection:
    """A connection to the API server, made when it is needed and kept as long as it can be.

    Used by one thread; only `abort` may be called by another.
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        self._socket: socket.socket | None = None
        self._response: Response | None = None
        self._buffer = memoryview(bytearray(_PIECE))
        self._aborted = False
        self._lock = threading.Lock()

    def get(self, target: str, timeout: float) -> Response:
        """Ask for *target* (path and query) and wait for the head of the answer.

        *timeout*: seconds of silence that are too much. What the previous
        response still holds is lost.

        Raises OSError, ProtocolError.
        """
        kept = self._response is not None and self._response.reusable
        self._response = None
        request = self._request(target)
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
        return self._buffer[:self._socket.recv_into(self._buffer)].tobytes()

    def set_timeout(self, seconds: float) -> None:
        """From now on, so many *seconds* of silence are too much."""
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

    def _request(self, target: str) -> bytes:
        access = self._access
        authorization = access.authorization() if access.authorization else ""
        return (f"GET {access.base_path}{target} HTTP/1.1\r\n"
                f"Host: {access.authority}\r\n"
                f"User-Agent: kproxy/{kproxy_core.__version__}\r\n"
                "Accept: application/json\r\n"
                + (f"Authorization: {authorization}\r\n" if authorization else "")
                + "\r\n").encode("latin-1")

    def _exchange(self, request: bytes, timeout: float) -> Response:
        assert self._socket is not None
        self._socket.settimeout(timeout)
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
        problem: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(
                access.host, access.port, type=socket.SOCK_STREAM):
            plain = self._new_socket(family, kind, protocol)
            try:
                plain.connect(address)
                if access.tls is not None:
                    self._secure(plain, access.tls)
            except OSError as error:
                self.close()
                problem = error
            else:
                return
        raise Unreachable(f"can't connect to {access.authority}: {problem}") from problem

    def _new_socket(self, family: int, kind: int, protocol: int) -> socket.socket:
        plain = socket.socket(family, kind, protocol)
        for level, option, value in _OPTIONS:
            plain.setsockopt(level, option, value)
        plain.settimeout(CONNECT_TIMEOUT)
        with self._lock:
            if self._aborted:
                plain.close()
                raise Aborted("closed from this side")
            self._socket = plain
        return plain

    def _secure(self, plain: socket.socket, tls: "ssl.SSLContext") -> None:
        with self._lock:
            # The handshake comes after, so that `abort` always finds the socket in use.
            secure = tls.wrap_socket(plain, server_hostname=self._access.server_name or self._access.host,
                                     do_handshake_on_connect=False)
            self._socket = secure
        secure.do_handshake()
