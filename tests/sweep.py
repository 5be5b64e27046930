"""Remove what runs of the tests that were killed have left on this machine.

Each thing is named with the process that made it (`own_name`), and is touched only if that process has ended.
Directories that a run announces, with its results or the logs of failures, have other names, and are kept.
"""

import ctypes
import os
import re
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kproxy_conformance.processes import OF_THE_MACHINE, OWNER, is_alive, owner

MARK = "KPROXY_TEST_RUN"
"""Environment variable of the processes that tests start: the `owner` of the run."""
NAMESPACES = Path("/run/netns")

_NAME = re.compile(rf"kproxy-[a-z]+-of-({OWNER})(?:-.*)?")
_ONCE = re.compile(r"(?:kptest|kpt)-(\d+-\d+)(?:-.*)?|(?:kpt|kb|kpb|kproxy-soak)-(\d+)(?:-.*)?")
"""Names that earlier versions gave to namespaces and cgroups, the latter ones without a start time."""
_EVIDENCE = "*.state"
"""Files in directories that are kept: a scenario has failed, and its message names them."""
_DETACH = 2
"""MNT_DETACH"""
_libc = ctypes.CDLL(None, use_errno=True)


def begin() -> None:
    """Begin a run outside pytest: sweep, and mark the processes that it starts."""
    if MARK not in os.environ:
        os.environ[MARK] = owner()
        sweep()


def sweep() -> None:
    """End the processes, and delete the mounts, namespaces, cgroups and directories of runs that ended.

    What this user may not touch is left, and all in another PID namespace: there, every process of the
    machine seems to have ended.
    """
    if os.readlink("/proc/self/ns/pid") != OF_THE_MACHINE or _is_guest():
        return
    _end_processes()
    for source, point, kind in _mounts():
        if kind == "bpf" and _is_left(source):
            _libc.umount2(os.fsencode(point), _DETACH)
    for path in _listed(NAMESPACES):
        if _is_left(path.name):
            _libc.umount2(os.fsencode(path), _DETACH)  # Killed early, it has not mounted one.
            with suppress(OSError):
                path.unlink()
    for _, tree, kind in _mounts():
        if kind == "cgroup2":
            for path in _listed(Path(tree)):
                if _is_left(path.name):
                    _remove_cgroup(path)
    for path in _listed(Path(tempfile.gettempdir())):
        if _is_left(path.name, _NAME) and _is_ours(path) and not any(path.glob(_EVIDENCE)):
            shutil.rmtree(path, ignore_errors=True)


def _is_guest() -> bool:
    """Return whether this kernel is a guest of a test, which is left with the processes of that run."""
    return "User Mode Linux" in Path("/proc/cpuinfo").read_text(errors="replace")


def _is_ours(path: Path) -> bool:
    """Return whether *path* is a directory of this user: another one may have run the tests, too."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _is_left(name: str, *patterns: re.Pattern[str]) -> bool:
    """Return whether *name* is one of the tests', and the process that it names has ended."""
    found = next(filter(None, (pattern.fullmatch(name) for pattern in patterns or (_NAME, _ONCE))), None)
    return found is not None and not is_alive(next(filter(None, found.groups())))


def _end_processes() -> None:
    for path in _listed(Path("/proc")):
        with suppress(OSError, ValueError):  # It has ended, or belongs to another user; no process.
            pid = int(path.name)
            handle = os.pidfd_open(pid)
            try:
                made_by = _mark(path)  # of the process that the handle has, not of one before it
                if made_by and made_by != owner() and not is_alive(made_by):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)


def _mark(process: Path) -> str:
    for entry in (process / "environ").read_bytes().split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == MARK.encode():
            text = value.decode(errors="replace")
            return text if re.fullmatch(OWNER, text) else ""
    return ""


def _remove_cgroup(path: Path) -> None:
    for child in _listed(path):
        if child.is_dir():
            _remove_cgroup(child)
    with suppress(OSError):  # A process is still in it.
        path.rmdir()


def _listed(directory: Path) -> list[Path]:
    with suppress(OSError):
        return list(directory.iterdir())
    return []


def _mounts() -> Iterator[tuple[str, str, str]]:
    """Yield source, place and type of each mount of this namespace."""
    for line in Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines():
        source, point, kind, *_ = line.split(" ")
        yield source, point.encode().decode("unicode_escape"), kind
