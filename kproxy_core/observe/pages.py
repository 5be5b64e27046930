"""Answers of the health and the metrics server by path (kube-proxy 1.36, cmd/kube-proxy/app)."""

import base64
import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from prometheus_client import CollectorRegistry, Counter, Gauge

from kproxy_core.contract.values import Fallback
from kproxy_core.linux import packages
from kproxy_core.model.address import parse_address
from kproxy_core.observe.health import ProxyHealth
from kproxy_core.observe.logs import stacks
from kproxy_core.observe.messages import Answer, Handler, Request, Slow, Turn
from kproxy_core.observe.metrics import KUBERNETES, Metrics, content_type, exposition

# ``/statusz`` and ``/flagz`` (Kubernetes 1.36, KEP-4827 and KEP-4828): text, or an object for a client that
# accepts ``application/json;v=v1beta1;g=config.k8s.io;as=Statusz`` (or ``Flagz``).

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


# ``/debug/pprof/...`` and ``/debug/flags/...``: profiles and verbosity.

_LONGEST_PROFILE = 300.0
_FRAMES_OF_AN_ALLOCATION = 10
_LARGEST_ALLOCATIONS = 50

_PROFILES = {
    "cmdline": "the command line of this process",
    "goroutine": "the stack of every thread",
    "heap": "memory allocated, and kept, in ?seconds=N (10), by the lines that allocated most",
    "profile": "processor time of ?seconds=N (30); ?debug=1 for folded stacks instead of pprof's format",
}

_HTML = "text/html; charset=utf-8"
_ANOTHER = Answer(409, b"another profile is being taken\n")


class Debug:
    """The handlers of the paths below ``/debug/``. Takes one profile at a time."""

    def __init__(self, set_verbosity: Callable[[int], None]) -> None:
        self._set_verbosity = set_verbosity
        self._busy = threading.Lock()
        self.handlers: dict[str, Handler] = {
            "/debug/pprof": lambda _: Answer(302, b"", headers=(("Location", "/debug/pprof/"),)),
            "/debug/pprof/": lambda _: Answer(200, _index("/debug/pprof/", _PROFILES), _HTML),
            "/debug/pprof/cmdline": lambda _: Answer(200, Path("/proc/self/cmdline").read_bytes()[:-1]),
            "/debug/pprof/goroutine": lambda _: Answer(200, stacks().encode()),
            "/debug/pprof/heap": self._heap,
            "/debug/pprof/profile": self._profile,
            "/debug/flags": lambda _: Answer(200, _index("/debug/flags/", {"v": "PUT a number"}), _HTML),
            "/debug/flags/": lambda _: Answer(200, _index("/debug/flags/", {"v": "PUT a number"}), _HTML),
            "/debug/flags/v": self._verbosity,
        }

    def _profile(self, request: Request) -> Answer | Slow:
        from kproxy_core.observe import profiling  # loaded for the first profile

        as_text = dict(request.options).get("debug", "") not in ("", "0")
        if not as_text and (problem := packages.lacking("api", "protobuf")):
            return Answer(501, f"pprof's format {problem}; ?debug=1 does without\n".encode())

        def make(seconds: float, abandoned: threading.Event) -> Answer:
            profile = profiling.sample(seconds, abandoned)
            if as_text:
                return Answer(200, "".join(f"{line}\n" for line in profiling.folded(profile)).encode())
            return Answer(
                200, profiling.encode(profile), "application/octet-stream",
                (("Content-Disposition", 'attachment; filename="profile"'),),
            )  # fmt: skip

        return self._slow(request, 30.0, make)

    def _heap(self, request: Request) -> Answer | Slow:
        return self._slow(request, 10.0, lambda seconds, abandoned: Answer(
            200, _allocations(seconds, abandoned).encode()))

    def _slow(
        self, request: Request, default: float, make: Callable[[float, threading.Event], Answer]
    ) -> Answer | Slow:
        try:
            seconds = float(dict(request.options).get("seconds") or default)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= _LONGEST_PROFILE:
            return Answer(400, f"seconds must be more than 0 and at most {_LONGEST_PROFILE:g}\n".encode())
        if self._busy.locked():
            return _ANOTHER

        def make_alone(abandoned: threading.Event) -> Answer:
            if not self._busy.acquire(blocking=False):
                return _ANOTHER
            try:
                return make(seconds, abandoned)
            finally:
                self._busy.release()

        return Slow(make_alone, seconds, Turn.AT_ONCE)

    def _verbosity(self, request: Request) -> Answer:
        if request.method != "PUT":
            return Answer(406, b"unsupported http method\n")
        text = request.body.decode("latin-1").strip()
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            return Answer(400, f"failed set klog.logging.verbosity {text[:40]!a}: not a number\n".encode())
        self._set_verbosity(int(text))
        return Answer(200, f"successfully set klog.logging.verbosity to {text}".encode())


