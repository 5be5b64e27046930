"""One serving kproxy in each network namespace: further ones stand by until it ends.

Without this, each would repair what the other changes. A standby process writes nothing and opens no port, so
probes of the health port are answered by the process that serves.
"""

import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kproxy_core.linux import process
from kproxy_core.linux.files import FileLock
from kproxy_core.linux.namespaces import namespace_name
from kproxy_core.modes.settings import StartFailed

log = logging.getLogger("kproxy.run")

_INTERVAL: Final = 0.1
"""Seconds between attempts to take it."""
_STANDING_BY: Final = "standing by: another kproxy serves this network namespace"
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def await_turn(
    directory: str, *, exclusive: bool, standing_by: Callable[[str], None] = lambda text: None,
) -> tuple[FileLock | None, bool]:
    """Wait until no other kproxy serves this network namespace. Return the lock, and whether another had it.

    *standing_by* is called before a wait, with a text that says so.
    The lock is a file in *directory*. SIGTERM and SIGINT end the process while it waits. Returns None at once
    without CAP_NET_ADMIN, or where the file cannot be used. Raises StartFailed instead if *exclusive*.
    """
    if "CAP_NET_ADMIN" not in process.network_privileges():
        return None, False
    lock: FileLock | None = None
    try:
        lock = FileLock(Path(directory) / f"serving-{namespace_name()}.lock")
        if lock.acquire():
            return lock, False
        if exclusive:
            raise StartFailed("another kproxy serves this network namespace")
        _stand_by(lock, standing_by)
    except OSError as error:
        if lock is not None:
            lock.release()
        log.info("cannot tell whether another kproxy runs here", extra={"fields": {"error": error.strerror}})
        return None, False
    log.info("the other kproxy has ended, taking over")
    return lock, True


def _stand_by(lock: FileLock, standing_by: Callable[[str], None]) -> None:
    """Take *lock* once it is free; see `await_turn`. Exit on SIGTERM and SIGINT. Raises OSError.

    Signals are blocked meanwhile: process 1 of a container ignores those that it neither handles nor blocks.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        log.warning(_STANDING_BY)
        standing_by(_STANDING_BY)
        while not lock.acquire():
            if signal.sigtimedwait(_SIGNALS, _INTERVAL):
                for number in _SIGNALS:
                    signal.signal(number, signal.SIG_IGN)
                log.info("stopped")
                sys.exit(0)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
