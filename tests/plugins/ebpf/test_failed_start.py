"""Starts that cannot set the programs up, after a process that did."""

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy_bpf import COMPILER
from kproxy_ebpf.names import ON_THE_WAY_OUT
from tests.core.processes import Proxy
from tests.plugins.ebpf.node import REMOTE, Node, node, until
from tests.plugins.ebpf.sockets import Sockets
from tests.plugins.ebpf.test_restart import attached

WEB = "10.96.0.10"
BEFORE, AFTER = REMOTE[:2], REMOTE[2:]

_COMPILER = """
import os, pathlib, subprocess, sys
if not pathlib.Path({works!r}).exists():
    {failure}
done = subprocess.run([sys.executable, {real!r}, *sys.argv[1:]])
raise SystemExit(done.returncode)
"""
_PRIVATE = """
mount -t tmpfs none /run/kproxy
mount --bind "$1" "$2"
shift 2
exec "$@"
"""


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path) as made:
        made.serve("web", WEB, BEFORE)
        yield made


class Compiler:
    """What the next processes run instead of the compiler, until `mend`."""

    def __init__(self, directory: Path, failure: str) -> None:
        self._script = directory / "compile.py"
        self._works = directory / "works"
        real = directory / "real.py"
        real.write_text(COMPILER.read_text())
        self._script.write_text(_COMPILER.format(works=str(self._works), failure=failure, real=str(real)))

    @property
    def under(self) -> list[str]:
        """The command to start a process with it, and without cached programs."""
        return ["unshare", "--mount", "sh", "-ec", _PRIVATE, "sh", str(self._script), str(COMPILER)]

    def mend(self) -> None:
        self._works.touch()


def chosen(sockets: Sockets) -> set[str]:
    """Return the endpoints that answer 20 connections."""
    found = set()
    for _ in range(20):
        with sockets.open(socket.AF_INET, socket.SOCK_STREAM) as client:
            client.connect((WEB, 80))
            found.add(client.recv(100).decode().split()[0])
    return found


def is_attached(proxy: Proxy) -> bool:
    return "\nkproxy_ebpf_attached 1\n" in proxy.get(10249, "/metrics")[1]


def number_choosing(where: Node) -> int:
    programs = attached(where)
    return sum(len(programs[name]) for name in ON_THE_WAY_OUT)


@pytest.mark.parametrize("failure", [
    "os.kill(os.getpid(), 9)",
    "print('{}'); raise SystemExit(0)",
], ids=["killed", "prints-something-else"])  # fmt: skip
def test_programs_that_nobody_maintains_choose_no_endpoint(where: Node, tmp_path: Path, failure: str) -> None:
    broken = Compiler(tmp_path, failure)
    with where.proxy() as proxy:
        assert number_choosing(where) == len(ON_THE_WAY_OUT)
        proxy.end(signal.SIGKILL)
    where.serve("web", WEB, AFTER)
    sockets = where.sockets(where.pod)
    assert chosen(sockets) <= set(BEFORE)
    with where.proxy(under=broken.under) as proxy:
        assert chosen(sockets) <= set(AFTER)
        assert number_choosing(where) == 0
        assert not is_attached(proxy)
        assert "BPF" in proxy.health()[1]
        broken.mend()
        until(lambda: is_attached(proxy) and "problems" not in proxy.health()[1])
        assert number_choosing(where) == len(ON_THE_WAY_OUT)
        assert chosen(sockets) <= set(AFTER)
