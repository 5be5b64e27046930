"""Trials in a child process, which may move to a network namespace of its own."""

import ctypes
import errno
import multiprocessing
import os
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
    forking = multiprocessing.get_context("fork")
    reader, writer = forking.Pipe(duplex=False)
    child = forking.Process(target=lambda: writer.send(question(Namespace())))
    child.start()
    writer.close()
    try:
        if not reader.poll(timeout):
            raise NoAnswer(f"no answer within {timeout:g} s")
        answer: T = reader.recv()
        return answer
    except EOFError:
        child.join()
        code = child.exitcode or 0
        raise NoAnswer(f"ended by signal {-code}" if code < 0 else f"ended with status {code}") from None
    finally:
        child.kill()
        child.join()
        reader.close()


def _unshare(flags: int) -> int:
    """Move to new namespaces. Return the error number, 0 for success."""
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.unshare(flags) else 0
