"""Sockets of other namespaces and cgroups, in this process."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.core.bpf_places import inside
from tests.core.namespaces import Namespace

_MAKER = """
import socket
home = socket.socket(fileno=0)
while wanted := home.recv(100):
    with socket.socket(*map(int, wanted.split())) as made:
        socket.send_fds(home, [b"."], [made.fileno()])
"""


class Sockets:
    """Makes sockets in one network namespace. They belong to the cgroup of the process that makes them."""

    def __init__(self, home: socket.socket) -> None:
        self._home = home

    def open(
        self, family: socket.AddressFamily, kind: socket.SocketKind, protocol: int = 0
    ) -> socket.socket:
        """Return a new socket; its calls give up after five seconds."""
        self._home.sendall(f"{int(family)} {int(kind)} {protocol}".encode())
        _, (descriptor,), _, _ = socket.recv_fds(self._home, 1, 1)
        made = socket.socket(fileno=descriptor)
        made.settimeout(5)
        return made


@contextmanager
def sockets_in(where: Namespace, cgroup: Path | None) -> Iterator[Sockets]:
    """Sockets of *where*, in *cgroup* or in this process's own."""
    ours, theirs = socket.socketpair()
    command = ["ip", "netns", "exec", where.name, sys.executable, "-S", "-c", _MAKER]
    with ours, theirs:
        if cgroup is not None:
            command = inside(cgroup, command)
        process = subprocess.Popen(command, stdin=theirs.fileno())
        theirs.close()
        try:
            yield Sockets(ours)
        finally:
            ours.close()
            process.wait(10)
