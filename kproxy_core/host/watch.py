"""A thread that waits for events of one descriptor."""

import os
import select
import threading
from collections.abc import Callable


class Watch:
    """Calls back whenever a descriptor is readable, from a thread of its own."""

    def __init__(
        self, name: str, descriptor: int, ready: Callable[[], float | None], *, first: float | None = None,
    ) -> None:
        """Start watching. *ready* returns None, or the seconds after which to call it even without events.

        *name* is the thread's, *first* the seconds before the first call without events.
        """
        self._ready = ready
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._poll.register(self._stop, select.POLLIN)
        self._thread = threading.Thread(target=self._run, args=(first,), name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; the callback is not called after this returns. The callback must not call this."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)
        self._stop = -1

    def _run(self, seconds: float | None) -> None:
        while True:
            events = self._poll.poll(None if seconds is None else seconds * 1000)
            if any(descriptor == self._stop for descriptor, _ in events):
                return
            seconds = self._ready()
