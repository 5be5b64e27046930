"""``/statusz`` and ``/flagz``: version, uptime and flags of this process.

Text by default. A client that accepts ``application/json;v=v1beta1;g=config.k8s.io;as=Statusz`` (or
``Flagz``) gets an object (Kubernetes 1.36, KEP-4827 and KEP-4828).
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence

from kproxy_core.observe.http.messages import Answer, Handler, Request
from kproxy_core.observe.metrics.process import KUBERNETES

_VERSION = "v1beta1"
_WARNING = (
    "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility "
    "guarantees and is for debugging purposes only.\n\n"
)
_NAME = "kproxy"


def statusz(version: str, started: float, paths: Sequence[str]) -> Handler:
    """Return the handler of ``/statusz``. *started*: seconds since the epoch; *paths*: all others."""

    def answer(request: Request) -> Answer:
        up, began = max(0, int(time.time() - started)), time.gmtime(started)
        text = (
            f"{_NAME} statusz\n{_WARNING}"
            f"Started: {time.strftime('%a %b %d %H:%M:%S UTC %Y', began)}\n"
            f"Up: {up // 3600} hr {up // 60 % 60:02d} min {up % 60:02d} sec\n"
            f"Python version: {sys.version.split()[0]}\n"
            f"Binary version: {version}\n"
            f"Emulation version: {KUBERNETES}\n"
            f"Paths: {' '.join(paths)}\n"
        )
        return _negotiated(request, "Statusz", text, {
            "startTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", began),
            "uptimeSeconds": up,
            "binaryVersion": version,
            "emulationVersion": KUBERNETES,
            "paths": list(paths),
        })

    return answer


def flagz(flags: Mapping[str, str]) -> Handler:
    """Return the handler of ``/flagz``. *flags*: effective values by name without dashes."""
    lines = "".join(f"{name}={flags[name]}\n" for name in sorted(flags))

    def answer(request: Request) -> Answer:
        return _negotiated(request, "Flagz", f"{_NAME} flags\n{_WARNING}{lines}", {"flags": dict(flags)})

    return answer


def _negotiated(request: Request, kind: str, text: str, fields: Mapping[str, object]) -> Answer:
    """Answer in the first form that the client accepts; 406 if it accepts none."""
    for entry in request.accept.split(",") if request.accept else ("*/*",):
        media, *parameters = (part.strip() for part in entry.split(";"))
        if media in ("*/*", "text/*", "text/plain"):
            return Answer(200, text.encode())
        wanted = {"g=config.k8s.io", f"v={_VERSION}", f"as={kind}"}
        if media in ("application/json", "application/*") and wanted <= set(parameters):
            head = {"kind": kind, "apiVersion": f"config.k8s.io/{_VERSION}", "metadata": {"name": _NAME}}
            return Answer(200, json.dumps({**head, **fields}).encode() + b"\n", "application/json")
    return Answer(406, f"text/plain or application/json;v={_VERSION};g=config.k8s.io;as={kind}\n".encode())
