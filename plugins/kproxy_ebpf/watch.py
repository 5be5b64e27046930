"""Notices programs that another process detached, replaced or unpinned.

The kernel announces none of this, so a thread looks once a second. Elements of maps are compared by full
syncs only.
"""

import threading
from collections.abc import Callable, Iterable

from kproxy_core.backend.api import Damage
from kproxy_core.model.address import Family

INTERVAL = 1.0
"""Seconds between two looks; each takes some 300 microseconds."""


class Watcher:
    """Calls *damaged* for every family when *problem* finds something."""

    def __init__(self, problem: Callable[[], str], families: Iterable[Family], damaged: Damage) -> None:
        self._problem = problem
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
        reported = ""
        while not self._stopped.wait(INTERVAL):
            problem = self._problem()
            if problem and problem != reported:
                for family in self._families:
                    self._damaged(family, problem)
            reported = problem
