"""kproxy as a service of a systemd that runs: docs/systemd.md."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kproxy_conformance.network.dialing import wait_until
from tests.core.api_servers import BenchServer
from tests.core.namespaces import Namespace
from tests.install.machine import LOOK, START, Machine, apt_get, machine, output

UNIT = "kproxy.service"
CONFIG = "/etc/kproxy/config.yaml"
API = 8001
"""The port of the API server."""
KUBECONFIG = f"""
apiVersion: v1
kind: Config
clusters: [{{name: here, cluster: {{server: "http://127.0.0.1:{API}"}}}}]
contexts: [{{name: here, context: {{cluster: here, user: ""}}}}]
current-context: here
"""
OF_A_CLUSTER = """
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {kubeconfig: /etc/kproxy/kubeconfig}
conntrack: {maxPerCore: 0, min: 0}
"""
IMPATIENT = """
[Service]
WatchdogSec=2s
TimeoutStopSec=1s
"""
SERVED = "10.96.0.10 . 6 . 80 : goto"
"""The Service of the API server, in the rules."""
NOT_YET = "no sync has succeeded yet"
KUBE_PROXY = "add table ip kube-proxy; add chain ip kube-proxy services"


@pytest.fixture(scope="module")
def network() -> Iterator[Namespace]:
    with closing(Namespace("node")) as made:
        yield made


@pytest.fixture(scope="module")
def installed(
    network: Namespace, package: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Machine, dict[str, str]]]:
    """A machine where kube-proxy had rules when the package was installed, and the unit's state then."""
    with machine("bookworm", tmp_path_factory.mktemp("node"), network) as made:
        output(made, "nft", KUBE_PROXY)
        apt_get(made, "install", made.put(package))
        yield made, made.shown(UNIT, "ActiveState", "UnitFileState")


@pytest.fixture
def node(installed: tuple[Machine, dict[str, str]]) -> Machine:
    """A machine on which kproxy is active."""
    made, _ = installed
    output(made, "systemctl", "restart", UNIT)
    made.await_shown(UNIT, ActiveState="active")
    return made


def rules(node: Machine) -> str:
    """List the rules without the flags of their table, which a running kproxy owns."""
    return output(node, "nft", "list", "table", "ip", "kproxy").partition("comment")[2]


def test_beside_another_service_proxy_it_is_installed_but_not_started(
    installed: tuple[Machine, dict[str, str]],
) -> None:
    assert installed[1] == {"ActiveState": "inactive", "UnitFileState": "disabled"}


def test_it_is_active_once_it_has_synced(node: Machine, network: Namespace) -> None:
    output(node, "cp", CONFIG, f"{CONFIG}.kept")
    output(node, "tee", CONFIG, stdin=OF_A_CLUSTER)
    output(node, "tee", "/etc/kproxy/kubeconfig", stdin=KUBECONFIG)
    output(node, "systemctl", "restart", "--no-block", UNIT)
    assert wait_until(lambda: NOT_YET in node.shown(UNIT, "StatusText")["StatusText"], START, LOOK)
    assert node.shown(UNIT, "ActiveState") == {"ActiveState": "activating"}
    server = BenchServer("--gen=services=1,endpoints=1", node=network, port=API)
    try:
        node.await_shown(UNIT, ActiveState="active")
        assert SERVED in rules(node)
    finally:
        server.stop()
    output(node, "mv", f"{CONFIG}.kept", CONFIG)


def test_a_stuck_process_is_restarted(node: Machine) -> None:
    drop_in = f"/run/systemd/system/{UNIT}.d"
    output(node, "mkdir", "-p", drop_in)
    output(node, "tee", f"{drop_in}/impatient.conf", stdin=IMPATIENT)
    output(node, "systemctl", "daemon-reload")
    output(node, "systemctl", "restart", UNIT)
    stuck = node.shown(UNIT, "MainPID")
    output(node, "systemctl", "kill", "--kill-whom=main", "--signal=STOP", UNIT)
    assert wait_until(lambda: node.shown(UNIT, "MainPID") not in (stuck, {"MainPID": "0"}), START, LOOK)
    node.await_shown(UNIT, ActiveState="active")
    assert "Watchdog timeout (limit 2s)!" in output(node, "journalctl", f"--unit={UNIT}")
    output(node, "rm", "-r", drop_in)
    output(node, "systemctl", "daemon-reload")


def test_a_stop_keeps_the_rules_and_the_state(node: Machine) -> None:
    output(node, "touch", "/run/kproxy/kept")
    before = rules(node)
    assert before
    output(node, "systemctl", "stop", UNIT)
    assert node.shown(UNIT, "ActiveState", "MainPID") == {"ActiveState": "inactive", "MainPID": "0"}
    assert rules(node) == before
    output(node, "ls", "/run/kproxy/kept")


def test_a_reload_is_refused_and_changes_nothing(node: Machine) -> None:
    before = node.shown(UNIT, "MainPID")
    assert node.run("systemctl", "reload", UNIT).returncode
    assert node.shown(UNIT, "MainPID", "ActiveState") == before | {"ActiveState": "active"}


def test_after_a_removal_it_is_installed_and_started_again(node: Machine, package: Path) -> None:
    output(node, "systemctl", "enable", UNIT)
    apt_get(node, "remove", "kproxy")
    assert rules(node)
    apt_get(node, "install", f"/tmp/{package.name}")
    node.await_shown(UNIT, ActiveState="active", UnitFileState="enabled")
