"""The pods' privileges suffice, and are needed: the real program has exactly these, on a read-only root."""

import io
import logging
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import yaml

from kproxy_core.app import preparation
from tests.core.namespaces import Namespace, namespace
from tests.core.processes import KPROXY, Proxy, started
from tests.deploy.objects import Object, base, containers

(INIT, MAIN) = containers(base()["DaemonSet"])
READY = MAIN["readinessProbe"]["httpGet"]["path"]

CONFIG = {
    "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
    "kind": "KubeProxyConfiguration",
    # The kernel's own are not this test's.
    "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
}
WEB = """
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10, "fd00:96::10"], ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints: [{addresses: [10.1.2.3]}]
ports: [{name: "", port: 8080}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-2, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv6
endpoints: [{addresses: ["fd00:1::3"]}]
ports: [{name: "", port: 8080}]
"""

# Everything is mounted again, read-only as in a container; only the lock file and /run/kproxy are writable.
# The program replaces all shells, so it has the id of the process that is started here.
CONTAINER = """
root=$1 lock=$2 privileged=$3 capabilities=$4; shift 4
mount --rbind / "$root"
mount -t tmpfs tmpfs "$root/run"
touch "$root/run/xtables.lock"
mkdir "$root/run/kproxy"
findmnt -rno TARGET -R "$root" | while read -r at; do
    case $at in
        "$root/run/"*) continue ;;  # hidden now
        "$root/proc"* | "$root/sys"*) if test "$privileged" = true; then continue; fi ;;
    esac
    mount -o remount,ro,bind "$at"
done
mount --bind "$lock" "$root/run/xtables.lock"
mount -t tmpfs tmpfs "$root/run/kproxy"
if chroot "$root" touch /probe 2>/dev/null; then echo "the root can be written to" >&2; exit 99; fi
if test "$privileged" = true; then exec chroot "$root" "$@"; fi
exec chroot "$root" setpriv --bounding-set="$capabilities" --inh-caps=-all --no-new-privs "$@"
"""


