"""A thread that receives netlink notifications."""

import errno
import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import Final

from kproxy_core.host.netlink.sockets import NetlinkSocket

_MOST: Final = 256
"""Datagrams handed over at once; all that have arrived if some were dropped, because those are outdated."""

Receive = Callable[[Sequence[bytes], bool], float | None]
"""Takes datagrams, oldest first, and True if the kernel dropped some because the socket's buffer was full.

Returns None, or the seconds after which to call it again even without notifications.
"""


class Watch:
    """Hands the notifications of a socket to a callback, from a thread of its own."""

    def __init__(self, name: str, sock: NetlinkSocket, receive: Receive) -> None:
        """Start watching. *name* is the thread's; *sock* is closed with the watch."""
        self._socket = sock
        self._receive = receive
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; the callback is not called after this returns. The callback must not call this."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)
        self._stop = -1
        self._socket.close()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        seconds: float | None = None
        while True:
            ready = poll.poll(None if seconds is None else seconds * 1000)
            if any(descriptor == self._stop for descriptor, _ in ready):
                return
            seconds = self._receive(*self._pending())

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
