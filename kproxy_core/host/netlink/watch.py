"""A thread that receives netlink notifications."""

import errno
from collections.abc import Callable, Sequence
from typing import Final

from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.host.watch import Watch as DescriptorWatch

_MOST: Final = 256
"""Datagrams handed over at once; all that have arrived if some were dropped, because those are outdated."""

Receive = Callable[[Sequence[bytes], bool], float | None]
"""Takes datagrams, oldest first, and True if the kernel dropped some because the socket's buffer was full.

Returns None, or the seconds after which to call it again even without notifications.
"""


class Watch(DescriptorWatch):
    """Hands the notifications of a socket to a callback, from a thread of its own."""

    def __init__(self, name: str, sock: NetlinkSocket, receive: Receive) -> None:
        """Start watching. *name* is the thread's; *sock* is closed with the watch."""
        self._socket = sock
        super().__init__(name, sock.fileno(), lambda: receive(*self._pending()))

    def close(self) -> None:
        super().close()
        self._socket.close()

    def _pending(self) -> tuple[list[bytes], bool]:
        """Return the datagrams that have arrived, and True if the kernel dropped some."""
        found: list[bytes] = []
        lost = False
        while lost or len(found) < _MOST:
            try:
                data = self._socket.receive()
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                lost = True  # Datagrams that are still in the socket are older than the dropped ones.
                continue
            if not data:
                break
            found.append(data)
        return found, lost