class Pod:
    """A node with the files of a pod, in which its containers run one after the other."""

    def __init__(self, node: Namespace, directory: Path, mode: str, *switch_modes: str) -> None:
        self.node = node
        self._root = directory / "root"
        self._root.mkdir()
        self._lock = directory / "xtables.lock"
        self._lock.touch()
        self._config = directory / "config.conf"
        self._config.write_text(yaml.safe_dump(
            CONFIG | {"mode": mode, "kproxy": {"switchModes": list(switch_modes)}}))
        self._manifests = directory / "manifests"
        self._manifests.mkdir()
        (self._manifests / "web.yaml").write_text(WEB)

    def command(self, container: Object, capabilities: Sequence[str] | None = None) -> list[str]:
        """Return the command that runs *container*, but with these *capabilities*."""
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        privileged = context.get("privileged", False)
        if not privileged:
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]
            if capabilities is None:
                capabilities = context["capabilities"]["add"]
        bounding = ",".join(["-all", *(f"+{name.lower()}" for name in capabilities or ())])
        config, mounted = str(self._config), "/var/lib/kube-proxy/config.conf"
        arguments = [
            argument.replace(mounted, config).replace("$(NODE_NAME)", "n") for argument in container["args"]
        ]
        return [
            "ip", "netns", "exec", self.node.name, "unshare", "--mount", "--propagation", "private",
            "sh", "-euc", CONTAINER, "container", str(self._root), str(self._lock),
            str(privileged).lower(), bounding, KPROXY, *arguments, "--manifests", str(self._manifests),
        ]  # fmt: skip

    def init(self) -> None:
        done = subprocess.run(self.command(INIT), capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr

    def main(self, capabilities: Sequence[str] | None = None) -> AbstractContextManager[Proxy]:
        return started(self.node, self.command(MAIN, capabilities))


@pytest.fixture
def node() -> Iterator[Namespace]:
    with namespace() as made:
        yield made


def test_the_privileges_of_the_pod_suffice(node: Namespace, tmp_path: Path) -> None:
    pod = Pod(node, tmp_path, "nftables")
    pod.init()
    with pod.main() as proxy:
        proxy.await_health(READY)
        status = Path(f"/proc/{proxy.pid}/status").read_text()
        (effective,) = (line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
        assert int(effective, 16) == 1 << 12  # CAP_NET_ADMIN
    assert "10.96.0.10" in node.run("nft", "list", "table", "ip", "kproxy")


def test_without_its_capability_nothing_is_programmed(node: Namespace, tmp_path: Path) -> None:
    pod = Pod(node, tmp_path, "nftables")
    with pod.main(capabilities=()) as proxy:
        status, log = proxy.ended()
    assert status == 1
    assert "run as root or with CAP_NET_ADMIN" in log
    assert node.run("nft", "list", "tables") == ""


def test_the_first_container_runs_the_privileged_steps_of_iptables(
    node: Namespace, tmp_path: Path
) -> None:
    pod = Pod(node, tmp_path, "iptables")
    route_localnet = ("sysctl", "-n", "net.ipv4.conf.all.route_localnet")
    assert node.run(*route_localnet) == "0\n"
    pod.init()
    assert node.run(*route_localnet) == "1\n"
    with pod.main() as proxy:
        proxy.await_health(READY)
    assert "-d 10.96.0.10/32" in node.run("iptables-nft-save", "-t", "nat")


def test_iptables_of_the_legacy_kind_needs_raw_sockets(node: Namespace, tmp_path: Path) -> None:
    """The kubelet's chain says which kind the node uses; without CAP_NET_RAW it can't be seen."""
    for program in ("iptables-legacy", "ip6tables-legacy"):
        node.run(program, "-w", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
    pod = Pod(node, tmp_path, "iptables")
    pod.init()
    with pod.main(capabilities=("NET_ADMIN", "NET_RAW")) as proxy:
        proxy.await_health(READY)
    assert "-d 10.96.0.10/32" in node.run("iptables-legacy-save", "-t", "nat")


def test_nothing_is_left_of_the_containers(tmp_path_factory: pytest.TempPathFactory) -> None:
    mounts = Path("/proc/self/mounts").read_text()
    assert str(tmp_path_factory.getbasetemp()) not in mounts


def test_the_mode_is_switched_in_the_pod_to_modes_that_were_prepared(node: Namespace, tmp_path: Path) -> None:
    pod = Pod(node, tmp_path, "nftables", "iptables")
    pod.init()
    with pod.main() as proxy:
        proxy.await_health(READY)
        for mode in ("iptables", "userspace", "nftables", "userspace", "iptables"):
            done = switch(proxy, mode)
            assert done.returncode == 0, done.stdout + done.stderr
            assert f"{mode} serves" in done.stdout.splitlines()


def test_a_check_names_the_requirements_an_unprepared_mode_lacks(node: Namespace, tmp_path: Path) -> None:
    pod = Pod(node, tmp_path, "nftables")
    pod.init()
    with pod.main() as proxy:
        proxy.await_health(READY)
        done = switch(proxy, "iptables", "--check")
        assert done.returncode == 1
        assert "route_localnet" in done.stdout + done.stderr


def test_a_report_is_written_to_the_standard_output_of_the_pod(node: Namespace, tmp_path: Path) -> None:
    pod = Pod(node, tmp_path, "nftables")
    pod.init()
    with pod.main() as proxy:
        proxy.await_health(READY)
        done = execute(proxy, "report")
        refused = execute(proxy, "report", "/report.tar.gz")
    assert done.returncode == 0, done.stderr
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        names = archive.getnames()
    assert {f"kproxy-report/{name}" for name in ("plans.json", "log.txt", "diff.json")} <= set(names)
    assert refused.returncode == 1
    assert b"/report.tar.gz: Read-only file system; `kproxy report >FILE`" in refused.stderr


def test_only_the_protection_that_the_kubelet_gives_needs_no_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:
    """A container may not lower its score, and the priority class of the pod has the kubelet do so."""
    pod = base()["DaemonSet"]["spec"]["template"]["spec"]
    assert pod["priorityClassName"] == "system-node-critical"
    score = int(Path("/proc/self/oom_score_adj").read_text())
    wanted = min(score - 1, -1001)  # less than the kernel knows: refused to all
    monkeypatch.setattr(preparation, "_NODE_CRITICAL_SCORE", score)
    caplog.set_level(logging.INFO)
    preparation.protect_from_oom_killer(wanted)
    assert not caplog.records
    monkeypatch.setattr(preparation, "_NODE_CRITICAL_SCORE", score - 1)
    preparation.protect_from_oom_killer(wanted)
    assert [record.message for record in caplog.records] == ["could not set oom_score_adj"]


def switch(proxy: Proxy, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = execute(proxy, "switch", *arguments)
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def execute(proxy: Proxy, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run kproxy as `kubectl exec` does: in the container's namespaces, with its capabilities."""
    return subprocess.run(
        ["nsenter", f"--target={proxy.pid}", "--mount", "--net", "--root", "setpriv",
         "--bounding-set=-all,+net_admin", "--inh-caps=-all", "--no-new-privs",
         KPROXY, *arguments],
        capture_output=True, check=False, timeout=120,
    )  # fmt: skip
