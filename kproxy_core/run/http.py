"""Every HTTP listener of the process on one thread that sleeps while nobody asks."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kproxy_core.model.address import Address


class Request(NamedTuple):
    """One request, as far as handlers care."""

    method: str
    path: str
    """Without the query."""
    query: str


class Answer(NamedTuple):
    """What a handler answers."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


Handler = Callable[[Request], Answer]
"""Answers one request, quickly: it runs on the server's thread, and all other clients wait."""

Binding = tuple[Address, int]
"""An address and TCP port to listen on."""


class Listener:
    """Sockets that share a handler; made by `HttpServer.listen`."""

    def close(self) -> None:
        """Stop listening; takes effect before anything asked of the server later."""

    @property
    def port(self) -> int:
        """The port that the first binding got, once bound (`HttpServer.settle`); 0: not bound."""
        raise NotImplementedError


class HttpServer:
    """Serves any number of listeners. All methods may be called from any thread and never block."""

    def start(self) -> None:
        """Start the thread (a daemon)."""

    def stop(self) -> None:
        """Close everything and end the thread; returns when it has ended."""

    def listen(
        self,
        name: str,
        bindings: Sequence[Binding],
        handler: Handler,
        *,
        both_families: bool = False,
        failed: Callable[[OSError], None] | None = None,
    ) -> Listener:
        """Serve *handler* on all *bindings*, or on none of them: it is then tried again every 5 s.

        *both_families*: an unspecified address of either family listens on both (as Go's "tcp").
        *failed* is called on the server's thread for each failure; by default it is logged.
        *name* is for the log.
        """
        raise NotImplementedError

    def settle(self, timeout: float = 5.0) -> None:
        """Wait until everything asked so far has been done (each bind tried once)."""
