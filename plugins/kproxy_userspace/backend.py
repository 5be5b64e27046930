"""The backend: relays in worker processes, portals in the kernel."""

import logging
import threading
import time
from collections import Counter as Clients
from collections.abc import Sequence

from kproxy_core.backend.api import (
    BackendSettings,
    Damage,
    KernelSide,
    Leftovers,
    Measurement,
    Question,
    SyncReport,
    Update,
)
from kproxy_core.backend.errors import SyncFailed
from kproxy_core.backend.family_sync import sync_family
from kproxy_core.backend.hookspecs import hookimpl
from kproxy_core.host.errors import HostError
from kproxy_core.model.address import Family, Protocol
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import Frontend
from kproxy_userspace.batch import JUMPS, Redirect, iptables_rewrite, nft_rewrite
from kproxy_userspace.explain import explain, frontends
from kproxy_userspace.family import GRACE_SECONDS, FamilyRelays
from kproxy_userspace.kernel.portals import NoPortals, Portals, find_tables, open_portals
from kproxy_userspace.kernel.ports import Allocator
from kproxy_userspace.kernel.workers import Workers
from kproxy_userspace.metrics import measurements
from kproxy_userspace.settings import read_settings
from kproxy_userspace.wanted import WantedRelay, wanted_relays
from kproxy_userspace.worker.counters import Counter

log = logging.getLogger("kproxy.userspace")

_LONGEST_HANDSHAKE = 185.0
"""Seconds after which connection tracking has forgotten whoever began one: the last SYN comes 63 s after the
first, and is remembered for 120 s. Counts only where connection tracking can't be read."""


