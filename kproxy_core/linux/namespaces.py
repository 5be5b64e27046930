"""The network namespaces of this machine that have processes."""

import ctypes
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from kproxy_core.linux.errors import HostError

_CLONE_NEWNET = 0x40000000
_SO_NETNS_COOKIE = 71
_libc = ctypes.CDLL(None, use_errno=True)


def namespace_name() -> str:
    """Return a text that identifies this network namespace among all others since boot."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            cookie = any_socket.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
            return str(int.from_bytes(cookie, "little"))
        except OSError:
            return f"inode-{os.stat('/proc/thread-self/ns/net').st_ino}"


def in_network_namespaces(act: Callable[[], None]) -> None:
    """Call *act* in the calling thread's network namespace and in that of every other process.

    Another thread makes the calls. Skips namespaces that this process may not enter: that requires
    CAP_SYS_ADMIN and visible processes of the host. Raises the first HostError of *act* after all calls.
    """
    errors: list[HostError] = []

    def visit() -> None:
        for _ in _namespaces():
            try:
                act()
            except HostError as error:
                errors.append(error)

    thread = threading.Thread(target=visit, name="kproxy-namespaces")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _namespaces() -> Iterator[None]:
    """Move the calling thread from one namespace to the next."""
    seen = {os.stat("/proc/thread-self/ns/net").st_ino}
    yield
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        with suppress(OSError):  # The process has ended, or belongs to another user.
            number = os.stat(path).st_ino
            if number in seen:
                continue
            seen.add(number)
            with open(path, "rb") as handle:
                entered = not _libc.setns(handle.fileno(), _CLONE_NEWNET)
            if entered:
                yield
