"""Run kproxy where something is amiss: ``python hostile.py HARM ARGUMENT KPROXY...``.

    refused CALL        seccomp refuses a system call (EPERM), for all children, too
    clock SECONDS       the wall clock jumps by so much, ahead and back, every 0.1 s
    netlink ERROR       one in 50 transmissions over netlink fails, for example with ENOBUFS, once the file
                        `BEGUN` is beside the configuration
"""

import ctypes
import errno
import itertools
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
"""seccomp.h of libseccomp"""
_EACH = 50
BEGUN = "begun"


def refused(call: str) -> None:
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
    number = library.seccomp_syscall_resolve_name(call.encode())
    action = ctypes.c_uint32(_ERRNO | errno.EPERM)
    if library.seccomp_rule_add_array(context, action, number, 0, None) or library.seccomp_load(context):
        sys.exit(f"seccomp cannot refuse {call}")


def clock(seconds: str) -> None:
    now, now_ns, jump = time.time, time.time_ns, int(seconds)

    def ahead() -> int:
        return jump * (int(time.monotonic() * 10) % 2)

    time.time = lambda: now() + ahead()
    time.time_ns = lambda: now_ns() + 1_000_000_000 * ahead()


def netlink(name: str) -> None:
    number = getattr(errno, name)
    calls = itertools.count(1)
    begun = Path(sys.argv[sys.argv.index("--config") + 1]).with_name(BEGUN)

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def fail_or_call(sock: socket.socket, *arguments: Any) -> Any:
            if sock.family == socket.AF_NETLINK and begun.exists() and not next(calls) % _EACH:
                raise OSError(number, os.strerror(number))
            return call(sock, *arguments)

        return fail_or_call

    for call in ("send", "sendto", "recv", "recvfrom"):
        setattr(socket.socket, call, failing(getattr(socket.socket, call)))


if __name__ == "__main__":
    _, harm, argument, *sys.argv = sys.argv
    {"refused": refused, "clock": clock, "netlink": netlink}[harm](argument)
    if harm == "refused":
        os.execv(sys.argv[0], sys.argv)
    runpy.run_path(sys.argv[0], run_name="__main__")
