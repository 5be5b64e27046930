"""Processes as the kernel lists them in /proc: who started them, and whether they still live."""

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

_PARENT, _STARTED = 1, 19
"""Fields of /proc/PID/stat after the name (proc_pid_stat(5))."""


def children(pid: int) -> set[int]:
    """Return the ids of the child processes of *pid*, zombies included.

    /proc/PID/task/TID/children would miss those of a thread that ends meanwhile.
    """
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # It has ended since it was listed.
            if int(_stat(path)[_PARENT]) == pid:
                found.add(int(path.name))
    return found


@cache
def _owner(pid: int) -> str:
    return f"{pid}-{_stat(Path('/proc', str(pid)))[_STARTED]}"


def owner() -> str:
    """Return the name of this process, ``PID-START``, which no other process of this boot has."""
    return _owner(os.getpid())


def is_alive(name: str) -> bool:
    """Return whether the process that `owner` named lives; of ``PID`` alone, whether any has that id."""
    pid, _, started = name.partition("-")
    try:
        fields = _stat(Path("/proc", pid))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return not started or fields[_STARTED] == started


def _stat(process: Path) -> list[str]:
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
