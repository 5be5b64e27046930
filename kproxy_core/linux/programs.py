"""Programs of the node, and the processes that run them for us."""

import errno
import io
import math
import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from kproxy_core.linux.errors import HostError

TIMEOUT = 10
"""Timeout in seconds for one run of a program: one that hangs holds up all syncs."""

_LINES_A_SECOND = 2_000
"""Lines of input that extend the timeout by a second: iptables-restore of a large table takes that long."""

_FOR_ROOT = ("/usr/sbin", "/sbin")
"""Directories of programs that are not in every user's path."""
_MAX_COMPLAINT = 500
_BATCH = 1 << 20
"""Size in bytes of one read of output."""
_MAX_REMEMBERED = 100
"""Limit for remembered processes: notifications are delayed, but never by more processes than this."""
_REMEMBERED_SECONDS = 600.0
"""Longer than any program runs. Later the PID may be that of another process, whose changes are foreign."""

Done = subprocess.CompletedProcess[str]


class ProgramFailed(HostError):
    """A program cannot be started, timed out, or failed."""


class ProgramUnfinished(ProgramFailed):
    """A program timed out or was killed, so its result is unknown."""


class OwnProcesses:
    """The processes that one backend has started; their changes in the kernel are its own."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._ids: dict[int, float] = {}
        """Start times by PID, the oldest first."""

    def __contains__(self, pid: object) -> bool:
        with self._lock:
            started = self._ids.get(pid, -math.inf) if isinstance(pid, int) else -math.inf
            return self._clock() - started < _REMEMBERED_SECONDS

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Block membership tests while a process is being started and its PID is unknown."""
        with self._lock:
            yield

    def remember(self, pid: int) -> None:
        """Add *pid*. Must be called within `starting`."""
        self._ids.pop(pid, None)
        self._ids[pid] = self._clock()
        if len(self._ids) > _MAX_REMEMBERED:
            del self._ids[next(iter(self._ids))]


_running: set[subprocess.Popen[str]] = set()
"""Running programs, which `interrupt` kills."""
_changing = threading.Lock()
"""Guards `_running` and `_ending`."""
_ending = threading.Event()


def interrupt() -> None:
    """Kill all running programs, and each that is started from now on, because this process is ending."""
    with _changing:
        _ending.set()
        for process in _running:
            process.kill()


def find(name: str) -> str | None:
    """Return the path of a program. Also searches the directories for root's programs.

    Ignores relative directories of the search path: the working directory may be writable for other users.
    """
    path = [*os.environ.get("PATH", "").split(os.pathsep), *_FOR_ROOT]
    return shutil.which(name, path=os.pathsep.join(filter(os.path.isabs, path)))


def run(*argv: str, stdin: str = "", own: OwnProcesses | None = None, timeout: float = TIMEOUT) -> Done:
    """Run a program. Raises ProgramFailed if it cannot start, ProgramUnfinished if it times out."""
    timeout += stdin.count("\n") / _LINES_A_SECOND
    with _started(argv, own) as process:
        try:
            out, err = process.communicate(stdin, timeout=timeout)
        except subprocess.TimeoutExpired as error:
            raise ProgramUnfinished(f"{argv[0]} timed out after {timeout:g} s") from error
    return Done(argv, process.returncode, out, err)


def output(*argv: str, stdin: str = "", own: OwnProcesses | None = None) -> str:
    """Run a program and return its output. Raises ProgramFailed with its error message."""
    done = run(*argv, stdin=stdin, own=own)
    if done.returncode:
        raise _error(done)
    return done.stdout


def lines(
    *argv: str, own: OwnProcesses | None = None, timeout: float = TIMEOUT
) -> Generator[str, None, None]:
    """Run a program and yield its output line by line. Kills it when closed.

    Raises ProgramFailed; ProgramUnfinished if nothing arrives for *timeout* seconds. Starts no thread: a
    process with threads cannot enter a user namespace.
    """
    with _started(argv, own) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.close()
        output = process.stdout.fileno()
        poller = select.poll()  # select() takes no descriptor above 1,023.
        poller.register(output, select.POLLIN)
        rest = b""
        while True:
            if not poller.poll(timeout * 1000):
                raise ProgramUnfinished(f"{argv[0]} timed out after {timeout:g} s without output")
            if not (data := os.read(output, _BATCH)):
                break
            complete, newline, rest = (rest + data).rpartition(b"\n")
            yield from io.StringIO((complete + newline).decode(errors="replace"))
        if rest:
            yield rest.decode(errors="replace")
        problem = process.stderr.read()
        if code := process.wait(timeout):
            raise _error(Done(argv, code, "", problem))


def complaint(done: Done) -> str:
    """Return a program's standard error output as one line."""
    return " ".join(done.stderr.split())[:_MAX_COMPLAINT]


def failure(done: Done) -> str:
    """Describe a failed run in one line."""
    if done.returncode == -signal.SIGKILL:
        return f"{done.args[0]}: killed, perhaps for lack of memory"
    if done.returncode < 0:
        return f"{done.args[0]}: ended by signal {-done.returncode} ({signal.strsignal(-done.returncode)})"
    return f"{done.args[0]}: exit {done.returncode}: {complaint(done)}"


def _error(done: Done) -> ProgramFailed:
    """Return the error of a run whose exit status is not 0; it is negative if a signal ended the program."""
    return (ProgramUnfinished if done.returncode < 0 else ProgramFailed)(failure(done))


@contextmanager
def _started(argv: tuple[str, ...], own: OwnProcesses | None) -> "Iterator[subprocess.Popen[str]]":
    pipe = subprocess.PIPE
    own = own or OwnProcesses()
    with own.starting():
        try:
            if (program := find(argv[0])) is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            process = subprocess.Popen(
                [program, *argv[1:]],
                stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace",
            )  # fmt: skip
        except OSError as error:
            raise ProgramFailed(f"cannot start {argv[0]}", error) from error
        own.remember(process.pid)
    with process:
        with _changing:
            _running.add(process)
            if _ending.is_set():
                process.kill()
        try:
            yield process
        finally:
            with _changing:
                _running.discard(process)
            if process.poll() is None:
                process.kill()
