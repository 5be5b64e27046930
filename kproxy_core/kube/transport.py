"""Requests to one API server over urllib3: sockets that another thread can end, typed errors, bounded
answers.
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
from collections.abc import Iterator, Mapping
from io import BytesIO
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

from msgspec import Struct
from urllib3 import BaseHTTPResponse, HTTPHeaderDict, PoolManager, ProxyManager, Timeout
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError, NewConnectionError
from urllib3.util import SKIP_HEADER, make_headers

import kproxy_core
from kproxy_core.kube.access import Access
from kproxy_core.linux import packages

JSON = "application/json"
PROTOBUF = "application/vnd.kubernetes.protobuf"
PROTOBUF_OR_JSON = f"{PROTOBUF},{JSON}"
"""An Accept header: JSON from servers and proxies that know no protobuf."""

MAX_LINE = 4 << 20
"""Limit in bytes for one line or frame, a little above the largest object that an API server stores."""

CONNECT_TIMEOUT = 10.0
"""Timeout in seconds for connecting, for a proxy's answer and for each step of a TLS handshake."""

READ_SIZE = 128 << 10
"""Size in bytes of one read, so that a burst which waits in the kernel is one batch."""

_USER_AGENT = f"kproxy/{kproxy_core.__version__}"
_FRAME_HEADER = 4
"""Bytes of a frame's length, in network order: apimachinery's LengthDelimitedFramer."""


class ProtocolError(Exception):
    """The server sent something other than HTTP, or stopped in the middle of an answer."""


class ResponseTooLarge(ProtocolError):
    def __init__(self, limit: int) -> None:
        super().__init__(f"answer exceeds {limit} bytes")


class Unreachable(OSError):
    """No connection can be made; the cause is chained."""


class Aborted(OSError):
    """This side closed the connection."""


class TooSlow(TimeoutError):
    """The answer arrived at less than `Limits.min_rate`."""


# Content types.


def accept_header(configured: str) -> str | None:
    """Return the Accept header for *configured*, content types separated by commas, the preferred one first.

    None: it names neither JSON nor protobuf, or only protobuf and its package is not installed.
    """
    for name in configured.split(","):
        if is_protobuf(name) and packages.is_installed("protobuf"):
            return PROTOBUF_OR_JSON
        if _media_type(name) == JSON:
            return JSON
    return None


def without_managed_fields(accept: str) -> str:
    """Return *accept* with a form before each type in which objects have no ``metadata.managedFields``.

    Nothing reads them here. API servers that do not know the parameter (KEP-5958), or have it disabled,
    ignore it and answer in the type as it is. The Content-Type of the answer does not tell which.
    """
    return ",".join(f"{kind};drop=metadata.managedFields,{kind}" for kind in accept.split(","))


def is_protobuf(content_type: str) -> bool:
    """Return whether *content_type*, perhaps with parameters, is that of protobuf."""
    return _media_type(content_type) == PROTOBUF


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


# Lines and frames of a byte stream. No I/O.

class Lines:
    """Splits a stream into lines with their ends.

    Skips empty lines, and lines of more than *limit* bytes without their ends.
    """

    __slots__ = ("_held", "_limit", "_skipping")

    def __init__(self, limit: int = MAX_LINE) -> None:
        self._limit = limit
        self._held = bytearray()
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes | None]:
        """Return the lines that end in *data*, the next bytes of the stream; None: a line is too long."""
        lines = BytesIO(data).readlines()  # split() compares each byte, this calls memchr
        found: list[bytes | None] = []
        rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        if lines:
            if self._skipping:
                self._skipping = False
                del lines[0]
            elif self._held:
                lines[0] = b"".join((self._held, lines[0]))
            self._held.clear()
            found += [line if len(line) <= self._limit + 1 else None for line in lines if line != b"\n"]
        if rest and not self._skipping:
            self._held += rest
            if len(self._held) > self._limit:
                self._held.clear()
                self._skipping = True
                found.append(None)
        return found


