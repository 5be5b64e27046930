"""Notifications that the kernel drops because the buffers of all watches are full (ENOBUFS)."""

import ctypes
import os
import signal
import socket
from pathlib import Path

import pytest

from kproxy_conformance.open_files import open_files
from tests.shortage.node import MODES, Node, node, vip

_PIDFD_GETFD = 438
_NEW_ADDRESS, _NODE_PORT = "192.0.2.77", 30080


def watches(pid: int) -> dict[str, int]:
    """Return the netlink sockets of a process that listen to groups, by inode, with their drops."""
    lines = [line.split() for line in Path(f"/proc/{pid}/net/netlink").read_text().splitlines()[1:]]
    listening = {fields[9]: int(fields[8]) for fields in lines if int(fields[3], 16)}
    return {inode: drops for inode, drops in listening.items() if inode in descriptors(pid)}


def descriptors(pid: int) -> dict[str, int]:
    """Return the sockets of a process: file descriptors by inode."""
    return {name[8:-1]: fd for fd, name in open_files(pid).items() if name.startswith("socket:[")}


def shrink(pid: int, inode: str) -> None:
    """Give one socket of another process the smallest receive buffer."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    fd = libc.syscall(_PIDFD_GETFD, process, descriptors(pid)[inode], 0)
    os.close(process)
    assert fd >= 0, os.strerror(ctypes.get_errno())
    with socket.socket(fileno=fd) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)


@pytest.mark.parametrize("mode", MODES)
def test_what_happened_meanwhile_is_repaired(tmp_path: Path, mode: str) -> None:
    with node(tmp_path, mode, nodePortAddresses=["192.0.2.0/24"]) as here:
        here.serve(1, _NODE_PORT)
        with here.proxy() as proxy:
            here.await_answer(vip(1))
            found = watches(proxy.pid)
            assert found
            for inode in found:
                shrink(proxy.pid, inode)
            os.kill(proxy.pid, signal.SIGSTOP)
            try:
                damage(here)
                assert all(watches(proxy.pid).values()), "a buffer that was not full"
            finally:
                os.kill(proxy.pid, signal.SIGCONT)
            here.await_log("notifications were lost")
            here.await_answer(vip(1))
            here.await_answer(_NEW_ADDRESS, _NODE_PORT)


def damage(here: Node) -> None:
    """Flush everything, add an address, and cause more notifications than the buffers hold."""
    noise = "".join(f"add table ip noise; add chain ip noise c{number};\n" for number in range(200))
    here.network.run("nft", "-f", "-", stdin=f"flush ruleset\n{noise}delete table ip noise\n")
    here.network.ip(f"address add {_NEW_ADDRESS}/24 dev node0")
    here.network.ip(*(f"address add 198.51.100.{number}/32 dev lo" for number in range(1, 200)))
