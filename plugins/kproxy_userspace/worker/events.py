"""The event loop of a relay worker: epoll, and timers of a few fixed lengths."""

import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
EDGE = select.EPOLLET
BROKEN = select.EPOLLERR | select.EPOLLHUP

_MOST_EVENTS = 256


class Watched(Protocol):
    """Who is told that something happened to a file descriptor."""

    def ready(self, fd: int, mask: int) -> None: ...


class Pumped(Protocol):
    """Who has more to do but let others go first."""

    def resume(self) -> None: ...


class Timeouts:
    """Calls that all come the same time after they were asked for, so that a queue keeps them in order."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.waiting: deque[tuple[float, Callable[[int], None], int]] = deque()

    def call(self, what: Callable[[int], None], argument: int = 0) -> None:
        """Call *what* with *argument* once the time is over. It finds out if that still matters."""
        self.waiting.append((time.monotonic() + self.seconds, what, argument))


class Events:
    """One epoll instance and its timers. Everything happens in the thread of `run`."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.watched: dict[int, Watched] = {}
        self.again: deque[Pumped] = deque()
        self.stopped = False
        self._timeouts: dict[float, Timeouts] = {}
        self._closing: list[socket.socket] = []

    def watch(self, fd: int, who: Watched, mask: int) -> None:
        """Tell *who* about *fd*."""
        self.watched[fd] = who
        self.epoll.register(fd, mask)

    def close(self, sock: socket.socket) -> None:
        """Close *sock*, of which nothing is told any more.

        Its number stays taken until the events that are already here are dealt with: none of them
        can be mistaken for one of a new socket's.
        """
        self.watched.pop(sock.fileno(), None)
        self._closing.append(sock)

    def timeouts(self, seconds: float) -> Timeouts:
        """The queue for calls after *seconds*."""
        return self._timeouts.setdefault(seconds, Timeouts(seconds))

    def run(self) -> None:
        """Work until `stopped`. Sleeps while nothing happens."""
        poll, watched, again = self.epoll.poll, self.watched, self.again
        while not self.stopped:
            self._close_all()
            now = time.monotonic()
            for fd, mask in poll(0.0 if again else self._patience(now), _MOST_EVENTS):
                who = watched.get(fd)
                if who is not None:
                    who.ready(fd, mask)
            for _ in range(len(again)):
                again.popleft().resume()
            self._close_all()
            self._call(now)

    def _close_all(self) -> None:
        for sock in self._closing:
            sock.close()
        self._closing.clear()

    def _call(self, now: float) -> None:
        """Make the calls that were due at *now*.

        What had happened by then has been dealt with: nobody runs out of time for something that came in
        time, while this process had no processor.
        """
        for timeouts in list(self._timeouts.values()):
            waiting = timeouts.waiting
            while waiting and waiting[0][0] <= now:
                _, what, argument = waiting.popleft()
                what(argument)

    def _patience(self, now: float) -> float:
        """Seconds until the next call is due, -1 for none."""
        soonest = min((t.waiting[0][0] for t in self._timeouts.values() if t.waiting), default=None)
        return -1.0 if soonest is None else max(0.0, soonest - now)