class Frames:
    """Splits a stream into the bodies of its frames.

    Skips empty frames, and frames of more than *limit* bytes without buffering them.
    """

    __slots__ = ("_held", "_limit", "_skip")

    def __init__(self, limit: int = MAX_LINE) -> None:
        self._limit = limit
        self._held = bytearray()
        self._skip = 0
        """Bytes to skip of a frame that is too long."""

    def feed(self, data: bytes) -> list[bytes | None]:
        """Return the frames that end in *data*, the next bytes of the stream; None: a frame is too long."""
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        held = self._held
        held += data[skipped:]
        frames: list[bytes | None] = []
        start = 0
        while len(held) >= (body := start + _FRAME_HEADER):
            size = int.from_bytes(held[start:body], "big")
            end = body + size
            if size > self._limit:
                frames.append(None)
                self._skip = max(end - len(held), 0)
            elif end > len(held):
                break
            elif size:
                frames.append(bytes(held[body:end]))
            start = end
        del held[:start]
        return frames


# Sockets under urllib3, which another thread can shut down.


class Limits(Struct, frozen=True, kw_only=True):
    """Limits on the silence, the duration and the size of an API server's answers."""

    keepalive: tuple[int, int, int] = (15, 10, 3)
    """Seconds of silence before a peer is probed, seconds between probes, and unanswered probes."""

    min_rate: int = 16 << 10
    """Minimum sustained rate of a list, bytes/s."""

    allowance: float = 60.0
    """Seconds that a page of a list, or a watch's initial events, may take besides those for the size."""

    watch_silence: float = 90.0
    """Seconds without a byte after which a watch is given up: there is a bookmark a minute at least.

    A longer silence means a server that hangs, or one that a load balancer in between has lost.
    """

    largest_page: int = 32 << 20
    """Bytes of one page of a list, decompressed."""

    largest_list: int = 4 << 30
    """Bytes of everything that exists, in a list or at the start of a watch."""

    most_held: int = 512 << 20
    """Bytes of the encodings of all objects of one kind, far above those of the largest clusters."""

    @property
    def peer_timeout(self) -> int:
        """Seconds after which the kernel notices that a peer vanished."""
        idle, interval, probes = self.keepalive
        return idle + interval * probes

    @property
    def socket_options(self) -> list[tuple[int, int, int]]:
        idle, interval, probes = self.keepalive
        return [
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self.peer_timeout * 1000),
        ]


LIMITS = Limits()


class AbortableSocket:
    """The socket of the connection in use. One thread uses it; only `abort` may be called by another.

    urllib3 cannot interrupt a connection attempt or bound a whole answer, and reads a burst of chunks one by
    one. Its connections use this socket and its buffer (through the methods that its SOCKS connection
    overrides) and do the rest: TLS, proxies, framing. An attempt through SOCKS can't be interrupted.
    """

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._stand_in: socket.socket | None = None
        """A duplicate of the socket, to shut it down while TLS wraps it."""
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
                for option in self._limits.socket_options:
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
        """Set the limits of the next answer: *silence* is the timeout in seconds between bytes.

        *allowance*: seconds that it may take in all, and one more for each `Limits.min_rate` bytes. 0 sets
        no limit.
        """
        self.silence = silence
        self._received = 0
        self._deadline = (time.monotonic(), allowance) if allowance else None

    def answer(self, connected: socket.socket, **options: Any) -> http.client.HTTPResponse:
        """Return the answer that arrives on *connected*, in the framing of http.client."""
        buffer = self._buffer = io.BufferedReader(_Raw(self, connected), READ_SIZE)
        # Of a socket, http.client only uses a file to read from.
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
            return False  # the next read meets it again
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
        left = allowance + self._received / self._limits.min_rate - lasted
        if left <= 0:
            raise TooSlow(f"received only {self._received} bytes in {lasted:.0f} s")
        return left


