"""A network namespace of its own for every test that relays, with a node in it."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .proxies import Proxy, Start

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)

_LINKS = """\
link set lo up
link add node0 type veth peer name lan0
link set node0 up
link set lan0 up
address add 192.0.2.1/24 dev node0
address add 192.0.2.2/24 dev node0
address add 192.0.2.3/24 dev node0
address add 2001:db8::1/64 dev node0 nodad
address add fd00:1::1/64 dev lo nodad
route add default via 192.0.2.254
route add ::/0 via 2001:db8::fe
"""


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The test's thread, and what it starts, are on a node with an address and a default route."""
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _check(_LIBC.unshare(_CLONE_NEWNET))
        try:
            subprocess.run(["ip", "-batch", "-"], input=_LINKS, text=True, check=True)
            yield
        finally:
            _check(_LIBC.setns(home, _CLONE_NEWNET))
    finally:
        os.close(home)


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[Proxy] = []

    def make(**options: object) -> Proxy:
        made.append(Proxy(**options))
        return made[-1]

    yield make
    for proxy in made:
        proxy.backend.kproxy_close()
