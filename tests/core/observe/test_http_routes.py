"""Answers of the health and the metrics server by path."""

import json
import re

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kproxy_core.model.address import Family
from kproxy_core.observe.health import ProxyHealth
from kproxy_core.observe.messages import Answer, Handler, Request
from kproxy_core.observe.metrics import Metrics
from kproxy_core.observe.pages import About, Debug, health_routes, metrics_routes
from tests.core.metric_values import values
from tests.core.sync_events import synced

STATUSZ = "application/json;v=v1beta1;g=config.k8s.io;as=Statusz"
FLAGZ = "application/json;v=v1beta1;g=config.k8s.io;as=Flagz"


def ask(routes: Handler, target: str, method: str = "GET", accept: str = "", body: bytes = b"") -> Answer:
    path, _, query = target.partition("?")
    answer = routes(Request(method, path, query, accept, body))
    assert isinstance(answer, Answer)
    return answer


def server(**about: object) -> Handler:
    """Return the handler of a metrics server that knows *about*."""
    return metrics_routes(Metrics("some-mode", "0"), About(mode="some-mode", **about))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "status", "body"),
    [
        ("/healthz", 200, "ok"),
        ("/healthz/ping", 200, "ok"),
        ("/healthz?verbose", 200, "[+]ping ok\nhealthz check passed\n"),
        ("/healthz?verbose=true", 200, "[+]ping ok\nhealthz check passed\n"),
        ("/healthz?exclude=ping", 200, "ok"),
        ("/healthz?verbose&exclude=ping", 200, "[+]ping excluded: ok\nhealthz check passed\n"),
        ("/healthz?verbose&exclude=x", 200, "[+]ping ok\nwarn: some health checks cannot be excluded: "
         'no matches for "x"\nhealthz check passed\n'),
        ("/proxyMode", 200, "some-mode"),
        ("/readyz", 404, "404 page not found\n"),
        ("/livez", 404, "404 page not found\n"),
        ("/", 404, "404 page not found\n"),
        ("/metrics/", 404, "404 page not found\n"),
        ("/debug/pprof/", 404, "404 page not found\n"),
        ("/debug/flags/v", 404, "404 page not found\n"),
    ],
)
def test_the_metrics_server(target: str, status: int, body: str) -> None:
    answer = ask(server(), target)
    assert (answer.status, answer.body.decode()) == (status, body)
    assert answer.content_type == "text/plain; charset=utf-8"


def test_metrics_are_in_the_text_format() -> None:
    answer = ask(server(), "/metrics")
    assert answer.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert b"# TYPE rest_client_request_duration_seconds histogram\n" in answer.body
    assert b'kproxy_build_info{mode="some-mode",version="0"} 1\n' in answer.body


@pytest.mark.parametrize("path", ["/metrics", "/metrics/slis"])
@pytest.mark.parametrize("accept", [
    "application/openmetrics-text",
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
])
def test_a_scraper_that_prefers_openmetrics_gets_it(path: str, accept: str) -> None:
    answer = ask(server(), path, accept=accept)
    assert answer.content_type.startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
    families = {family.name: family for family in openmetrics(answer.body.decode())}  # type: ignore[no-untyped-call]
    assert answer.body.endswith(b"# EOF\n")
    assert families["process_start_time_seconds"].type == "gauge"


@pytest.mark.parametrize("accept", ["", "*/*", "text/plain", "application/json", "text/html, text/plain"])
def test_other_clients_get_the_text_format(accept: str) -> None:
    assert ask(server(), "/metrics", accept=accept).content_type == "text/plain; version=0.0.4; charset=utf-8"


def test_the_health_server_answers_and_counts() -> None:
    health = ProxyHealth((Family.IPV4,), timeout=60, node_required=False)
    metrics = Metrics("x", "0")
    routes = health_routes(health, metrics)
    statuses = [ask(routes, path).status for path in ("/healthz", "/livez", "/readyz", "/", "/metrics")]
    assert statuses == [503, 200, 404, 404, 404]
    health.sync_succeeded(synced(Family.IPV4))
    answer = ask(routes, "/healthz?verbose", method="POST")
    assert (answer.status, answer.content_type) == (200, "application/json")
    assert answer.body.startswith(b'{"lastUpdated":"')
    counted = values(metrics)
    assert counted['kubeproxy_proxy_healthz_total{code="503"}'] == 1
    assert counted['kubeproxy_proxy_healthz_total{code="200"}'] == 1
    assert counted['kubeproxy_proxy_livez_total{code="200"}'] == 1