class UserspaceBackend:
    """Relays everything itself; see `kproxy_core.backend.hookspecs` for the contract."""

    def __init__(self, settings: BackendSettings) -> None:
        self._served = settings.families
        self._settings = read_settings(settings)
        self._workers = Workers(
            self._settings.workers, self._settings.udp_idle_seconds, self._settings.drain_seconds
        )
        self._allocator = Allocator(self._settings.port_range)
        self._families: dict[Family, FamilyRelays] = {}
        self._watch: threading.Thread | None = None
        self._stop = threading.Event()
        self._retired_at = 0.0
        """On the monotonic clock; 0: this mode serves."""
        self._accepts_no_more = False

    @hookimpl
    def kproxy_begin(self) -> bool:
        """Find out how each family is redirected. Raises Unsupported where it can't be."""
        for family in self._served:
            self._relays_of(family)
        return True

    @hookimpl
    def kproxy_sync(self, update: Update) -> SyncReport:
        """Bring one family's relays and portals to *update*. Raises Unsupported if it can't be redirected."""
        family = self._relays_of(update.family)
        try:
            return sync_family(family, update)
        except HostError as error:
            raise SyncFailed(str(error)) from error

    def _relays_of(self, family: Family) -> FamilyRelays:
        """Made by who asks first."""
        known = self._families.get(family)
        if known is not None:
            return known
        listen = self._settings.listen
        bind = self._settings.bind_in(family)
        portals: Portals = NoPortals() if listen else open_portals(family, bind)
        made = FamilyRelays(family, portals, self._workers, self._allocator, listen, bind)
        self._families[family] = made
        return made

    @hookimpl
    def kproxy_relays(self, family: Family, key: ServicePortKey) -> frozenset[int]:
        """What connection tracking has for an endpoint."""
        relays = self._families.get(family)
        return frozenset() if relays is None else relays.ports(key)

    @hookimpl
    def kproxy_render(self, update: Update) -> str:
        """The portals as iptables-restore or nft takes them; relays appear as port 0, not being open yet."""
        if self._settings.listen:
            return ""
        wanted = [
            relay
            for plan in update.plans.values()
            for relay in wanted_relays(plan, update.node, None).values()
        ]
        at = self._settings.bind_in(update.family)
        redirects = [Redirect(portal, 0, at) for relay in wanted for portal in relay.portals]
        if find_tables(update.family) is None:
            return nft_rewrite(update.family, redirects, at)
        return iptables_rewrite(redirects, JUMPS)

    @hookimpl
    def kproxy_explain(self, questions: Sequence[Question], live: bool) -> Sequence[KernelSide]:
        """Return the portals and the relay that each packet meets. Raises HostError."""
        relays = self._families.get(questions[0].node.family)

        def find(protocol: Protocol, port: int) -> WantedRelay | None:
            return None if relays is None else relays.relay_at(protocol, port)

        return explain(questions, self._settings, find, live=live)

    @hookimpl
    def kproxy_frontends(self, family: Family) -> Sequence[Frontend]:
        """Return the frontends that the kernel serves now. Raises BackendError or HostError."""
        return frontends(family)

    @hookimpl
    def kproxy_watch(self, damaged: Damage) -> bool:
        """Tell when a worker ends, and look after the portals now and then."""

        def ended(what: str) -> None:
            for family in self._families:
                damaged(family, what)

        self._workers.watch(ended)
        if self._settings.listen is None:
            self._watch = threading.Thread(
                target=self._look_after_portals, args=[damaged], name="kproxy-portals", daemon=True
            )
            self._watch.start()
        return True

    @hookimpl
    def kproxy_retire(self) -> Leftovers:
        """Let another mode have new connections; those that are open go on until they end.

        Relays accept as long as somebody is on the way to one, and for a grace period. UDP clients are served
        until connection tracking forgets them; their next datagram is the other mode's.
        """
        removed: list[str] = []
        errors: list[str] = []
        self._unwatch()
        self._retired_at = self._retired_at or time.monotonic()
        for family in self._families.values():
            try:
                removed += family.withdraw()
            except HostError as error:
                errors.append(str(error))
                self._retired_at = time.monotonic()  # Clients still come.
        arriving = self._arriving(errors)
        if not arriving[Protocol.TCP] and not self._accepts_no_more:
            self._accepts_no_more = True
            errors += self._accept_no_more()
        # Only now: some may just have been accepted.
        waiting = self._workers.count(Counter.CONNECTIONS) + arriving.total()
        return Leftovers("userspace", tuple(removed), tuple(errors), waiting)

    @hookimpl
    def kproxy_measure(self) -> Sequence[Measurement]:
        """What the workers count."""
        return measurements(
            self._workers, sum(family.unserved for family in list(self._families.values())))

    @hookimpl
    def kproxy_close(self) -> None:
        """Close every connection, port and portal."""
        self._unwatch()
        # Portals first: who comes now finds the next process, or another mode, when its SYN is sent again.
        for family in self._families.values():
            family.leave()
        self._workers.close()
        for family in self._families.values():
            family.close()

    def _arriving(self, errors: list[str]) -> Clients[Protocol]:
        """How many clients still come, by protocol; adds what went wrong to *errors*."""
        if self._settings.listen is not None:
            return Clients()
        since = time.monotonic() - self._retired_at
        if since < GRACE_SECONDS:
            return Clients([Protocol.TCP])
        found: Clients[Protocol] = Clients()
        for family in self._families.values():
            try:
                found += family.arriving()
            except HostError as error:
                errors.append(str(error))
                found[Protocol.TCP] += since < _LONGEST_HANDSHAKE
        return found

    def _accept_no_more(self) -> list[str]:
        """Listen no more; says what went wrong."""
        errors: list[str] = []
        for family in self._families.values():
            try:
                family.accept_no_more()
            except (HostError, SyncFailed) as error:
                errors.append(str(error))
        return errors

    def _unwatch(self) -> None:
        """Tell nobody any more about damage."""
        self._stop.set()
        if self._watch is not None:
            self._watch.join()
            self._watch = None
        self._workers.unwatch()

    def _look_after_portals(self, damaged: Damage) -> None:
        while not self._stop.wait(self._settings.check_seconds):
            for name, family in self._families.items():
                try:
                    if not family.intact():
                        damaged(name, "portals are missing")
                    family.settle()
                except (HostError, SyncFailed) as error:
                    log.warning("the portals can't be looked at", extra={"fields": {"error": str(error)}})
