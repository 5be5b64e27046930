"""Run a command under a seccomp profile: ``python seccomp.py PROFILE COMMAND...``.

As a container runtime does (runtime-spec, config-linux.md), but most system calls that the profile denies end
the process instead of failing: no program can go on without one unnoticed.
"""

import ctypes
import errno
import json
import os
import sys
from pathlib import Path

_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
"""seccomp.h of libseccomp"""
_REFUSED = ("unshare", "setns")
"""Tried by `kproxy modes --probe`, which makes do without: they need CAP_SYS_ADMIN."""


def load(profile: Path) -> None:
    """Confine this process. Raises OSError."""
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_KILL_PROCESS)))
    (rule,) = json.loads(profile.read_text())["syscalls"]
    actions = dict.fromkeys(rule["names"], _ALLOW) | dict.fromkeys(_REFUSED, _ERRNO | errno.EPERM)
    for name, action in actions.items():
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # This architecture may lack it.
            _check(library.seccomp_rule_add_array(context, ctypes.c_uint32(action), number, 0, None))
    _check(library.seccomp_load(context))


def _check(result: int) -> None:
    if result:
        raise OSError(-result, os.strerror(-result))


if __name__ == "__main__":
    load(Path(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