class _Raw(io.RawIOBase):
    """Unbuffered bytes of a socket, within the limits of *owner*."""

    def __init__(self, owner: AbortableSocket, connected: socket.socket) -> None:
        self._owner = owner
        self._socket = connected
        self._raw = connected.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int | None:
        return self._owner.receive(self._socket, self._raw, target)

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


def connection_class(base: type[HTTPConnection], owner: AbortableSocket) -> type[HTTPConnection]:
    """Return a subclass of urllib3's connection *base* whose sockets belong to *owner*."""

    class AbortableConnection(base):  # type: ignore[misc, valid-type]
        def _new_conn(self) -> socket.socket:
            if hasattr(self, "_socks_options"):
                made: socket.socket = super()._new_conn()
            else:
                try:
                    made = owner.open(self._dns_host.strip("[]"), self.port)
                except OSError as error:
                    # urllib3 takes a bare ConnectionResetError for one of a connection that was made.
                    raise NewConnectionError(self, str(error)) from error
            owner.start_handshake(made)
            return made

        def connect(self) -> None:
            owner.is_connecting = True
            made = None
            try:
                super().connect()
                made = getattr(self.sock, "socket", self.sock)  # TLS to a server within TLS to a proxy
            finally:
                owner.end_handshake(made)
            owner.is_connecting = False
            owner.connections += 1
            # Without verification only where the kubeconfig asks for that: no warning each time.
            self.is_verified = True

        def response_class(self, connected: socket.socket, **options: Any) -> http.client.HTTPResponse:
            return owner.answer(connected, **options)

    return AbortableConnection


# Requests and responses.

class Response:
    """The response to one request, whose body is still to be read."""

    def __init__(self, transport: "Transport", answer: BaseHTTPResponse) -> None:
        self.status = answer.status
        self.headers: Mapping[str, str] = answer.headers
        self._transport = transport
        self._answer = answer
        self._problem: Exception | None = None

    @property
    def is_protobuf(self) -> bool:
        """Return whether the body is Kubernetes protobuf; else it should be JSON."""
        return is_protobuf(self.headers.get("content-type", ""))

    def read(self) -> bytes:
        """Return the bytes of the body that have arrived, at least one; b"" at its end.

        Raises OSError, ProtocolError.
        """
        if self._problem is not None:
            raise self._problem
        data = self._read_once()
        size, pieces = len(data), [data]
        try:
            while data and size < READ_SIZE and self._transport.socket.has_more():
                data = self._read_once()
                size += len(data)
                pieces.append(data)
        except (OSError, ProtocolError) as error:
            self._problem = error  # after what arrived before it
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read_once(self) -> bytes:
        with self._transport.typed_errors():
            return self._answer.read1(READ_SIZE)

    def read_all(self, limit: int) -> bytes:
        """Return the rest of the body, decompressed. Raises OSError, ProtocolError, ResponseTooLarge."""
        pieces, size = [], 0
        while data := self.read():
            pieces.append(data)
            size += len(data)
            if size > limit:
                self._transport.close()
                raise ResponseTooLarge(limit)
        return b"".join(pieces)


