"""Clients: send packets from a host, and report their fate."""

import errno
import http.client
import json
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from kproxy_conformance.network.addresses import symbol_of
from kproxy_conformance.network.namespaces import Namespace
from kproxy_conformance.network.patience import patience

REACHED, REFUSED, DROPPED, UNREACHABLE = "reached", "refused", "dropped", "unreachable"
RESET, BROKEN = "reset", "broken"
"""An established connection ended with an error, or in another way."""

ATTEMPT_TIMEOUT = 0.8
"""Seconds without an answer after which an attempt counts as dropped. Shorter than the second after which TCP
repeats a lost SYN, which would hide the loss. Multiplied by `patience`, as every timeout here."""

_IP_FREEBIND, _IPV6_FREEBIND = 15, 78
_IP_RECVERR, _IPV6_RECVERR = 11, 25
_RESETS = {errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE}
"""From the peer; from the node, which destroys the socket; for those who send once more."""
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: str
    """`REACHED`, `REFUSED`, `DROPPED`, `UNREACHABLE`, `RESET` or `BROKEN`."""
    endpoint: str = ""
    """Symbol of the endpoint that answered."""
    port: int = 0
    """Its port."""
    seen_client: str = ""
    """The client's address as the endpoint saw it."""
    own_client: str = ""
    """The client's address as the client saw it; "" if the attempt failed before it was chosen."""
    own_port: int = 0
    """The client's port, of an attempt that reached an endpoint."""

    def __str__(self) -> str:
        if self.kind != REACHED:
            return self.kind
        return f"{self.endpoint}:{self.port} (which saw {self.seen_client})"


def _failure(error: OSError, own: str = "") -> Outcome:
    if isinstance(error, TimeoutError):
        kind = DROPPED
    elif isinstance(error, ConnectionRefusedError):
        kind = REFUSED
    elif error.errno in _RESETS:
        kind = RESET
    else:
        kind = UNREACHABLE if error.errno in _UNREACHABLE else BROKEN
    return Outcome(kind, own_client=own)


