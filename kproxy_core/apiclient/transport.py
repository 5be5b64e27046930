"""Requests to one API server over urllib3, with every error typed and every answer bounded."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from urllib3 import BaseHTTPResponse, HTTPHeaderDict, PoolManager, ProxyManager, Timeout
from urllib3.exceptions import HTTPError
from urllib3.util import SKIP_HEADER, make_headers

import kproxy_core
from kproxy_core.apiclient.access import Access
from kproxy_core.apiclient.content import JSON, is_protobuf
from kproxy_core.apiclient.wire import CONNECT_TIMEOUT, PIECE, Aborted, Wire, on_wire, socket_options

_USER_AGENT = f"kproxy/{kproxy_core.__version__}"


class ProtocolError(Exception):
    """The server sent something other than HTTP, or stopped in the middle of an answer."""


class TooLarge(ProtocolError):
    def __init__(self, limit: int) -> None:
        super().__init__(f"answer exceeds {limit} bytes")


class Unreachable(OSError):
    """No connection can be made; the cause is chained."""


class Response:
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
        """Return the next bytes of the body, all that have arrived; b"" at its end.

        Raises OSError, ProtocolError.
        """
        if self._problem is not None:
            raise self._problem
        data = self._read_once()
        size, pieces = len(data), [data]
        try:
            while data and size < PIECE and self._transport.wire.has_more():
                data = self._read_once()
                size += len(data)
                pieces.append(data)
        except (OSError, ProtocolError) as error:
            self._problem = error  # after what arrived before it
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read_once(self) -> bytes:
        with self._transport.typed_errors():
            return self._answer.read1(PIECE)

    def read_all(self, limit: int) -> bytes:
        """Return the rest of the body, decompressed. Raises OSError, ProtocolError, TooLarge."""
        pieces, size = [], 0
        while data := self.read():
            pieces.append(data)
            size += len(data)
            if size > limit:
                self._transport.close()
                raise TooLarge(limit)
        return b"".join(pieces)


class Transport:
    """Requests to one API server, one at a time, on a connection that is kept as long as it can be.

    Used by one thread; only `abort` may be called by another.
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        self.wire = Wire()
        self._manager = _manager(access)
        pools: dict[str, Any] = self._manager.pool_classes_by_scheme
        self._manager.pool_classes_by_scheme = {
            scheme: type(pool.__name__, (pool,), {"ConnectionCls": on_wire(pool.ConnectionCls, self.wire)})
            for scheme, pool in pools.items()}
        self._answer: BaseHTTPResponse | None = None

    def get(
        self, target: str, silence: float, *, accept: str = JSON, compressed: bool = False,
        allowance: float = 0.0,
    ) -> Response:
        """Ask for *target* (path and query) and return the answer once its head has arrived.

        *silence*: seconds without a byte that are too many. *accept*: content types that the body may have.
        *compressed*: the body may be. *allowance*: see `Wire.start_answer`. The rest of the previous answer
        is lost. Raises OSError, ProtocolError.
        """
        coding = "gzip" if compressed and self._access.compression else SKIP_HEADER
        headers = {"Accept": accept, "Accept-Encoding": coding}
        known = self.wire.connections
        try:
            return self._ask("GET", target, headers, None, silence, allowance)
        except ConnectionError:
            if not known or self.wire.connections != known or self.wire.is_aborted:
                raise
        # The server closed the kept connection just before the request: no failure yet.
        return self._ask("GET", target, headers, None, silence, allowance)

    def post(self, target: str, body: bytes, silence: float) -> Response:
        """Send *body*, JSON, to *target*. Raises as `get` does."""
        headers = {"Content-Type": JSON, "Accept": JSON, "Accept-Encoding": SKIP_HEADER}
        return self._ask("POST", target, headers, body, silence, 0.0)

    def _ask(self, method: str, target: str, headers: Mapping[str, str], body: bytes | None, silence: float,
             allowance: float) -> Response:
        if self._answer is not None and not self._answer.closed:
            self.close()
        self.wire.start_answer(silence, allowance)
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
        self.wire.close()

    def abort(self) -> None:
        """Fail the current request at once, and every further one."""
        self.wire.abort()

    @contextlib.contextmanager
    def typed_errors(self) -> Iterator[None]:
        """Turn the errors of urllib3 into OSError and ProtocolError."""
        try:
            yield
        except (HTTPError, ValueError) as error:
            if self.wire.is_aborted:
                raise Aborted("closed from this side") from error
            root = _root(error)
            if self.wire.is_connecting:
                self.wire.is_connecting = False
                via = f" through the proxy {self._access.via}" if self._access.via else ""
                raise Unreachable(f"can't connect to {self._access.authority}{via}: {root}") from root
            if isinstance(root, OSError):
                raise root from None
            raise ProtocolError(str(root) or type(root).__name__) from error


def _manager(access: Access) -> PoolManager:
    options: dict[str, Any] = {"maxsize": 1, "socket_options": socket_options()}
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
