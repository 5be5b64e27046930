"""Another mode in the configuration file, and at the socket, while the proxy runs."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.core.cli.test_cli import configuration, manifests, node
from tests.core.namespaces import Namespace
from tests.core.processes import KPROXY, Proxy, running
from tests.patience import PATIENCE

__all__ = ["manifests", "node"]


class ConfigFile:
    """A configuration file that lets a change of the mode be followed."""

    def __init__(self, directory: Path, manifests: Path) -> None:
        self.state = directory / "state"
        self._path = directory / "config.yaml"
        self._own = f"manifests: {manifests}, liveModeSwitch: true, stateDirectory: {self.state}"
        self.option = f"--config={self._path}"

    def write(self, mode: str, rest: str = "", options: str = "{}") -> None:
        own = f"{{{self._own}, backendOptions: {options}}}"
        configuration(self._path, f"mode: {mode}\nkproxy: {own}\n{rest}")


@pytest.fixture
def file(manifests: Path, tmp_path: Path) -> ConfigFile:
    """One with the nftables mode."""
    made = ConfigFile(tmp_path, manifests)
    made.write("nftables")
    return made


def await_that(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.01)


def await_mode(proxy: Proxy, mode: str) -> None:
    await_that(lambda: proxy.get(10249, "/proxyMode") == (200, mode), f"{mode} serves")


def test_another_mode_in_the_file_is_followed_without_a_restart(
    node: Namespace, file: ConfigFile
) -> None:
    with running(node, file.option) as proxy:
        proxy.await_health()
        file.write("iptables")
        await_mode(proxy, "iptables")
        assert "10.1.2.3" in node.run("iptables", "-t", "nat", "-S")
        assert '"mode":"iptables"' in proxy.get(10249, "/configz")[1]
        assert 'kproxy_build_info{mode="iptables"' in proxy.get(10249, "/metrics")[1]
        file.write("nftables")
        await_mode(proxy, "nftables")
        assert "10.1.2.3" in node.run("nft", "list", "table", "ip", "kproxy")
        await_that(lambda: not list(file.state.glob("mode-*")), "only the file says what serves")
        file.write("iptables", "oomScoreAdj: 0\n")
        status, log = proxy.ended()
    assert status == 1
    assert "the content of the configuration file has changed" in log


_SLOW = """
import time
from kproxy_core.contract.hooks import hookimpl
from kproxy_core.app import assembly

effective = assembly.effective
assembly.effective = lambda config: time.sleep(0.3) or effective(config)

@hookimpl(wrapper=True)
def kproxy_sync(update):
    return (yield)
"""
"""A plugin that makes the configuration for /configz late, as a busy machine does."""


def test_the_new_mode_is_shown_after_its_configuration(
    node: Namespace, file: ConfigFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow.py").write_text(_SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with running(node, file.option, "-p", "slow") as proxy:
        proxy.await_health()
        file.write("iptables")
        await_mode(proxy, "iptables")
        assert '"mode":"iptables"' in proxy.get(10249, "/configz")[1]


def test_a_mode_in_the_file_that_does_not_work_leaves_the_one_that_does(
    node: Namespace, file: ConfigFile
) -> None:
    with running(node, file.option) as proxy:
        proxy.await_health()
        file.write("no-such-mode")
        proxy.await_log("could not switch to the mode in the configuration mode=no-such-mode")
        file.write("iptables")
        await_mode(proxy, "iptables")
        assert proxy.end()[0] == 0


def test_a_mode_with_a_wrong_option_in_the_file_leaves_the_one_that_serves(
    node: Namespace, file: ConfigFile
) -> None:
    with running(node, file.option) as proxy:
        proxy.await_health()
        file.write("iptables", options="{iptables: {syncperiod: 5}}")
        proxy.await_log("kproxy.backendOptions.iptables.syncperiod: 5: mode iptables has no such option")
        assert proxy.get(10249, "/proxyMode") == (200, "nftables")
        assert "10.1.2.3" in node.run("nft", "list", "table", "ip", "kproxy")
        file.write("iptables", options="{iptables: {syncPeriod: 5}}")
        await_mode(proxy, "iptables")


def test_a_switch_is_remembered_until_the_configuration_changes(
    node: Namespace, file: ConfigFile
) -> None:
    with running(node, file.option) as proxy:
        proxy.await_health()
        said = node.run(KPROXY, "switch", "iptables")
        assert said.splitlines()[-1] == (
            "the configuration has mode 'nftables': set 'iptables' to keep it after a reboot")
        proxy.end()
    with running(node, file.option) as proxy:
        proxy.await_health()
        assert proxy.get(10249, "/proxyMode") == (200, "iptables")
        _, log = proxy.end()
        assert "resuming earlier mode switch" in log
    file.write("userspace")
    with running(node, file.option) as proxy:
        proxy.await_health()
        assert proxy.get(10249, "/proxyMode") == (200, "userspace")
    assert list(file.state.glob("mode-*")) == []
