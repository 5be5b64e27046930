"""The sockets under urllib3: opened, read and shut down here, so that another thread can end them.

urllib3 has no way to interrupt a connection attempt or to bound a whole answer, and reads a burst of chunks
one by one. Its connections use these sockets and buffers (through the methods that its own SOCKS connection
overrides) and do the rest: TLS, proxies, framing. A connection attempt through SOCKS can't be interrupted.
"""

import contextlib
import errno
import http.client
import io
import os
import select
import socket
import ssl
import threading
import time
from types import SimpleNamespace
from typing import Any

from urllib3.connection import HTTPConnection
from urllib3.exceptions import NewConnectionError

CONNECT_TIMEOUT = 10.0
"""Timeout in seconds for connecting, for a proxy's answer and for each step of a TLS handshake."""

PIECE = 128 << 10
"""Bytes read at once, so that a burst which waits in the kernel is one batch."""

KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_PROBES = 15, 10, 3
"""Seconds of silence before a peer is probed, seconds between probes, and probes that may go unanswered."""

PEER_TIMEOUT = KEEPALIVE_IDLE + KEEPALIVE_INTERVAL * KEEPALIVE_PROBES
"""Seconds after which the kernel notices that a peer vanished."""

SLOWEST = 16 << 10
"""Bytes a second that a list has to arrive with in the long run."""


def socket_options() -> list[tuple[int, int, int]]:
    return [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PEER_TIMEOUT * 1000),
    ]


class Aborted(OSError):
    """The connection was closed from this side."""


class TooSlow(TimeoutError):
    """The answer did not arrive as fast as one of its size has to."""


class Wire:
    """The socket of the connection in use. One thread uses it; only `abort` may be called by another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._stand_in: socket.socket | None = None
        """Another handle of the socket, to shut it down while TLS takes it over."""
        self._buffer: io.BufferedReader | None = None
        self._answer: http.client.HTTPResponse | None = None
        self.is_aborted = False
        self.is_connecting = False
        self.connections = 0
        """Connections made so far."""
        self.silence = CONNECT_TIMEOUT
        """Seconds without a byte after which reading fails with TimeoutError."""
        self._deadline: tuple[float, float] | None = None
        """Start of the answer by the monotonic clock, and the seconds that it may take."""
        self._received = 0
        self._looking = False

    # -- opening and ending

    def open(self, host: str, port: int) -> socket.socket:
        """Return a socket connected to the first address of *host* that accepts. Raises OSError."""
        problem: OSError = OSError(f"{host} has no address")
        name = host.encode("ascii")  # urllib3 made it ASCII; for text, the codec idna would be imported
        for family, kind, protocol, _, address in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM):
            plain = socket.socket(family, kind, protocol)
            try:
                for option in socket_options():
                    plain.setsockopt(*option)
                self._connect(plain, address)
                return plain
            except OSError as error:
                plain.close()
                problem = error
        raise problem

    def _connect(self, plain: socket.socket, address: Any) -> None:
        """Connect. Starts under the lock: `abort` can't shut down a connection that has not been started."""
        plain.settimeout(0)
        with self._lock:
            if self.is_aborted:
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

    def start_handshake(self, connected: socket.socket) -> None:
        """Be ready to shut *connected* down while urllib3 wraps it."""
        with self._lock:
            self._stand_in = self._socket = socket.socket(fileno=os.dup(connected.fileno()))
            self._shut_down_if_aborted()

    def end_handshake(self, wrapped: socket.socket | None) -> None:
        """Use *wrapped* from now on; None: the connection was not made."""
        with self._lock:
            if self._stand_in is not None:
                self._stand_in.close()
            self._stand_in, self._socket = None, wrapped
            self._shut_down_if_aborted()

    def close(self) -> None:
        """Close the connection. urllib3 leaves that to the garbage collector, as do tracebacks."""
        with self._lock:
            if self._buffer is not None:
                self._buffer.close()  # which keeps the socket's descriptor open, too
            if self._socket is not None:
                self._socket.close()
            self._buffer = self._socket = None

    def abort(self) -> None:
        """Fail the current operation and every further connection attempt."""
        with self._lock:
            self.is_aborted = True
            self._shut_down_if_aborted()

    def _shut_down_if_aborted(self) -> None:
        if self.is_aborted and self._socket is not None:
            # Not SSLSocket's own, which would make the reading thread take the rest for plain text.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    # -- reading

    def start_answer(self, silence: float, allowance: float = 0.0) -> None:
        """Start to count for an answer that may be silent for *silence* seconds.

        *allowance*: seconds that it may take in all, and one more for each `SLOWEST` bytes; 0: for ever.
        """
        self.silence = silence
        self._received = 0
        self._deadline = (time.monotonic(), allowance) if allowance else None

    def answer(self, connected: socket.socket, **options: Any) -> http.client.HTTPResponse:
        """Return the answer that arrives on *connected*, in the framing of http.client."""
        buffer = self._buffer = io.BufferedReader(_Raw(self, connected), PIECE)
        # All that http.client wants from a socket is a file to read from.
        readable = SimpleNamespace(makefile=lambda _: buffer)
        self._answer = http.client.HTTPResponse(readable, **options)  # type: ignore[arg-type]
        return self._answer

    def has_more(self) -> bool:
        """Return whether more of the answer has arrived, so that reading on does not wait."""
        if self._buffer is None or self._buffer.closed or self._answer is None:
            return False
        self._looking = True
        try:
            waiting = self._buffer.peek(1)
        except OSError:
            return False  # reading on meets it again
        finally:
            self._looking = False
        if self._answer.chunked and not self._answer.chunk_left:
            # The end of a chunk, and perhaps the size and the start of the next.
            waiting = waiting.removeprefix(b"\r\n").partition(b"\r\n")[2]
        return bool(waiting)

    def receive(self, connected: socket.socket, raw: io.RawIOBase, target: memoryview) -> int | None:
        """Read from *raw* into *target*; None if nothing has arrived and the caller does not wait."""
        connected.settimeout(0 if self._looking else min(self._patience, self._left()))
        try:
            size = raw.readinto(target)
            if size and isinstance(connected, ssl.SSLSocket):
                size = _read_on(connected, target, size)
        except ssl.SSLWantReadError:
            return None
        except TimeoutError:
            self._left()
            raise TimeoutError(f"silent for {self._patience:g} s") from None
        finally:
            connected.settimeout(self._patience)  # for what urllib3 does next
        self._received += size or 0
        return size

    @property
    def _patience(self) -> float:
        return CONNECT_TIMEOUT if self.is_connecting else self.silence

    def _left(self) -> float:
        """Return the seconds left for the answer. Raises TooSlow if there are none."""
        if self._deadline is None:
            return self.silence
        started, allowance = self._deadline
        lasted = time.monotonic() - started
        left = allowance + self._received / SLOWEST - lasted
        if left <= 0:
            raise TooSlow(f"received only {self._received} bytes in {lasted:.0f} s")
        return left


