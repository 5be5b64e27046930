"""A cluster of three nodes in namespaces, each with a running kproxy, behind the stand-in API server."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kproxy_conformance.apiserver.server import Server
from kproxy_conformance.apiserver.store import Store
from tests.core.api_servers import write_kubeconfig
from tests.core.namespaces import Namespace
from tests.core.processes import KPROXY, Proxy, started
from tests.listeners import accepting
from tests.patience import PATIENCE

KUBECTL_KPROXY = str(Path(sys.executable).with_name("kubectl-kproxy"))

NODES = ("node-a", "node-b", "node-c")
HUB = "10.9.0.1"
"""Address of the API server and of its users."""
PORT = 8080
"""Of the servers in pods."""

Json = dict[str, Any]


def node_address(node: str) -> str:
    return f"10.9.0.{11 + NODES.index(node)}"


def pod_network(node: str) -> str:
    return f"10.128.{1 + NODES.index(node)}.0/24"


def pod_address(node: str) -> str:
    """Return the address of the pod on *node* that answers on `PORT`."""
    return f"10.128.{1 + NODES.index(node)}.2"


def node_object(node: str, **labels: str) -> Json:
    return {
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": node, "labels": {"kubernetes.io/hostname": node, **labels}},
        "spec": {"podCIDR": pod_network(node), "podCIDRs": [pod_network(node)]},
        "status": {"addresses": [{"type": "InternalIP", "address": node_address(node)}],
                   "conditions": [{"type": "Ready", "status": "True"}]},
    }  # fmt: skip


def kproxy_pod(node: str, **changes: Any) -> Json:
    """Return the DaemonSet's pod on *node*; *changes*: of its status."""
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": f"kproxy-{node}", "namespace": "kube-system", "labels": {"k8s-app": "kproxy"}},
        "spec": {"nodeName": node, "hostNetwork": True, "containers": [{"name": "kproxy"}]},
        "status": {
            "phase": "Running", "podIP": node_address(node),
            "containerStatuses": [{"name": "kproxy", "ready": True, "state": {"running": {}}}], **changes,
        },
    }  # fmt: skip


def pod_object(node: str, name: str) -> Json:
    """Return the pod on *node* that answers on `PORT`."""
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "shop", "labels": {"app": "web"}},
        "spec": {"nodeName": node, "containers": [{"name": "web"}]},
        "status": {"phase": "Running", "podIP": pod_address(node), "podIPs": [{"ip": pod_address(node)}],
                   "conditions": [{"type": "Ready", "status": "True"}]},
    }  # fmt: skip


def service(name: str = "web", cluster_ip: str = "10.96.0.10", **spec: Any) -> Json:
    """Return a Service in the namespace ``shop``."""
    return {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "shop"},
        "spec": {"type": "ClusterIP", "clusterIP": cluster_ip, "clusterIPs": [cluster_ip],
                 "ipFamilies": ["IPv4"], "ports": [{"port": 80, "protocol": "TCP"}], **spec},
    }  # fmt: skip


def slice_of(name: str = "web", nodes: Sequence[str] = NODES) -> Json:
    """Return the EndpointSlice of a Service with the pods on *nodes*."""
    return {
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": f"{name}-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": name}},
        "endpoints": [
            {"addresses": [pod_address(node)], "nodeName": node, "conditions": {"ready": True},
             "targetRef": {"kind": "Pod", "namespace": "shop", "name": f"{name}-{node}"}} for node in nodes],
        "ports": [{"name": "", "port": PORT, "protocol": "TCP"}],
    }  # fmt: skip


