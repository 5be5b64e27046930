"""A running proxy, scraped: kube-proxy's dashboards, alerts and tools find their metrics."""

import http.client
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import pytest

from tests.core.api_servers import BenchServer
from tests.core.golden import golden
from tests.core.namespaces import Namespace, namespace
from tests.core.observe.test_metrics import shapes
from tests.patience import PATIENCE

KPROXY = str(Path(sys.executable).with_name("kproxy"))
SLICE = "bench-0000/svc-000000-000"
"""One that the server generates."""

DASHBOARD = [
    "kubeproxy_sync_proxy_rules_duration_seconds_count", "kubeproxy_sync_proxy_rules_duration_seconds_bucket",
    "kubeproxy_network_programming_duration_seconds_count",
    "kubeproxy_network_programming_duration_seconds_bucket",
    'rest_client_requests_total{code="200"', "rest_client_request_duration_seconds_bucket",
    "process_resident_memory_bytes", "process_cpu_seconds_total", "process_start_time_seconds",
    "go_goroutines", 'kubernetes_build_info{build_date="",',
]  # fmt: skip
"""Samples that the dashboard "Kubernetes / Proxy" and the alerts of kubernetes-mixin use."""


class Scraped:
    """A proxy that follows an API server."""

    def __init__(self, node: Namespace) -> None:
        self._node = node

    def get(
        self, path: str, port: int = 10249, method: str = "GET", body: str | None = None
    ) -> tuple[int, str]:
        """Return status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        connection.sock = self._node.inside(lambda: socket.create_connection(("127.0.0.1", port), PATIENCE))
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def exposition_with(self, *samples: str, change: Callable[[], None] = lambda: None) -> str:
        """Return all metrics, once the *samples* are among them. Call *change* before each scrape."""
        deadline = time.monotonic() + PATIENCE
        while True:
            change()
            try:
                exposition = self.get("/metrics")[1]
            except OSError:
                exposition = ""
            missing = [sample for sample in samples if f"\n{sample}" not in exposition]
            if not missing:
                return exposition
            assert time.monotonic() < deadline, missing
            time.sleep(0.05)


@contextmanager
def scraped(mode: str, directory: Path, **settings: object) -> Iterator[tuple[Scraped, BenchServer]]:
    with namespace() as node:
        server = BenchServer("--gen", "services=20", node=node)
        try:
            config = directory / "config.conf"
            config.write_text(json.dumps({
                "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
                "mode": mode, "conntrack": {"maxPerCore": 0}, **settings,
            }))  # fmt: skip
            process = subprocess.Popen([
                "ip", "netns", "exec", node.name, KPROXY, "--config", str(config), "--master", server.url,
                "--hostname-override", "kb-node-0",
            ])  # fmt: skip
            try:
                yield Scraped(node), server
            finally:
                process.terminate()
                process.wait(PATIENCE)
        finally:
            server.stop()


def changing_endpoints(server: BenchServer) -> Callable[[], None]:
    """Return a function that gives an endpoint another address.

    One change is not enough for a partial sync: a full one may be due, which writes it too.
    """
    addresses = cycle(f"10.192.9.{number}" for number in range(250))
    return lambda: server.post("set", ops=[{"slice": SLICE, "index": 0, "address": next(addresses)}])


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
def test_all_metrics_of_kube_proxy_are_exposed(mode: str, tmp_path: Path) -> None:
    with scraped(mode, tmp_path) as (proxy, server):
        proxy.exposition_with('kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family="IPv6"}')
        proxy.get("/healthz", 10256)
        exposition = proxy.exposition_with(
            'kubeproxy_sync_partial_proxy_rules_duration_seconds_count{ip_family="IPv4"}',
            "kubeproxy_network_programming_duration_seconds_count", "kubeproxy_proxy_healthz_total",
            "rest_client_response_size_bytes_count",  # of the first event: objects come from watches
            change=changing_endpoints(server),
        )
    ours = shapes(exposition)
    wanted = {}
    for line in golden(f"metrics-{mode}.txt").read_text().splitlines():
        name, _, shape = line.partition(" ")
        # "filter" and "nat" are no buckets but the tables seen.
        wanted[name] = shape.removesuffix(" buckets=filter,nat")
    del wanted["go_info"]
    assert {name: ours.get(name) for name in wanted} == wanted
    for sample in DASHBOARD:
        assert f"\n{sample}" in exposition


def test_the_pages_show_the_effective_configuration(tmp_path: Path) -> None:
    with scraped("nftables", tmp_path, enableProfiling=True, clusterCIDR="10.244.0.0/16") as (proxy, _):
        proxy.exposition_with("kproxy_build_info")
        assert proxy.get("/proxyMode") == (200, "nftables")
        document = json.loads(proxy.get("/configz")[1])["kubeproxy.config.k8s.io"]
        assert document["kind"] == "KubeProxyConfiguration"
        assert document["clusterCIDR"] == "10.244.0.0/16"
        assert document["enableProfiling"] is True
        assert document["configSyncPeriod"] == "15m0s"
        assert "\nhostname-override=kb-node-0\n" in proxy.get("/flagz")[1]
        assert proxy.get("/statusz")[1].startswith("kproxy statusz\n")
        assert re.match(r"thread \d+ \[", proxy.get("/debug/pprof/goroutine?debug=2")[1])
        assert proxy.get("/debug/flags/v", method="PUT", body="3")[0] == 200
        assert proxy.get("/healthz")[1] == "ok"
        assert 'kubernetes_healthchecks_total{name="ping",' in proxy.get("/metrics/slis")[1]
        assert proxy.get("/readyz")[0] == 404


def test_profiles_are_served_only_if_enabled(tmp_path: Path) -> None:
    with scraped("nftables", tmp_path) as (proxy, _):
        proxy.exposition_with("kproxy_build_info")
        for path in ("/debug/pprof/", "/debug/pprof/profile", "/debug/flags/v"):
            assert proxy.get(path)[0] == 404
