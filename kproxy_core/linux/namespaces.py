"""The network namespaces of this machine that have processes or names."""

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from kproxy_core.linux.addresses import read_interface_addresses
from kproxy_core.linux.errors import HostError, doing
from kproxy_core.model.address import Address
from kproxy_core.netlink.messages import NETLINK_ROUTE, attribute, attributes
from kproxy_core.netlink.sockets import NetlinkSocket

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_NAMES = Path("/run/netns")
"""Where ip(8) and the runtimes of containers bind namespaces."""
_RTM_GETNSID = 90
_RTGENMSG = bytes(4)
_NETNSA_NSID, _NETNSA_FD = 1, 3
"""linux/net_namespace.h"""
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


@contextmanager
def neighbour_with(address: Address) -> Iterator["Neighbour | None"]:
    """Yield the namespace at the other end of an interface of this one that has *address*, as a pod's has.

    None if there is none, or it may not be entered: that requires CAP_SYS_ADMIN, and a process of it or its
    name in /run/netns to be visible here. Acts on the network namespace of the calling thread. Raises
    HostError.
    """
    with ExitStack() as stack:
        with doing("look for pods' network namespaces"), NetlinkSocket.open(NETLINK_ROUTE) as route:
            found = next(_with(address, route, stack), None)
        yield found


def _with(address: Address, route: NetlinkSocket, stack: ExitStack) -> Iterator["Neighbour"]:
    seen = set()
    for path in [*Path("/proc").glob("[0-9]*/ns/net"), *_NAMES.glob("*")]:
        with suppress(OSError):  # The process has ended, or belongs to another user.
            if (number := os.stat(path).st_ino) not in seen:
                seen.add(number)
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
                found = Neighbour(descriptor)
                if _is_adjacent(route, descriptor) and address in found.call(_own_addresses):
                    yield found
                    return


def _own_addresses() -> set[Address]:
    return {each.address for each in read_interface_addresses()}


def _is_adjacent(route: NetlinkSocket, namespace: int) -> bool:
    """Return whether an interface of this namespace has its other end in *namespace*, a descriptor."""
    wanted = attribute(_NETNSA_FD, struct.pack("=i", namespace))
    data, start, end = route.request_one(_RTM_GETNSID, _RTGENMSG + wanted)
    found = attributes(data, start + len(_RTGENMSG), end).get(_NETNSA_NSID, b"")
    return bool(found) and struct.unpack("=i", found)[0] >= 0


class Neighbour:
    """Another network namespace of this machine, while it is open."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def call(self, act: Callable[[], T]) -> T:
        """Return what *act* returns, called by a thread there. Raises OSError if it may not be entered."""
        def visit() -> T:
            if _libc.setns(self._descriptor, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
            return act()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(visit).result()

    def open_socket(self, family: int, kind: int) -> socket.socket:
        """Return a socket that sends from there. Raises OSError."""
        return self.call(lambda: socket.socket(family, kind))
