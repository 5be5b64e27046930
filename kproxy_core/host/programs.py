"""Running programs of the node, and knowing which processes were ours."""

import os
import shutil
import subprocess
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager

from kproxy_core.host.errors import HostError

LONGEST_RUN = 300
"""Seconds after which a program that hangs is ended."""

_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_LONGEST_COMPLAINT = 500
_MOST_REMEMBERED = 100
"""Notifications of the kernel come late, but not by so many processes."""

Done = subprocess.CompletedProcess[str]


class ProgramFailed(HostError):
    """A program can't be started, hangs, or says that it failed."""


class OwnProcesses:
    """The processes that one part of kproxy has started: whose changes in the kernel are its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: dict[int, None] = {}

    def __contains__(self, pid: int) -> bool:
        """Whether *pid* is or was one of them."""
        with self._lock:
            return pid in self._ids

    @contextmanager
    def starting(self) -> Iterator[None]:
        """While it lasts, who asks whether a process is one of these waits: its id is not known yet."""
        with self._lock:
            yield

    def remember(self, pid: int) -> None:
        """Add *pid*. To be called while `starting`."""
        self._ids.pop(pid, None)
        self._ids[pid] = None
        if len(self._ids) > _MOST_REMEMBERED:
            del self._ids[next(iter(self._ids))]


def find(name: str) -> str | None:
    """The path of a program, also where PATH leaves out what only root needs."""
    return shutil.which(name, path=_PATH)


def run(*argv: str, stdin: str = "", own: OwnProcesses | None = None) -> Done:
    """Run a program to its end, whatever that is. Raises ProgramFailed if it can't be started or hangs."""
    with _started(argv, own) as process:
        try:
            out, err = process.communicate(stdin, timeout=LONGEST_RUN)
        except subprocess.TimeoutExpired as error:
            raise ProgramFailed(f"{argv[0]} has not ended after {LONGEST_RUN} s") from error
    return Done(argv, process.returncode, out, err)


def output(*argv: str, stdin: str = "") -> str:
    """What a program prints. Raises ProgramFailed with its complaint if it fails."""
    done = run(*argv, stdin=stdin)
    if done.returncode:
        raise ProgramFailed(failure(done))
    return done.stdout


def lines(*argv: str, own: OwnProcesses | None = None) -> Generator[str, None, None]:
    """What a program prints, line by line; closing it ends the program. Raises ProgramFailed if it fails."""
    with _started(argv, own) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.close()
        yield from process.stdout
        problem = process.stderr.read()
        if code := process.wait(LONGEST_RUN):
            raise ProgramFailed(failure(Done(argv, code, "", problem)))


def complaint(done: Done) -> str:
    """What a program said on standard error, in one line; "" if nothing."""
    return " ".join(done.stderr.split())[:_LONGEST_COMPLAINT]


def failure(done: Done) -> str:
    """How a program failed, in one line."""
    return f"{done.args[0]}: exit {done.returncode}: {complaint(done)}"


@contextmanager
def _started(argv: tuple[str, ...], own: OwnProcesses | None) -> "Iterator[subprocess.Popen[str]]":
    pipe = subprocess.PIPE
    own = own or OwnProcesses()
    with own.starting():
        try:
            process = subprocess.Popen(
                [find(argv[0]) or argv[0], *argv[1:]],
                stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace",
            )  # fmt: skip
        except OSError as error:
            raise ProgramFailed(f"{argv[0]} can't be started", error) from error
        own.remember(process.pid)
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
