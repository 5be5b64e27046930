"""The process at the other end of a local socket, and whether it may change this node's service proxy."""

import contextlib
import errno
import os
import select
import socket
import struct
from typing import Final

from kproxy_core.host import privileges

_CREDENTIALS = struct.Struct("3i")
_SO_PEERPIDFD: Final = 77
"""Linux 6.5, include/uapi/asm-generic/socket.h."""

_REQUIRED: Final = "CAP_NET_ADMIN"
"""With this capability a process could rewrite the rules by itself."""


def problem_of_peer(connection: socket.socket) -> str:
    """Return why the process at the other end has no power over this node's rules; "" if it has.

    The kernel identified it when it connected, or when it began to listen. Raises OSError.
    """
    pid, uid, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    pidfd = _pidfd(connection, pid)
    try:
        return _problem(pid, uid, pidfd)
    finally:
        if pidfd >= 0:
            os.close(pidfd)


def _problem(pid: int, uid: int, pidfd: int) -> str:
    """Return why a process has no power. *pid* 0: it is in another PID namespace, and not visible.

    User id 0 proves nothing: a container may run as root, in the node's network namespace, without any
    capability, or with all of them in a user namespace of its own.
    """
    if uid not in (0, os.geteuid()):
        return f"user {uid} is neither root nor the user that runs kproxy"
    if pid == 0 or pidfd < 0:
        return "the process is in another PID namespace, such as that of another container"
    try:
        same_user_namespace = os.path.samefile(f"/proc/{pid}/ns/user", "/proc/self/ns/user")
        lacking = (privileges.held() & {_REQUIRED}) - privileges.held(pid)
    except PermissionError:  # ptrace(2): it has privileges that this process lacks, or is not dumpable.
        more = ", ".join(sorted(privileges.held(pid) - privileges.held())) or "others"
        return (
            f"process {pid} has capabilities that this one lacks ({more}); run the command with"
            " those of the proxy, for example as root in its container")
    except OSError as error:
        return f"the privileges of process {pid} cannot be read: {error.strerror}"
    if not same_user_namespace:
        return f"process {pid} is in another user namespace"
    if lacking:
        return f"process {pid} does not have {_REQUIRED}"
    if _has_ended(pidfd):  # Its number may belong to another process by now.
        return f"process {pid} has ended"
    return ""


def _pidfd(connection: socket.socket, pid: int) -> int:
    """Return a descriptor of the process; -1: it cannot be followed."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            return -1
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid) if pid else -1
    return -1


def _has_ended(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))
