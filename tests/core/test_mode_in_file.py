"""Another mode in the configuration file, and at the socket, while the proxy runs."""

import time
from collections.abc import Callable
from pathlib import Path

from tests.core.namespaces import Namespace
from tests.core.processes import KPROXY, Proxy, running
from tests.core.test_cli import configuration, manifests, node

__all__ = ["manifests", "node"]


def text(mode: str, manifests: Path, state: Path, rest: str = "") -> str:
    own = f"{{manifests: {manifests}, liveModeSwitch: true, stateDirectory: {state}}}"
    return f"mode: {mode}\nkproxy: {own}\n{rest}"


def await_that(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, f"not after 20 s: {what}"
        time.sleep(0.01)


def await_mode(proxy: Proxy, mode: str) -> None:
    await_that(lambda: proxy.get(10249, "/proxyMode") == (200, mode), f"{mode} serves")


def test_another_mode_in_the_file_is_followed_without_a_restart(
    node: Namespace, manifests: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    file = configuration(tmp_path / "config.yaml", text("nftables", manifests, state))
    with running(node, f"--config={file}") as proxy:
        proxy.await_health()
        configuration(file, text("iptables", manifests, state))
        await_mode(proxy, "iptables")
        assert "10.1.2.3" in node.run("iptables", "-t", "nat", "-S")
        assert '"mode":"iptables"' in proxy.get(10249, "/configz")[1]
        assert 'kproxy_build_info{mode="iptables"' in proxy.get(10249, "/metrics")[1]
        configuration(file, text("nftables", manifests, state))
        await_mode(proxy, "nftables")
        assert "10.1.2.3" in node.run("nft", "list", "table", "ip", "kproxy")
        await_that(lambda: not list(state.iterdir()), "only the file says what serves")
        configuration(file, text("iptables", manifests, state, "oomScoreAdj: 0\n"))
        status, log = proxy.ended()
    assert status == 1
    assert "the content of the configuration file has changed" in log


def test_a_mode_in_the_file_that_does_not_work_leaves_the_one_that_does(
    node: Namespace, manifests: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    file = configuration(tmp_path / "config.yaml", text("nftables", manifests, state))
    with running(node, f"--config={file}") as proxy:
        proxy.await_health()
        configuration(file, text("no-such-mode", manifests, state))
        time.sleep(0.5)
        configuration(file, text("iptables", manifests, state))
        await_mode(proxy, "iptables")
        _, log = proxy.end()
    assert "the mode in the configuration file is not followed mode=no-such-mode" in log


def test_a_switch_is_remembered_until_the_configuration_changes(
    node: Namespace, manifests: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    file = configuration(tmp_path / "config.yaml", text("nftables", manifests, state))
    with running(node, f"--config={file}") as proxy:
        proxy.await_health()
        said = node.run(KPROXY, "switch", "iptables")
        assert said.splitlines()[-1] == (
            "the configuration has mode 'nftables': put 'iptables' there to keep it after a reboot")
        proxy.end()
    with running(node, f"--config={file}") as proxy:
        proxy.await_health()
        assert proxy.get(10249, "/proxyMode") == (200, "iptables")
        _, log = proxy.end()
        assert "an earlier switch of modes counts" in log
    configuration(file, text("userspace", manifests, state))
    with running(node, f"--config={file}") as proxy:
        proxy.await_health()
        assert proxy.get(10249, "/proxyMode") == (200, "userspace")
    assert list(state.iterdir()) == []
