"""The pod of deploy/ebpf: its volumes suffice for the mode, in the init container as well."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from kproxy_ebpf.kernel.mounts import is_bpf_file_system
from tests.core.bpf_places import new_cgroup
from tests.core.namespaces import Namespace, namespace
from tests.core.processes import KPROXY, Proxy, started
from tests.deploy.objects import Object, base, containers
from tests.deploy.test_manifests import patched
from tests.patience import PATIENCE

DAEMON_SET, _ = patched(base()["DaemonSet"], "ebpf")
(INIT, MAIN) = containers(DAEMON_SET)
VOLUMES = {volume["name"]: volume for volume in DAEMON_SET["spec"]["template"]["spec"]["volumes"]}

# /sys/fs/cgroup is a container's own cgroup, as in a cgroup namespace. Only the mount that stands for the
# host's /sys/fs/bpf is shared with the other container, as mountPropagation has it.
CONTAINER = """
root=$1 own=$2 bpf=$3 cgroups=$4 tree=$5 capabilities=$6; shift 6
findmnt -rno TARGET | while read -r at; do
    test "$at" = "$bpf" || mount --make-private "$at" 2>/dev/null || true
done
mount --rbind / "$root"
mount -t tmpfs tmpfs "$root/run"
mkdir "$root/run/kproxy"
mount --rbind "$bpf" "$root/sys/fs/bpf"
umount -l "$root/sys/fs/cgroup"
mount --bind "$own" "$root/sys/fs/cgroup"
if test -n "$cgroups"; then
    mkdir "$root$cgroups"
    mount --rbind "$tree" "$root$cgroups"
fi
if test "$capabilities" = all; then exec chroot "$root" "$@"; fi
exec chroot "$root" setpriv --bounding-set="$capabilities" --inh-caps=-all --no-new-privs "$@"
"""


class Pod:
    """A node, and directories that stand for its volumes, in which the pod's containers run."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self.node: Namespace = stack.enter_context(namespace())
        self.translated = stack.enter_context(new_cgroup())
        self.tree = Path("/sys/fs/cgroup")
        """What the node has at /sys/fs/cgroup."""
        self._own = stack.enter_context(new_cgroup())
        self._root = directory / "root"
        self.bpf = directory / "bpf"
        self._config = directory / "config.conf"
        self._manifests = directory / "manifests"
        for made in (self._root, self.bpf, self._manifests):
            made.mkdir()
        subprocess.run(["mount", "--bind", self.bpf, self.bpf], check=True)
        stack.callback(unmount, self.bpf)
        subprocess.run(["mount", "--make-shared", self.bpf], check=True)

    def configure(self, cgroup: str) -> None:
        self._config.write_text(yaml.safe_dump({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
            "mode": "ebpf", "conntrack": {"maxPerCore": 0},
            "kproxy": {"backendOptions": {"ebpf": {"cgroup": cgroup}}},
        }))  # fmt: skip

    def kproxy(self, container: Object) -> list[str]:
        """Return the command of *container*."""
        return self.command(
            container, KPROXY, f"--config={self._config}", f"--manifests={self._manifests}",
            "--hostname-override=n", *(one for one in container["args"] if one == "--init-only"))

    def command(self, container: Object, *command: str) -> list[str]:
        """Return a command that runs *command* with the volumes and capabilities of *container*."""
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted["bpf"] == VOLUMES["bpf"]["hostPath"]["path"] == "/sys/fs/bpf"
        assert VOLUMES["cgroup"]["hostPath"]["path"] == "/sys/fs/cgroup"
        return [
            "nsenter", f"--net=/run/netns/{self.node.name}",
            "unshare", "--mount", "--propagation", "unchanged", "sh", "-euc", CONTAINER, "container",
            str(self._root), str(self._own), str(self.bpf),
            mounted.get("cgroup", ""), str(self.tree), capabilities(container), *command,
        ]  # fmt: skip

    def execute(self, proxy: Proxy, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run kproxy as `kubectl exec` does."""
        return subprocess.run(
            ["nsenter", f"--target={proxy.pid}", "--mount", "--net", "--root", "setpriv",
             f"--bounding-set={capabilities(MAIN)}", "--inh-caps=-all", "--no-new-privs",
             KPROXY, *arguments, f"--config={self._config}"],
            capture_output=True, text=True, check=False, timeout=PATIENCE,
        )  # fmt: skip


def unmount(point: Path) -> None:
    """Unmount everything at *point*: what the pod mounted as well."""
    while subprocess.run(["mountpoint", "--quiet", point], check=False).returncode == 0:
        subprocess.run(["umount", "--lazy", point], check=True)


def capabilities(container: Object) -> str:
    context = container["securityContext"]
    if context.get("privileged"):
        return "all"
    return ",".join(["-all", *(f"+{name.lower()}" for name in context["capabilities"]["add"])])


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    with ExitStack() as stack:
        yield Pod(stack, tmp_path)


@pytest.mark.parametrize("tree", ["", "/run/host-cgroup"], ids=["on-the-host", "in-the-container"])
def test_a_cgroup_of_the_host_is_found_in_both_containers(pod: Pod, tree: str) -> None:
    path = str(pod.translated)
    pod.configure(path.replace("/sys/fs/cgroup", tree) if tree else path)
    done = subprocess.run(pod.kproxy(INIT), capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "falling back" not in done.stderr
    assert is_bpf_file_system(str(pod.bpf / "kproxy"))
    with started(pod.node, pod.kproxy(MAIN)) as proxy:
        proxy.await_health()
        assert proxy.get(10249, "/proxyMode") == (200, "ebpf")
        assert "\nkproxy_ebpf_attached 1\n" in proxy.get(10249, "/metrics")[1]
        probed = pod.execute(proxy, "modes", "ebpf", "--probe")
        assert probed.returncode == 0, probed.stdout


def roots_found(pod: Pod) -> list[int]:
    """Return the inodes of the cgroups that the container finds without a path, and at /sys/fs/cgroup."""
    program = (
        "import os; from kproxy_ebpf.kernel.mounts import open_cgroup\n"
        "for path in ('', '/sys/fs/cgroup'): print(os.fstat(open_cgroup(path)).st_ino)"
    )
    done = subprocess.run(
        pod.command(MAIN, sys.executable, "-c", program), capture_output=True, text=True, check=True)
    return [int(inode) for inode in done.stdout.split()]


def test_the_root_of_the_hosts_cgroups_is_not_the_containers_own(pod: Pod) -> None:
    root_of_the_tree = 1
    assert roots_found(pod) == [root_of_the_tree] * 2


def test_the_root_of_a_node_in_a_container_is_that_containers_cgroup(pod: Pod) -> None:
    pod.tree = pod.translated
    assert roots_found(pod) == [pod.translated.stat().st_ino] * 2
