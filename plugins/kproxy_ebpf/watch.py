"""Detection of programs that another process detached, replaced or unpinned.

The kernel announces none of this, so a thread checks once a second. Only full syncs compare elements of maps.
"""

import threading
from collections.abc import Callable, Iterable

from kproxy_core.contract import Damage, Family

INTERVAL = 1.0
"""Interval in seconds between checks; each takes some 400 microseconds."""

Look = tuple[int, str]
"""Number of repairs so far, and the problem; "": none."""


class Watcher:
    """Reports problems that *look* finds, for every family, from a thread of its own until it is closed.

    The same problem is reported again only after a repair: a failed repair is retried anyway.
    """

    def __init__(
        self, look: Callable[[], Look], families: Iterable[Family], damaged: Damage,
        interval: float = INTERVAL,
    ) -> None:
        self._look = look
        self._interval = interval
        self._families = tuple(families)
        self._damaged = damaged
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kproxy-ebpf-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. No report follows."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        last: Look = (0, "")
        while not self._stopped.wait(self._interval):
            seen = self._look()
            if seen[1] and seen != last:
                for family in self._families:
                    self._damaged(family, seen[1])
            last = seen
