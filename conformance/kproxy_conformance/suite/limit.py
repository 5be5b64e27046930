"""A time limit that reports the stacks of all threads."""

import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AGAIN = 10.0
"""Seconds that clean-up in the body may take before it is interrupted, too."""


class Overdue(Exception):
    """It took longer than its limit. The message has the stacks of this process at that time."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise Overdue in the body once it has taken *seconds*, whatever it does or waits for.

    Main thread only: the signal SIGALRM interrupts it.
    """
    stacks = ""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal stacks
        stacks = stacks or _stacks()
        signal.setitimer(signal.ITIMER_REAL, _AGAIN)
        raise Overdue(f"it was not done within {seconds:g} s\n{stacks}")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, 'unknown')}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
