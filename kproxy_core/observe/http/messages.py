"""HTTP/1 requests and answers as values: what arrived means, and what is sent. Pure."""

from collections.abc import Callable
from typing import NamedTuple

LONGEST_HEAD = 16 * 1024
LONGEST_BODY = 64 * 1024

_REASONS = {
    200: "OK", 302: "Found", 400: "Bad Request", 404: "Not Found", 406: "Not Acceptable", 409: "Conflict",
    411: "Length Required", 413: "Content Too Large",
    431: "Request Header Fields Too Large", 500: "Internal Server Error", 503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}  # fmt: skip


class Request(NamedTuple):
    """One request, as far as handlers care."""

    method: str
    path: str
    """Without the query."""
    query: str
    accept: str = ""
    """The media types that the client takes; "": any."""
    body: bytes = b""


class Answer(NamedTuple):
    """What a handler answers."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


class Slow(NamedTuple):
    """An answer that takes its time: it is made on a thread of its own."""

    make: Callable[[], Answer]
    seconds: float
    """How long that takes, at most."""


Handler = Callable[[Request], Answer | Slow]
"""Answers one request, quickly: it runs on the server's thread, and all other clients wait."""


class Refused(Exception):
    """What arrived is no request that this server serves."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.answer = Answer(status, (_REASONS[status] + "\n").encode())


def parse(received: bytes) -> Request | None:
    """The request that *received* holds; None: it is not complete yet. Raises Refused.

    A body is waited for, also so that closing the connection doesn't reset it.
    """
    head, end, body = received.partition(b"\r\n\r\n")
    if len(head) > LONGEST_HEAD:
        raise Refused(431)
    if not end:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not (words[0].isascii() and words[0].isalpha()) or not words[2].startswith("HTTP/"):
        raise Refused(400)
    method, target, version = words
    if not version.startswith("HTTP/1."):
        raise Refused(505)
    if target.startswith("http://"):
        target = "/" + target.removeprefix("http://").partition("/")[2]
    if not target.startswith("/"):
        raise Refused(400)
    length, accept = _length_and_accept(lines)
    if len(body) < length:
        return None
    path, _, query = target.partition("?")
    return Request(method, path, query, accept, body[:length])


def _length_and_accept(lines: list[str]) -> tuple[int, str]:
    length = 0
    accepted = []
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise Refused(400)
        match name.lower():
            case "content-length":
                value = value.strip()
                if not (value.isascii() and value.isdigit()):
                    raise Refused(400)
                if len(value) > 9 or int(value) > LONGEST_BODY:
                    raise Refused(413)
                length = int(value)
            case "transfer-encoding":
                raise Refused(411)
            case "accept":
                accepted.append(value.strip())
    return length, ",".join(accepted)


def render(answer: Answer, date: str, with_body: bool = True) -> bytes:
    """The bytes of *answer*, sent at *date* (RFC 9110), after which the connection ends."""
    head = [
        f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, '')}",
        f"Content-Type: {answer.content_type}",
        "X-Content-Type-Options: nosniff",
        *(f"{name}: {value}" for name, value in answer.headers),
        f"Date: {date}",
        f"Content-Length: {len(answer.body)}",
        "Connection: close",
        "\r\n",
    ]
    return "\r\n".join(head).encode("latin-1") + (answer.body if with_body else b"")
