"""The command line, as an operator meets it: real processes, in a network namespace where they act."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy_core import __version__
from tests.core.golden import golden
from tests.core.namespaces import Namespace, namespace
from tests.core.processes import KPROXY, kproxy, running, started
from tests.patience import PATIENCE

EXAMPLES = Path(__file__).parents[3] / "examples"

WEB = """
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.10, ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints: [{addresses: [10.1.2.3]}]
ports: [{name: "", port: 8080}]
"""


@pytest.fixture
def node() -> Iterator[Namespace]:
    with namespace() as made:
        yield made


@pytest.fixture
def manifests(tmp_path: Path) -> Path:
    directory = tmp_path / "manifests"
    directory.mkdir()
    (directory / "web.yaml").write_text(WEB)
    return directory


# Answers without a kernel


def with_imports(argument: str) -> tuple[str, set[str]]:
    """Return the output of ``kproxy`` with *argument*, and the modules that it imports."""
    asked = (
        f"import sys, kproxy_core.cli; sys.argv[1:] = ['{argument}']\n"
        "try: kproxy_core.cli.main()\nexcept SystemExit: print(*sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    *output, modules = told.splitlines()
    return "\n".join(output), set(modules.split())


HEAVY = {"msgspec", "yaml", "pluggy", "nftables", "pyroute2", "kubernetes", "socket", "kproxy_core.model"}


def test_help_is_printed_without_heavy_imports() -> None:
    output, modules = with_imports("--help")
    assert output.startswith("Usage: ")
    assert not HEAVY & modules
    assert "kproxy_core.cli.explain" not in modules


def test_the_version_is_printed_without_heavy_imports() -> None:
    version, modules = with_imports("--version")
    commit = subprocess.run(
        ["git", "-c", "safe.directory=*", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    assert version.startswith(f"kproxy {__version__}")
    assert commit[:12] in version
    assert not HEAVY & modules


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["explian"], "Did you mean one of: 'explain'"),
        (["--no-such-flag"], "No such option '--no-such-flag'"),
        (["--cluster-cdir=10.0.0.0/8"], "Did you mean one of: '--cluster-cidr'"),
        (["--version=latest"], "--version: 'latest': must be true or false"),
        (["--cleanup=perhaps"], "--cleanup: 'perhaps': must be true or false"),
        (["--cleanup", "--cleanup-ipvs=x"], "--cleanup-ipvs: 'x': must be true or false"),
        (["--write-config-to=/no/such/file"], "--write-config-to: '/no/such/file': No such file"),
        (["--v=loud"], "--v: 'loud': must be a whole number"),
        (["--dry-run"], "--dry-run, --own-only and --output require --cleanup"),
        (["--mode=nftable", "--manifests=/tmp"],
         "no backend provides mode 'nftable'; did you mean 'nftables'?; installed: "),
        (["--cluster-cidr=10.0.0.0/33"], "--cluster-cidr: '10.0.0.0/33': must be a CIDR"),
        (["--cluster_cidr=10.0.0.0/33"], "--cluster-cidr: '10.0.0.0/33': must be a CIDR"),
        (["--config=/no/such/file"], "--config: '/no/such/file': can't be read: No such file"),
        (["--mode=nftables"], "neither --master nor --kubeconfig is given"),
        (["render", "--mode=nftables"], "render needs --manifests"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_status_2(
    arguments: list[str], problem: str
) -> None:
    done = kproxy(*arguments)
    assert done.returncode == 2
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


def test_rules_are_rendered_without_touching_the_kernel(node: Namespace, manifests: Path) -> None:
    rules = node.run(KPROXY, "render", "--mode=nftables", f"--manifests={manifests}", "--family=ipv4")
    assert "10.96.0.10" in rules
    assert "10.1.2.3" in rules
    assert "ip6" not in rules
    assert node.run("nft", "list", "ruleset") == ""
    node.nft(rules)


@pytest.mark.parametrize("mode", ["nftables", "iptables", "ipvs", "userspace", "ebpf"])
def test_rules_are_rendered_in_the_same_order_by_every_process(mode: str, manifests: Path) -> None:
    for number in range(20):
        text = WEB.replace("10.96.0.10", f"10.96.1.{number}").replace("name: web", f"name: web-{number}")
        (manifests / f"web-{number}.yaml").write_text(text)
    rendered = [
        subprocess.run(
            [KPROXY, "render", f"--mode={mode}", f"--manifests={manifests}"],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert "10.96.1.19" in rendered[0]
    assert rendered[0] == rendered[1]


def test_a_failed_rendering_is_reported(manifests: Path) -> None:
    (manifests / "bad.yaml").write_text(WEB.replace("port: 80}", "port: 0}").replace("web", "bad"))
    (manifests / "twin.yaml").write_text(WEB.replace("name: web", "name: twin"))
    done = kproxy("render", "--mode=nftables", f"--manifests={manifests}", "--family=ipv4")
    assert done.returncode == 0
    assert "Service shop/bad: spec.ports[0].port" in done.stderr
    assert "shop/web is not served on 10.96.0.10:80/TCP: it belongs to shop/twin" in done.stderr


# The process


def test_it_serves_until_a_signal_and_leaves_the_rules(node: Namespace, manifests: Path) -> None:
    with running(node, "--mode=nftables", f"--manifests={manifests}", "--hostname-override=node1") as proxy:
        proxy.await_health()
        assert "10.1.2.3" in node.run("nft", "list", "table", "ip", "kproxy")
        assert proxy.get(10249, "/proxyMode") == (200, "nftables")
        assert "kubeproxy_sync_full_proxy_rules_duration_seconds_count" in proxy.get(10249, "/metrics")[1]
        status, log = proxy.end()
    assert status == 0
    assert "first sync" in log
    assert "10.1.2.3" in node.run("nft", "list", "table", "ip", "kproxy")


def test_it_ends_while_a_program_hangs(node: Namespace, manifests: Path, tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("iptables-nft-restore", "iptables-legacy-restore", "iptables-restore"):
        (programs / name).write_text("#!/bin/sh\nexec sleep 1000\n")
        (programs / name).chmod(0o755)
    environment = ["env", f"PATH={programs}:{os.environ['PATH']}"]
    command = [KPROXY, "--mode=iptables", f"--manifests={manifests}"]
    with started(node, ["ip", "netns", "exec", node.name, *environment, *command]) as proxy:
        deadline = time.monotonic() + PATIENCE
        while "sleep\0001000" not in children(proxy.pid):
            assert time.monotonic() < deadline, "the program was not started"
            time.sleep(0.05)
        status, log = proxy.end()
    assert status == 0
    assert "timed out" not in log, "it waited for the program"


def children(pid: int) -> str:
    """Return the command lines of a process's children."""
    found = ""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if status.read_text().rpartition(")")[2].split()[1] == str(pid):
                found += (status.parent / "cmdline").read_text()
    return found


