"""Answers of the health and the metrics server by path (kube-proxy 1.36, cmd/kube-proxy/app)."""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial

from msgspec import Struct, field

from kproxy_core.backend.fallback import Fallback
from kproxy_core.observe.health import ProxyHealth
from kproxy_core.observe.http.messages import Answer, Handler, Request, Slow
from kproxy_core.observe.http.zpages import flagz, statusz
from kproxy_core.observe.metrics.registry import Metrics
from kproxy_core.observe.metrics.slis import HealthcheckSlis

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
    slis = HealthcheckSlis(about.started)
    handlers: dict[str, Handler] = {
        "/configz": lambda _: _configz(about.configuration),
        "/healthz": lambda request: _healthz(request, slis),
        "/healthz/ping": lambda _: Answer(200, b"ok"),
        "/metrics": partial(_metrics, metrics, slow=about.many_series),
        "/metrics/slis": lambda request: _slis(request, slis),
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
    def make() -> Answer:
        return Answer(200, *metrics.exposition(request.accept))

    return Slow(make, _LONGEST_SCRAPE) if slow else make()


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


def _slis(request: Request, slis: HealthcheckSlis) -> Answer:
    if request.method == "DELETE":
        slis.reset()
        return Answer(200, b"metrics reset\n")
    return Answer(200, *slis.exposition(request.accept))


def _healthz(request: Request, slis: HealthcheckSlis) -> Answer:
    """Answer the only check of this server, ``ping``, with the options of all Kubernetes servers."""
    if request.method in _REFUSED_METHODS:
        return _NOT_ALLOWED
    excluded = dict.fromkeys(value for name, value in request.options if name == "exclude")
    lines = []
    if "ping" in excluded:
        lines.append("[+]ping excluded: ok\n")
    else:
        slis.record_check()
        lines.append("[+]ping ok\n")
    if "verbose" not in dict(request.options):
        return Answer(200, b"ok")
    unknown = ",".join(f'"{name}"' for name in excluded if name != "ping")
    if unknown:
        lines.append(f"warn: some health checks cannot be excluded: no matches for {unknown}\n")
    return Answer(200, ("".join(lines) + "healthz check passed\n").encode())