class Conversation:
    """A TCP connection or a UDP flow that can be used again and again."""

    def __init__(
        self, host: Namespace, address: str, port: int, *, protocol: str = "tcp",
        source: str | None = None, source_port: int = 0, timeout: float = ATTEMPT_TIMEOUT,
    ) -> None:  # fmt: skip
        self._is_stream = protocol == "tcp"
        v6 = ":" in address
        self._socket = host.socket(
            socket.AF_INET6 if v6 else socket.AF_INET,
            socket.SOCK_STREAM if self._is_stream else socket.SOCK_DGRAM,
        )
        self._timeout = timeout * patience()
        self._socket.settimeout(self._timeout)
        self._target = (address, port)
        if source or source_port:
            level = socket.IPPROTO_IPV6 if v6 else socket.IPPROTO_IP
            self._socket.setsockopt(level, _IPV6_FREEBIND if v6 else _IP_FREEBIND, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                self._socket.bind((source or ("::" if v6 else "0.0.0.0"), source_port))
            except OSError:
                self._socket.close()
                raise

    def start(self) -> Outcome:
        """Connect. A TCP server answers at once, a UDP server when it is sent something."""
        try:
            if self._is_stream:
                self._connect_stream()
                return self._read()
            self._socket.connect(self._target)
            return self.exchange()
        except OSError as error:
            return _failure(error, self._own_address())

    def _own_address(self) -> str:
        """Return the address from which the socket sends; "" if none has been chosen."""
        own: str = self._socket.getsockname()[0]
        return "" if own in ("0.0.0.0", "::") else own

    def _connect_stream(self) -> None:
        """Connect, noticing every ICMP error.

        An ICMP error that arrives while connect() still holds the socket does not end the attempt (the
        kernel would try again a second later), but it is always found in the socket's error queue.
        """
        v6 = self._socket.family == socket.AF_INET6
        level = socket.IPPROTO_IPV6 if v6 else socket.IPPROTO_IP
        self._socket.setsockopt(level, _IPV6_RECVERR if v6 else _IP_RECVERR, 1)
        self._socket.setblocking(False)
        error = self._socket.connect_ex(self._target)
        if error == errno.EINPROGRESS:
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            if not poll.poll(self._timeout * 1000):
                raise TimeoutError
            error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        error = error or self._queued_error()
        if error:
            raise OSError(error, os.strerror(error))
        self._socket.settimeout(self._timeout)

    def _queued_error(self) -> int:
        try:
            _, ancillary, _, _ = self._socket.recvmsg(512, 512, socket.MSG_ERRQUEUE)
        except BlockingIOError:
            return 0
        return int.from_bytes(ancillary[0][2][:4], sys.byteorder)

    def exchange(self) -> Outcome:
        try:
            if not self._is_stream:
                self._discard_late_answers()
            self._socket.send(b"again\n")
            return self._read()
        except OSError as error:
            return _failure(error, self._own_address())

    def _discard_late_answers(self) -> None:
        self._socket.setblocking(False)
        try:
            while True:
                self._socket.recv(4096)
        except BlockingIOError:
            pass
        finally:
            self._socket.settimeout(self._timeout)

    def _read(self) -> Outcome:
        data = b""
        while not data.endswith(b"\n"):
            piece = self._socket.recv(4096)
            if not piece:
                return Outcome(BROKEN)
            data += piece
        answer = json.loads(data.splitlines()[-1])
        endpoint = symbol_of(answer["address"])
        return Outcome(REACHED, endpoint, answer["port"], answer["client"], self._own_address(),
                       self._socket.getsockname()[1])

    def close(self) -> None:
        self._socket.close()

    def reset(self) -> None:
        """End a TCP connection with RST, so that nothing is left in TIME_WAIT."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


def dial(
    host: Namespace, address: str, port: int, *, protocol: str = "tcp", source: str | None = None,
    source_port: int = 0, timeout: float = ATTEMPT_TIMEOUT,
) -> Outcome:  # fmt: skip
    """Have one fresh conversation, and close it. *source_port* 0: one that the kernel chooses."""
    try:
        conversation = Conversation(
            host, address, port, protocol=protocol, source=source, source_port=source_port, timeout=timeout
        )
    except OSError as error:
        return _failure(error)
    try:
        return conversation.start()
    finally:
        conversation.close()


class Traffic:
    """Fresh conversations, one after the other, until it is stopped."""

    def __init__(self, attempt: Callable[[], Outcome], interval: float) -> None:
        """*interval*: seconds between two of them."""
        self._outcomes: list[Outcome] = []
        self._attempt = attempt
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._outcomes.append(self._attempt())

    @property
    def made(self) -> int:
        """The number of conversations that have ended."""
        return len(self._outcomes)

    def stop(self) -> list[Outcome]:
        self._stop.set()
        self._thread.join()
        return self._outcomes


class HttpAnswer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: str


class _HostConnection(http.client.HTTPConnection):
    def __init__(self, host: Namespace, address: str, port: int, timeout: float) -> None:
        super().__init__(address, port, timeout=timeout)
        self._from = host

    def connect(self) -> None:
        with self._from.entered():
            super().connect()


def http_get(
    host: Namespace, address: str, port: int, path: str, headers: Mapping[str, str] | None = None
) -> HttpAnswer | None:
    """Send a GET request from *host*; None if there is no answer."""
    connection = _HostConnection(host, address, port, 2 * patience())
    try:
        connection.request("GET", path, headers=dict(headers or {}))
        response = connection.getresponse()
        return HttpAnswer(response.status, dict(response.getheaders()), response.read().decode())
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def wait_until(check: Callable[[], T], seconds: float, interval: float = 0.02) -> T:
    """Call *check* until it returns a true value or *seconds*, multiplied by `patience`, have passed."""
    end = time.monotonic() + seconds * patience()
    while True:
        result = check()
        if result or time.monotonic() > end:
            return result
        time.sleep(interval)
