"""Clients: the endpoint that answers at a frontend, and the client address that it sees."""

import contextlib
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from kproxy_core.model.address import Protocol
from kproxy_core.testing.conformance.checks import Failed
from kproxy_core.testing.conformance.namespaces import Namespace
from kproxy_core.testing.conformance.network import NAMES

PATIENCE = 5.0
"""Timeout in seconds for an answer."""
SILENCE = 0.4
"""Seconds to wait where no answer may arrive."""

_KINDS = {Protocol.TCP: socket.SOCK_STREAM, Protocol.UDP: socket.SOCK_DGRAM}


class Answer(NamedTuple):
    """The endpoint that answered, and the client that it saw: names as in `network`, else an address."""

    by: str
    seen: str


class Frontend(NamedTuple):
    """An address that clients dial."""

    address: str
    port: int
    protocol: Protocol = Protocol.TCP

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{self.protocol.name} {host}:{self.port}"

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.address else socket.AF_INET


class Connection:
    """An established connection."""

    def __init__(self, sock: socket.socket, answer: Answer) -> None:
        self._sock = sock
        self.answer = answer

    def echoes(self) -> bool:
        """Return whether it still works."""
        try:
            self._sock.sendall(b"hello")
            return self._sock.recv(64) == b"hello"
        except OSError:
            return False

    def reset(self) -> None:
        """Reset the connection, so that none is left in TIME_WAIT."""
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()


def ask(host: Namespace, frontend: Frontend, source: str = "") -> Answer:
    """Return the answer to a new connection or flow. Raises Failed without one."""
    with connection(host, frontend, source) as found:
        return found.answer


@contextlib.contextmanager
def connection(host: Namespace, frontend: Frontend, source: str = "") -> Iterator[Connection]:
    """Return a connection that has been answered. Raises Failed."""
    with host.socket(frontend.family, _KINDS[frontend.protocol]) as sock:
        try:
            answer = _dial(sock, frontend, source, PATIENCE)
        except OSError as error:
            problem = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise Failed(f"from {source or host.name} to {frontend}: {problem}") from error
        made = Connection(sock, answer)
        try:
            yield made
        finally:
            made.reset()


def refused(host: Namespace, frontend: Frontend) -> None:
    """Fail unless a client is refused at once."""
    with host.socket(frontend.family, _KINDS[frontend.protocol]) as sock:
        try:
            answer = _dial(sock, frontend, "", PATIENCE)
        except (ConnectionRefusedError, ConnectionResetError, PermissionError):
            return  # The last one is for senders of datagrams on the node itself.
        except OSError as error:
            problem = "no answer" if isinstance(error, TimeoutError) else error.strerror
            raise Failed(f"from {host.name} to {frontend}: {problem}, where it must be refused") from error
        raise Failed(f"from {host.name} to {frontend}: {answer.by} answers, where it must be refused")


def unanswered(host: Namespace, frontend: Frontend, source: str = "", *, silent: bool = False) -> None:
    """Fail if an answer arrives; with *silent*, also if the client is refused."""
    with host.socket(frontend.family, _KINDS[frontend.protocol]) as sock:
        try:
            answer = _dial(sock, frontend, source, SILENCE)
        except TimeoutError:
            return
        except OSError as error:
            if silent:
                told = error.strerror
                raise Failed(
                    f"from {source or host.name} to {frontend}: {told}, where it must be dropped"
                ) from error
            return
        raise Failed(f"from {source or host.name} to {frontend}: {answer.by} answers, and must not")


def _dial(sock: socket.socket, frontend: Frontend, source: str, patience: float) -> Answer:
    sock.settimeout(patience)
    if source:
        sock.bind((source, 0))
    sock.connect((frontend.address, frontend.port))
    if frontend.protocol is Protocol.UDP:
        sock.send(b"who?")
    line = b""
    while not line.endswith(b"\n"):
        data = sock.recv(512)
        if not data:
            raise ConnectionResetError("closed without an answer")
        line += data
    by, seen = line.decode().split()
    return Answer(by, NAMES.get(seen, seen))
