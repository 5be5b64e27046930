"""The event loop of a relay worker: epoll, and timers of a few fixed lengths."""

import select
import socket
import time
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from typing import Protocol

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
EDGE = select.EPOLLET
BROKEN = select.EPOLLERR | select.EPOLLHUP

_MOST_EVENTS = 256


class Watched(Protocol):
    """The receiver of a file descriptor's events."""

    def ready(self, fd: int, mask: int) -> None: ...


class Timeouts:
    """Calls with the same delay, so that a queue keeps them in order."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.waiting: deque[tuple[float, Callable[[], None]]] = deque()

    def call(self, callback: Callable[[], None]) -> None:
        """Call *callback* after the delay. It must check whether it is still needed."""
        self.waiting.append((time.monotonic() + self.seconds, callback))


class Events:
    """One epoll instance with its timers. Everything runs in the thread of `run`."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.watched: dict[int, Watched] = {}
        self.again: deque[Callable[[], None]] = deque()
        """Calls to continue unfinished work after other events."""
        self.stopped = False
        self._timeouts: dict[float, Timeouts] = {}
        self._closing: list[socket.socket] = []

    def watch(self, fd: int, receiver: Watched, mask: int) -> None:
        self.watched[fd] = receiver
        self.epoll.register(fd, mask)

    def close(self, sock: socket.socket) -> None:
        """Stop reporting events of *sock*, and close it after those that epoll has already returned.

        Until then its number stays in use, so that no event is mistaken for one of a new socket.
        """
        self.watched.pop(sock.fileno(), None)
        self._closing.append(sock)

    def timeouts(self, seconds: float) -> Timeouts:
        """Return the queue of calls to make after *seconds*."""
        return self._timeouts.setdefault(seconds, Timeouts(seconds))

    def run(self) -> None:
        """Handle events and timers until `stopped`."""
        poll, watched, again = self.epoll.poll, self.watched, self.again
        while not self.stopped:
            self._close_all()
            now = time.monotonic()
            for fd, mask in poll(0.0 if again else self._patience(now), _MOST_EVENTS):
                receiver = watched.get(fd)
                if receiver is not None:
                    receiver.ready(fd, mask)
            for _ in range(len(again)):
                again.popleft()()
            self._close_all()
            self._call(now)

    def _close_all(self) -> None:
        for sock in self._closing:
            sock.close()
        self._closing.clear()

    def _call(self, now: float) -> None:
        """Make the calls that were due at *now*, in the order in which they were.

        All earlier events have been handled, so a lack of CPU time here causes no timeout.
        """
        due: list[tuple[float, Callable[[], None]]] = []
        for timeouts in self._timeouts.values():
            while timeouts.waiting and timeouts.waiting[0][0] <= now:
                due.append(timeouts.waiting.popleft())
        for _, callback in sorted(due, key=itemgetter(0)):
            callback()

    def _patience(self, now: float) -> float:
        """Return the seconds until the next call is due, -1 without one."""
        soonest = min((t.waiting[0][0] for t in self._timeouts.values() if t.waiting), default=None)
        return -1.0 if soonest is None else max(0.0, soonest - now)
