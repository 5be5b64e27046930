"""Ten thousand connections that do nothing, through the whole program."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from kproxy_conformance.processes import children
from tests.bench.load import endpoint, idle_connections
from tests.bench.relays import resident_mib
from tests.patience import PATIENCE

from .proxies import VIP

KPROXY = Path(sys.executable).with_name("kproxy")
HOST = "192.0.2.2"
BULK, ECHO = 9001, 9002
CONNECTIONS = 10_000
LIMIT_MIB = 150

MANIFESTS = [
    {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "namespace": "default"},
        "spec": {"clusterIP": VIP, "clusterIPs": [VIP], "ports": [{"port": 80, "protocol": "TCP"}]},
    },
    {
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": "web-1", "namespace": "default",
                     "labels": {"kubernetes.io/service-name": "web"}},
        "ports": [{"name": "", "port": ECHO, "protocol": "TCP"}],
        "endpoints": [{"addresses": [HOST], "conditions": {"ready": True}}],
    },
]  # fmt: skip


def family_of(pid: int) -> list[int]:
    """*pid* and its children."""
    return [pid, *children(pid)]


@pytest.mark.usefixtures("node")
def test_ten_thousand_idle_connections_take_at_most_150_mib(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "web.yaml").write_text(yaml.safe_dump_all(MANIFESTS))
    log = tmp_path / "log"
    with endpoint(BULK, ECHO, HOST), log.open("wb") as out:
        process = subprocess.Popen(
            [str(KPROXY), "--mode=userspace", f"--manifests={tmp_path / 'objects'}",
             "--hostname-override=node1"],
            stdin=subprocess.DEVNULL, stderr=out,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + PATIENCE
            while log.read_text().count("first sync") < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            with idle_connections(80, CONNECTIONS, VIP):
                processes = family_of(process.pid)
                assert len(processes) > 1
                assert resident_mib(processes) <= LIMIT_MIB
        finally:
            process.terminate()
            assert process.wait(PATIENCE) == 0, log.read_text()
