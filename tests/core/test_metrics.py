"""Metrics have kube-proxy's names, types, labels and buckets, and count what they say."""

import math
import re
import subprocess
import sys
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kproxy_core.backend.api import Scope
from kproxy_core.model.address import Family
from kproxy_core.observe.instruments import exposition
from kproxy_core.observe.metrics import Metrics
from tests.core.golden import golden

V4, V6 = Family.IPV4, Family.IPV6


def exercised(mode: str) -> Metrics:
    """Metrics in which everything happened once."""
    metrics = Metrics(mode, "0.1")
    for family in (V4, V6):
        metrics.sync_requested(family, 1000.0)
        metrics.sync_ended(family, Scope.RESYNC, 0.2, 1001.0, 7)
        metrics.sync_ended(family, Scope.CHANGED, 0.003, 1002.0, None)
        metrics.sync_retried(family)
        metrics.programmed(family, [0.3, 70])
        metrics.no_local_endpoints(family, 1, 2)
        metrics.foreign_change(family)
        metrics.stale_flows(family, 0.01, 3)
    metrics.service_events(4, 2)
    metrics.endpoint_events(10, 5)
    metrics.bad_object("Service")
    metrics.gate("SomeGate", "BETA", True)
    metrics.client.requested("GET", "api:6443", "200", waited=0.1, seconds=0.2, received=700)
    metrics.client.requested("GET", "api:6443", "<error>", waited=0, seconds=1)
    metrics.client.requested("POST", "api:6443", "201", waited=0, seconds=3, sent=5_000_000, received=100)
    for status in (200, 503):
        metrics.health_answered("healthz", status)
        metrics.health_answered("livez", status)
    return metrics


def shapes(exposition: str) -> dict[str, str]:
    """Name -> type, labels and buckets, as in ``shared/golden``."""
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
    ours = shapes(exercised(mode).exposition().decode())
    assert {name: ours.get(name) for name in wanted} == wanted


def test_metrics_of_a_mode_are_named_after_it() -> None:
    name = "kubeproxy_sync_proxy_rules_{}_sync_failures_total"
    assert name.format("nftables") in shapes(exercised("nftables").exposition().decode())
    other = shapes(exercised("my-mode").exposition().decode())
    assert name.format("my_mode") in other
    assert name.format("nftables") not in other


def test_the_programming_buckets_are_kube_proxys() -> None:
    shape = shapes(exercised("x").exposition().decode())["kubeproxy_network_programming_duration_seconds"]
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
def test_each_metric_counts_what_it_says(sample: str, value: float) -> None:
    metrics = exercised("x")
    assert metrics.values()[sample] == value
    line = next(line for line in metrics.exposition().decode().splitlines() if line.startswith(sample + " "))
    assert float(line.rpartition(" ")[2]) == value


def test_a_value_falls_into_the_first_bucket_that_is_not_below_it() -> None:
    metrics = Metrics("x", "0")
    for seconds in (0.0005, 0.001, 0.0011, 16.384, 99):
        metrics.sync_ended(V4, Scope.CHANGED, seconds, 0, 0)
    text = metrics.exposition().decode()
    counts = re.findall(r'kubeproxy_sync_proxy_rules_duration_seconds_bucket\{.*le="(.*)"\} (.*)', text)
    assert [
        (bound, float(count))
        for bound, count in counts
        if bound in ("0.001", "0.002", "8.192", "16.384", "+Inf")
    ] == [("0.001", 2), ("0.002", 3), ("8.192", 3), ("16.384", 4), ("+Inf", 5)]


def test_changes_that_went_into_a_sync_are_pending_no_more() -> None:
    metrics = exercised("x")
    metrics.changes_taken()
    values = metrics.values()
    assert values["kubeproxy_sync_proxy_rules_service_changes_pending"] == 0
    assert values["kubeproxy_sync_proxy_rules_endpoint_changes_pending"] == 0
    assert values["kubeproxy_sync_proxy_rules_service_changes_total"] == 4


def test_hostile_labels_are_escaped() -> None:
    metrics = Metrics("x", "0")
    metrics.bad_object('a"} 5\n# evil\\')
    families = {f.name: f for f in text_string_to_metric_families(metrics.exposition().decode())}
    assert families["kproxy_bad_objects"].samples[0].labels == {"kind": 'a"} 5\n# evil\\'}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (3.0, "3"), (-1, "-1"), (0.25, "0.25"), (16.384, "16.384"), (0.00001, "1e-05"),
        (999_999, "999999"), (1_000_000, "1e+06"), (1795275385.429969, "1.795275385429969e+09"),
        (2.0**64, "1.8446744073709552e+19"), (math.inf, "+Inf"), (-math.inf, "-Inf"), (math.nan, "NaN"),
    ],
)  # fmt: skip
def test_numbers_look_as_go_programs_write_them(value: float, text: str) -> None:
    assert exposition([("x", "an x", "gauge", [("", {}, value)])]) == (
        f"# HELP x an x\n# TYPE x gauge\nx {text}\n".encode())


def test_the_bound_of_a_bucket_is_the_last_label() -> None:
    sample = ("_bucket", {"zone": "a", "le": "0.5", "code": "200"}, 1)
    text = exposition([("x", "an x", "histogram", [sample])])
    assert b'x_bucket{code="200",zone="a",le="0.5"} 1\n' in text


def test_recording_needs_no_prometheus_client() -> None:
    program = (
        "import sys\n"
        "from kproxy_core.backend.api import Scope\n"
        "from kproxy_core.model.address import Family\n"
        "from kproxy_core.observe.metrics import Metrics\n"
        "metrics = Metrics('x', '0')\n"
        "metrics.sync_ended(Family.IPV4, Scope.CHANGED, 0.1, 0.0, 1)\n"
        "print('prometheus_client' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_build_is_told_as_the_kubernetes_that_it_stands_for() -> None:
    text = exercised("x").exposition().decode()
    (build,) = (f for f in text_string_to_metric_families(text) if f.name == "kubernetes_build_info")
    labels = build.samples[0].labels
    assert (labels["major"], labels["minor"]) == ("1", "36")
    assert re.match(r"v1\.36\.0\+kproxy-0\.1$", labels["git_version"])


def test_the_process_is_told_as_it_is() -> None:
    values = exercised("x").values()
    assert values["process_virtual_memory_max_bytes"] == float(2**64)
    assert values["process_network_receive_bytes_total"] > 0
    assert values["go_threads"] == values["go_goroutines"] == threading.active_count()
