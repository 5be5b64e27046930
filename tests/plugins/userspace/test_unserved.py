"""A port of a Service that another program has, as the operator of the whole program sees it."""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from .endpoints import PATIENCE, endpoints, reached

KPROXY = Path(sys.executable).with_name("kproxy")
HOST = "192.0.2.2"
NAME = f"{HOST}:9001"
TAKEN, FREE = 30080, 30081

pytestmark = pytest.mark.usefixtures("node")


def manifests(name: str, vip: str, node_port: int) -> str:
    return yaml.safe_dump_all([
        {
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "default"},
            "spec": {"type": "NodePort", "clusterIP": vip, "clusterIPs": [vip],
                     "ports": [{"port": 80, "protocol": "TCP", "nodePort": node_port}]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": f"{name}-1", "namespace": "default",
                         "labels": {"kubernetes.io/service-name": name}},
            "ports": [{"name": "", "port": 9001, "protocol": "TCP"}],
            "endpoints": [{"addresses": [HOST], "conditions": {"ready": True}}],
        },
    ])  # fmt: skip


def got(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=PATIENCE) as answer:
        text: str = answer.read().decode()
    return text


def metric(name: str) -> float:
    lines = got(10249, "metrics").splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def problems() -> list[str]:
    found: list[str] = json.loads(got(10256, "healthz")).get("problems", [])
    return found


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            if holds():
                return
        except OSError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def objects(tmp_path: Path) -> Iterator[Path]:
    """Of the program that runs meanwhile; one of its Services wants a port that is taken."""
    directory, log = tmp_path / "objects", tmp_path / "log"
    directory.mkdir()
    (directory / "one.yaml").write_text(manifests("one", "10.96.0.1", TAKEN))
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(KPROXY), "--mode=userspace", f"--manifests={directory}", "--hostname-override=node1",
             "--iptables-sync-period=1s"],
            stdin=subprocess.DEVNULL, stderr=out,
        )  # fmt: skip
        try:
            yield directory
        finally:
            process.terminate()
            assert process.wait(PATIENCE) == 0, log.read_text()


def test_a_port_in_use_is_told_and_taken_once_it_is_free(request: pytest.FixtureRequest) -> None:
    with endpoints((HOST, 9001)):
        with socket.create_server(("0.0.0.0", TAKEN)):
            objects: Path = request.getfixturevalue("objects")
            until(lambda: bool(problems()))
            assert problems() == [
                f"IPv4: not served: default/one: TCP port {TAKEN} of this node: Address already in use"]
            assert metric("kproxy_userspace_unserved_service_ports") == 1
            until(lambda: metric("kproxy_sync_retries_total") >= 3)
            assert reached("10.96.0.1", 80) == NAME
            (objects / "two.yaml").write_text(manifests("two", "10.96.0.2", FREE))
            until(lambda: reached("192.0.2.1", FREE) == reached("10.96.0.2", 80) == NAME)
            assert len(problems()) == 1
        until(lambda: not problems())
        assert reached("192.0.2.1", TAKEN) == NAME
        assert metric("kproxy_userspace_unserved_service_ports") == 0
