"""kproxy takes kube-proxy's place on a running node, and gives it back, as docs/deploy.md has it.

So does one release of kproxy to the next.

kube-proxy is here what it leaves in the kernel: rules of a real one (``tests/golden``), or a table of its
nftables mode's name. Meanwhile a client keeps one connection and makes new ones all the time.
"""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from tests.core.agreement import expect_equal
from tests.core.golden import golden
from tests.core.namespaces import Namespace, namespace
from tests.core.processes import Proxy, running
from tests.deploy.objects import DEPLOY, Object, built, chart
from tests.deploy.programs import program
from tests.listeners import accepting, in_a_thread
from tests.patience import PATIENCE

PROGRAMS = Path(sys.executable).parent
"""The directory of kproxy, as in the image."""
SCENARIO = "iptables/clusterip-tcp-ipv4"
SERVICE = ("10.96.10.1", 80)
ENDPOINTS = ["10.244.1.11", "10.244.1.12", "10.244.2.13", "10.244.2.14"]

CONFIG = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}


def fields(mode: str, directory: Path) -> Object:
    """Return the fields of a configuration whose state is in *directory*."""
    manifests = golden(f"{SCENARIO}/objects.yaml").parent
    return {
        "clusterCIDR": "10.244.0.0/16", "conntrack": {"maxPerCore": 0}, "mode": mode,
        "kproxy": {"manifests": str(manifests), "stateDirectory": str(directory / "state")},
    }  # fmt: skip


NFTABLES = f"""
table ip kube-proxy {{
    chain nat-prerouting {{
        type nat hook prerouting priority dstnat
        ip daddr {SERVICE[0]} tcp dport {SERVICE[1]} dnat to {ENDPOINTS[0]}:8080
    }}
}}
"""


class Cluster:
    """A client, a node, and all pods of the Service behind it."""

    def __init__(self, client: Namespace, node: Namespace, pod: Namespace) -> None:
        self.client, self.node, self.endpoints = client, node, pod
        node.ip(
            f"link add client type veth peer eth0 netns {client.name}", "addr add 203.0.113.1/24 dev client",
            f"link add pod type veth peer eth0 netns {pod.name}", "addr add 10.244.1.1/24 dev pod",
            "link set client up", "link set pod up", "route add 10.244.2.0/24 dev pod",
        )  # fmt: skip
        client.ip("addr add 203.0.113.2/24 dev eth0", "link set eth0 up", "route add default via 203.0.113.1")
        addresses = [f"addr add {endpoint}/24 dev eth0" for endpoint in ENDPOINTS]
        pod.ip(*addresses, "link set eth0 up", "route add default via 10.244.1.1")
        node.run("sysctl", "-qw", "net.ipv4.ip_forward=1")

    @contextmanager
    def serving(self) -> Iterator[None]:
        """The pods send back whatever they get."""
        listener = self.endpoints.inside(lambda: socket.create_server(("", 8080), backlog=128))

        def echo(connected: socket.socket) -> None:
            with connected:
                while data := connected.recv(100):
                    connected.sendall(data)

        with accepting(listener, in_a_thread(echo)):
            yield

    @contextmanager
    def using(self) -> Iterator[None]:
        """Clients use the Service all the time: no connection may fail, and no packet be lost."""
        done = threading.Event()
        problems: list[BaseException] = []
        made = 0

        def use() -> None:
            nonlocal made
            with closing(socket.create_connection(SERVICE, PATIENCE)) as kept:
                while not done.is_set():
                    with closing(socket.create_connection(SERVICE, PATIENCE)) as fresh:
                        said(fresh)
                        expect_equal(lambda: lost_segments(fresh), lambda: 0)
                    said(kept)
                    expect_equal(lambda: lost_segments(kept), lambda: 0)
                    made += 1
                    time.sleep(0.002)

        def run() -> None:
            try:
                self.client.inside(use)
            except BaseException as error:  # noqa: BLE001 - raised again below
                problems.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        assert not problems, problems
        assert made > 10

    def pod(self, config: Path) -> AbstractContextManager[Proxy]:
        """A container of kproxy with the file *config*."""
        return running(self.node, f"--config={config}", "--hostname-override=kc-node")

    @contextmanager
    def kproxy(self, mode: str, directory: Path) -> Iterator[None]:
        """Running; when it begins to be used it is ready, which includes that kube-proxy's rules are gone."""
        config = directory / "config.conf"
        config.write_text(json.dumps(CONFIG | fields(mode, directory)))
        with self.pod(config) as proxy:
            proxy.await_health()
            yield

    def as_operator(self, command: str) -> None:
        """Run a shell command on the node, where kproxy is installed."""
        self.node.run("env", f"PATH={PROGRAMS}:{os.environ['PATH']}", "sh", "-c", command)

    @contextmanager
    def healthy_kube_proxy(self) -> Iterator[None]:
        """Its health server says that it has synced."""
        script = (
            "from http.server import *\n"
            "class Health(BaseHTTPRequestHandler):\n"
            "    def do_GET(self): self.send_response(200); self.end_headers()\n"
            "HTTPServer(('127.0.0.1', 10256), Health).serve_forever()\n"
        )
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.node.name, sys.executable, "-c", script], stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.kill()
            process.wait()

    def kube_proxy(self, mode: str) -> None:
        """Return the programmed rules after the start."""
        if mode == "nftables":
            self.node.nft("table ip kube-proxy\ndelete table ip kube-proxy\n" + NFTABLES)
        else:
            rules = golden(f"{SCENARIO}/rules").read_text()
            counting = "-m nfacct --nfacct-name  ct_state_invalid_dropped_pkts "
            self.node.run("iptables-nft-restore", stdin=rules.replace(counting, ""))


