"""The resources shared by the relays of one worker: lent descriptors, the event loop, counters."""

import contextlib
import errno
import fcntl
import os
import socket
from typing import NamedTuple

from kproxy_userspace.worker.counters import Counts
from kproxy_userspace.worker.events import Events
from kproxy_userspace.worker.half_closed import HalfClosed

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors that mean a shortage of file descriptors or memory."""

PIPE_SIZE = 1 << 19
"""Bytes that one call moves at most. The default of pipe-max-size allows it to every user."""

_MOST_SPARE = 64


class Pipe(NamedTuple):
    read: int
    write: int


class Pipes:
    """Pipes for splice(2), lent only while they hold bytes: idle connections need none."""

    def __init__(self) -> None:
        self._spare: list[Pipe] = []

    def take(self) -> Pipe:
        """Return an empty pipe. Raises OSError if the process has no more descriptors."""
        if self._spare:
            return self._spare.pop()
        pipe = Pipe(*os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
        with contextlib.suppress(OSError):  # At the user's limit of pipe memory, 64 KiB are enough.
            fcntl.fcntl(pipe.write, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        return pipe

    def give_back(self, pipe: Pipe, *, empty: bool = True) -> None:
        """Take *pipe* back. One that still holds bytes is closed."""
        if empty and len(self._spare) < _MOST_SPARE:
            self._spare.append(pipe)
        else:
            os.close(pipe.read)
            os.close(pipe.write)


class DialSockets:
    """Sockets to dial with. One is kept in reserve, so that every client that is accepted can be served."""

    def __init__(self) -> None:
        self._reserve: dict[int, socket.socket] = {}

    def reserve(self, family: int) -> None:
        """Ensure that there is a reserve. Raises OSError if the process has no more descriptors."""
        if family not in self._reserve:
            self._reserve[family] = self._make(family)

    def take(self, family: int) -> socket.socket:
        """Return the reserve, or else a new socket. Raises OSError."""
        return self._reserve.pop(family, None) or self._make(family)

    @staticmethod
    def _make(family: int) -> socket.socket:
        return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, 0)


class Resources(NamedTuple):
    """Parts of a worker that all its relays share."""

    events: Events
    counts: Counts
    pipes: Pipes
    sockets: DialSockets
    half_closed: HalfClosed
