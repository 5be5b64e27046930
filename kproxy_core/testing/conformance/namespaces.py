"""Network namespaces without names, which end with the process in any case."""

import contextlib
import ctypes
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


class CommandFailed(Exception):
    """A program of the kit, not of the backend, failed."""


class Namespace:
    """A network namespace with its loopback up. Sockets and processes made inside remain inside."""

    def __init__(self, name: str) -> None:
        """Raises OSError without the necessary privileges."""
        self.name = name
        with _here() as home:
            _check(_LIBC.unshare(_CLONE_NEWNET))
            try:
                self._handle = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                # Make addresses usable at once, and allow asymmetric routes.
                for scope in ("all", "default"):
                    _set(f"ipv4/conf/{scope}/rp_filter", 0)
                    _set(f"ipv6/conf/{scope}/accept_dad", 0)
            finally:
                _check(_LIBC.setns(home, _CLONE_NEWNET))

    @property
    def path(self) -> str:
        """Path for ``ip link ... netns``."""
        return f"/proc/{os.getpid()}/fd/{self._handle}"

    def close(self) -> None:
        """Release it; the kernel removes it once nothing uses it."""
        os.close(self._handle)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Move the calling thread, and all that it starts, inside for the ``with`` block."""
        with _here() as home:
            _check(_LIBC.setns(self._handle, _CLONE_NEWNET))
            try:
                yield
            finally:
                _check(_LIBC.setns(home, _CLONE_NEWNET))

    def ip(self, *commands: str) -> None:
        """Run ip(8) commands, all in one process."""
        with self.entered():
            run("ip", "-batch", "-", stdin="".join(f"{command}\n" for command in commands))

    def forward(self) -> None:
        """Enable forwarding."""
        with self.entered():
            _set("ipv4/ip_forward", 1)
            _set("ipv6/conf/all/forwarding", 1)

    def socket(self, family: socket.AddressFamily, kind: socket.SocketKind) -> socket.socket:
        with self.entered():
            return socket.socket(family, kind)


def run(*command: str, stdin: str = "") -> str:
    """Return the output of *command*. Raises CommandFailed with its error message."""
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CommandFailed(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        raise CommandFailed(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@contextlib.contextmanager
def _here() -> Iterator[int]:
    """Return a handle of the calling thread's namespace."""
    handle = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)


def _set(name: str, value: int) -> None:
    Path("/proc/sys/net", name).write_text(str(value), encoding="ascii")


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