def test_control_c_ends_it_without_a_traceback(node: Namespace, manifests: Path) -> None:
    with running(node, "--mode=nftables", f"--manifests={manifests}", "--logging-format=json") as proxy:
        proxy.await_health()
        status, log = proxy.end(signal.SIGINT)
    assert status == 0
    assert {json.loads(line)["level"] for line in log.splitlines()} <= {"INFO", "WARNING"}


def test_it_chooses_the_preferred_mode_by_default(node: Namespace, manifests: Path) -> None:
    with running(node, f"--manifests={manifests}") as proxy:
        proxy.await_health()
        assert proxy.get(10249, "/proxyMode") == (200, "nftables")


def test_its_score_for_the_oom_killer_is_the_one_given(node: Namespace, manifests: Path) -> None:
    with running(node, "--mode=nftables", f"--manifests={manifests}", "--oom-score-adj=321") as proxy:
        proxy.await_health()
        assert Path(f"/proc/{proxy.pid}/oom_score_adj").read_text() == "321\n"


def test_a_health_port_that_must_be_had_and_is_not_ends_it(
    node: Namespace, manifests: Path, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
        "mode: nftables\nbindAddressHardFail: true\nhealthzBindAddress: 192.0.2.1:10256\n"
    )
    with running(node, f"--config={config}", f"--manifests={manifests}") as proxy:
        status, log = proxy.ended()
    assert status == 1
    assert "the health server can't listen on 192.0.2.1:10256" in log


