"""Trials in a child process, which may move to a network namespace of its own."""

import ctypes
import errno
import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

TIMEOUT = 60.0
"""Seconds for one question."""

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000


class NoAnswer(Exception):
    """The child process ended without an answer; ``str()`` says how."""


class Namespace:
    """A network namespace that this process can enter, and that ends with it."""

    def enter(self) -> str:
        """Move this process there for good. Return "" or the reason why that is impossible.

        Without the privilege, also enters a new user namespace if the kernel allows that.
        """
        user, group = os.geteuid(), os.getegid()
        problem = _unshare(_CLONE_NEWNET)
        if problem == errno.EPERM:
            problem = _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
            if not problem:
                try:
                    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
                    Path("/proc/self/uid_map").write_text(f"0 {user} 1", encoding="ascii")
                    Path("/proc/self/gid_map").write_text(f"0 {group} 1", encoding="ascii")
                except OSError as error:
                    return f"cannot map users into a user namespace: {error.strerror}"
        if problem:
            return f"cannot create a network namespace: {os.strerror(problem)}"
        # This namespace shares no rules, and the lock file may be inaccessible.
        os.environ["XTABLES_LOCKFILE"] = os.devnull
        return ""


def ask(question: Callable[[Namespace], T], timeout: float = TIMEOUT) -> T:
    """Return the answer to *question*, called in a fork of this process, which may crash or hang.

    The answer must be picklable. This process must have no other threads. Raises NoAnswer.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        _answer(question, reader, writer)
    os.close(writer)
    try:
        data = _read(reader, time.monotonic() + timeout)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if data is None:
        raise NoAnswer(f"no answer within {timeout:g} s")
    if not data:
        code = os.waitstatus_to_exitcode(status)
        raise NoAnswer(f"ended by signal {-code}" if code < 0 else f"ended with status {code}")
    answer: T = pickle.loads(data)
    return answer


def _answer(question: Callable[[Namespace], T], reader: int, writer: int) -> None:
    """Run the child process: answer, and exit."""
    status = 1
    try:
        os.close(reader)
        data = pickle.dumps(question(Namespace()))
        with open(writer, "wb") as file:
            file.write(data)
        status = 0
    finally:
        os._exit(status)


def _read(reader: int, deadline: float) -> bytes | None:
    """Return all data up to the end of file; None if that takes too long."""
    data = b""
    poller = select.poll()  # select() takes no descriptor above 1,023.
    poller.register(reader, select.POLLIN)
    while poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        part = os.read(reader, 1 << 16)
        if not part:
            return data
        data += part
    return None


def _unshare(flags: int) -> int:
    """Move to new namespaces. Return the error number, 0 for success."""
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.unshare(flags) else 0
