"""Answers of the health and the metrics server by path (kube-proxy 1.36, cmd/kube-proxy/app)."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from kproxy_core.backend.fallback import Fallback
from kproxy_core.observe.health import ProxyHealth
from kproxy_core.observe.http.debug import Debug
from kproxy_core.observe.http.messages import Answer, Handler, Request, Slow
from kproxy_core.observe.http.zpages import flagz, statusz
from kproxy_core.observe.metrics import Metrics
from kproxy_core.observe.slis import HealthcheckSlis

_NOT_FOUND = Answer(404, b"404 page not found\n")


def health_routes(health: ProxyHealth, metrics: Metrics) -> Handler:
    """``/healthz`` and ``/livez`` (port 10256)."""

    def answer(request: Request) -> Answer:
        match request.path:
            case "/healthz":
                said = health.healthz()
            case "/livez":
                said = health.livez()
            case _:
                return _NOT_FOUND
        status = 200 if said.ok else 503
        metrics.record_health_answer(request.path.removeprefix("/"), status)
        return Answer(status, said.body, "application/json")

    return answer


@dataclass(slots=True, kw_only=True)
class About:
    """What the metrics server tells of the process besides metrics. Mode and configuration may change."""

    mode: str
    fallback: Fallback | None = None
    """Why that is not the mode which was asked for."""
    version: str = ""
    started: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    configuration: Mapping[str, object] = field(default_factory=dict)
    """The KubeProxyConfiguration in effect, as JSON has it, with apiVersion and kind."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """By name without dashes, as they are in effect."""
    statusz: bool = True
    """Serve ``/statusz`` (gate ComponentStatusz)."""
    flagz: bool = True
    """Serve ``/flagz`` (gate ComponentFlagz)."""
    debug: Debug | None = None
    """Serve ``/debug/`` (enableProfiling)."""


def metrics_routes(metrics: Metrics, about: About) -> Handler:
    """``/metrics``, ``/proxyMode``, ``/healthz``, ``/configz`` ... (port 10249)."""
    slis = HealthcheckSlis(about.started)
    handlers: dict[str, Handler] = {
        "/configz": lambda _: _configz(about.configuration),
        "/healthz": lambda request: Answer(200, _healthz(request.query, slis)),
        "/healthz/ping": lambda _: Answer(200, b"ok"),
        "/metrics": lambda request: Answer(200, *metrics.exposition(request.accept)),
        "/metrics/slis": lambda request: _slis(request, slis),
        "/proxyMode": lambda _: _proxy_mode(about),
    }
    if about.flagz:
        handlers["/flagz"] = flagz(about.flags)
    if about.debug is not None:
        handlers |= dict.fromkeys(about.debug.paths, about.debug)
    if about.statusz:
        handlers["/statusz"] = statusz(about.version, about.started, sorted([*handlers, "/statusz"]))

    def answer(request: Request) -> Answer | Slow:
        handler = handlers.get(request.path)
        return handler(request) if handler else _NOT_FOUND

    return answer


def _proxy_mode(about: About) -> Answer:
    """The mode alone, for scripts that compare it; headers say what was asked for instead, and why."""
    headers: tuple[tuple[str, str], ...] = ()
    if about.fallback is not None and about.fallback.serving == about.mode:
        reason = about.fallback.because.encode("ascii", "replace").decode()
        headers = (("Kproxy-Mode-Wanted", about.fallback.wanted), ("Kproxy-Mode-Fallback-Reason", reason))
    return Answer(200, about.mode.encode(), headers=headers)


def _configz(configuration: Mapping[str, object]) -> Answer:
    """The form that all of Kubernetes' components share: their configurations by API group."""
    body = json.dumps({"kubeproxy.config.k8s.io": configuration}, separators=(",", ":"))
    return Answer(200, body.encode(), "application/json")


def _slis(request: Request, slis: HealthcheckSlis) -> Answer:
    if request.method == "DELETE":
        slis.reset()
        return Answer(200, b"metrics reset\n")
    return Answer(200, *slis.exposition(request.accept))


def _healthz(query: str, slis: HealthcheckSlis) -> bytes:
    """The only check of this server is that it answers; the forms are those of all Kubernetes' servers."""
    options = [option.partition("=") for option in query.split("&") if option]
    excluded = dict.fromkeys(value for name, _, value in options if name == "exclude")
    lines = []
    if "ping" in excluded:
        lines.append("[+]ping excluded: ok\n")
    else:
        slis.record_check()
        lines.append("[+]ping ok\n")
    if not any(name == "verbose" for name, _, _ in options):
        return b"ok"
    unknown = ",".join(f'"{name}"' for name in excluded if name != "ping")
    if unknown:
        lines.append(f"warn: some health checks cannot be excluded: no matches for {unknown}\n")
    return ("".join(lines) + "healthz check passed\n").encode()