def going_back() -> str:
    """Run the command of docs/deploy.md for a node to which kube-proxy has returned."""
    page = (DEPLOY.parent / "docs/deploy.md").read_text()
    found = re.search(r"-- sh -c '\n(.*?)'\n", page, re.DOTALL)
    assert found
    return found[1]


def said(connected: socket.socket) -> None:
    connected.sendall(b"x")
    assert connected.recv(1) == b"x"


def lost_segments(connected: socket.socket) -> int:
    """Return how many segments, SYN included, were sent again and had not arrived before.

    On a busy machine an acknowledgement may be later than the repetition; a second one then says that both
    arrived (tcpi_total_retrans and tcpi_dsack_dups of struct tcp_info).
    """
    info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 220)
    sent_again, arrived_twice = (int.from_bytes(info[at:at + 4], sys.byteorder) for at in (100, 216))
    return sent_again - arrived_twice


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        made = Cluster(*(stack.enter_context(namespace()) for _ in range(3)))
        stack.enter_context(made.serving())
        yield made


@pytest.mark.parametrize("kube_proxys", ["iptables", "nftables"])
@pytest.mark.parametrize(("mode", "its_tables"), [
    ("nftables", {"kproxy"}), ("iptables", {"filter", "nat"}), ("userspace", set[str]()),
])  # fmt: skip
def test_no_connection_is_dropped_on_the_way_there_and_back(
    cluster: Cluster, tmp_path: Path, kube_proxys: str, mode: str, its_tables: set[str]
) -> None:
    cluster.kube_proxy(kube_proxys)
    with cluster.using():
        with cluster.kproxy(mode, tmp_path):
            assert tables(cluster) == its_tables
            cluster.as_operator("kproxy switch nftables")
            assert tables(cluster) == {"kproxy"}
        cluster.kube_proxy(kube_proxys)
        with cluster.healthy_kube_proxy():
            cluster.as_operator(going_back())
        assert tables(cluster) == ({"kube-proxy"} if kube_proxys == "nftables" else {"filter", "nat"})


def test_chains_of_the_same_names_change_hands(cluster: Cluster, tmp_path: Path) -> None:
    cluster.kube_proxy("iptables")
    with cluster.using():
        with cluster.kproxy("iptables", tmp_path):
            assert tables(cluster) == {"filter", "nat"}
        cluster.kube_proxy("iptables")


# -- one release after another

PAGE = (DEPLOY.parent / "docs/deploy.md").read_text(encoding="utf-8")


def upgraded() -> Object:
    """Return the fields that the command of docs/deploy.md for an upgrade changes."""
    (mode,) = re.findall(r"^helm upgrade kproxy deploy/chart .*--set config\.mode=(\w+)$", PAGE, re.MULTILINE)
    return {"mode": mode}


