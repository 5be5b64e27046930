"""What the health and the metrics server answer to which path (kube-proxy 1.36, cmd/kube-proxy/app)."""

from kproxy_core.run.health import ProxyHealth
from kproxy_core.run.http_messages import Answer, Handler, Request
from kproxy_core.run.metrics import Metrics

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
        metrics.health_answered(request.path.removeprefix("/"), status)
        return Answer(status, said.body, "application/json")

    return answer


def metrics_routes(metrics: Metrics, mode: str) -> Handler:
    """``/metrics``, ``/proxyMode`` and ``/healthz`` (port 10249)."""

    def answer(request: Request) -> Answer:
        match request.path:
            case "/metrics":
                return Answer(200, metrics.exposition(), "text/plain; version=0.0.4; charset=utf-8")
            case "/proxyMode":
                return Answer(200, mode.encode())
            case "/healthz":
                return Answer(200, _ping(request.query.split("&")))
            case "/healthz/ping":
                return Answer(200, b"ok")
            case _:
                return _NOT_FOUND

    return answer


def _ping(options: list[str]) -> bytes:
    """The only check of this server is that it answers; the forms are those of all Kubernetes' servers."""
    if not any(option.partition("=")[0] == "verbose" for option in options):
        return b"ok"
    line = b"[+]ping excluded: ok" if "exclude=ping" in options else b"[+]ping ok"
    return line + b"\nhealthz check passed\n"
