"""Graceful removal of real servers: weight 0 until their connections have ended, then deletion.

Source: kube-proxy 1.36, pkg/proxy/ipvs/graceful_termination.go. After a restart, draining real servers are
found in the kernel.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping

from kproxy_core.host.errors import HostError
from kproxy_core.model.endpoint import Destination
from kproxy_ipvs.wanted import ServerKey

log = logging.getLogger("kproxy.ipvs")

_PERIOD = 10.0
"""Seconds between two checks while real servers are draining."""

RealServers = Mapping[ServerKey, set[Destination]]
"""Real servers by virtual server."""


class Draining:
    """Deletes drained real servers from a thread of its own."""

    def __init__(self, delete_drained: Callable[[RealServers], RealServers]) -> None:
        """*delete_drained* deletes real servers without connections and returns the others.

        It may raise HostError.
        """
        self._delete_drained = delete_drained
        self.lock = threading.RLock()
        """Hold it while changing real servers, so that none is deleted that was just added again."""
        self._servers: dict[ServerKey, set[Destination]] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, servers: Iterable[tuple[ServerKey, Destination]]) -> None:
        """Delete those *servers* that have no connections, and the others later. Their weight is 0 already.

        Raises HostError.
        """
        added: dict[ServerKey, set[Destination]] = {}
        for key, where in servers:
            added.setdefault(key, set()).add(where)
        if not added:
            return
        with self.lock:
            for key, left in self._delete_drained(added).items():
                self._servers.setdefault(key, set()).update(left)
            if self._servers and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ipvs-draining", daemon=True)
                self._thread.start()

    def forget(self, key: ServerKey, where: Destination) -> bool:
        """Stop draining a real server. Return False if it was not draining."""
        with self.lock:
            draining = self._servers.get(key, set())
            if where not in draining:
                return False
            draining.remove(where)
            if not draining:
                del self._servers[key]
            return True

    def forget_server(self, key: ServerKey) -> None:
        """Forget the real servers of a deleted virtual server."""
        with self.lock:
            self._servers.pop(key, None)

    def clear(self) -> None:
        with self.lock:
            self._servers.clear()

    def close(self) -> None:
        """End the thread. Real servers that are still draining keep weight 0."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_PERIOD):
            with self.lock:
                if not self._servers:
                    continue
                try:
                    left = self._delete_drained(self._servers)
                    self._servers = {key: set(places) for key, places in left.items()}
                except HostError as error:
                    log.debug("could not delete drained real servers: %s", error)