def _index(path: str, entries: dict[str, str]) -> bytes:
    row = '<li><a href="{0}{1}">{1}</a>: {2}</li>\n'
    rows = "".join(row.format(path, name, about) for name, about in entries.items())
    page = f"<!DOCTYPE html>\n<html><head><title>{path}</title></head><body><h1>{path}</h1>"
    return f"{page}\n<ul>\n{rows}</ul></body></html>\n".encode()


def _allocations(seconds: float, abandoned: threading.Event) -> str:
    """Return the lines that allocated most of the memory allocated within *seconds* and kept."""
    import tracemalloc

    tracemalloc.start(_FRAMES_OF_AN_ALLOCATION)
    try:
        abandoned.wait(seconds)
        statistics = tracemalloc.take_snapshot().statistics("traceback")
    finally:
        tracemalloc.stop()
    total = sum(statistic.size for statistic in statistics)
    lines = [f"{total} bytes allocated in {seconds:g} s and kept\n"]
    for statistic in statistics[:_LARGEST_ALLOCATIONS]:
        lines.append(f"\n{statistic.size} bytes in {statistic.count} blocks:")
        lines += statistic.traceback.format()
    return "\n".join(lines) + "\n"


# ``/debug/kproxy/``: a read-only page in one file, and the answers that it polls.

PAGE = "/debug/kproxy/"
_LONGEST = 10.0
"""Timeout in seconds for one answer."""


AnswerTo = Callable[[Mapping[str, str]], Mapping[str, Any]]
"""Answers the question with the given fields. A refusal is in ``problem``."""


def page_handlers(
    status: Callable[[], Mapping[str, Any]], services: AnswerTo, explain: AnswerTo
) -> dict[str, Handler]:
    """Return the handlers of the page, which asks for the *status*, for *services*, and to *explain*."""
    return {
        PAGE.removesuffix("/"): lambda _: Answer(302, b"", headers=(("Location", PAGE),)),
        PAGE: lambda _: _page(),
        f"{PAGE}status.json": lambda request: _json(request, status),
        f"{PAGE}services.json": lambda request: _json(request, lambda: services(dict(request.options))),
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


# Answers of the health and the metrics server by path (kube-proxy 1.36, cmd/kube-proxy/app).

_NOT_FOUND = Answer(404, b"404 page not found\n")
_NOT_ALLOWED = Answer(405, b"405 method not allowed\n", headers=(("Allow", "GET, HEAD, POST, PUT, OPTIONS"),))
_LONGEST_SCRAPE = 10.0
"""Seconds."""
_REFUSED_METHODS = ("DELETE", "TRACE")
"""A health check cannot be deleted, and the answer to TRACE would be the request. kube-proxy accepts both."""


def health_routes(health: ProxyHealth, metrics: Metrics) -> Handler:
    """Return the handler of ``/healthz`` and ``/livez`` (port 10256)."""

    def answer(check: Callable[[], Answer], request: Request) -> Answer:
        if request.method in _REFUSED_METHODS:
            return _NOT_ALLOWED
        result = check()
        metrics.record_health_answer(request.path.removeprefix("/"), result.status)
        return result

    return partial(dispatch, {"/healthz": partial(answer, health.healthz),
                              "/livez": partial(answer, health.livez)})  # fmt: skip


class About(Struct, kw_only=True):
    """Facts about the process for the metrics server. Mode and configuration may change."""

    mode: str
    fallback: Fallback | None = None
    """The reason why that is not the configured mode."""
    version: str = ""
    started: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    configuration: Mapping[str, object] = field(default_factory=dict)
    """The effective KubeProxyConfiguration in JSON types, with apiVersion and kind."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Effective values by name without dashes."""
    statusz: bool = True
    """Serve ``/statusz`` (gate ComponentStatusz)."""
    flagz: bool = True
    """Serve ``/flagz`` (gate ComponentFlagz)."""
    many_series: bool = False
    """Metrics take long to render."""
    debug: Mapping[str, Handler] = field(default_factory=dict)
    """Handlers of the paths below ``/debug/`` (enableProfiling)."""
    names: frozenset[str] = frozenset()
    """Names of this node in lower case, besides localhost."""

    def fallback_to(self, mode: str) -> Fallback | None:
        """Return why *mode* serves instead of the configured one; None: it does not."""
        return self.fallback if self.fallback is not None and self.fallback.serving == mode else None


def metrics_routes(metrics: Metrics, about: About) -> Handler:
    """Return the handler of ``/metrics``, ``/proxyMode``, ``/healthz``, ``/configz`` ... (port 10249)."""
    ping = _Ping(about.started)
    handlers: dict[str, Handler] = {
        "/configz": lambda _: _configz(about.configuration),
        "/healthz": ping.healthz,
        "/healthz/ping": lambda _: Answer(200, b"ok"),
        "/metrics": partial(_metrics, metrics, slow=about.many_series),
        "/metrics/slis": ping.slis,
        "/proxyMode": lambda _: _proxy_mode(about),
    }
    if about.flagz:
        handlers["/flagz"] = flagz(about.flags)
    handlers |= about.debug
    if about.statusz:
        handlers["/statusz"] = statusz(about.version, about.started, sorted([*handlers, "/statusz"]))
    return partial(_guarded, about.names, partial(dispatch, handlers))


_OPEN = frozenset({"/healthz", "/healthz/ping", "/metrics", "/metrics/slis", "/proxyMode"})
"""Paths that any client may read by any name: load balancers and Prometheus dial the names of Services."""
_READS = ("GET", "HEAD")


def _guarded(names: Collection[str], handler: Handler, request: Request) -> Answer | Slow:
    """Answer *request* with *handler*, unless a web page of another site may have sent it.

    Whoever controls a DNS name can point it at a loopback address, and the browser then takes this server
    for a part of that site (DNS rebinding). No DNS name leads to a host that is dialled by its address.
    Health checks are not guarded, here or on ports of their own: they tell no secret and change nothing.
    """
    if request.path in _OPEN and request.method in _READS:
        return handler(request)
    if request.host and not _is_of_node(request.host, names):
        return _MISDIRECTED
    is_link = request.method in _READS and request.fetch_mode == "navigate"
    is_foreign = request.fetch_site not in ("", "none", "same-origin") and not is_link
    if is_foreign or (request.origin and request.origin.lower() != f"http://{request.host}".lower()):
        return _FOREIGN
    return handler(request)


_MISDIRECTED = Answer(421, b"this is no name of the node: dial one of its addresses, or localhost\n")
_FOREIGN = Answer(403, b"the request was sent by a web page of another site\n")


_HOST = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<name>[^:\[\]]+?)\.?)(?::\d*)?", re.ASCII)


