"""The whole program in the mode, its metrics and its health."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.patience import PATIENCE

KPROXY = Path(sys.executable).with_name("kproxy")


def manifests(name: str, vip: str, *hosts: str, port: int = 80, protocol: str = "TCP", node_port: int) -> str:
    """A Service with endpoints at port 9001."""
    return yaml.safe_dump_all([
        {
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "default"},
            "spec": {"type": "NodePort", "clusterIP": vip, "clusterIPs": [vip],
                     "ports": [{"port": port, "protocol": protocol, "nodePort": node_port}]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": f"{name}-1", "namespace": "default",
                         "labels": {"kubernetes.io/service-name": name}},
            "ports": [{"name": "", "port": 9001, "protocol": protocol}],
            "endpoints": [{"addresses": [host], "conditions": {"ready": True}} for host in hosts],
        },
    ])  # fmt: skip


@contextmanager
def program(directory: Path, *arguments: str) -> Iterator[None]:
    """Run the program with the manifests in *directory*."""
    log = directory.with_suffix(".log")
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(KPROXY), "--mode=userspace", f"--manifests={directory}", "--hostname-override=node1",
             *arguments],
            stdin=subprocess.DEVNULL, stderr=out,
        )  # fmt: skip
        try:
            yield
        finally:
            process.terminate()
            assert process.wait(PATIENCE) == 0, log.read_text()


def metric(name: str) -> float:
    lines = _get(10249, "metrics").splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def problems() -> list[str]:
    """Return the problems that /healthz reports with status 200."""
    found: list[str] = json.loads(_get(10256, "healthz")).get("problems", [])
    return found


def until(holds: Callable[[], bool]) -> None:
    """Wait until *holds* returns True. An OSError counts as False."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            if holds():
                return
        except OSError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=PATIENCE) as answer:
        text: str = answer.read().decode()
    return text
