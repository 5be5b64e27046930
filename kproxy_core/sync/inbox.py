"""Calls for one thread to make, put there by others."""

import os
import select
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

Call = Callable[[], None]


class Inbox:
    """`put` may be called from any thread and from signal handlers, `take` by one thread.

    The waiting is not the queue's own: SimpleQueue.get with a timeout may wait for ever when that is over
    before it sleeps (CPython 3.11, Modules/_queuemodule.c: what is left of it is negative then, which stands
    for no timeout at all).
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call] = SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        os.close(self._bell)

    def put(self, call: Call) -> None:
        """Have it taken."""
        self._calls.put(call)
        os.eventfd_write(self._bell, 1)

    def take(self, patience: float | None) -> list[Call]:
        """All that is there, oldest first; waits up to *patience* seconds for something, None: for ever."""
        if self._calls.empty() and patience != 0:
            select.select([self._bell], [], [], patience)
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        return [self._calls.get_nowait() for _ in range(self._calls.qsize())]
