"""Requests of one thread to the API server: granted, or refused with a typed reason."""

import threading
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from ssl import SSLError

import msgspec
from msgspec import Struct

from kproxy_core.kube.access import CurrentAccess, Stamp, stamp
from kproxy_core.kube.decode import UNDECODABLE, Malformed, Status
from kproxy_core.kube.reading import shown
from kproxy_core.kube.transport import (
    JSON,
    LIMITS,
    Aborted,
    Limits,
    Response,
    Transport,
    without_managed_fields,
)
from kproxy_core.model.timing import TokenBucket

SILENCE = 60.0
"""Timeout in seconds for a silent answer."""

MAX_REFUSAL = 1 << 20
"""Limit in bytes for the body of an answer other than 200."""

_NOT_ACCEPTABLE = 406


class StatusError(Exception):
    """The server refused a request with an HTTP status, or in the middle of a watch."""

    def __init__(self, status: Status, retry_after: float = 0.0) -> None:
        super().__init__(f"{status.code} {shown(status.reason or '')}: {shown(status.message or '', 200)}")
        self.code = status.code or 0
        asked = status.details.retry_after_seconds if status.details else None
        self.retry_after = max(retry_after, asked or 0.0)
        """Seconds that the server asks us to wait; 0: it does not say."""


class ResourceExpired(Exception):
    """The server lost the resource version: everything must be listed again."""


class ApiRequest(Struct, frozen=True):
    """One request to the API server, as client-go counts it (``rest_client_*``)."""

    host: str
    """``host:port`` of the server."""
    code: str
    """HTTP status, or ``<error>`` if there was no answer."""
    waited: float
    """Seconds that the rate limit delayed it."""
    seconds: float
    """Seconds until the whole answer had arrived, or a watch was granted or refused."""
    received: int | None
    """Bytes of the whole answer; None: a watch, or no answer."""
    method: str = "GET"
    sent: int = 0
    """Bytes of the request's body."""


Observe = Callable[[ApiRequest], None]
"""Called after each request, by the thread that made it."""


