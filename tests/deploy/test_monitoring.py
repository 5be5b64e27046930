"""The rules and the dashboard of ``deploy/monitoring``: accepted by promtool, about metrics that exist."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from kproxy_core.model.address import Family
from kproxy_core.observe.metrics import Metrics, SyncMetrics
from kproxy_core.observe.traffic.series import TrafficCollector
from tests.rights import program

CHECKOUT = Path(__file__).parents[2]
MONITORING = CHECKOUT / "deploy" / "monitoring"
PAGE = (CHECKOUT / "docs" / "observability.md").read_text(encoding="utf-8")
SUFFIXES = "(?:_total|_bucket|_sum|_count)?"
OF_A_METRIC = re.compile(r"(?<![:\w])(?:kproxy|kubeproxy|process)_\w+")


def promtool(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [program("promtool"), *arguments], cwd=MONITORING, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", [("check", "rules", "rules.yaml"), ("test", "rules", "rules-test.yaml")])
def test_promtool_accepts_the_rules(command: tuple[str, ...]) -> None:
    done = promtool(*command)
    assert done.returncode == 0, done.stdout + done.stderr


def rules() -> list[dict[str, Any]]:
    content = yaml.safe_load((MONITORING / "rules.yaml").read_text(encoding="utf-8"))
    return [rule for group in content["groups"] for rule in group["rules"]]


def test_each_alert_is_tested_and_explained() -> None:
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    tests = (MONITORING / "rules-test.yaml").read_text(encoding="utf-8")
    tested = set(re.findall(r"alertname: (\w+)", tests))
    assert tested == alerts
    assert {alert for alert in alerts if f"`{alert}`" not in PAGE} == set()


def expressions(value: Any) -> Iterator[str]:
    """Yield every query in the dashboard."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name in ("expr", "definition") and isinstance(item, str):
                yield item
            else:
                yield from expressions(item)
    elif isinstance(value, list):
        for item in value:
            yield from expressions(item)


def test_the_dashboard_has_queries_that_promtool_can_parse(tmp_path: Path) -> None:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    queries = [query for query in expressions(dashboard) if not query.startswith("label_values(")]
    assert len(queries) > 15
    written = [
        {"record": f"query:{number}", "expr": query.replace("$__rate_interval", "5m")}
        for number, query in enumerate(queries)
    ]
    (tmp_path / "queries.yaml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": written}]}))
    done = promtool("check", "rules", str(tmp_path / "queries.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_every_metric_in_use_is_explained() -> None:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    queries = [*expressions(dashboard), *(rule["expr"] for rule in rules())]
    used = {name for query in queries for name in OF_A_METRIC.findall(query)}
    missing = {
        name for name in used
        if f"`{name}`" not in PAGE and f"`{re.sub('_(bucket|sum|count)$', '', name)}`" not in PAGE
    }
    assert missing == set()


def exposed() -> set[str]:
    """Return the names of all series that a proxy can have, without those of a mode's own metrics."""
    metrics = Metrics("nftables", "0")
    SyncMetrics(metrics.registry, "nftables", tuple(Family), lambda: 0.0)
    recorder: Any = SimpleNamespace(read=dict, failures=SimpleNamespace(lost=0))
    metrics.registry.register(TrafficCollector(recorder, endpoints=True, limit=1))
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    return {
        f"{metric.name}{suffix}"
        for metric in metrics.registry.collect() for suffix in suffixes.get(metric.type, ("",))
    }  # fmt: skip


def test_every_metric_in_use_exists() -> None:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    queries = [*expressions(dashboard), *(rule["expr"] for rule in rules())]
    used = {name for query in queries for name in OF_A_METRIC.findall(query)}
    assert used - exposed() == set()
