"""A node: containerd and a kubelet in namespaces of their own, on this machine's files."""

import functools
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from kproxy_conformance.network.namespaces import CommandFailed, Namespace, run
from tests.cluster.certificates import Certificates
from tests.cluster.fabric import addresses, pod_networks
from tests.core.bpf_places import cgroup2_tree

PAUSE = "registry.k8s.io/pause:3.10.2"
_HERE = Path(__file__).parent
_UNSHARED = ("--mount", "--uts", "--ipc", "--pid", "--cgroup")


class Node:
    """A running node."""

    def __init__(
        self, number: int, network: Namespace, directory: Path, kubelet: Path, certificates: Certificates
    ) -> None:
        self.name = f"n{number}"
        self._number = number
        self._network = network
        self._directory = directory
        self._directory.mkdir()
        self._write_configuration(certificates)
        self.cgroup = cgroup2_tree() / f"kproxy-cluster-{os.getpid()}-{self.name}"
        self.cgroup.mkdir()
        with (directory / "init.log").open("wb") as log:
            self._outer = subprocess.Popen(
                ("sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', self.cgroup,
                 "nsenter", f"--net={network.path}", "unshare", *_UNSHARED, "--fork", "--kill-child",
                 "--propagation", "private", str(_HERE / "node-init"), str(directory), self.name,
                 ",".join(addresses(number)), str(kubelet)),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # fmt: skip

    def run(self, *argv: str, timeout: float = 300.0) -> str:
        """Return the output of *argv* on the node. Raises CommandFailed."""
        return run("nsenter", f"--target={self._init}", "--mount", "--uts", "--ipc", "--pid", "--net", *argv,
                   timeout=timeout)  # fmt: skip

    @functools.cached_property
    def _init(self) -> str:
        """The process id of node-init, once unshare has started it."""
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        while not (found := children.read_text().split()):
            if self._outer.poll() is not None:
                raise CommandFailed(f"{self.name} ended: {(self._directory / 'init.log').read_text()}")
            time.sleep(0.05)
        return found[0]

    def load(self, images: Sequence[Path]) -> None:
        """Put images into containerd, which may still be starting."""
        self.run("sh", "-c", "until ctr version >/dev/null 2>&1; do sleep 0.2; done")
        for image in images:
            self.run("ctr", "-n", "k8s.io", "images", "import", str(image))

    def close(self) -> None:
        """End all its processes, and remove its cgroup."""
        self._outer.send_signal(signal.SIGKILL)  # --kill-child: its init ends, and so does its PID namespace.
        self._outer.wait()
        _remove(self.cgroup)

    def _write_configuration(self, certificates: Certificates) -> None:
        def write(name: str, text: str) -> None:
            (self._directory / name).write_text(text)

        networks = pod_networks(self._number)
        (self._directory / "cni").mkdir()
        write("cni/10-pods.conflist", json.dumps({
            "cniVersion": "0.3.1", "name": "pods", "plugins": [{
                "type": "ptp", "ipMasq": False, "mtu": 1500, "ipam": {
                    "type": "host-local", "dataDir": "/run/cni-ipam",
                    "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
                    "ranges": [[{"subnet": network}] for network in networks]}},
                {"type": "portmap", "capabilities": {"portMappings": True}}]}))  # fmt: skip
        write("resolv.conf", "nameserver 10.10.0.254\n")
        write("kubeconfig", certificates.path(f"{self.name}.conf").read_text())
        write("kubelet.yaml", json.dumps({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "authentication": {
                "x509": {"clientCAFile": str(certificates.path("ca.crt"))},
                "anonymous": {"enabled": False}, "webhook": {"enabled": True}},
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(certificates.path(f"{self.name}.crt")),
            "tlsPrivateKeyFile": str(certificates.path(f"{self.name}.key")),
            "cgroupDriver": "cgroupfs", "cgroupsPerQOS": False, "enforceNodeAllocatable": [],
            "clusterDNS": ["10.96.0.10"], "clusterDomain": "cluster.local",
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "failSwapOn": False, "oomScoreAdj": 0,
            "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%", "nodefs.inodesFree": "0%",
                             "imagefs.available": "0%"},
            "imageGCHighThresholdPercent": 100, "localStorageCapacityIsolation": False,
            "resolvConf": str(self._directory / "resolv.conf"),
            "kubeAPIQPS": 100, "kubeAPIBurst": 200}))  # fmt: skip
        write("containerd.toml", f"""\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
oom_score = 0
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  tolerate_missing_hugetlb_controller = true
  disable_hugetlb_controller = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "{_runc()}"
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{self._directory / 'cni'}"
""")


def _runc() -> str:
    """Return the program that starts containers: one without limits if the cgroups know none."""
    controllers = (cgroup2_tree() / "cgroup.controllers").read_text().split()
    return "runc" if {"cpu", "memory", "pids"} <= set(controllers) else str(_HERE / "runc")


def _remove(cgroup: Path) -> None:
    """End what runs in *cgroup*, and remove it with those below."""
    (cgroup / "cgroup.kill").write_text("1")
    while "populated 1" in (cgroup / "cgroup.events").read_text():
        time.sleep(0.05)
    for below in sorted(cgroup.rglob("*/"), reverse=True):
        below.rmdir()
    cgroup.rmdir()
