"""Answers of the health and the metrics server by path (kube-proxy 1.36, cmd/kube-proxy/app)."""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial

from msgspec import Struct, field
from prometheus_client import CollectorRegistry, Counter, Gauge

from kproxy_core.backend.fallback import Fallback
from kproxy_core.observe.health import ProxyHealth
from kproxy_core.observe.http.messages import Answer, Handler, Request, Slow, Turn
from kproxy_core.observe.http.zpages import flagz, statusz
from kproxy_core.observe.metrics.registry import Metrics, content_type, exposition

_NOT_FOUND = Answer(404, b"404 page not found\n")
_NOT_ALLOWED = Answer(405, b"405 method not allowed\n", headers=(("Allow", "GET, HEAD, POST, PUT, OPTIONS"),))
_LONGEST_SCRAPE = 10.0
"""Seconds."""
_REFUSED_METHODS = ("DELETE", "TRACE")
"""Health checks cannot be deleted, and a TRACE would be answered with the request. kube-proxy takes both."""


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
    """Metrics take long to write."""
    debug: Mapping[str, Handler] = field(default_factory=dict)
    """Handlers of the paths below ``/debug/`` (enableProfiling)."""


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
    return partial(dispatch, handlers)


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
    if about.fallback is not None and about.fallback.serving == about.mode:
        reason = about.fallback.because.encode("ascii", "replace").decode()
        headers = (("Kproxy-Mode-Wanted", about.fallback.wanted), ("Kproxy-Mode-Fallback-Reason", reason))
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
