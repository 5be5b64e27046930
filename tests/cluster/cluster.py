"""A cluster of Kubernetes' own programs on this machine."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from kproxy_conformance.network.namespaces import CommandFailed
from tests.cluster.certificates import Certificates
from tests.cluster.fabric import CONTROL_PLANE, SERVICES, Fabric, addresses
from tests.cluster.node import Node

SERVER = f"https://{addresses(CONTROL_PLANE)[0]}:6443"
_PATIENCE = 600.0
"""Seconds for anything that must happen."""
_DNS = """
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system}
spec:
  clusterIP: 10.96.0.10
  ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: kube-dns, namespace: kube-system, labels: {kubernetes.io/service-name: kube-dns}}
addressType: IPv4
endpoints: [{addresses: [%s]}]
ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53, protocol: TCP}]
"""


class Cluster:
    """The control plane and the nodes, all running."""

    def __init__(
        self, binaries: Path, directory: Path, fabric: Fabric, stack: ExitStack, images: Sequence[Path]
    ) -> None:
        """Start everything, and put *images*, archives, on each node."""
        self.directory = directory
        self.binaries = binaries
        self.home = fabric.control_plane
        self.outside = fabric.outside
        self.networks = fabric.nodes
        self._stack = stack
        self._certificates = Certificates(directory / "pki")
        self._sign(list(fabric.nodes))
        self.kubeconfig = self._certificates.kubeconfig("admin", SERVER)
        self._start("etcd", str(binaries / "kcetcd"), str(directory / "etcd"))
        self._start("kube-apiserver", *self._api_server())
        self.wait("the API server", "get", "--raw", "/readyz")
        self._start("kube-controller-manager", *self._controller_manager())
        self._start("kube-scheduler", *self._scheduler())
        self.nodes = []
        for number, network in fabric.nodes.items():
            node = Node(number, network, directory / f"n{number}", binaries / "kubelet", self._certificates)
            stack.callback(node.close)
            self.nodes.append(node)
        for node in self.nodes:
            node.load(images)
        for node in self.nodes:
            self.wait(node.name, "wait", "node", node.name, "--for=condition=Ready", "--timeout=10s")
            self.kubectl("label", "node", node.name, f"topology.kubernetes.io/zone=zone-of-{node.name}")
        self._start_own("dns")
        self._start_own("load_balancer", *(addresses(number)[0] for number in fabric.nodes))
        self.apply(_DNS % addresses(CONTROL_PLANE)[0])

    def kubectl(self, *arguments: str, stdin: str = "", timeout: float = _PATIENCE) -> str:
        """Return the output of kubectl. Raises CommandFailed."""
        return self.home.run(
            str(self.binaries / "kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments, stdin=stdin,
            timeout=timeout)

    def apply(self, objects: str) -> None:
        """Make the objects of a manifest, or change them to it. Raises CommandFailed."""
        # Kubernetes built with another Go than its release may lack schemas.
        self.kubectl("apply", "--validate=false", "-f", "-", stdin=objects)

    def shell(self) -> None:
        """Start a shell on the control plane, and wait for its end."""
        with self.home.entered():
            subprocess.run(["bash"], check=False, env={
                **os.environ, "KUBECONFIG": str(self.kubeconfig),
                "PATH": f"{self.binaries}:{os.environ['PATH']}"})  # fmt: skip

    def wait(self, what: str, *arguments: str) -> None:
        """Repeat a command of kubectl until it succeeds."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                self.kubectl(*arguments)
                return
            except CommandFailed as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{what}: {error}") from error
            time.sleep(0.5)

    def _start(self, name: str, *argv: str) -> None:
        log = self._stack.enter_context((self.directory / f"{name}.log").open("wb"))
        self._stack.callback(_end, self.home.start(argv, log))

    def _start_own(self, module: str, *arguments: str) -> None:
        """Start a program of this package."""
        self._start(module, sys.executable, "-B", "-m", f"tests.cluster.{module}", str(self.kubeconfig),
                    *arguments)  # fmt: skip

    def _sign(self, nodes: list[int]) -> None:
        issue = self._certificates.issue
        names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc")
        issue("apiserver", "kube-apiserver", addresses=(
            *names, "localhost", "127.0.0.1", *addresses(CONTROL_PLANE), "10.96.0.1", "fd00:10:96::1"))
        issue("admin", "admin", "system:masters")
        issue("kubelet-client", "kube-apiserver-kubelet-client", "system:masters")
        for name in ("kube-controller-manager", "kube-scheduler"):
            issue(name, f"system:{name}")
            self._certificates.kubeconfig(name, SERVER)
        for number in nodes:
            issue(f"n{number}", f"system:node:n{number}", "system:nodes", (f"n{number}", *addresses(number)))
            self._certificates.kubeconfig(f"n{number}", SERVER)

    def _api_server(self) -> Iterator[str]:
        path = self._certificates.path
        yield str(self.binaries / "kube-apiserver")
        yield "--etcd-servers=http://127.0.0.1:2379"
        yield f"--service-cluster-ip-range={','.join(SERVICES)}"
        yield f"--advertise-address={addresses(CONTROL_PLANE)[0]}"
        yield "--bind-address=::"
        yield f"--tls-cert-file={path('apiserver.crt')}"
        yield f"--tls-private-key-file={path('apiserver.key')}"
        yield f"--client-ca-file={path('ca.crt')}"
        yield f"--service-account-key-file={path('sa.pub')}"
        yield f"--service-account-signing-key-file={path('sa.key')}"
        yield "--service-account-issuer=https://kubernetes.default.svc.cluster.local"
        yield "--authorization-mode=Node,RBAC"
        yield f"--kubelet-client-certificate={path('kubelet-client.crt')}"
        yield f"--kubelet-client-key={path('kubelet-client.key')}"
        yield "--kubelet-preferred-address-types=InternalIP"
        yield "--enable-admission-plugins=NodeRestriction"
        yield "--allow-privileged=true"

    def _controller_manager(self) -> Iterator[str]:
        path = self._certificates.path
        yield str(self.binaries / "kube-controller-manager")
        for option in ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"):
            yield f"--{option}={path('kube-controller-manager.conf')}"
        yield f"--root-ca-file={path('ca.crt')}"
        yield f"--service-account-private-key-file={path('sa.key')}"
        yield f"--cluster-signing-cert-file={path('ca.crt')}"
        yield f"--cluster-signing-key-file={path('ca.key')}"
        yield from ("--use-service-account-credentials=true", "--leader-elect=false",
                    "--bind-address=127.0.0.1", "--allocate-node-cidrs=false", "--kube-api-qps=100",
                    "--kube-api-burst=200")

    def _scheduler(self) -> Iterator[str]:
        yield str(self.binaries / "kube-scheduler")
        for option in ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"):
            yield f"--{option}={self._certificates.path('kube-scheduler.conf')}"
        yield from ("--leader-elect=false", "--kube-api-qps=100", "--kube-api-burst=200",
                    "--bind-address=127.0.0.1")  # fmt: skip


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


