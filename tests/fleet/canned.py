"""A cluster whose nodes answer what a test wants: small commands in place of kproxy's."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from kproxy_conformance.apiserver.server import Server
from kproxy_conformance.apiserver.store import Store
from kproxy_core.cli.kubectl import kubectl_kproxy
from tests.core.api_servers import write_kubeconfig
from tests.fleet.fleet import Json


class Canned:
    def __init__(self, directory: Path) -> None:
        self.server = Server(("127.0.0.1", 0), Store({}), locate=self._located)
        self.server.start()
        self.kubeconfig = write_kubeconfig(
            directory / "kubeconfig", f"http://127.0.0.1:{self.server.port}")
        self.asked: list[str] = []
        """Commands of kproxy in the pods."""
        self._scripts: dict[str, str] = {}

    def node(
        self, name: str, script: str = "", pod: Json | None = None, ready: str = "True", **labels: str
    ) -> None:
        """Add a node, and its kproxy pod, where *script* of sh answers. *pod*: changes of its status."""
        self.server.store.apply({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels},
            "status": {"conditions": [{"type": "Ready", "status": ready}]}})
        self.pod(name, f"kproxy-{name}", **(pod or {}))
        self._scripts[name] = script

    def pod(self, node: str, name: str, created: str = "2026-01-01T00:00:00Z", **status: Any) -> None:
        """Add a kproxy pod that runs on *node*, but for what *status* changes."""
        running = {"name": "kproxy", "ready": True, "state": {"running": {"startedAt": None}}}
        self.server.store.apply({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "kube-system", "labels": {"k8s-app": "kproxy"},
                         "creationTimestamp": created},
            "spec": {"nodeName": node, "containers": [{"name": "sidecar"}, {"name": "kproxy"}]},
            "status": {"phase": "Running", "containerStatuses": [running], **status}})

    def answer(self, name: str, answer: Any, status: int = 0) -> None:
        """Add a node whose kproxy prints *answer* as JSON."""
        self.node(name, f"echo {shlex.quote(json.dumps(answer))}; exit {status}")

    def kubectl(self, *arguments: str) -> Result:
        """Run ``kubectl kproxy`` in this process. Its output has standard error's in between."""
        return CliRunner().invoke(
            kubectl_kproxy, [*arguments, "--kubeconfig", self.kubeconfig], standalone_mode=False)

    def _located(self, pod: Json, command: Sequence[str]) -> list[str]:
        self.asked.append(shlex.join(command))
        script = self._scripts[pod["spec"]["nodeName"]]
        return ["sh", "-c", script] if script else ["/no/such/program"]


STATUS: Json = {
    "mode": "nftables", "configured": "nftables", "version": "0.2.0", "commit": "0123456789ab", "well": True,
    "since": 100.0, "now": 7300.0, "problems": [], "lag": 0.0, "foreign_changes": 0, "last_sync": 7290.0,
}
"""The answer of a kproxy that is well."""
