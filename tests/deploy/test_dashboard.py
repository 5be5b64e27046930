"""The dashboard's panels show data of a proxy with traffic, which a Prometheus server scrapes."""

import itertools
import json
import math
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest

from tests.deploy.test_monitoring import MONITORING
from tests.switch.room import Room, room
from tests.switch.test_traffic import COUNTED, EMPTY, OURS, WEB, abandoned, dial, refused

CLOSED = ("10.96.201.30", 80)
PORT = 9090
CONFIGURATION = """
global: {scrape_interval: 5s, scrape_timeout: 5s}
scrape_configs: [{job_name: kproxy, static_configs: [{targets: ["127.0.0.1:10249"]}]}]
"""
SCRAPES = 8
"""After so many that were answered, a panel without data has none."""
VARIABLES = {"$instance": ".*", "$namespace": ".*", "$__rate_interval": "1h"}
CHANGED = """
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: changing
  namespace: counted
  labels: {{kubernetes.io/service-name: two}}
  annotations: {{endpoints.kubernetes.io/last-change-trigger-time: "{now}"}}
addressType: IPv4
endpoints: [{{addresses: [10.1.2.{last}]}}]
ports: [{{name: http, port: 8080}}]
"""
UNUSABLE = """
apiVersion: v1
kind: Service
metadata: {name: unusable, namespace: counted}
spec: {clusterIP: 10.96.201.300, ports: [{port: 80}]}
"""

Series = list[dict[str, Any]]


class Query(NamedTuple):
    panel: str
    text: str
    labels: frozenset[str]
    """The labels that the legend or a template variable shows."""


def queries() -> Iterator[Query]:
    """Yield the queries of all panels and template variables."""
    dashboard = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"]
            for name, value in VARIABLES.items():
                text = text.replace(name, value)
            legend = re.findall(r"{{(\w+)}}", target.get("legendFormat", ""))
            yield Query(panel["title"], text, frozenset(legend))
    for variable in dashboard["templating"]["list"]:
        if found := re.fullmatch(r"label_values\((\w+), (\w+)\)", variable.get("definition", "")):
            yield Query(variable["name"], found[1], frozenset({found[2]}))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Room]:
    with room(tmp_path) as made:
        made.node.run("sysctl", "-qw", "net.netfilter.nf_conntrack_acct=1")
        (made.manifests / "ours.yaml").write_text(OURS)
        (made.manifests / "unusable.yaml").write_text(UNUSABLE)
        with made.proxy("userspace", COUNTED):  # Its metrics are all that a panel shows.
            yield made


@pytest.fixture
def prometheus(node: Room, tmp_path: Path) -> Iterator[None]:
    """Run a Prometheus server on the node until the end of the test."""
    (tmp_path / "prometheus.yaml").write_text(CONFIGURATION)
    process = subprocess.Popen([
        "ip", "netns", "exec", node.node.name, "prometheus", f"--config.file={tmp_path}/prometheus.yaml",
        f"--storage.tsdb.path={tmp_path}/tsdb", f"--web.listen-address=127.0.0.1:{PORT}",
    ], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def evaluate(node: Room, query: str) -> Series:
    """Return the series that Prometheus answers with now; none before it serves."""
    connection = HTTPConnection("127.0.0.1", PORT)
    try:
        connection.sock = node.node.inside(lambda: socket.create_connection(("127.0.0.1", PORT), 5))
        connection.request("GET", f"/api/v1/query?{urlencode({'query': query})}")
        answer = connection.getresponse()
        content = answer.read()
    except ConnectionRefusedError:
        return []
    finally:
        connection.close()
    if answer.status == 503:
        return []
    found = json.loads(content)
    assert found["status"] == "success", f"{query}: {found}"
    return [one for one in found["data"]["result"] if not math.isnan(float(one["value"][1]))]


@pytest.mark.usefixtures("prometheus")
def test_every_panel_shows_data_with_the_labels_of_its_legend(node: Room) -> None:
    waiting = list(queries())
    assert len(waiting) > 20
    found: dict[Query, Series] = {}
    for last in itertools.cycle(range(1, 255)):
        answered = sum(float(one["value"][1]) for one in evaluate(node, "sum_over_time(up[1h])"))
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        (node.manifests / "changing.yaml").write_text(CHANGED.format(now=now, last=last))
        dial(node, WEB, 2)
        abandoned(node, CLOSED, 1)
        refused(node, EMPTY, 1)
        found |= {query: evaluate(node, query.text) for query in waiting}
        waiting = [query for query in waiting if not found[query]]
        if not waiting or answered >= SCRAPES:
            break
        time.sleep(1)
    assert waiting == []
    unlabelled = {
        query.panel for query, series in found.items()
        if any(query.labels - one["metric"].keys() for one in series)
    }
    assert unlabelled == set()
