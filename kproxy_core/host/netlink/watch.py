"""A thread that receives netlink notifications."""

from collections.abc import Callable, Sequence

from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.host.watch import Watch as DescriptorWatch

Receive = Callable[[Sequence[bytes], bool], float | None]
"""Takes datagrams, oldest first, and True if the kernel dropped some because the socket's buffer was full.

Returns None, or the seconds after which to call it again even without notifications.
"""


class Watch(DescriptorWatch):
    """Hands the notifications of a socket to a callback, from a thread of its own."""

    def __init__(self, name: str, sock: NetlinkSocket, receive: Receive) -> None:
        """Start watching. *name* is the thread's; *sock* is closed with the watch."""
        self._socket = sock
        super().__init__(name, sock.fileno(), lambda: receive(*sock.pending()))

    def close(self) -> None:
        super().close()
        self._socket.close()
