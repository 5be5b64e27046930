"""Metrics have kube-proxy's names, types, labels and buckets, and the right values."""

import itertools
import math
import re
import threading
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kproxy_conformance.builders import endpoint, endpoint_slice, node_view, service
from kproxy_core.contract.values import Measurement, Scope, SyncReport
from kproxy_core.kube.requests import ApiRequest
from kproxy_core.kube.store import Store
from kproxy_core.model.address import Family
from kproxy_core.model.events import BadObject
from kproxy_core.observe.metrics import Metrics, SyncMetrics
from kproxy_core.plan.service_plan import plan_service
from kproxy_core.sync.difference import Step
from kproxy_core.sync.observer import Folded, Synced, SyncFailure
from kproxy_core.sync.plans import FamilyPlans
from tests.core.golden import golden
from tests.core.metric_values import values

V4, V6 = Family.IPV4, Family.IPV6
NO_INSTANCE: Any = None


class Recorded:
    """Metrics, and an observer that records in them at wall clock times 1000, 1001 ..."""

    def __init__(self, mode: str) -> None:
        self.metrics = Metrics(mode, "0.1")
        self.sync = SyncMetrics(
            self.metrics.registry, mode, (V4, V6), map(float, itertools.count(1000)).__next__)

    def succeed(self, family: Family, scope: Scope, seconds: float, **fields: Any) -> None:
        plans = FamilyPlans(family, Store([family], [], 0.0))
        self.sync.sync_succeeded(Synced(
            plans=plans, instance=NO_INSTANCE, scope=scope, seconds=seconds, report=SyncReport(7), **fields))

    def text(self) -> str:
        return self.metrics.exposition()[0].decode()


def exercised(mode: str) -> Recorded:
    """Return metrics in which each event was recorded once."""
    recorded = Recorded(mode)
    metrics, sync = recorded.metrics, recorded.sync
    local = service("a", "80@30000", internal_local=True, external_local=True)
    (plan,) = plan_service(local, {"": endpoint_slice("a", endpoint("10.0.0.1", "elsewhere"))}, node_view())
    for family, others in ((V4, 1), (V6, 2)):
        sync.sync_requested(family)
        recorded.succeed(family, Scope.RESYNC, 0.2, trigger_times=[1000.7, 931],
                         steps=[Step(plan.key, None, plan)] * others)
        sync.sync_started(family, retry=True)
        sync.sync_failed(SyncFailure(family=family, scope=Scope.CHANGED, seconds=0.003, error=OSError()))
        sync.damage_found(family)
        sync.record_cleanup(family, 3, 0.01)
    sync.events_folded(Folded(service_changes=4, services_pending=2, endpoint_changes=10, endpoints_pending=5,
                              bad_objects=[BadObject("Service", "a/b", "spec", "bad")]))
    metrics.set_gate("SomeGate", "BETA", True)
    for request in (
        ApiRequest("api:6443", "200", waited=0.1, seconds=0.2, received=700),
        ApiRequest("api:6443", "<error>", waited=0, seconds=1, received=None),
        ApiRequest("api:6443", "201", waited=0, seconds=3, received=100, method="POST", sent=5_000_000),
    ):
        metrics.client.record(request)
    for status in (200, 503):
        metrics.record_health_answer("healthz", status)
        metrics.record_health_answer("livez", status)
    return recorded


def shapes(exposition: str) -> dict[str, str]:
    """Return type, labels and buckets by name, as in ``tests/golden``."""
    found = {}
    for family in text_string_to_metric_families(exposition):
        if not family.samples:
            continue
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        name = family.name + ("_total" if family.type == "counter" else "")
        shape = f"{family.type} labels={','.join(labels) or '-'}"
        bounds = [sample.labels["le"] for sample in family.samples if sample.name.endswith("_bucket")]
        if bounds:
            shape += f" buckets={','.join(dict.fromkeys(bounds))}"
        found[name] = shape
    return found


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
def test_every_metric_of_kube_proxy_is_there_with_its_type_labels_and_buckets(mode: str) -> None:
    lines = golden(f"metrics-{mode}.txt").read_text().splitlines()
    # Go's own has nothing to say here, and a mode's own are its backend's (see test_metrics_scraped).
    wanted = dict(line.split(" ", 1) for line in lines if not re.match(rf"go_|kubeproxy_.*{mode}", line))
    assert "kubeproxy_sync_proxy_rules_duration_seconds" in wanted
    assert "rest_client_request_size_bytes" in wanted
    ours = shapes(exercised(mode).text())
    assert {name: ours.get(name) for name in wanted} == wanted


