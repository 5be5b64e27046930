"""This process: its capabilities (linux/capability.h), its CPU time, and processes that run its modules."""

import os
import resource
import socket
import sys
import time
from pathlib import Path

CAPABILITIES = {
    "CAP_NET_ADMIN": 12, "CAP_NET_RAW": 13, "CAP_SYS_MODULE": 16, "CAP_SYS_ADMIN": 21, "CAP_BPF": 39,
}  # fmt: skip
"""The capabilities that a service proxy may need, and their numbers."""
_RTM_DELADDR = 21
_NO_ADDRESS = bytes(8)
"""An ifaddrmsg (linux/if_addr.h) of no family, prefix or interface."""
_PACKAGES = str(Path(__file__).parents[2])
"""Where this package is."""


def held(pid: int | None = None) -> frozenset[str]:
    """Return those of `CAPABILITIES` that are effective for process *pid* (None: this one)."""
    try:
        status = Path(f"/proc/{pid or 'self'}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    mask = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    return frozenset(name for name, number in CAPABILITIES.items() if mask >> number & 1)


def network_privileges() -> frozenset[str]:
    """Return those of `CAPABILITIES` that this process can use in its network namespace.

    A process in a user namespace of its own may hold all capabilities there, but none over a network
    namespace that another user namespace owns. So the kernel is asked: rtnetlink refuses every change without
    CAP_NET_ADMIN before it looks at the rest of the message, which here is none that it could carry out.
    """
    found = held()
    if "CAP_NET_ADMIN" not in found:
        return found
    from kproxy_core.netlink.sockets import NetlinkSocket

    try:
        with NetlinkSocket.open(socket.NETLINK_ROUTE) as sock:
            sock.request(_RTM_DELADDR, 0, _NO_ADDRESS)
    except PermissionError:
        return found - {"CAP_NET_ADMIN", "CAP_NET_RAW"}
    except OSError:  # No such address.
        pass
    return found


def cpu_seconds() -> float:
    """Return the CPU time of the calling thread and of all child processes that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.thread_time() + children.ru_utime + children.ru_stime


def interpreter(module: str, *arguments: object) -> list[str]:
    """Return the command that calls ``main(ARGUMENTS)`` of *module* in another process of this Python.

    It imports from where this process does, but never from the working directory, which another user may be
    able to write to, and not by variables of the environment. It passes the import path to no child.
    """
    path = [_PACKAGES, *(entry for entry in sys.path if os.path.isabs(entry))]
    program = f"import sys; sys.path[:] = {path!r}; from {module} import main; main(sys.argv[1:])"
    return [sys.executable, "-I", "-S", "-c", program, *map(str, arguments)]
