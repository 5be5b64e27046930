"""Deletion of tracked flows after syncs: stale UDP flows, and TCP connections older than their rules.

Each runs on its own thread, because walking conntrack takes 10 ms or more.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

from kproxy_core.contract.calls import BackendInstance
from kproxy_core.linux.conntrack import delete_stale_syns, delete_stale_udp
from kproxy_core.linux.errors import HostError
from kproxy_core.model.address import Address, Family, Socket
from kproxy_core.model.address import Protocol as IpProtocol
from kproxy_core.model.timing import Repeats
from kproxy_core.plan.service_plan import Frontend, serving_destinations
from kproxy_core.plan.stale_flows import StaleFlows, StaleFlowTracker, adds_tcp, is_stale_syn, relay
from kproxy_core.sync.observer import Synced, SyncObserver

log = logging.getLogger("kproxy.run")

_BOTH_FAMILIES = 0.05
"""Delay in seconds, so that one search covers the sync of the other family, too."""
_REST = 1.0
"""Minimum seconds between searches: Services may be created in a row. Clients retransmit a SYN after a second
at the earliest."""


Search = Callable[[Family, Callable[[Socket], bool]], int]
"""Deletes the stale connections of one family, and returns their number."""


class EarlyConnections(SyncObserver):
    """Deletes TCP connections that began before the rules for them existed.

    Searches after each sync that adds TCP frontends, or before which rules were missing.

    A first sync that writes nothing shows that none were missing. A failed search is repeated after the next
    sync.
    """

    def __init__(
        self, deleted: Callable[[Family, int, float], None], *, search: Search = delete_stale_syns,
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """*deleted* is told, on the thread, how many connections a *search* deleted, and its seconds."""
        self._deleted = deleted
        self._delete_stale = search
        self._clock = clock
        self._sleep = sleep
        self._due: dict[Family, Callable[[Socket], bool]] = {}
        """The destinations of such connections."""
        self._wakeup = threading.Event()
        self._thread: threading.Thread | None = None
        """Started with the first search."""
        self._failed: set[Family] = set()
        self._repeats: defaultdict[Family, Repeats] = defaultdict(Repeats)

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
            self._sleep(_BOTH_FAMILIES)
            self._wakeup.clear()
            for family in list(self._due):
                self._search(family, self._due.pop(family))
            self._sleep(_REST)

    def _search(self, family: Family, is_stale: Callable[[Socket], bool]) -> None:
        started = self._clock()
        try:
            deleted = self._delete_stale(family, is_stale)
        except (HostError, OSError) as error:
            self._failed.add(family)
            if times := self._repeats[family].count(str(error)):
                log.warning("could not delete early TCP connections", extra={
                    "fields": {"ip_family": family.label, "error": str(error), "times": times}
                })
            return
        self._repeats[family].end()
        self._deleted(family, deleted, self._clock() - started)


# Stale UDP flows.

class Deletion:
    """One set of stale flows during its deletion, whose thread checks each flow that the kernel lists.

    Newer syncs start flows that the set does not know: flows to their frontends are spared.
    """

    def __init__(self, stale: StaleFlows) -> None:
        self.stale = stale
        self._spared: frozenset[Frontend] = frozenset()

    @property
    def is_incomplete(self) -> bool:
        """Flows were spared, and must be checked again."""
        return bool(self._spared & self.stale.frontends)

    def spare(self, frontends: frozenset[Frontend]) -> None:
        """Delete no more flows to *frontends*. Called before the kernel gets rules that start such flows."""
        self._spared |= frontends

    def is_stale(self, destination: Socket, answered_by: Socket) -> bool:
        """Return True if a flow to *destination* that *answered_by* replies to must be deleted."""
        spared = self._spared
        address, port = destination
        if spared and not spared.isdisjoint(
            (Frontend(address, IpProtocol.UDP, port), Frontend(None, IpProtocol.UDP, port))
        ):
            return False
        return self.stale.is_stale(destination, answered_by)


class CleanupResult(NamedTuple):
    family: Family
    deletion: Deletion
    deleted: int | None
    """None: it failed, and must be tried again."""
    seconds: float


class FlowCleaner:
    """Deletes stale flows on one thread, started with the first ones, and reports the results."""

    def __init__(self, done: Callable[[CleanupResult], None]) -> None:
        """*done* is called on the thread."""
        self._done = done
        self._due: SimpleQueue[tuple[Family, Deletion]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def clean(self, family: Family, deletion: Deletion) -> None:
        """Start deleting the flows of *family* that *deletion* finds stale."""
        self._due.put((family, deletion))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kproxy-flows", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        repeats: defaultdict[Family, Repeats] = defaultdict(Repeats)
        while True:
            family, deletion = self._due.get()
            started = time.monotonic()
            deleted: int | None = None
            try:
                deleted = delete_stale_udp(family, deletion.stale.ports, deletion.is_stale)
                repeats[family].end()
            except (HostError, OSError) as error:
                if times := repeats[family].count(str(error)):
                    log.warning("could not delete stale UDP flows", extra={
                        "fields": {"ip_family": family.label, "error": str(error), "times": times}
                    })
            self._done(CleanupResult(family, deletion, deleted, time.monotonic() - started))


class StaleFlowObserver(SyncObserver):
    """Has stale UDP flows deleted after each sync, for each family one set at a time."""

    def __init__(self, families: Sequence[Family], clean: Callable[[Family, Deletion], None]) -> None:
        """*clean*: see `FlowCleaner.clean`. Its result must be given to `finish`."""
        self._start_cleaning = clean
        self._trackers = {family: StaleFlowTracker() for family in families}
        self._running: dict[Family, Deletion] = {}
        self._unsettled: set[Family] = set()
        """Families whose rules may be newer than the last success. No deletion starts: it would not know the
        endpoints and relays of those rules."""
        self._instances: dict[Family, BackendInstance] = {}
        self._node_port_addresses: dict[Family, frozenset[Address]] = {}

    def plans_changed(self, family: Family, udp_frontends: frozenset[Frontend] | None) -> None:
        self._unsettled.add(family)
        running = self._running.get(family)
        if running is not None:
            running.spare(running.stale.frontends if udp_frontends is None else udp_frontends)

    def sync_succeeded(self, synced: Synced) -> None:
        family, plans = synced.family, synced.plans
        changed = synced.follow_ups.udp_ports
        if self._instances.get(family) is not synced.instance:
            # Record its relays for all service ports: they answer flows even after another mode took over.
            self._instances[family] = synced.instance
            changed |= {key for key in plans.plans if key.protocol is IpProtocol.UDP}
        self._unsettled.discard(family)
        for key in changed:
            relays = {relay(family, port) for port in synced.instance.relays(family, key)}
            serving = serving_destinations(plans.candidates(key))
            self._trackers[family].put(key, plans.plans.get(key), serving | relays)
        if synced.rules_were_missing:
            self._trackers[family].examine_all()
        self._node_port_addresses[family] = frozenset(plans.node.node_port_addresses)
        self._clean(family)

    def finish(self, result: CleanupResult) -> None:
        """Take back the flows that could not be deleted, else continue. Called on the loop's thread.

        Ignores results of deletions that another observer started.
        """
        if self._running.get(result.family) is not result.deletion:
            return
        del self._running[result.family]
        if result.deleted is None or result.deletion.is_incomplete:
            self._trackers[result.family].give_back(result.deletion.stale)
        if result.deleted is not None:
            self._clean(result.family)

    def _clean(self, family: Family) -> None:
        """Start deleting, unless a deletion is running: `finish` or the next success then continues."""
        if family in self._running or family in self._unsettled:
            return
        stale = self._trackers[family].take(self._node_port_addresses[family])
        if stale:
            deletion = self._running[family] = Deletion(stale)
            self._start_cleaning(family, deletion)