def test_metrics_of_a_mode_are_named_after_it() -> None:
    name = "kubeproxy_sync_proxy_rules_{}_sync_failures_total"
    assert name.format("nftables") in shapes(exercised("nftables").text())
    other = shapes(exercised("my-mode").text())
    assert name.format("my_mode") in other
    assert name.format("nftables") not in other


def test_the_programming_buckets_are_kube_proxys() -> None:
    shape = shapes(exercised("x").text())["kubeproxy_network_programming_duration_seconds"]
    bounds = shape.partition("buckets=")[2].split(",")
    assert bounds[:4] == ["0.25", "0.5", "1", "2"]
    assert bounds[60:64] == ["59", "60", "65", "70"]
    assert bounds[-4:] == ["240", "270", "300", "+Inf"]
    assert len(bounds) == 2 + 59 + 12 + 7 + 1


@pytest.mark.parametrize(
    ("sample", "value"),
    [
        ('kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="IPv4"}', 2),
        ('kubeproxy_sync_proxy_rules_duration_seconds_sum{ip_family="IPv6"}', pytest.approx(0.203)),
        ('kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family="IPv4"}', 1),
        ('kubeproxy_sync_partial_proxy_rules_duration_seconds_sum{ip_family="IPv4"}', 0.003),
        ('kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"}', 1001),
        ('kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family="IPv4"}', 1000),
        ('kubeproxy_network_programming_duration_seconds_count{ip_family="IPv4"}', 2),
        ("kubeproxy_sync_proxy_rules_service_changes_total", 4),
        ("kubeproxy_sync_proxy_rules_service_changes_pending", 2),
        ("kubeproxy_sync_proxy_rules_endpoint_changes_total", 10),
        ("kubeproxy_sync_proxy_rules_endpoint_changes_pending", 5),
        (
            'kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv6",traffic_policy="external"}',
            2,
        ),
        ('kubeproxy_sync_proxy_rules_x_sync_failures_total{ip_family="IPv4"}', 1),
        ('kubeproxy_proxy_healthz_total{code="503"}', 1),
        ('kubeproxy_proxy_livez_total{code="200"}', 1),
        ('kubeproxy_conntrack_reconciler_deleted_entries_total{ip_family="IPv4"}', 3),
        ('kproxy_sync_operations_total{ip_family="IPv4"}', 7),
        ('kproxy_sync_retries_total{ip_family="IPv4"}', 1),
        ('kproxy_foreign_changes_total{ip_family="IPv4"}', 1),
        ('kproxy_bad_objects_total{kind="Service"}', 1),
        ('kproxy_build_info{mode="x",version="0.1"}', 1),
        ('kubernetes_feature_enabled{name="SomeGate",stage="BETA"}', 1),
        ('rest_client_requests_total{code="200",host="api:6443",method="GET"}', 1),
        ('rest_client_requests_total{code="<error>",host="api:6443",method="GET"}', 1),
        ('rest_client_request_duration_seconds_sum{host="api:6443",verb="GET"}', 1.2),
        ('rest_client_rate_limiter_duration_seconds_sum{host="api:6443",verb="GET"}', 0.1),
        ('rest_client_request_size_bytes_sum{host="api:6443",verb="POST"}', 5_000_000),
        ('rest_client_response_size_bytes_sum{host="api:6443",verb="GET"}', 700),
    ],
)
def test_values_of_metrics(sample: str, value: float) -> None:
    recorded = exercised("x")
    assert values(recorded.metrics)[sample] == value
    line = next(line for line in recorded.text().splitlines() if line.startswith(sample + " "))
    assert float(line.rpartition(" ")[2]) == value


def test_buckets_count_values_up_to_and_including_their_bound() -> None:
    recorded = Recorded("x")
    for seconds in (0.0005, 0.001, 0.0011, 16.384, 99):
        recorded.succeed(V4, Scope.CHANGED, seconds)
    counts = re.findall(
        r'kubeproxy_sync_proxy_rules_duration_seconds_bucket\{.*le="(.*)"\} (.*)', recorded.text())
    assert [
        (bound, float(count))
        for bound, count in counts
        if bound in ("0.001", "0.002", "8.192", "16.384", "+Inf")
    ] == [("0.001", 2), ("0.002", 3), ("8.192", 3), ("16.384", 4), ("+Inf", 5)]


def test_changes_taken_by_a_sync_are_no_longer_pending() -> None:
    recorded = exercised("x")
    recorded.sync.sync_started(V4, retry=False)
    found = values(recorded.metrics)
    assert found["kubeproxy_sync_proxy_rules_service_changes_pending"] == 0
    assert found["kubeproxy_sync_proxy_rules_endpoint_changes_pending"] == 0
    assert found["kubeproxy_sync_proxy_rules_service_changes_total"] == 4


