"""The text of ``kubectl kproxy explain``."""

from typing import Any

import click
import pytest

from kproxy_core.cli.kubectl.explain import as_text

ROW = {"endpoint": "10.1.2.1:8080", "share": 0.5, "masqueraded": True, "pod": "shop/web-2", "node": "b",
       "there": "ready", "policies": ["deny-all", "web"]}
WAY: dict[str, Any] = {
    "nodes": ["a"], "to": "10.96.0.1:80", "protocol": "TCP",
    "frontend": {"kind": "ClusterIP", "service": "shop/web", "port": "http", "service_port": "shop/web:http"},
    "outcome": "forwarded", "because": "internal traffic policy Cluster", "near": "", "source": "kept",
    "last_resort": None,
    "kernel": {"modes": ["test"], "verdict": "agrees", "differences": [], "filters": []},
    "endpoints": [ROW],
    "not_chosen": [{"endpoint": "10.1.3.1:8080", "because": "not ready", "pod": "", "node": "",
                    "there": "not ready", "policies": []}],
}  # fmt: skip
FOUND: dict[str, Any] = {
    "from": "pod shop/cart on node a", "to": "shop/web", "problems": [], "settling": [], "ways": [WAY],
    "probes": [],
    "egress_policies": ["carts"], "policies_problem": "",
    "objects": [{"service": "shop/web", "resource_version": "7", "seconds": 300.0,
                 "slices": [{"name": "web-1", "resource_version": "8", "seconds": None}]}],
}  # fmt: skip


def text(way: dict[str, Any] | None = None, **changes: Any) -> str:
    return click.unstyle(as_text({**FOUND, "ways": [{**WAY, **(way or {})}], **changes}))


def test_the_whole_way_is_one_screen() -> None:
    assert text() == """\
from pod shop/cart on node a to shop/web

at a: 10.96.0.1:80/TCP, ClusterIP of shop/web:http
  outcome     forwarded: internal traffic policy Cluster
  source      kept
  endpoints   10.1.2.1:8080  50.0%, masqueraded  pod shop/web-2 on b  there: ready  ingress: deny-all, web
  not chosen  10.1.3.1:8080  not ready
  kernel      agrees (test)

  policies    egress of the sender: carts
  API server  Service shop/web at resource version 7, changed 5 min ago
              EndpointSlice web-1 at resource version 8, changed at an unknown time"""


def test_problems_come_first_with_their_age() -> None:
    def problem(node: str, what: str, *, lags: bool, seconds: float | None = None) -> dict[str, Any]:
        return {"node": node, "problem": what, "lags": lags, "seconds": seconds}

    lines = text(problems=[
        problem("b", "knows an older EndpointSlice web-1", lags=True, seconds=40.0),
        problem("b", "still uses EndpointSlice web-2", lags=True),
        problem("c", "timed out", lags=False),
        problem("d", "knows an older EndpointSlice web-1", lags=True, seconds=40.1),
    ], settling=[problem("b", "knows nothing", lags=True, seconds=2.0)]).splitlines()
    assert lines[1:5] == [
        "  b, d: knows an older EndpointSlice web-1 (changed 40 s ago)",
        "  b: still uses EndpointSlice web-2 (changed at an unknown time)",
        "  c: timed out",
        "  b: knows nothing (changed 2 s ago)",
    ]


WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "many nodes": ({"nodes": list("abcdefg")}, "at a, b, c, d, e and 2 more: 10.96.0.1:80/TCP"),
    "no frontend": ({"frontend": None, "endpoints": []}, "at a: 10.96.0.1:80/TCP, no Service's frontend"),
    "last resort": ({"last_resort": {"seconds": 12.3, "left": 1.0}}, "last resort for 12 s: no endpoint is"),
    "nearest": ({"near": "10.96.0.1 serves 81/TCP"}, "nearest     10.96.0.1 serves 81/TCP"),
    "share": ({"endpoints": [ROW | {"share": None}]}, "10.1.2.1:8080  share varies, masqueraded"),
    "many endpoints": ({"endpoints": [ROW] * 12}, "and 2 more, which -o json lists"),
    "filters": ({"kernel": WAY["kernel"] | {"filters": ["nft table x drops it"]}}, "nft table x drops it"),
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_a_way_is_told(name: str) -> None:
    way, expected = WAYS[name]
    assert expected in text(way)


def test_endpoints_that_are_not_ready_on_their_own_node_come_first() -> None:
    odd = ROW | {"endpoint": "10.1.9.9:8080", "there": "not known"}
    told = text({"endpoints": [ROW, odd]})
    assert 0 < told.index("10.1.9.9:8080") < told.index("10.1.2.1:8080")


def test_probes_are_told_with_their_sender() -> None:
    probe = {"node": "a", "to": "10.96.0.1:80", "protocol": "TCP", "source": "10.1.1.1", "unclear": []}
    said = text(probes=[probe | {"findings": []}, probe | {"findings": ["it refuses"]}])
    assert "  probe       10.96.0.1:80/TCP from 10.1.1.1 at a: answers as it should\n" in said
    assert "              10.96.0.1:80/TCP from 10.1.1.1 at a: a problem\n" in said


def test_policies_that_could_not_be_read_are_said() -> None:
    assert "policies    refused" in text(policies_problem="refused", egress_policies=[])


def test_many_slices_are_not_all_told() -> None:
    (service,) = FOUND["objects"]
    lines = text(objects=[service | {"slices": service["slices"] * 9}]).splitlines()
    assert [line.split()[0] for line in lines[-7:]] == ["API", *["EndpointSlice"] * 5, "and"]