@pytest.mark.parametrize("method", ["DELETE", "TRACE"])
@pytest.mark.parametrize("path", ["/healthz", "/livez"])
def test_health_checks_are_neither_deleted_nor_traced(path: str, method: str) -> None:
    metrics = Metrics("x", "0")
    health = ProxyHealth((Family.IPV4,), timeout=60, node_required=False)
    answer = ask(health_routes(health, metrics), path, method)
    assert (answer.status, dict(answer.headers)["Allow"]) == (405, "GET, HEAD, POST, PUT, OPTIONS")
    assert not any("_proxy_" in name for name in values(metrics))
    assert ask(server(), "/healthz", method).status == 405


def test_configz_has_the_configuration_under_its_group() -> None:
    configuration = {"kind": "KubeProxyConfiguration", "conntrack": {"min": 131072}}
    answer = ask(server(configuration=configuration), "/configz")
    assert (answer.status, answer.content_type) == (200, "application/json")
    assert json.loads(answer.body) == {"kubeproxy.config.k8s.io": configuration}


def test_slis_count_the_checks_until_they_are_deleted() -> None:
    routes = server(started=1000.5)
    for target in ("/healthz", "/healthz?verbose", "/healthz?exclude=ping", "/healthz/ping"):
        ask(routes, target)

    def samples() -> dict[str, float]:
        answer = ask(routes, "/metrics/slis")
        assert answer.content_type == "text/plain; version=0.0.4; charset=utf-8"
        families = text_string_to_metric_families(answer.body.decode())
        return {
            s.name + "".join(f" {k}={v}" for k, v in sorted(s.labels.items())): s.value
            for f in families for s in f.samples
        }  # fmt: skip

    assert samples() == {
        "kubernetes_healthcheck name=ping type=healthz": 1,
        "kubernetes_healthchecks_total name=ping status=success type=healthz": 2,
        "process_start_time_seconds": 1000.5,
    }
    assert ask(routes, "/metrics/slis", "DELETE").body == b"metrics reset\n"
    assert samples() == {"process_start_time_seconds": 1000.5}


def test_statusz_as_text() -> None:
    answer = ask(server(version="1.2.3", started=0.0), "/statusz")
    assert answer.content_type == "text/plain; charset=utf-8"
    text = answer.body.decode()
    assert text.startswith("kproxy statusz\nWarning: ")
    assert "\nStarted: Thu Jan 01 00:00:00 UTC 1970\n" in text
    assert "\nBinary version: 1.2.3\n" in text
    assert re.search(r"\nUp: \d+ hr \d\d min \d\d sec\n", text)
    assert "\nPaths: /configz /flagz /healthz /healthz/ping /metrics " in text


def test_statusz_as_an_object() -> None:
    answer = ask(server(version="1.2.3", started=0.0), "/statusz", accept=STATUSZ)
    assert answer.content_type == "application/json"
    document = json.loads(answer.body)
    assert (document["kind"], document["apiVersion"]) == ("Statusz", "config.k8s.io/v1beta1")
    assert document["startTime"] == "1970-01-01T00:00:00Z"
    assert document["uptimeSeconds"] > 1_000_000_000
    assert "/statusz" in document["paths"]


def test_flagz() -> None:
    routes = server(flags={"v": "2", "config": "/etc/config.conf"})
    text = ask(routes, "/flagz").body.decode()
    assert text.startswith("kproxy flags\nWarning: ")
    assert text.endswith("\n\nconfig=/etc/config.conf\nv=2\n")
    document = json.loads(ask(routes, "/flagz", accept=FLAGZ).body)
    assert document["flags"] == {"v": "2", "config": "/etc/config.conf"}
    assert document["kind"] == "Flagz"


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain"), ("*/*", "text/plain"), ("text/plain", "text/plain"),
        ("text/html, */*;q=0.8", "text/plain"),
        (FLAGZ, "application/json"), (f"{FLAGZ},text/plain", "application/json"),
        ("text/plain; charset=utf-8", "text/plain"),
        ("application/json", None), (STATUSZ, None), ("image/png", None),
        ("application/json;v=v9;g=config.k8s.io;as=Flagz", None),
    ],
)  # fmt: skip
def test_pages_have_a_form_that_the_client_accepts(accept: str, content_type: str | None) -> None:
    answer = ask(server(), "/flagz", accept=accept)
    if content_type is None:
        assert answer.status == 406
    else:
        assert (answer.status, answer.content_type.partition(";")[0]) == (200, content_type)


