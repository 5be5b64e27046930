"""Remove what runs of the tests that were killed have left on this machine.

Each thing is named with the process that made it (`owner`), and is touched only if that process has ended.
"""

import ctypes
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kproxy_conformance.processes import is_alive, owner

MARK = "KPROXY_TEST_RUN"
"""Environment variable of the processes that tests start: the `owner` of the run."""
NAMESPACES = Path("/run/netns")

_NAMESPACE = re.compile(r"(?:kptest-(\d+-\d+)|kpt-(\d+))-\d+(?:-.*)?")
"""Names once had no start time."""
_CGROUP = re.compile(r"(?:kproxy-test-(\d+-\d+)|kpt-(\d+-\d+)-\d+)")
_MOUNT = re.compile(r"kpt-(\d+-\d+)")
_DIRECTORY = re.compile(r"guests-(\d+-\d+)-.*")
_OF_THE_MACHINE = "pid:[4026531836]"
"""The first PID namespace (PROC_PID_INIT_INO in linux/proc_ns.h)."""
_DETACH = 2
"""MNT_DETACH"""
_libc = ctypes.CDLL(None, use_errno=True)


def sweep() -> None:
    """End the processes, and delete the mounts, namespaces, cgroups and directories of runs that ended.

    What this user may not touch is left, and all in another PID namespace: there, every process of the
    machine seems to have ended.
    """
    if os.readlink("/proc/self/ns/pid") != _OF_THE_MACHINE or _is_guest():
        return
    _end_processes()
    for source, point, kind in _mounts():
        if kind == "bpf" and _is_left(_MOUNT, source):
            _libc.umount2(os.fsencode(point), _DETACH)
    for path in _listed(NAMESPACES):
        if _is_left(_NAMESPACE, path.name):
            _libc.umount2(os.fsencode(path), _DETACH)  # Killed early, it has not mounted one.
            with suppress(OSError):
                path.unlink()
    for _, tree, kind in _mounts():
        if kind == "cgroup2":
            for path in _listed(Path(tree)):
                if _is_left(_CGROUP, path.name):
                    _remove_cgroup(path)
    for path in _listed(Path(tempfile.gettempdir())):
        if _is_left(_DIRECTORY, path.name):
            shutil.rmtree(path, ignore_errors=True)


def _is_guest() -> bool:
    """Return whether this kernel is a guest of a test, which is left with the processes of that run."""
    return "User Mode Linux" in Path("/proc/cpuinfo").read_text(errors="replace")


def _is_left(pattern: re.Pattern[str], name: str) -> bool:
    """Return whether *name* is one of the tests', and the process that it names has ended."""
    found = pattern.fullmatch(name)
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
            return text if re.fullmatch(r"\d+-\d+", text) else ""
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
