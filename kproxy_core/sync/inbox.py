"""Calls that other threads leave for one thread to make."""

import os
import select
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

Call = Callable[[], None]


class Inbox:
    """`put` may be called from any thread and from signal handlers, `take` by one thread.

    Waits with select instead of SimpleQueue.get, whose timeout may last for ever: if it expires before the
    thread sleeps, the rest is negative, which means no timeout (CPython 3.11, Modules/_queuemodule.c).
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call] = SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        os.close(self._bell)

    def put(self, call: Call) -> None:
        """Leave *call* for the next `take`."""
        self._calls.put(call)
        os.eventfd_write(self._bell, 1)

    def take(self, patience: float | None) -> list[Call]:
        """Return all calls, oldest first. Waits up to *patience* seconds for one; None: without limit."""
        if self._calls.empty() and patience != 0:
            select.select([self._bell], [], [], patience)
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        return [self._calls.get_nowait() for _ in range(self._calls.qsize())]