def test_gates_close_the_pages() -> None:
    routes = server(statusz=False, flagz=False)
    assert ask(routes, "/statusz").status == ask(routes, "/flagz").status == 404


@pytest.mark.parametrize("path", ["/debug/pprof", "/debug/pprof/", "/debug/flags", "/debug/flags/"])
def test_profiling_opens_the_debug_pages(path: str) -> None:
    assert ask(server(), path).status == 404
    assert ask(server(debug=Debug(lambda _: None).handlers), path).status in (200, 302)


GUARDED = ["/configz", "/flagz", "/statusz", "/debug/flags/v", "/debug/kproxy/services.json", "/nothing"]


def by_web(path: str, method: str = "GET", **fields: str) -> int:
    """Return the status of the answer to a request with *fields* of a browser."""
    changes: list[int] = []
    pages = {"/debug/kproxy/services.json": lambda _: Answer(200, b"{}")}
    routes = server(names=frozenset({"node-1", "node-1.example.com"}),
                    debug=Debug(changes.append).handlers | pages)  # fmt: skip
    answer = routes(Request(method, path, "", body=b"7", **fields))
    assert isinstance(answer, Answer)
    assert bool(changes) == (method == "PUT" and answer.status == 200)
    return answer.status


@pytest.mark.parametrize("host", [
    "rebound.example", "rebound.example:10249", "node-1.example.org", "xnode-1", "localhost.example",
    "127.0.0.1.example", "[rebound.example]", "::1", "a:b:c", "[::1", "node-1:10249x",
])  # fmt: skip
def test_a_name_that_is_not_the_nodes_reads_and_changes_nothing(host: str) -> None:
    assert {by_web(path, host=host) for path in GUARDED} == {421}
    assert by_web("/debug/flags/v", "PUT", host=host) == 421
    assert by_web("/metrics/slis", "DELETE", host=host) == 421


@pytest.mark.parametrize("host", [
    "", "localhost", "LOCALHOST:10249", "localhost.:10249", "127.0.0.1:10249", "192.0.2.7", "[::1]:10249",
    "[2001:db8::7]", "node-1:10249", "Node-1.Example.com.",
])  # fmt: skip
def test_addresses_and_names_of_the_node_are_served(host: str) -> None:
    assert [by_web(path, host=host) for path in GUARDED] == [200, 200, 200, 406, 200, 404]
    assert by_web("/debug/flags/v", "PUT", host=host) == 200


@pytest.mark.parametrize("path", ["/metrics", "/metrics/slis", "/healthz", "/healthz/ping", "/proxyMode"])
def test_scrapers_and_load_balancers_use_any_name(path: str) -> None:
    assert by_web(path, host="kproxy.kube-system.svc:10249") == 200
    assert by_web(path, host="lb.example", fetch_site="cross-site", fetch_mode="cors") == 200


@pytest.mark.parametrize(("fields", "read", "changed"), [
    ({"origin": "http://localhost:10249", "fetch_site": "same-origin", "fetch_mode": "cors"}, 200, 200),
    ({"fetch_site": "none", "fetch_mode": "navigate"}, 200, 200),
    ({"fetch_site": "cross-site", "fetch_mode": "navigate"}, 200, 403),
    ({"fetch_site": "cross-site", "fetch_mode": "no-cors"}, 403, 403),
    ({"fetch_site": "same-site", "fetch_mode": "cors"}, 403, 403),
    ({"origin": "http://localhost:8080"}, 403, 403),
    ({"origin": "https://localhost:10249"}, 403, 403),
    ({"origin": "http://site.example"}, 403, 403),
    ({"origin": "null"}, 403, 403),
])  # fmt: skip
def test_pages_of_other_sites_read_and_change_nothing(
    fields: dict[str, str], read: int, changed: int
) -> None:
    assert by_web("/configz", host="localhost:10249", **fields) == read
    assert by_web("/debug/flags/v", "PUT", host="localhost:10249", **fields) == changed