NODE = """
apiVersion: v1
kind: Node
metadata: {name: node1}
spec: {podCIDRs: [10.1.2.0/24]}
status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}
"""


def test_other_pod_networks_of_the_node_change_the_rules_of_a_running_proxy(
    node: Namespace, manifests: Path
) -> None:
    """kube-proxy has to be restarted for that."""
    (manifests / "node.yaml").write_text(NODE)
    with running(node, "--mode=nftables", f"--manifests={manifests}", "--hostname-override=node1",
                 "--detect-local-mode=NodeCIDR") as proxy:
        proxy.await_health()
        assert "10.1.2.0/24" in node.run("nft", "list", "table", "ip", "kproxy")
        (manifests / "node.yaml").write_text(NODE.replace("10.1.2.0/24", "10.7.0.0/24"))
        deadline = time.monotonic() + PATIENCE
        while "10.7.0.0/24" not in node.run("nft", "list", "table", "ip", "kproxy"):
            assert time.monotonic() < deadline, "the rules did not follow"
            time.sleep(0.05)
        assert "10.1.2.0/24" not in node.run("nft", "list", "table", "ip", "kproxy")
        assert proxy.end()[0] == 0


# Configuration


def configuration(file: Path, text: str) -> Path:
    file.write_text(f"apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n{text}\n")
    return file


def test_another_content_of_the_configuration_file_ends_it_for_a_restart(
    node: Namespace, manifests: Path, tmp_path: Path
) -> None:
    text = f"mode: nftables\nkproxy: {{manifests: {manifests}}}"
    file = configuration(tmp_path / "config.yaml", text)
    with running(node, f"--config={file}") as proxy:
        proxy.await_health()
        configuration(file, text + "\noomScoreAdj: 0")
        status, log = proxy.ended()
    assert status == 1
    assert "the content of the configuration file has changed" in log
    assert "10.1.2.3" in node.run("nft", "list", "table", "ip", "kproxy")


def test_the_configuration_is_written_and_nothing_else_is_done(node: Namespace, tmp_path: Path) -> None:
    node.run(KPROXY, f"--write-config-to={tmp_path}/default.yaml")
    assert (tmp_path / "default.yaml").read_bytes() == golden("default-config.yaml").read_bytes()
    node.run(KPROXY, f"--config={tmp_path}/default.yaml", f"--write_config_to={tmp_path}/again.yaml")
    assert (tmp_path / "again.yaml").read_bytes() == (tmp_path / "default.yaml").read_bytes()
    assert node.run("nft", "list", "ruleset") == ""


def test_privileged_steps_can_run_alone(node: Namespace, manifests: Path) -> None:
    node.nft("table ip t { chain c { type filter hook input priority 0; ct state new accept; }; }")
    before = node.run("nft", "list", "ruleset")
    node.run(KPROXY, "--init-only", "--mode=iptables", f"--manifests={manifests}",
             "--conntrack-tcp-timeout-close-wait=61s")
    assert node.run("sysctl", "-n", "net.netfilter.nf_conntrack_tcp_timeout_close_wait").strip() == "61"
    assert node.run("sysctl", "-n", "net.ipv4.conf.all.route_localnet").strip() == "1"
    assert node.run("nft", "list", "ruleset") == before


@pytest.mark.parametrize(("modes", "value"), [("[]", "0"), ("[iptables]", "1")])
def test_init_only_prepares_the_modes_that_are_named(
    node: Namespace, manifests: Path, tmp_path: Path, modes: str, value: str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: nftables\n"
        f"kproxy: {{switchModes: {modes}}}\n")
    node.run(KPROXY, "--init-only", f"--config={config}", f"--manifests={manifests}")
    assert node.run("sysctl", "-n", "net.ipv4.conf.all.route_localnet").strip() == value
    assert "kproxy" not in node.run("nft", "list", "ruleset")


