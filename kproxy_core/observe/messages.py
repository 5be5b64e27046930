"""HTTP/1 requests and answers as values."""

import enum
import threading
from collections.abc import Callable, Hashable
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import parse_qsl


class Request(NamedTuple):
    """One request, as far as handlers care."""

    method: str
    path: str
    """Without the query."""
    query: str
    accept: str = ""
    """Media types that the client accepts; "": any."""
    body: bytes = b""
    host: str = ""
    """Host and port that the client dialled, in its own words; "": not told (HTTP/1.0)."""
    origin: str = ""
    """Origin of the web page that sent it (RFC 6454); "": no page did, or not to change anything."""
    fetch_site: str = ""
    """Relation of that page to this server (``Sec-Fetch-Site``); "": not told."""
    fetch_mode: str = ""
    """``Sec-Fetch-Mode``, such as ``navigate`` for a link; "": not told."""

    @property
    def options(self) -> list[tuple[str, str]]:
        """Names and values in the query."""
        return parse_qsl(self.query, keep_blank_values=True)


class Answer(NamedTuple):
    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


class Turn(enum.Enum):
    """The order in which slow answers are made, most urgent first."""

    AT_ONCE = 0
    """Beside others: it takes hardly any CPU time, and its handler refuses a second one."""
    FIRST = 1
    IN_ORDER = 2


class Slow(NamedTuple):
    """An answer that takes long, and is made on another thread."""

    make: Callable[[threading.Event], Answer]
    """Called with an event that is set once no client waits for the answer."""
    seconds: float
    """Upper bound of the time it takes."""
    turn: Turn
    same: Hashable = None
    """Requests with the same value get the same answer; None: each gets its own."""


Handler = Callable[[Request], Answer | Slow]
"""Answers one request, quickly: it runs on the server's thread while all other clients wait."""


class HttpError(Exception):
    """The client sent no request that this server serves."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.answer = Answer(status, (HTTPStatus(status).phrase + "\n").encode())