@pytest.mark.parametrize("command", ["install", "upgrade", "history", "rollback"])
def test_helm_has_the_flags_on_the_page(command: str) -> None:
    known = helm_help(command)
    lines = re.findall(rf"^helm {command} .*$", PAGE, re.MULTILINE)
    assert lines
    for flag in re.findall(r"(?<= )--[\w-]+", " ".join(lines)):
        assert re.search(rf"(?<= ){flag} ", known), flag


def helm_help(command: str) -> str:
    done = subprocess.run([program("helm"), command, "--help"], capture_output=True, text=True, check=True)
    return done.stdout


def test_the_configuration_of_a_release_is_upgraded_and_rolled_back(cluster: Cluster, tmp_path: Path) -> None:
    """The ConfigMap keeps its name: the kubelet replaces the file, and the container is started again."""
    first = fields("nftables", tmp_path)
    releases = [chart({"config": values}) for values in (first, first | upgraded(), first)]
    old, new, back = ([of["DaemonSet"], of["ConfigMap"]["metadata"]] for of in releases)
    assert old == new == back, "no pod is replaced"
    config = tmp_path / "config.conf"
    texts = [of["ConfigMap"]["data"]["config.conf"] for of in releases]
    replace(config, texts[0])
    with ExitStack() as stack:
        pod = stack.enter_context(cluster.pod(config))
        pod.await_health()
        assert tables(cluster) == {"kproxy"}
        with cluster.using():
            for text, its_tables in ((texts[1], {"filter", "nat"}), (texts[2], {"kproxy"})):
                replace(config, text)
                assert "the content of the configuration file has changed" in pod.ended()[1]
                pod = stack.enter_context(cluster.pod(config))
                pod.await_health()
                assert tables(cluster) == its_tables


def test_pods_of_a_release_are_replaced_and_the_rollout_is_undone(cluster: Cluster, tmp_path: Path) -> None:
    """The next pod begins beside the one before it; as kustomize has it, each has its own ConfigMap."""
    first = fields("nftables", tmp_path)
    revisions = [overlay(tmp_path / name, of) for name, of in (("old", first), ("new", first | upgraded()))]
    assert config_map(revisions[0]) != config_map(revisions[1]), "the undone rollout has its configuration"
    files = [tmp_path / f"{config_map(of)}.conf" for of in revisions]
    for file, revision in zip(files, revisions, strict=True):
        file.write_text(revision["ConfigMap"]["data"]["config.conf"])
    with ExitStack() as stack:
        pod = stack.enter_context(cluster.pod(files[0]))
        pod.await_health()
        with cluster.using():
            for file, its_tables in ((files[1], {"filter", "nat"}), (files[0], {"kproxy"})):
                successor = stack.enter_context(cluster.pod(file))
                successor.await_log("standing by")
                pod.end()
                pod = successor
                pod.await_health()
                assert tables(cluster) == its_tables


def overlay(directory: Path, config: Object) -> dict[str, Object]:
    """Return the objects of the base with *config*, built in a new *directory*."""
    directory.mkdir()
    (directory / "config.conf").write_text(json.dumps(CONFIG | config))
    (directory / "kustomization.yaml").write_text(json.dumps({
        "resources": [os.path.relpath(DEPLOY / "base", directory.resolve())],
        "namespace": "kube-system",
        "configMapGenerator": [
            {"name": "kproxy", "namespace": "kube-system", "behavior": "merge", "files": ["config.conf"]}],
    }))  # fmt: skip
    return built(directory)


def config_map(objects: dict[str, Object]) -> str:
    """Return the name of the ConfigMap that the pods mount."""
    name: str = objects["DaemonSet"]["spec"]["template"]["spec"]["volumes"][0]["configMap"]["name"]
    return name


def replace(path: Path, text: str) -> None:
    """Write a file as the kubelet does: whole, at once."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def tables(cluster: Cluster) -> set[str]:
    """Names of those that hold rules of a service proxy."""
    listed = json.loads(cluster.node.run("nft", "--json", "list", "ruleset"))["nftables"]
    chains = [found["chain"] for found in listed if "chain" in found]
    return {of["table"] for of in chains if of["name"] == "KUBE-SERVICES" or "proxy" in of["table"]}