def test_a_sync_without_differences_is_not_timed() -> None:
    recorded = Recorded("x")
    plans = FamilyPlans(V4, Store([V4], [], 0.0))
    recorded.sync.sync_succeeded(Synced(plans=plans, instance=NO_INSTANCE, scope=Scope.CHANGED, seconds=1))
    assert "kubeproxy_sync_proxy_rules_duration_seconds_count{" not in recorded.text()


def test_failures_of_each_mode_are_counted_apart() -> None:
    recorded = exercised("x")
    for mode in ("y", "x"):
        recorded.sync.set_mode(mode)
        recorded.sync.sync_failed(SyncFailure(family=V4, scope=Scope.CHANGED, seconds=1, error=OSError()))
    found = values(recorded.metrics)
    assert found['kubeproxy_sync_proxy_rules_x_sync_failures_total{ip_family="IPv4"}'] == 2
    assert found['kubeproxy_sync_proxy_rules_y_sync_failures_total{ip_family="IPv4"}'] == 1
    assert found['kubeproxy_sync_proxy_rules_y_sync_failures_total{ip_family="IPv6"}'] == 0


def test_hostile_labels_are_escaped() -> None:
    recorded = Recorded("x")
    evil = 'a"} 5\n# evil\\'
    recorded.sync.events_folded(Folded(
        service_changes=0, services_pending=0, endpoint_changes=0, endpoints_pending=0,
        bad_objects=[BadObject(evil, "", "", "")]))
    families = {f.name: f for f in text_string_to_metric_families(recorded.text())}
    assert families["kproxy_bad_objects"].samples[0].labels == {"kind": evil}


def test_numbers_are_written_as_by_go_programs() -> None:
    numbers = {"zero": 0, "whole": -3, "half": 0.5, "million": 1e6, "time": 1795275385.4, "none": math.inf}
    metrics = Metrics("x", "1.0")
    metrics.add_collector(lambda: [[Measurement(n, "version 1.0", "gauge", v) for n, v in numbers.items()]])
    lines = metrics.exposition()[0].decode().splitlines()
    assert {"zero 0", "whole -3", "half 0.5", "million 1e+06", "none +Inf"} <= set(lines)
    assert {"time 1.7952753854e+09", "# HELP zero version 1.0"} <= set(lines)
    assert 'kproxy_build_info{mode="x",version="1.0"} 1' in lines


def test_no_creation_times_are_exposed() -> None:
    assert "_created" not in exercised("x").text()


def test_kube_proxys_metrics_are_counted() -> None:
    text = exercised("x").text()
    names = {name for name in shapes(text) if name.startswith("kubeproxy_")}
    line = next(line for line in text.splitlines() if line.startswith("registered_metrics_total{"))
    assert float(line.rpartition(" ")[2]) == len(names)


def test_measurements_of_backends_are_read_at_each_scrape() -> None:
    metrics = Metrics("x", "0")
    counted = itertools.count(5)
    metrics.add_collector(lambda: [
        [Measurement("a_total", "an a", "counter", next(counted), {"x": "1"})],
        [Measurement("b", "a b", "gauge", 2.5), Measurement("a_total", "an a", "counter", 9, {"x": "2"})],
    ])
    metrics.exposition()
    text = metrics.exposition()[0].decode()
    assert '# TYPE a_total counter\na_total{x="1"} 6\na_total{x="2"} 9\n' in text
    assert "# TYPE b gauge\nb 2.5\n" in text


def test_the_build_is_that_of_the_kubernetes_it_replaces() -> None:
    text = exercised("x").text()
    (build,) = (f for f in text_string_to_metric_families(text) if f.name == "kubernetes_build_info")
    labels = build.samples[0].labels
    assert (labels["major"], labels["minor"]) == ("1", "36")
    assert re.match(r"v1\.36\.0\+kproxy-0\.1$", labels["git_version"])


def test_the_kubernetes_version_is_a_semantic_one_between_releases() -> None:
    text = Metrics("x", "1.0.0.dev7+g0123456789ab").exposition()[0].decode()
    assert 'git_version="v1.36.0+kproxy-1.0.0.dev7.g0123456789ab"' in text
    assert 'kproxy_build_info{mode="x",version="1.0.0.dev7+g0123456789ab"}' in text


def test_metrics_of_the_process() -> None:
    before = threading.active_count()
    found = values(exercised("x").metrics)
    assert found["process_virtual_memory_max_bytes"] == float(2**64)
    assert found["process_network_receive_bytes_total"] > 0
    # Threads of earlier tests may end meanwhile.
    assert before >= found["go_threads"] == found["go_goroutines"] >= threading.active_count()
