"""Half-closed connections: one peer has sent FIN, the other may never do so."""

import time
from typing import TYPE_CHECKING

from kproxy_userspace.worker.events import Events

if TYPE_CHECKING:
    from kproxy_userspace.worker.tcp import Connection

_LONGEST_INTERVAL = 30.0


class HalfClosed:
    """The half-closed connections of one worker. Those that stay idle are reset."""

    def __init__(self, events: Events, seconds: float) -> None:
        """Reset a half-closed connection once it has moved no byte for *seconds*."""
        self._seconds = seconds
        self._timer = events.timeouts(min(seconds / 4, _LONGEST_INTERVAL))
        self._is_scheduled = False
        self._idle: dict[Connection, tuple[int, float]] = {}
        """Bytes moved when last checked, and the time since which there are no more."""

    def add(self, connection: "Connection") -> None:
        """Start the timeout of *connection*, unless it is running."""
        if connection not in self._idle:
            self._idle[connection] = connection.moved, time.monotonic()
            self._schedule()

    def discard(self, connection: "Connection") -> None:
        self._idle.pop(connection, None)

    def _schedule(self) -> None:
        if self._idle and not self._is_scheduled:
            self._is_scheduled = True
            self._timer.call(self._check)

    def _check(self) -> None:
        self._is_scheduled = False
        now = time.monotonic()
        for connection, (moved, since) in list(self._idle.items()):
            if connection.moved != moved:
                self._idle[connection] = connection.moved, now
            elif now - since >= self._seconds:
                connection.time_out()  # It discards itself.
        self._schedule()
