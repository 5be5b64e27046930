"""Deletion of stale UDP flows after each sync, on its own thread: walking conntrack takes 10 ms or more."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from kproxy_core.host.conntrack.flows import delete_stale_udp
from kproxy_core.host.errors import HostError
from kproxy_core.model.address import Address, Family
from kproxy_core.plan.stale_flows import StaleFlows, StaleFlowTracker, relay
from kproxy_core.sync.observer import Synced, SyncObserver

log = logging.getLogger("kproxy.run")


class CleanupResult(NamedTuple):
    """Result of deleting one set of stale flows."""

    family: Family
    stale: StaleFlows
    deleted: int | None
    """None: it failed, and must be tried again."""
    seconds: float


class Cleaner(Protocol):
    """Deletes stale flows in the background and reports each `CleanupResult`."""

    def clean(self, family: Family, stale: StaleFlows) -> None:
        """Start deleting the flows of *family* that are *stale*."""


class FlowCleaner:
    """Deletes stale flows on one thread, which is started with the first ones."""

    def __init__(self, done: Callable[[CleanupResult], None]) -> None:
        """*done* is called on the thread."""
        self._done = done
        self._due: SimpleQueue[tuple[Family, StaleFlows]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def clean(self, family: Family, stale: StaleFlows) -> None:
        self._due.put((family, stale))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kproxy-flows", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            family, stale = self._due.get()
            started = time.monotonic()
            deleted: int | None = None
            try:
                deleted = delete_stale_udp(family, stale)
            except (HostError, OSError) as error:
                log.warning("could not delete stale UDP flows", extra={
                    "fields": {"ip_family": family.label, "error": str(error)}
                })
            self._done(CleanupResult(family, stale, deleted, time.monotonic() - started))


class StaleFlowObserver(SyncObserver):
    """Has stale UDP flows deleted after each sync, for each family one set at a time."""

    def __init__(self, families: Sequence[Family], cleaner: Cleaner) -> None:
        self._cleaner = cleaner
        self._trackers = {family: StaleFlowTracker() for family in families}
        self._busy: set[Family] = set()
        self._node_port_addresses: dict[Family, frozenset[Address]] = {}

    def sync_succeeded(self, synced: Synced) -> None:
        family, plans = synced.family, synced.plans
        for key in synced.udp_ports:
            relays = {relay(family, port) for port in synced.instance.relays(family, key)}
            self._trackers[family].put(key, plans.plans.get(key), plans.serving(key) | relays)
        self._node_port_addresses[family] = frozenset(plans.node.node_port_addresses)
        self._clean(family)

    def finish(self, result: CleanupResult) -> None:
        """Take back what could not be deleted, else continue. Called on the loop's thread."""
        self._busy.discard(result.family)
        if result.deleted is None:
            self._trackers[result.family].give_back(result.stale)
        else:
            self._clean(result.family)

    def _clean(self, family: Family) -> None:
        """Start deleting, unless a deletion is running: `finish` then continues."""
        if family in self._busy:
            return
        stale = self._trackers[family].take(self._node_port_addresses[family])
        if stale:
            self._busy.add(family)
            self._cleaner.clean(family, stale)