class Fleet:
    """`NODES`, connected by a bridge in the namespace of the API server and its users."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self._stack = stack
        self._directory = directory
        self.hub = self._namespace("hub")
        self.nodes = {node: self._namespace(node) for node in NODES}
        self._connect()
        objects = {
            "nodes": [node_object(node, pool="blue" if node == "node-a" else "green") for node in NODES],
            "pods": [*map(kproxy_pod, NODES), *(pod_object(node, f"web-{node}") for node in NODES)],
            "services": [service()],
            "endpointslices": [slice_of()],
        }
        self.server = self.hub.inside(lambda: Server((HUB, 0), Store(objects), locate=self.located))
        """Its ``refused`` has what RBAC refuses."""
        stack.callback(self.server.stop)
        self.server.start()
        self.kubeconfig = write_kubeconfig(
            directory / "kubeconfig", f"http://{HUB}:{self.server.port}")
        self.proxies = {node: stack.enter_context(self.proxy(node)) for node in NODES}
        for proxy in self.proxies.values():
            proxy.await_health()

    def kubectl(self, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run ``kubectl kproxy`` with *arguments* as a user of the cluster does, with output to pipes."""
        return subprocess.run(
            self.in_hub(*arguments), capture_output=True, text=True, check=False, timeout=PATIENCE,
            env={**os.environ, "KUBECONFIG": self.kubeconfig, **environment})

    def in_hub(self, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", self.hub.name, KUBECTL_KPROXY, *arguments]

    def connect(self, node: str, address: str, port: int) -> None:
        """Open a TCP connection from *node*, and close it. Raises OSError."""
        self.nodes[node].inside(lambda: socket.create_connection((address, port), PATIENCE)).close()

    def apply(self, obj: Json) -> None:
        """Create or replace an object at the API server."""
        self.server.store.apply(obj)

    def delete(self, obj: Json) -> None:
        self.server.store.remove(obj)

    def located(self, pod: Json, command: Sequence[str]) -> list[str]:
        """Return what runs *command* of a pod on its node."""
        words = [KPROXY, *command[1:]] if command[0] == "kproxy" else command
        return ["ip", "netns", "exec", self.nodes[pod["spec"]["nodeName"]].name, *words]

    @contextmanager
    def stalled(self, node: str) -> Iterator[None]:
        """No watch of the kproxy of *node* delivers anything, for as long as it lasts."""
        self.server.stall(node_address(node))
        try:
            yield
        finally:
            self.server.stall("")

    @contextmanager
    def proxy(self, node: str, mode: str = "nftables") -> Iterator[Proxy]:
        """Run the kproxy of *node*."""
        config = self._directory / f"{node}.conf"
        config.write_text(json.dumps({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
            "mode": mode, "clusterCIDR": "10.128.0.0/16", "conntrack": {"maxPerCore": 0},
            "clientConnection": {"kubeconfig": self.kubeconfig},
            "kproxy": {"stateDirectory": str(self._directory / f"state-{node}"), "trafficMetrics": "service",
                       "modeFromNodeLabel": "kproxy.dev/mode"},
        }))  # fmt: skip
        command = [KPROXY, f"--config={config}", f"--hostname-override={node}"]
        with started(self.nodes[node], ["ip", "netns", "exec", self.nodes[node].name, *command]) as proxy:
            yield proxy

    def _namespace(self, host: str) -> Namespace:
        made = Namespace(host)
        self._stack.callback(made.close)
        return made

    def _connect(self) -> None:
        for node, namespace in self.nodes.items():
            self.hub.add_veth(f"to-{node}", namespace, "eth0")
            namespace.add_address(f"{node_address(node)}/24", "eth0")
            namespace.add_address(f"{pod_address(node)}/32", "lo")
            namespace.forward()
            listener = namespace.inside(lambda: socket.create_server(("", PORT), backlog=512))
            self._stack.enter_context(accepting(listener, socket.socket.close))
        self.hub.add_bridge("br0", *(f"to-{node}" for node in NODES))
        self.hub.add_address(f"{HUB}/24", "br0")
        for node, namespace in self.nodes.items():
            namespace.add_route("0.0.0.0/0", via=HUB)
            for other in NODES:
                if other != node:
                    namespace.add_route(pod_network(other), via=node_address(other))


