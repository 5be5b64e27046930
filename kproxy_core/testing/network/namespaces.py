"""Network namespaces without names: the kernel deletes them with the process, however it ends.

A socket belongs to the namespace and the cgroup that it was created in for life, so one process can talk from
every host of a topology: a thread enters a namespace, creates the socket and leaves again.
"""

import contextlib
import ctypes
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from typing import IO

from kproxy_core.testing.network.cgroup import NodeCgroup

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)

COMMAND_TIMEOUT = 60.0
"""Seconds."""

_SETTINGS = {
    "net/ipv6/conf/{}/disable_ipv6": 0,
    "net/ipv6/conf/{}/accept_dad": 0,  # addresses are usable at once
    "net/ipv6/conf/{}/accept_ra": 0,
    "net/ipv6/conf/{}/accept_redirects": 0,
    "net/ipv4/conf/{}/rp_filter": 0,  # a reply may take another path than the request
    "net/ipv4/conf/{}/accept_redirects": 0,
    "net/ipv4/conf/{}/send_redirects": 0,
}
_RATES = {
    "net/ipv4/icmp_ratelimit": 0,
    "net/ipv6/icmp/ratelimit": 0,
    # No ICMP errors under the limit of 1000 a second that all namespaces share: a refusal that is sent while
    # other tests cause many would be dropped.
    "net/ipv4/icmp_ratemask": 0,
    "net/ipv6/icmp/ratemask": 2,
}


class CommandFailed(Exception):
    """A command of the tests, not of the proxy, failed. The message has its output."""


def run(*argv: str, stdin: str = "", timeout: float = COMMAND_TIMEOUT) -> str:
    """Run *argv* where the calling thread is, and return what it prints. Raises CommandFailed."""
    try:
        done = _run(argv, stdin, timeout)
    except OSError as error:
        raise CommandFailed(f"{argv[0]}: {error.strerror}") from error
    if done.returncode:
        raise CommandFailed(f"{' '.join(argv)}: exit {done.returncode}\n{done.stdout}")
    return done.stdout


def _run(argv: Sequence[str], stdin: str, timeout: float) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        argv, input=stdin, text=True, errors="replace", timeout=timeout, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


class Namespace:
    """A network namespace with its loopback up, deleted when it is closed and nothing runs in it."""

    def __init__(self, name: str, cgroup: NodeCgroup | None = None) -> None:
        """*cgroup*: sockets of this namespace are created there. Raises OSError without privileges."""
        self.name = name
        self._cgroup = cgroup
        with _current() as home:
            _check(_LIBC.unshare(_CLONE_NEWNET))
            try:
                self._handle = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                for setting, value in _SETTINGS.items():
                    for scope in ("all", "default"):
                        _write(setting.format(scope), value)
                for setting, value in _RATES.items():
                    _write(setting, value)
            finally:
                _check(_LIBC.setns(home, _CLONE_NEWNET))
        self.ip("link set lo up")

    @property
    def path(self) -> str:
        """The namespace as a path, for ``ip link ... netns`` and ``nsenter --net=``."""
        return f"/proc/{os.getpid()}/fd/{self._handle}"

    def close(self) -> None:
        os.close(self._handle)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Move the calling thread, and what it starts meanwhile, into the namespace and its cgroup."""
        with contextlib.ExitStack() as stack:
            if self._cgroup is not None:
                stack.enter_context(self._cgroup.entered())
            stack.enter_context(self.joined())
            yield

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Move the calling thread into the namespace alone."""
        with _current() as home:
            _check(_LIBC.setns(self._handle, _CLONE_NEWNET))
            try:
                yield
            finally:
                _check(_LIBC.setns(home, _CLONE_NEWNET))

    def socket(self, family: socket.AddressFamily, kind: socket.SocketKind) -> socket.socket:
        with self.entered():
            return socket.socket(family, kind)

    def ip(self, *lines: str) -> None:
        """Run commands of ip(8), all in one process."""
        with self.entered():
            run("ip", "-batch", "-", stdin="".join(f"{line}\n" for line in lines))

    def forward(self) -> None:
        """Make it a router."""
        with self.entered():
            _write("net/ipv4/ip_forward", 1)
            _write("net/ipv6/conf/all/forwarding", 1)

    def run(self, *argv: str, stdin: str = "", timeout: float = COMMAND_TIMEOUT) -> str:
        """Return what *argv* prints in the namespace. Raises CommandFailed."""
        with self.entered():
            return run(*argv, stdin=stdin, timeout=timeout)

    def attempt(self, *argv: str, timeout: float = COMMAND_TIMEOUT) -> "subprocess.CompletedProcess[str]":
        """Run *argv* in the namespace, and return its exit status and output whatever they are."""
        with self.entered():
            return _run(argv, "", timeout)

    def start(self, argv: Sequence[str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
        """Start a program in the namespace, in a session of its own, with its output in *log*."""
        with self.entered():
            return subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )


@contextlib.contextmanager
def _current() -> Iterator[int]:
    """Yield a handle of the calling thread's namespace."""
    handle = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)


def _write(setting: str, value: int) -> None:
    with open(f"/proc/sys/{setting}", "w", encoding="ascii") as file:
        file.write(str(value))


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
