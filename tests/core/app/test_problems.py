"""What is wrong on a node, as `kproxy status`, `/healthz`, the metrics and the page tell it alike."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kproxy_core.model.address import Family
from kproxy_core.model.events import BadObject
from kproxy_core.observe.health import ProxyHealth
from tests.core.namespaces import Namespace, namespace
from tests.core.processes import Proxy, kproxy, running
from tests.core.sync_events import synced
from tests.patience import PATIENCE

V4 = Family.IPV4
METRICS = 10249

SERVICE = """
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec: {clusterIP: 10.96.0.10, ports: [{port: 80}]}
"""
BAD_SERVICE = SERVICE.replace("name: web", "name: bad").replace("10.96.0.10", "10.96.0.999")
FORWARD = """
apiVersion: kproxy.dev/v1
kind: Forward
name: lb
listen: ["203.0.113.1:80"]
to: ["192.0.2.1:10256", "192.0.2.1:1"]
check: {tcp: 100ms}
"""
NODE = """
apiVersion: v1
kind: Node
metadata: {name: NAME}
"""


@contextmanager
def proxy_at(directory: Path) -> Iterator[tuple[Namespace, Proxy]]:
    with namespace() as node:
        node.ip("address add 192.0.2.1/32 dev lo")
        node.run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
        with running(node, "--mode=nftables", f"--manifests={directory}", "--hostname-override=n1",
                     "--profiling") as proxy:
            proxy.await_health()
            yield node, proxy


def until(holds: Callable[[], bool], what: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def problems(proxy: Proxy) -> list[str]:
    found: list[str] = json.loads(proxy.health()[1]).get("problems", [])
    return found


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Namespace, Proxy]]:
    """A proxy without problems, and its directory."""
    directory = tmp_path_factory.mktemp("manifests")
    (directory / "web.yaml").write_text(SERVICE)
    with proxy_at(directory) as (node, proxy):
        yield directory, node, proxy


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("bad.yaml", BAD_SERVICE, "Service default/bad: spec.clusterIP: '10.96.0.999' is not an IP address"),
        ("forward.yaml", FORWARD.replace("Forward", "Foward"),
         "Foward forward.yaml: kind: 'Foward' is not known; is Forward meant?"),
        ("kind.yaml", SERVICE.replace("Service", "Servcie"),
         "Servcie kind.yaml: kind: 'Servcie' is not known; is Service meant?"),
        ("text.json", "no JSON", "file text.json: is not a JSON object: JSON is malformed"),
        ("twice.yaml", SERVICE, "Service default/web: is in web.yaml as well; the one in twice.yaml is used"),
        ("node.yaml", NODE.replace("NAME", "n2"), "Node n1: there is no such Node, but Node n2 in node.yaml"),
        ("lb.yaml", FORWARD,
         "Forward lb: to: 1 of 2 endpoints pass their checks: 192.0.2.1:1: Connection refused"),
    ],
)
def test_an_object_that_is_not_served_as_it_says(
    serving: tuple[Path, Namespace, Proxy], file: str, content: str, problem: str
) -> None:
    directory, node, proxy = serving
    assert problems(proxy) == []
    (directory / file).write_text(content)
    try:
        until(lambda: any(each.startswith(problem) for each in problems(proxy)), lambda: problems(proxy))
        assert proxy.health()[0] == 200
        assert 'kproxy_problems{about="objects"} 1\n' in proxy.get(METRICS, "/metrics")[1]
        done = kproxy("status", "-o", "json", node=node)
        status: dict[str, Any] = json.loads(done.stdout)
        assert (done.returncode, status["well"]) == (1, False)
        assert [each for each in status["problems"] if each.startswith(problem)]
        doctor = json.loads(kproxy("doctor", "-o", "json", node=node).stdout)["findings"][0]
        assert (doctor["check"], doctor["evidence"]) == ("proxy", problems(proxy))
        page = json.loads(proxy.get(METRICS, "/debug/kproxy/status.json")[1])
        assert (page["healthy"], page["well"]) == (True, False)
    finally:
        (directory / file).unlink()
    until(lambda: problems(proxy) == [], lambda: problems(proxy))
    assert kproxy("status", "--no-doctor", node=node).returncode == 0


def test_a_port_that_cannot_be_opened(tmp_path: Path) -> None:
    with namespace() as node:
        taken = node.inside(lambda: socket.create_server(("127.0.0.1", METRICS)))
        with running(node, "--mode=nftables", f"--manifests={tmp_path}") as proxy:
            proxy.await_health()
            (problem,) = problems(proxy)
            assert problem.startswith("the metrics server: cannot listen on 127.0.0.1:10249: ")
            taken.close()
            until(lambda: problems(proxy) == [], lambda: problems(proxy))


def test_a_node_that_forwards_nothing_is_not_well(tmp_path: Path) -> None:
    with proxy_at(tmp_path) as (node, _):
        node.run("sysctl", "-qw", "net.ipv4.ip_forward=0")
        done = kproxy("status", node=node)
        assert "ip-forward: this node forwards no IPv4 packets" in done.stdout
        assert done.returncode == 1
        assert kproxy("status", "--no-doctor", node=node).returncode == 0


def test_rules_of_objects_with_mistakes_are_not_accepted(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(BAD_SERVICE)
    (tmp_path / "web.yaml").write_text(SERVICE)
    done = kproxy("render", "--mode=nftables", f"--manifests={tmp_path}", "--check")
    assert done.returncode == 1
    assert "Service default/bad: spec.clusterIP" in done.stderr
    assert done.stderr.endswith("Error: 1 mistake in objects, named above\n")
    assert "rules of mode nftables are accepted" in done.stdout


def test_of_many_problems_the_first_are_named() -> None:
    health = ProxyHealth((V4,), timeout=60, node_required=False)
    health.sync_succeeded(synced(V4))
    bad = [BadObject("Service", f"a/{number}", "", "bad") for number in range(1000)]
    health.include("objects", lambda: map(str, bad))
    named = health.problems()
    assert (len(named), named[0], named[-1]) == (21, "Service a/0: bad", "objects: 980 more problems")
    assert len(health.all_problems()) == 1000
    assert not health.condition().is_well
    bad.clear()
    assert len(health.last_problems()) == 21, "the loop's thread asks nobody"
    assert health.condition().is_well
    assert health.last_problems() == []


def test_a_reader_that_fails_keeps_no_other_from_telling(caplog: pytest.LogCaptureFixture) -> None:
    health = ProxyHealth((V4,), timeout=60, node_required=False)
    health.sync_succeeded(synced(V4))
    health.include("objects", lambda: [str(1 // 0)])
    health.include("listeners", lambda: ["the metrics server: cannot listen"])
    assert health.healthz().status == 200
    assert health.problems() == ["the metrics server: cannot listen"]
    assert "bug: problems cannot be told" in caplog.text
    caplog.clear()