def _is_of_node(host: str, names: Collection[str]) -> bool:
    """Return whether *host*, a field ``Host``, is an address, localhost or one of *names*."""
    found = _HOST.fullmatch(host.strip().lower())
    if found is None:
        return False
    name = found["v6"] or found["name"]
    try:
        parse_address(name)
    except ValueError:
        return name in ("localhost", *names)
    return True


def dispatch(handlers: Mapping[str, Handler], request: Request) -> Answer | Slow:
    """Answer *request* with the handler of its path, or 404."""
    handler = handlers.get(request.path)
    return handler(request) if handler else _NOT_FOUND


def _metrics(metrics: Metrics, request: Request, *, slow: bool) -> Answer | Slow:
    def make(_: object = None) -> Answer:
        return Answer(200, *metrics.exposition(request.accept))

    if not slow:
        return make()
    return Slow(make, _LONGEST_SCRAPE, Turn.FIRST, same=(request.path, content_type(request.accept)))


def _proxy_mode(about: About) -> Answer:
    """Answer with the mode alone, for scripts that compare it. Headers explain a fallback."""
    headers: tuple[tuple[str, str], ...] = ()
    if fallback := about.fallback_to(about.mode):
        reason = fallback.because.encode("ascii", "replace").decode()
        headers = (("Kproxy-Mode-Wanted", fallback.wanted), ("Kproxy-Mode-Fallback-Reason", reason))
    return Answer(200, about.mode.encode(), headers=headers)


def _configz(configuration: Mapping[str, object]) -> Answer:
    """Answer in the form of all Kubernetes components: configurations by API group."""
    body = json.dumps({"kubeproxy.config.k8s.io": configuration}, separators=(",", ":"))
    return Answer(200, body.encode(), "application/json")


class _Ping:
    """The only check of the metrics server, which succeeds whenever it is made (component-base 1.36)."""

    def __init__(self, started: float) -> None:
        """*started*: start of the process, in seconds since the epoch."""
        self._registry = CollectorRegistry()
        self._result = Gauge(
            "kubernetes_healthcheck", "Result of the last check", ("name", "type"), registry=self._registry)
        self._checks = Counter(
            "kubernetes_healthchecks_total", "Checks by result", ("name", "type", "status"),
            registry=self._registry)
        Gauge("process_start_time_seconds", "Start of this process, in seconds since the epoch",
              registry=self._registry).set(started)

    def healthz(self, request: Request) -> Answer:
        """Make the check, with the options of all Kubernetes servers."""
        if request.method in _REFUSED_METHODS:
            return _NOT_ALLOWED
        excluded = dict.fromkeys(value for name, value in request.options if name == "exclude")
        if "ping" in excluded:
            text = "[+]ping excluded: ok\n"
        else:
            self._result.labels("ping", "healthz").set(1)
            self._checks.labels("ping", "healthz", "success").inc()
            text = "[+]ping ok\n"
        if "verbose" not in dict(request.options):
            return Answer(200, b"ok")
        if unknown := ",".join(f'"{name}"' for name in excluded if name != "ping"):
            text += f"warn: some health checks cannot be excluded: no matches for {unknown}\n"
        return Answer(200, (text + "healthz check passed\n").encode())

    def slis(self, request: Request) -> Answer:
        """Answer with the results. DELETE resets them."""
        if request.method == "DELETE":
            self._result.clear()
            self._checks.clear()
            return Answer(200, b"metrics reset\n")
        return Answer(200, *exposition(self._registry, request.accept))
