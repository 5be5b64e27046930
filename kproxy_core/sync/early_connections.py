"""Deletion of TCP connections that began before there were rules for them, on its own thread."""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from kproxy_core.host.conntrack.flows import delete_stale_syns
from kproxy_core.host.errors import HostError
from kproxy_core.model.address import Family
from kproxy_core.plan.stale_flows import Socket, adds_tcp, is_stale_syn
from kproxy_core.sync.observer import Synced, SyncObserver

log = logging.getLogger("kproxy.run")

_BOTH_FAMILIES = 0.05
"""Seconds in which the other family is synced, too."""
_REST = 1.0
"""Seconds after searches: walking conntrack takes 10 ms or more, and Services may be created in a row.
Clients repeat a SYN after a second at the earliest."""


class EarlyConnections(SyncObserver):
    """Searches after each sync that adds TCP frontends, or before which rules were missing.

    A first sync that writes nothing shows that none were missing. A failed search is repeated after the next
    sync.
    """

    def __init__(self, deleted: Callable[[Family, int, float], None]) -> None:
        """*deleted* is told, on the thread, how many connections a search has deleted in how many seconds."""
        self._deleted = deleted
        self._due: dict[Family, Callable[[Socket], bool]] = {}
        """The destinations of such connections."""
        self._wakeup = threading.Event()
        self._thread: threading.Thread | None = None
        """Started with the first search."""
        self._failed: set[Family] = set()

    def sync_succeeded(self, synced: Synced) -> None:
        family, plans = synced.family, synced.plans
        if (
            synced.rules_were_missing or family in self._failed
            or (not synced.is_first and any(adds_tcp(step.before, step.after) for step in synced.steps))
        ):  # fmt: skip
            self._failed.discard(family)
            self._due[family] = partial(
                is_stale_syn, owner=plans.owner,
                node_port_addresses=frozenset(plans.node.node_port_addresses),
            )  # fmt: skip
            self._wakeup.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kproxy-early", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while self._wakeup.wait():
            time.sleep(_BOTH_FAMILIES)
            self._wakeup.clear()
            for family in list(self._due):
                self._search(family, self._due.pop(family))
            time.sleep(_REST)

    def _search(self, family: Family, is_stale: Callable[[Socket], bool]) -> None:
        started = time.monotonic()
        try:
            deleted = delete_stale_syns(family, is_stale)
        except (HostError, OSError) as error:
            self._failed.add(family)
            log.warning("could not delete early TCP connections", extra={
                "fields": {"ip_family": family.label, "error": str(error)}
            })
            return
        self._deleted(family, deleted, time.monotonic() - started)
