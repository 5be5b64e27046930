"""Hosts in network namespaces, in a world of their own that ends with this process.

The process starts itself again in fresh mount, PID and network namespaces. Whatever happens in
there, and however it ends, the kernel removes every process, interface and rule with it; nothing
outside can be reached or changed.
"""

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Protocol

CLONE_NEWNET = 0x40000000
NAMES = Path("/run/netns")
"""Where `ip netns` keeps its names; in the sandbox a directory in memory."""

INSIDE = "--inside-the-sandbox"

_libc = ctypes.CDLL(None, use_errno=True)


class SandboxError(Exception):
    """The machine does not let us build the sandbox; the message says what is missing."""


def enter(module: str) -> None:
    """Return inside the sandbox; the first call replaces this process by one that is.

    *module* is what ``python -m`` is to start again. Raises SandboxError if that is not possible here.
    """
    if INSIDE not in sys.argv:
        if os.geteuid() != 0:
            raise SandboxError("network namespaces and packet filter rules need root: sudo make demo")
        isolate = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        os.execvp("unshare", [*isolate, sys.executable, "-m", module, *sys.argv[1:], INSIDE])
    sys.argv.remove(INSIDE)
    run(["mount", "-t", "tmpfs", "-o", "mode=755", "kproxy-demo", "/run"])
    NAMES.mkdir()


def run(command: Sequence[str], stdin: str = "") -> str:
    """What *command* prints. Raises SandboxError with its words if it fails."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SandboxError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class Place(Protocol):
    """Where programs and sockets are."""

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """The calling thread is there."""

    def socket(self, family: socket.AddressFamily, kind: socket.SocketKind) -> socket.socket:
        """A socket that belongs there for life."""

    def start(self, command: Sequence[str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
        """A program that runs there, its output in *log*."""


class Host:
    """One network namespace: a node, a pod, a router or a client."""

    def __init__(self, name: str) -> None:
        self.name = name
        run(["ip", "netns", "add", name])
        self._namespace = os.open(NAMES / name, os.O_RDONLY | os.O_CLOEXEC)
        # Addresses are usable at once, and a reply may leave by another way than the request came.
        self.sysctl("ipv6/conf/all/accept_dad", 0)
        self.sysctl("ipv6/conf/default/accept_dad", 0)
        self.sysctl("ipv4/conf/all/rp_filter", 0)
        self.sysctl("ipv4/conf/default/rp_filter", 0)
        self.ip("link set lo up")

    def ip(self, *commands: str) -> None:
        """Run `ip` commands in this host, all in one process."""
        run(["ip", "-n", self.name, "-batch", "-"], stdin="\n".join(commands) + "\n")

    def sysctl(self, name: str, value: int) -> None:
        with self.entered():
            Path("/proc/sys/net", name).write_text(str(value))

    def forward(self) -> None:
        """Make a router of this host."""
        self.sysctl("ipv4/ip_forward", 1)
        self.sysctl("ipv6/conf/all/forwarding", 1)

    def link(self, device: str, peer: "Host", peer_device: str) -> None:
        """A cable from *device* of this host to *peer_device* of *peer*."""
        self.ip(
            f"link add {device} type veth peer name {peer_device} netns {peer.name}", f"link set {device} up"
        )
        peer.ip(f"link set {peer_device} up")

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread is in this host: the sockets it makes belong there for life."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _set_namespace(self._namespace)
            yield
        finally:
            _set_namespace(home)
            os.close(home)

    def socket(self, family: socket.AddressFamily, kind: socket.SocketKind) -> socket.socket:
        with self.entered():
            return socket.socket(family, kind)

    def start(self, command: Sequence[str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
        """A program that runs in this host, its output in *log*."""
        inside = ["ip", "netns", "exec", self.name, *command]
        return subprocess.Popen(inside, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, f"setns: {os.strerror(code)}")
