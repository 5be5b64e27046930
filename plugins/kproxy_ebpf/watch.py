"""Notices programs that another process detached, replaced or unpinned.

The kernel announces none of this, so a thread looks once a second. Elements of maps are compared by full
syncs only.
"""

import threading
from collections.abc import Callable, Iterable

from kproxy_core.contract import Damage
from kproxy_core.model.address import Family

INTERVAL = 1.0
"""Seconds between two looks; each takes some 400 microseconds."""


Look = tuple[int, str]
"""The number of repairs so far, and the problem; "": none."""


class Watcher:
    """Calls *damaged* for every family when *look* finds a problem.

    The same problem is reported again only after a repair: a repair that fails is retried anyway.
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
        """Stop looking; no report follows."""
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