class _Raw(io.RawIOBase):
    """Unbuffered bytes of a socket, read under the rules of a wire."""

    def __init__(self, wire: Wire, connected: socket.socket) -> None:
        self._wire = wire
        self._socket = connected
        self._raw = connected.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int | None:
        return self._wire.receive(self._socket, self._raw, target)

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


def _read_on(secure: ssl.SSLSocket, target: memoryview, size: int) -> int:
    """Read what else has arrived, as TLS gives one record at a time; return the size of all in *target*.

    An error, or the end, is met again by the next read.
    """
    secure.settimeout(0)
    with contextlib.suppress(OSError):
        while size < len(target):
            more = secure.recv_into(target[size:])
            if not more:
                break
            size += more
    return size


def on_wire(base: type[HTTPConnection], wire: Wire) -> type[HTTPConnection]:
    """Return a class of urllib3's connections like *base* whose sockets belong to *wire*."""

    class Connection(base):  # type: ignore[misc, valid-type]
        def _new_conn(self) -> socket.socket:
            if hasattr(self, "_socks_options"):
                made: socket.socket = super()._new_conn()
            else:
                try:
                    made = wire.open(self._dns_host.strip("[]"), self.port)
                except OSError as error:
                    # urllib3 takes a bare ConnectionResetError for one of a connection that was made.
                    raise NewConnectionError(self, str(error)) from error
            wire.start_handshake(made)
            return made

        def connect(self) -> None:
            wire.is_connecting = True
            made = None
            try:
                super().connect()
                made = getattr(self.sock, "socket", self.sock)  # TLS to a server within TLS to a proxy
            finally:
                wire.end_handshake(made)
            wire.is_connecting = False
            wire.connections += 1
            # Without verification only where the kubeconfig asks for that: no warning each time.
            self.is_verified = True

        def response_class(self, connected: socket.socket, **options: Any) -> http.client.HTTPResponse:
            return wire.answer(connected, **options)

    return Connection