class Transport:
    """Requests to one API server, one at a time, on a persistent connection.

    Used by one thread; only `abort` may be called by another.
    """

    def __init__(self, access: Access, limits: Limits = LIMITS) -> None:
        self._access = access
        self.socket = AbortableSocket(limits)
        self._manager = _manager(access, limits)
        pools: dict[str, Any] = self._manager.pool_classes_by_scheme
        self._manager.pool_classes_by_scheme = {
            scheme: type(
                pool.__name__, (pool,), {"ConnectionCls": connection_class(pool.ConnectionCls, self.socket)})
            for scheme, pool in pools.items()}
        self._answer: BaseHTTPResponse | None = None

    def get(
        self, target: str, silence: float, *, accept: str = JSON, compressed: bool = False,
        allowance: float = 0.0,
    ) -> Response:
        """Send a GET for *target* (path and query) and return the answer once its head has arrived.

        *silence*: timeout in seconds between bytes. *accept*: accepted content types. *compressed*: accept a
        compressed body. *allowance*: see `AbortableSocket.start_answer`. Discards the rest of the previous
        answer. Raises OSError, ProtocolError.
        """
        coding = "gzip" if compressed and self._access.compression else SKIP_HEADER
        headers = {"Accept": accept, "Accept-Encoding": coding}
        known = self.socket.connections
        try:
            return self._ask("GET", target, headers, None, silence, allowance)
        except ConnectionError:
            if not known or self.socket.connections != known or self.socket.is_aborted:
                raise
        # The server closed the persistent connection just before the request: no failure yet.
        return self._ask("GET", target, headers, None, silence, allowance)

    def post(self, target: str, body: bytes, silence: float) -> Response:
        """Send a POST with *body*, JSON, to *target*. Raises as `get` does."""
        headers = {"Content-Type": JSON, "Accept": JSON, "Accept-Encoding": SKIP_HEADER}
        return self._ask("POST", target, headers, body, silence, 0.0)

    def _ask(self, method: str, target: str, headers: Mapping[str, str], body: bytes | None, silence: float,
             allowance: float) -> Response:
        if self._answer is not None and not self._answer.closed:
            self.close()
        self.socket.start_answer(silence, allowance)
        sent = HTTPHeaderDict([("User-Agent", _USER_AGENT), *headers.items(), *self._access.headers])
        with self.typed_errors():
            self._answer = self._manager.urlopen(
                method, self._access.server + target, body=body, headers=sent, redirect=False, retries=False,
                preload_content=False, timeout=Timeout(connect=CONNECT_TIMEOUT, read=silence))
        return Response(self, self._answer)

    def close(self) -> None:
        """Close the connection; the next request makes a new one."""
        if self._answer is not None:
            self._answer.close()
            self._answer = None
        self._manager.clear()
        self.socket.close()

    def abort(self) -> None:
        """Fail the current request at once, and every further one."""
        self.socket.abort()

    @contextlib.contextmanager
    def typed_errors(self) -> Iterator[None]:
        """Turn the errors of urllib3 into OSError and ProtocolError."""
        try:
            yield
        except (HTTPError, ValueError) as error:
            if self.socket.is_aborted:
                raise Aborted("closed from this side") from error
            root = _root(error)
            if self.socket.is_connecting:
                self.socket.is_connecting = False
                via = f" through the proxy {self._access.via}" if self._access.via else ""
                raise Unreachable(f"can't connect to {self._access.authority}{via}: {root}") from root
            if isinstance(root, OSError):
                raise root from None
            raise ProtocolError(str(root) or type(root).__name__) from error


def _manager(access: Access, limits: Limits) -> PoolManager:
    options: dict[str, Any] = {"maxsize": 1, "socket_options": limits.socket_options}
    if access.tls is not None:
        options |= {"ssl_context": access.tls, "server_hostname": access.server_name or None}
    if not access.proxy:
        return PoolManager(**options)
    proxy = urlsplit(access.proxy)
    user, password = (part and unquote(part) for part in (proxy.username, proxy.password))
    if proxy.scheme.startswith("socks"):
        from urllib3.contrib.socks import SOCKSProxyManager

        return SOCKSProxyManager(access.proxy, user, password, **options)
    headers = make_headers(proxy_basic_auth=f"{user}:{password or ''}") if user else None
    # client-go, too, trusts the CA of the cluster for an https proxy.
    return ProxyManager(access.proxy, proxy_headers=headers, proxy_ssl_context=access.tls, **options)


def _root(error: BaseException) -> BaseException:
    """Return the error that urllib3 wrapped, once or more."""
    while True:
        wrapped = (part for part in error.args if isinstance(part, BaseException))
        inner = error.__cause__ or next(wrapped, None)
        if inner is None:
            return error
        error = inner
