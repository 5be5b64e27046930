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
    name = f"{pid}-{_stat(Path('/proc', str(pid)))[_STARTED]}"
    namespace = os.readlink("/proc/self/ns/pid")
    return name if namespace == OF_THE_MACHINE else f"ns{namespace.removeprefix('pid:[').rstrip(']')}-{name}"


OF_THE_MACHINE = "pid:[4026531836]"
"""The first PID namespace (PROC_PID_INIT_INO in linux/proc_ns.h)."""

OWNER = r"(?:ns\d+-)?\d+-\d+"
"""What `owner` returns, as a regular expression."""


def owner() -> str:
    """Return the name of this process, ``PID-START``, which no other process of this boot has.

    In another PID namespace than the machine's, with the number of that: ids count there only.
    """
    return _owner(os.getpid())


def own_name(word: str) -> str:
    """Return a name for what this process makes, and deletes before it ends: ``kproxy-WORD-of-OWNER``.

    What a killed process leaves under such a name, the next run of the tests deletes (`tests.sweep`).
    """
    return f"kproxy-{word}-of-{owner()}"


def is_alive(name: str) -> bool:
    """Return whether the process that `owner` named lives; of ``PID`` alone, whether any has that id.

    Of a process in another PID namespace, whether there is any process, as far as this user sees.
    """
    if name.startswith("ns"):
        return _has_processes(name[2:].partition("-")[0])
    pid, _, started = name.partition("-")
    try:
        fields = _stat(Path("/proc", pid))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return not started or fields[_STARTED] == started


def _has_processes(namespace: str) -> bool:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(path / "ns/pid") == f"pid:[{namespace}]":
                return True
        except PermissionError:
            if os.geteuid() != 0:  # Root is refused those only that a security module protects.
                return True
        except OSError:  # It has ended since it was listed.
            continue
    return False


def _stat(process: Path) -> list[str]:
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
