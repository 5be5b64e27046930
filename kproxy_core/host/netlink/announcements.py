"""Announcements of the netfilter subsystems, read by the program that waits for them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Self, TypeVar

from kproxy_core.host.errors import doing
from kproxy_core.host.netlink.messages import NETLINK_NETFILTER
from kproxy_core.host.netlink.sockets import NetlinkSocket

T = TypeVar("T")

_RECEIVE_SPACE = 8 << 20


class Announcements(Generic[T]):
    """The announcements since it was opened, in this thread's network namespace. `fileno` can be polled."""

    def __init__(self, groups: Sequence[int], parse: Callable[[bytes], Iterator[T]], purpose: str) -> None:
        """*parse* yields the announcements in a datagram. Raises HostError without CAP_NET_ADMIN."""
        self._parse = parse
        with doing(f"{purpose}, which requires CAP_NET_ADMIN"):
            self._socket = NetlinkSocket.open(NETLINK_NETFILTER, groups=groups, receive_space=_RECEIVE_SPACE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> Iterator[T]:
        """Yield the announcements that have arrived. Some may be lost on a busy node."""
        while datagrams := self._socket.pending()[0]:
            for data in datagrams:
                yield from self._parse(data)
