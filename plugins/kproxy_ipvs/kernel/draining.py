"""Graceful removal of real servers: weight 0 until their connections have ended, then deletion.

Source: kube-proxy 1.36, pkg/proxy/ipvs/graceful_termination.go. After a restart, draining real servers are
found in the kernel.
"""

import logging
import threading
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet

from kproxy_core.host.errors import HostError
from kproxy_core.model.endpoint import Destination
from kproxy_ipvs.wanted import ServerKey

log = logging.getLogger("kproxy.ipvs")

_PERIOD = 10.0
"""Seconds between two checks while real servers are draining."""

RealServers = AbstractSet[tuple[ServerKey, Destination]]
"""Real servers, each with its virtual server."""


class Draining:
    """Deletes drained real servers from a thread of its own."""

    def __init__(self, delete_drained: Callable[[RealServers], RealServers]) -> None:
        """*delete_drained* deletes real servers without connections and returns the others.

        It may raise HostError.
        """
        self._delete_drained = delete_drained
        self.lock = threading.RLock()
        """Hold it while changing real servers, so that none is deleted that was just added again, and to call
        all methods but `close`."""
        self._servers: set[tuple[ServerKey, Destination]] = set()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, servers: RealServers) -> None:
        """Delete those *servers* that have no connections, and the others later. Their weight is 0 already.

        Raises HostError.
        """
        self._servers |= self._delete_drained(servers)
        if self._servers and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ipvs-draining", daemon=True)
            self._thread.start()

    def forget(self, key: ServerKey, where: Destination) -> bool:
        """Stop draining a real server. Return False if it was not draining."""
        was_draining = (key, where) in self._servers
        self._servers.discard((key, where))
        return was_draining

    def forget_all_of(self, keys: Collection[ServerKey]) -> None:
        """Forget the real servers of deleted virtual servers."""
        self._servers = {server for server in self._servers if server[0] not in keys}

    def clear(self) -> None:
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
                    self._servers = set(self._delete_drained(self._servers))
                except HostError as error:
                    log.debug("could not delete drained real servers: %s", error)
