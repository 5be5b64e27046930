"""The page ``/debug/kproxy/`` and the answers that it polls. Read-only; one file, nothing from elsewhere."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kproxy_core.observe.http.messages import Answer, Handler, Request, Slow, Turn

PAGE = "/debug/kproxy/"
_LONGEST = 10.0
"""Seconds for one answer."""


Services = Callable[[str, str, int, int], Mapping[str, Any]]
"""Returns the Services that a search finds, in an order, from a place on, and how many of them."""

Explain = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Answers a question about packets: ``to``, ``from`` and ``origin``. A refusal is in ``problem``."""


def page_handlers(
    status: Callable[[], Mapping[str, Any]], services: Services, explain: Explain
) -> dict[str, Handler]:
    def found(request: Request) -> Mapping[str, Any]:
        asked = dict(request.options)
        start, count = (_number(asked.get(name, "")) for name in ("start", "count"))
        return services(
            asked.get("search", "")[:200], asked.get("sort", "name"), start, min(count or 50, 200))

    return {
        PAGE.removesuffix("/"): lambda _: Answer(302, b"", headers=(("Location", PAGE),)),
        PAGE: lambda _: _page(),
        f"{PAGE}status.json": lambda request: _json(request, status),
        f"{PAGE}services.json": lambda request: _json(request, lambda: found(request)),
        f"{PAGE}explain.json": lambda request: _json(request, lambda: explain(dict(request.options))),
    }


def _page() -> Answer:
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    policy = "; ".join((
        "default-src 'none'", "connect-src 'self'", "base-uri 'none'", "form-action 'none'",
        "frame-ancestors 'none'", f"script-src {_hash(text, 'script')}", f"style-src {_hash(text, 'style')}",
    ))
    headers = (("Content-Security-Policy", policy), ("Referrer-Policy", "no-referrer"),
               ("Cache-Control", "no-store"))
    return Answer(200, text.encode(), "text/html; charset=utf-8", headers)


def _hash(text: str, element: str) -> str:
    """Return the CSP source of the page's only *element* of this kind."""
    found = re.search(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
    assert found is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"


def _json(request: Request, make: Callable[[], Mapping[str, Any]]) -> Slow:
    def answer(_: object) -> Answer:
        body = json.dumps(make(), separators=(",", ":")).encode()
        return Answer(200, body, "application/json", (("Cache-Control", "no-store"),))

    return Slow(answer, _LONGEST, Turn.IN_ORDER, same=(request.path, request.query))


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 8 else 0
