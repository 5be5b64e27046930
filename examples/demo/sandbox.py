"""A world of its own that ends with this process, for hosts in network namespaces.

The process starts itself again in fresh mount, PID and network namespaces. Whatever happens in
there, and however it ends, the kernel removes every process, interface and rule with it; nothing
outside can be reached or changed.
"""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Protocol

from kproxy_conformance.network.rights import missing

INSIDE = "--inside-the-sandbox"
_ISOLATED = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")


class SandboxError(Exception):
    """The sandbox cannot be built on this machine; the message says what is missing."""


def obstacle() -> str:
    """Return why no sandbox can be made here; "" if one can. A container's root often may not make one."""
    if INSIDE in sys.argv:
        return ""
    needed = ("network namespaces", "mount namespaces", "process namespaces")
    return next((f"{right}: {reason}" for right in needed if (reason := missing(right))), "")


def enter(module: str) -> None:
    """Return inside the sandbox; the first call replaces this process by one that is.

    *module* is what ``python -m`` is to start again. Raises SandboxError if that is not possible here.
    """
    if INSIDE not in sys.argv:
        os.execvp(_ISOLATED[0], [*_ISOLATED, sys.executable, "-m", module, *sys.argv[1:], INSIDE])
    sys.argv.remove(INSIDE)
    _mount("tmpfs", "/run")
    _mount("sysfs", "/sys")  # without the machine's cgroups and BPF programs


def _mount(kind: str, where: str) -> None:
    command = ["mount", "-t", kind, "kproxy-demo", where]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SandboxError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


class Place(Protocol):
    """A namespace or a machine, with programs and sockets."""

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Move the calling thread there."""

    def socket(self, family: socket.AddressFamily, kind: socket.SocketKind) -> socket.socket:
        """Return a socket that belongs there for life."""

    def start(self, argv: Sequence[str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
        """Start a program there, with its output in *log*."""