@pytest.mark.parametrize(
    "asked", ["--nodeport-addresses=192.0.2.0/24", "--nodeport-addresses=primary",
              "--iptables-localhost-nodeports=false"],
)  # fmt: skip
def test_localhost_is_not_opened_where_it_serves_no_node_ports(
    node: Namespace, manifests: Path, asked: str
) -> None:
    node.run(KPROXY, "--init-only", "--mode=iptables", f"--manifests={manifests}", asked)
    assert node.run("sysctl", "-n", "net.ipv4.conf.all.route_localnet").strip() == "0"


def test_localhost_beside_primary_is_opened(node: Namespace, manifests: Path) -> None:
    node.run(KPROXY, "--init-only", "--mode=iptables", f"--manifests={manifests}",
             "--nodeport-addresses=primary,localhost")
    assert node.run("sysctl", "-n", "net.ipv4.conf.all.route_localnet").strip() == "1"


def test_there_may_be_no_health_server(node: Namespace, manifests: Path) -> None:
    with running(node, "--mode=nftables", f"--manifests={manifests}", "--healthz-port=0") as proxy:
        deadline = time.monotonic() + PATIENCE
        while "10.1.2.3" not in node.run("nft", "list", "ruleset"):
            assert time.monotonic() < deadline, "no rules"
            time.sleep(0.05)
        proxy.await_health("/proxyMode", 10249)
        assert proxy.get(10249, "/proxyMode") == (200, "nftables")
        with pytest.raises(ConnectionRefusedError):
            proxy.get(10256, "/healthz")


def test_the_metrics_server_shows_the_configuration_and_the_flags(node: Namespace, manifests: Path) -> None:
    with running(node, "--mode=nftables", f"--manifests={manifests}", "--conntrack-min=77") as proxy:
        proxy.await_health()
        configuration = json.loads(proxy.get(10249, "/configz")[1])["kubeproxy.config.k8s.io"]
        assert (configuration["mode"], configuration["conntrack"]["min"]) == ("nftables", 77)
        assert "conntrack-min=77" in proxy.get(10249, "/flagz")[1]


@pytest.mark.parametrize("mode", ["nftables", "iptables", "userspace"])
def test_a_service_whose_name_begins_with_a_digit_is_served(
    node: Namespace, manifests: Path, mode: str
) -> None:
    service = WEB.replace("web", "1-web").replace("ports: [{port", "sessionAffinity: ClientIP, ports: [{port")
    (manifests / "web.yaml").write_text(service)
    with running(node, f"--mode={mode}", f"--manifests={manifests}") as proxy:
        proxy.await_health()
        for packet in json.loads(node.run(KPROXY, "explain", "shop/1-web", "-o", "json"))["packets"]:
            assert packet["frontend"]["service_port"] == "shop/1-web"
            assert [chosen["endpoint"] for chosen in packet["endpoints"]] == ["10.1.2.3:8080"]
            assert packet["kernel"]["verdict"] in ("agrees", "deviates by design")


# Clean-up


def test_cleanup_removes_every_trace_and_nothing_else_and_can_be_repeated(
    node: Namespace, manifests: Path
) -> None:
    node.nft("add table ip theirs")
    with running(node, "--mode=nftables", f"--manifests={manifests}") as proxy:
        proxy.await_health()
        proxy.end()
    node.nft("add table ip kproxy-resets\n")
    assert "nftables: table ip kproxy would be removed" in node.run(KPROXY, "--cleanup", "--dry-run")
    done = node.run(KPROXY, "--cleanup")
    assert "nftables: table ip kproxy removed" in done
    assert "resets: table ip kproxy-resets removed" in done
    assert node.run("nft", "list", "tables").strip() == "table ip theirs"
    assert node.run(KPROXY, "--cleanup") == ""