class ApiRequests:
    """Requests to the API server with the current credentials, on a persistent connection.

    *accept*: the Accept header, to which a wish to omit managed fields is added. A server that refuses this,
    or protobuf, is asked without from then on.
    Used by one thread; only `abort` may be called by another.
    """

    def __init__(
        self, access: CurrentAccess, rate: TokenBucket, observe: Observe, accept: str,
        limits: Limits = LIMITS,
    ) -> None:
        self._limits = limits
        self._current = access
        self._rate = rate
        self._observe = observe
        self._accept = without_managed_fields(accept)
        self._less = [accept, JSON] if accept != JSON else [JSON]
        """What to ask for next, each time that the server can't answer so."""
        self._stopping = threading.Event()
        self._access = access.now
        self._tried = self._access
        """The access of the last request."""
        self._noticed: dict[str, Stamp] = {}
        """Replaced files that `files_replaced` has reported, and their stamps."""
        self._transport = Transport(self._access, self._limits)

    def list(self, target: str, first: bool) -> tuple[bytes, bool]:
        """Return a page of a list, and whether it is protobuf. Only the *first* page waits for the rate
        limit.

        Raises StatusError, ResourceExpired, OSError, ProtocolError.
        """
        # The other pages belong to the same list, which kube-proxy requests as a whole.
        response, data = self._get(target, self._wait_for_turn() if first else 0.0, is_list=True)
        return data, response.is_protobuf

    def watch(self, target: str) -> Response:
        """Return a watch that was granted. Raises as `list` does."""
        response, _ = self._get(target, self._wait_for_turn(), is_list=False)
        return response

    def _get(self, target: str, waited: float, *, is_list: bool) -> tuple[Response, bytes]:
        """Return an answer, and the body of a list's. *waited*: seconds, for the observer."""
        response, data = self._ask(target, waited, is_list=is_list)
        while response.status == _NOT_ACCEPTABLE and self._less:
            self._accept = self._less.pop(0)
            response, data = self._ask(target, 0.0, is_list=is_list)
        if response.status != 200:
            raise _refused(response, data if is_list else response.read_all(MAX_REFUSAL))
        return response, data

    def _ask(self, target: str, waited: float, *, is_list: bool) -> tuple[Response, bytes]:
        started, code, received, data = time.monotonic(), "<error>", None, b""
        self._tried = self._access
        try:
            response = self._transport.get(
                target, SILENCE, accept=self._accept, compressed=is_list, allowance=self._limits.allowance)
            if is_list:
                data = response.read_all(
                    self._limits.largest_page if response.status == 200 else MAX_REFUSAL)
                received = len(data)
            code = str(response.status)
        finally:
            seconds = time.monotonic() - started
            self._observe(ApiRequest(self._access.authority, code, waited, seconds, received))
        return response, data

    def allow_endless_watch(self) -> None:
        """Let the watch last as long as it is not silent for `Limits.watch_silence`."""
        self._transport.socket.start_answer(self._limits.watch_silence)

    def disconnect(self) -> None:
        """Close the connection; the next request makes a new one."""
        self._transport.close()

    def abort(self) -> None:
        """Fail the current request at once, and every further one."""
        self._stopping.set()
        self._transport.abort()

    def keep_up(self) -> None:
        """Load the credentials again if a file was replaced or they expired.

        Raises AccessError, having changed nothing.
        """
        self._current.keep_up()
        self._take_current()

    def renew(self, error: Exception) -> None:
        """Load the credentials again if *error* may be due to them or a CA.

        Raises AccessError, having changed nothing.
        """
        if (error.code == 401 if isinstance(error, StatusError)
                else self._access.tls is not None and _is_about_tls(error)):
            self._current.renew(self._access)
            self._take_current()

    def files_replaced(self) -> bool:
        """Return whether a file was replaced since the last request and since the last call."""
        found = {path: now for path, known in self._tried.files
                 if (now := stamp(path)) is not None and now not in (known, self._noticed.get(path))}
        self._noticed |= found
        return bool(found)

    def _take_current(self) -> None:
        if self._access is self._current.now:
            return
        self._access = self._current.now
        self._transport.close()
        self._transport = Transport(self._access, self._limits)
        if self._stopping.is_set():
            self._transport.abort()

    def _wait_for_turn(self) -> float:
        delay = self._rate.reserve(time.monotonic())
        if delay and self._stopping.wait(delay):
            raise Aborted("closed from this side")
        return delay


_decode_status = msgspec.json.Decoder(Status).decode


def _refused(response: Response, body: bytes) -> Exception:
    """Return the exception for an answer other than 200."""
    if response.is_protobuf:
        from kproxy_core.kube.protobuf import read_status
    try:
        said = read_status(body) if response.is_protobuf else _decode_status(body)
    except (*UNDECODABLE, Malformed):
        said = Status()
    status = Status(response.status, said.reason, said.message, said.details)
    return status_error(status, _retry_after(response))


def status_error(status: Status, retry_after: float = 0.0) -> Exception:
    """Return the exception for *status*: 410 stands for a resource version, or a list, that is too old."""
    if status.code == 410:
        return ResourceExpired(shown(status.message or status.reason or "410 Gone", 200))
    return StatusError(status, retry_after)


def _retry_after(response: Response) -> float:
    """Return the seconds that Retry-After asks for (RFC 9110, section 10.2.3); 0: none."""
    asked = response.headers.get("retry-after", "")
    if asked.isascii() and asked.isdigit():
        return float(asked[:9])
    if not asked:
        return 0.0
    try:
        # By the server's clock, which may be wrong.
        return (parsedate_to_datetime(asked)
                - parsedate_to_datetime(response.headers.get("date", ""))).total_seconds()
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _is_about_tls(error: Exception) -> bool:
    return isinstance(error, SSLError) or isinstance(error.__cause__, SSLError)
