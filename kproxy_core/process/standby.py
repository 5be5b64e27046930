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
from pathlib import Path
from types import FrameType
from typing import Final

from kproxy_core.host import privileges
from kproxy_core.host.files.lock import FileLock
from kproxy_core.host.namespaces import namespace_name
from kproxy_core.process.terms import StartFailed

log = logging.getLogger("kproxy.run")

_INTERVAL: Final = 0.1
"""Seconds between attempts to take it."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def await_turn(directory: str, *, exclusive: bool) -> tuple[FileLock | None, bool]:
    """Wait until no other kproxy serves this network namespace. Return the lock, and whether another had it.

    The lock is a file in *directory*. SIGTERM and SIGINT end the process while it waits. Returns None at once
    without CAP_NET_ADMIN, or where the file cannot be used. Raises StartFailed instead if *exclusive*.
    """
    if "CAP_NET_ADMIN" not in privileges.held():
        return None, False
    lock: FileLock | None = None
    try:
        lock = FileLock(Path(directory) / f"serving-{namespace_name()}.lock")
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


class _Ended(BaseException):
    """A signal ended this process while it stood by."""


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Exit on SIGTERM and SIGINT, also as process 1 of a container, whose default is to ignore them."""

    def end(_number: int, _frame: FrameType | None) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        # Nothing is logged here: Python drops what is logged while it handles another log record.
        raise _Ended

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        for number in _SIGNALS:
            signal.signal(number, end)
        yield
    except _Ended:
        log.info("stopped")
        sys.exit(0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
