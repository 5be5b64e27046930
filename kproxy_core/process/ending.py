"""The end of the process after SIGTERM: soon, whatever a program or a server does."""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

from kproxy_core.host import programs
from kproxy_core.observe.logs import innermost_calls

log = logging.getLogger("kproxy.run")

PROGRAMS_END = 2.0
"""Seconds after a signal when running programs are killed."""
PROCESS_ENDS = 4.5
"""Seconds after a signal when the process exits, even if it is not done."""


def stop_on_signals(stop: Callable[[], None]) -> None:
    """Call *stop* from a thread after SIGTERM or SIGINT, and make sure that the process ends.

    A signal handler runs in the main thread. If the signal arrives just before that thread falls asleep, the
    handler runs only at the next wake-up, whereas Python writes to the wake-up descriptor at once.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.detach(), warn_on_full_buffer=False)

    def wait() -> None:
        ours.recv(1)
        stop()
        time.sleep(PROGRAMS_END)
        programs.interrupt()
        time.sleep(PROCESS_ENDS - PROGRAMS_END)
        log.error("exiting before everything has ended", extra={"fields": {"threads": innermost_calls()}})
        logging.shutdown()
        os._exit(1)

    threading.Thread(target=wait, name="kproxy-signals", daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
