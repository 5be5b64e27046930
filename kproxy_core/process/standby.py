"""One serving kproxy in each network namespace: further ones stand by until it ends.

Without this, each would repair what the other changes. A standby process writes nothing and opens no port, so
probes of the health port are answered by the process that serves.
"""

import contextlib
import logging
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final

from kproxy_core.host import privileges
from kproxy_core.host.netlink.lock import Lock
from kproxy_core.process.terms import StartFailed

log = logging.getLogger("kproxy.run")

NAME: Final = "kproxy-serving"
"""Of the lock."""
_INTERVAL: Final = 0.1
"""Seconds between attempts to take it."""


def await_turn(*, exclusive: bool) -> tuple[Lock | None, bool]:
    """Wait until no other kproxy serves this network namespace. Return the lock, and whether another had it.

    SIGTERM and SIGINT end the process meanwhile. Without CAP_NET_ADMIN, or where the kernel has no such lock,
    returns None at once. Raises StartFailed instead of waiting if *exclusive*.
    """
    if "CAP_NET_ADMIN" not in privileges.held():
        return None, False
    lock: Lock | None = None
    try:
        lock = Lock(NAME)
        if lock.acquire():
            return lock, False
        if exclusive:
            raise StartFailed("another kproxy serves this network namespace")
        with _ending_on_signals():
            log.warning("standing by: another kproxy serves this network namespace")
            while not lock.acquire():
                time.sleep(_INTERVAL)
    except OSError as error:
        if lock is not None:
            lock.release()
        log.info("cannot tell whether another kproxy runs here", extra={"fields": {"error": error.strerror}})
        return None, False
    log.info("the other kproxy has ended, taking over")
    return lock, True


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Exit on SIGTERM and SIGINT, also as process 1 of a container, whose default is to ignore them."""

    def end(_number: int, _frame: FrameType | None) -> None:
        log.info("stopped")
        sys.exit(0)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
