"""kproxy started as root where other users can write: neither it nor a child runs anything from there."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.core.processes import KPROXY
from tests.patience import PATIENCE
from tests.shortage.node import MODES, Node, node, vip

_MODULES = (
    "random", "socket", "struct", "json", "ctypes", "signal", "os", "marshal", "select", "site",
    "sitecustomize", "usercustomize", "kubernetes", "yaml", "msgspec", "nftables", "bcc", "encodings",
    "kproxy_core", "subprocess",
)
_PROGRAMS = (
    "nft", "iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save",
    "ip6tables-restore", "iptables-nft", "iptables-legacy", "ipset", "ipvsadm", "modprobe", "conntrack",
    "python3", "ip", "tcpdump", "systemctl", "dmesg", "uname", "ethtool", "sysctl",
)
_COMMANDS = (
    ("modes", "--probe"), ("render", "--mode", "iptables", "--check"),
    ("render", "--mode", "nftables", "--check"), ("doctor",), ("diff",), ("explain", vip(1)),
    ("report", "--output", "-"), ("verify",), ("--cleanup", "--dry-run"),
)


class Trap:
    """A directory that everybody can write, with modules and programs that leave a mark."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._marks = path / "marks"
        path.chmod(0o1777)
        self._marks.mkdir()
        self._marks.chmod(0o1777)
        for name in _MODULES:
            (path / f"{name}.py").write_text(
                f"import sys; open({str(self._marks)!r} + '/{name}.py', 'w').close()\n")
        for name in _PROGRAMS:
            program = path / name
            program.write_text(f"#!/bin/sh\n: >{self._marks}/{name}\nexit 1\n")
            program.chmod(program.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)

    @property
    def under(self) -> list[str]:
        """The begin of a command that starts here, with a search path that names this directory first."""
        return ["/usr/bin/env", "-C", str(self.path), f"PATH=.:{os.environ['PATH']}:"]

    def sprung(self) -> list[str]:
        return sorted(os.listdir(self._marks))


@pytest.fixture
def trap(tmp_path: Path) -> Trap:
    path = tmp_path / "trap"
    path.mkdir()
    return Trap(path)


def assert_safe(here: Node, trap: Trap) -> None:
    here.serve(1, 30080)
    with here.proxy(under=trap.under):
        here.await_answer(vip(1))
        here.await_answer("127.0.0.1", 30080)
        here.serve(2)
        here.await_answer(vip(2))
        assert trap.sprung() == []


@pytest.mark.parametrize("mode", MODES)
def test_no_mode_runs_what_other_users_can_write(tmp_path: Path, trap: Trap, mode: str) -> None:
    with node(tmp_path, mode, nodePortAddresses=["localhost", "primary"]) as here:
        assert_safe(here, trap)


@pytest.mark.parametrize("arguments", _COMMANDS, ids=lambda arguments: "-".join(arguments))
def test_no_command_runs_what_other_users_can_write(
    tmp_path: Path, trap: Trap, arguments: tuple[str, ...]
) -> None:
    with node(tmp_path, "nftables") as here:
        here.serve(1)
        with here.proxy():
            here.await_answer(vip(1))
            command = ["nsenter", f"--net=/run/netns/{here.network.name}", *trap.under, KPROXY, *arguments]
            subprocess.run(command, capture_output=True, check=False, timeout=PATIENCE)
            assert trap.sprung() == []


def test_the_loader_of_a_kubeconfig_imports_nothing_from_where_it_is_started(
    tmp_path: Path, trap: Trap
) -> None:
    kubeconfig = trap.path / "kubeconfig"
    kubeconfig.write_text("""{apiVersion: v1, kind: Config, current-context: c,
        clusters: [{name: c, cluster: {server: "http://127.0.0.1:9"}}],
        contexts: [{name: c, context: {cluster: c, user: u}}], users: [{name: u, user: {token: t}}]}""")
    command = ["unshare", "--net", *trap.under, KPROXY, "--kubeconfig", "kubeconfig", "--mode", "nftables"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert any("127.0.0.1:9" in line for line in process.stderr), "the relative path was found"
        finally:
            process.kill()
    assert trap.sprung() == []
