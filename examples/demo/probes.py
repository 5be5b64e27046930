"""Connections through a Service: which endpoint answers, and which source address it sees."""

import json
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Self

from examples.demo.sandbox import Place

PATIENCE = 10.0
"""Timeout of an attempt in seconds."""
_MANY = 60
"""Connections. One of three endpoints that are chosen at random is missed by so many once in 10^10 times."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The endpoint that answered, and the source address that it saw."""

    by: str
    seen: str


@dataclass(frozen=True, slots=True)
class Frontend:
    """An address that clients dial."""

    address: str
    port: int
    protocol: str = "TCP"

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}" + ("" if self.protocol == "TCP" else f"/{self.protocol.lower()}")


def dial(host: Place, frontend: Frontend) -> socket.socket:
    """Return a socket in *host*, connected to *frontend*. Raises OSError."""
    family = socket.AF_INET6 if ":" in frontend.address else socket.AF_INET
    kind = socket.SOCK_DGRAM if frontend.protocol == "UDP" else socket.SOCK_STREAM
    caller = host.socket(family, kind)
    try:
        caller.settimeout(PATIENCE)
        caller.connect((frontend.address, frontend.port))
        if frontend.protocol == "UDP":
            caller.send(b"who?\n")
    except OSError:
        caller.close()
        raise
    return caller


def hear(caller: socket.socket) -> Answer:
    """Return the answer of the other end. Raises OSError."""
    data = caller.recv(2048)
    if not data:
        raise ConnectionResetError("closed without an answer")
    words = json.loads(data)
    return Answer(words["by"], words["seen"])


def ask(host: Place, frontend: Frontend) -> Answer:
    """Open a new connection or flow, and return the answer. Raises OSError."""
    with dial(host, frontend) as caller:
        return hear(caller)


@dataclass
class Traffic:
    """New connections, one after another, until the end of the ``with`` block."""

    host: Place
    frontend: Frontend
    answered: Counter[str] = field(default_factory=Counter)
    last: dict[str, float] = field(default_factory=dict)
    """Start of the last connection that each endpoint answered, on the monotonic clock."""
    failures: list[str] = field(default_factory=list)
    _made: dict[str, int] = field(default_factory=dict)
    """Answered connections up to the last one that each endpoint answered."""

    def has_left(self, endpoint: str) -> bool:
        """Return whether *endpoint* answered none of so many connections that chance does not explain it."""
        return self.answered.total() - self._made.get(endpoint, 0) > _MANY

    def __enter__(self) -> Self:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._go, name="traffic")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _go(self) -> None:
        while not self._ended.wait(0.001):
            begun = time.monotonic()
            try:
                answer = ask(self.host, self.frontend)
            except OSError as error:
                self.failures.append(str(error))
            else:
                self.answered[answer.by] += 1
                self.last[answer.by] = begun
                self._made[answer.by] = self.answered.total()
