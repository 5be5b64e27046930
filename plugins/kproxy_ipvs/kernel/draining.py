"""Real servers that have left while they had connections: weight 0 until those have ended.

kube-proxy 1.36, pkg/proxy/ipvs/graceful_termination.go; what is left of them after a restart is
found in the kernel.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping

from kproxy_core.backend.errors import SyncFailed
from kproxy_core.model.endpoint import Destination
from kproxy_ipvs.wanted import ServerKey

log = logging.getLogger("kproxy.ipvs")

_PERIOD = 10.0
"""Seconds between two looks, while there is anything to look at."""

Leaving = Mapping[ServerKey, set[Destination]]


class Draining:
    """Deletes what has drained, from a thread of its own that sleeps while there is nothing."""

    def __init__(self, delete_drained: Callable[[Leaving], Leaving]) -> None:
        """*delete_drained* deletes those without connections and returns the others. Raises SyncFailed."""
        self._delete_drained = delete_drained
        self.lock = threading.RLock()
        """Held by who changes real servers, so that none is deleted that has just come back."""
        self._leaving: dict[ServerKey, set[Destination]] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, leaving: Iterable[tuple[ServerKey, Destination]]) -> None:
        """These have weight 0 now. Those without connections are deleted at once. Raises SyncFailed."""
        added: dict[ServerKey, set[Destination]] = {}
        for key, where in leaving:
            added.setdefault(key, set()).add(where)
        if not added:
            return
        with self.lock:
            for key, left in self._delete_drained(added).items():
                self._leaving.setdefault(key, set()).update(left)
            if self._leaving and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ipvs-draining", daemon=True)
                self._thread.start()

    def forget(self, key: ServerKey, where: Destination) -> bool:
        """It is wanted again; True if it was waiting to go."""
        with self.lock:
            places = self._leaving.get(key, set())
            if where not in places:
                return False
            places.remove(where)
            if not places:
                del self._leaving[key]
            return True

    def forget_server(self, key: ServerKey) -> None:
        """The virtual server is gone with all that was left of it."""
        with self.lock:
            self._leaving.pop(key, None)

    def clear(self) -> None:
        """The kernel is read afresh."""
        with self.lock:
            self._leaving.clear()

    def close(self) -> None:
        """End the thread; what has not drained stays as it is."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_PERIOD):
            with self.lock:
                if not self._leaving:
                    continue
                try:
                    left = self._delete_drained(self._leaving)
                    self._leaving = {key: set(places) for key, places in left.items()}
                except SyncFailed as error:
                    log.debug("drained real servers stay for now: %s", error)
