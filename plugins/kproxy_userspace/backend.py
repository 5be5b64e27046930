"""The backend instance: relays in worker processes, and one `FamilyState` for each IP family."""

import logging
from collections.abc import Sequence

from kproxy_core.contract import (
    Address,
    Backend,
    BackendSettings,
    Connections,
    Damage,
    Family,
    Frontend,
    HostError,
    IsRemoved,
    KernelSide,
    Leftovers,
    Measurement,
    NodeView,
    Preview,
    Protocol,
    Question,
    ServicePortKey,
    SyncFailed,
    SyncReport,
    Update,
    sync_family,
)
from kproxy_core.linux.programs import OwnProcesses
from kproxy_core.linux.relay.pool import WorkerPool
from kproxy_userspace.explain import explain, frontends
from kproxy_userspace.family import FamilyState
from kproxy_userspace.kernel.portals import Portals, open_portals
from kproxy_userspace.metrics import measurements
from kproxy_userspace.render import complaint_about, preview, render_text
from kproxy_userspace.retire import Retirement
from kproxy_userspace.settings import OLD_OPTION, read_settings
from kproxy_userspace.traffic import Traffic
from kproxy_userspace.watch import Watcher

log = logging.getLogger("kproxy.userspace")


class UserspaceBackend(Backend):
    """Relays all traffic itself."""

    def __init__(self, settings: BackendSettings) -> None:
        """Raises InvalidOption."""
        self._served = settings.families
        self._given = settings
        self._settings = read_settings(settings)
        self._workers = WorkerPool(self._settings.workers, self._settings.of_workers)
        self._traffic = Traffic(self._workers)
        self._families: dict[Family, FamilyState] = {}
        self._own = OwnProcesses()
        self._watch: Watcher | None = None
        self._retirement: Retirement | None = None

    def begin(self) -> bool:
        """Choose between iptables and netlink for each family. Raises Unsupported or SyncFailed."""
        if OLD_OPTION in self._given.options:
            log.warning("option will be removed", extra={"fields": {
                "option": f"kproxy.backendOptions.userspace.{OLD_OPTION}",
                "use_instead": "kproxy.removedEndpoints, or the annotation kproxy.dev/removed-endpoints"}})
        for family in self._served:
            self._state_of(family)
        return True

    def sync(self, update: Update) -> SyncReport:
        """Bring one family's relays and portals to *update*. Raises Unsupported at the first call."""
        family = self._state_of(update.family)
        try:
            return sync_family(family, update)
        except HostError as error:
            raise SyncFailed(str(error)) from error

    def relays(self, family: Family, key: ServicePortKey) -> frozenset[int]:
        state = self._families.get(family)
        return frozenset() if state is None else state.listening_ports(key)

    def reset_connections(self, family: Family, is_removed: IsRemoved) -> int:
        state = self._families.get(family)
        return 0 if state is None else state.reset_connections(is_removed)

    def serves_on_loopback(self, node: NodeView, address: Address, protocol: Protocol) -> bool:
        if self._settings.listen is not None:
            return address == self._settings.listen
        return node.node_ports_anywhere or address == node.family.loopback

    def needs_interface_addresses(self, family: Family) -> bool:
        return self._settings.redirects_to_interface(family)

    def render(self, update: Update) -> str:
        return render_text(update, self._settings)

    def check_text(self, update: Update) -> str | None:
        return complaint_about(update, self._settings)

    def preview(self, update: Update) -> Preview:
        return preview(update, self._settings)

    def explain(self, questions: Sequence[Question], *, live: bool) -> Sequence[KernelSide]:
        state = self._families.get(questions[0].node.family)
        relays = {} if state is None else state.relays_by_port()
        return explain(questions, self._settings, relays, self._workers.kept, live=live)

    def frontends(self, family: Family) -> Sequence[Frontend]:
        return frontends(family)

    def traffic(self, family: Family) -> Sequence[Connections]:
        state = self._families.get(family)
        return self._traffic.read(family, frozenset() if state is None else state.refusing_ports())

    def watch(self, damaged: Damage) -> bool:
        """Report workers that exit, and portals that another program changes."""
        seconds = self._settings.check_seconds if self._settings.listen is None else None
        self._watch = Watcher(self._families, self._workers, damaged, seconds, self._own)
        return True

    def retire(self) -> Leftovers:
        self._unwatch()
        if self._retirement is None:
            self._retirement = Retirement(
                self._families.values(), self._workers, has_portals=self._settings.listen is None
            )
        return self._retirement.advance()

    def measure(self) -> Sequence[Measurement]:
        unserved = sum(len(family.unserved) for family in list(self._families.values()))
        return measurements(self._workers.count, unserved)

    def close(self) -> None:
        """Close every connection, port and portal."""
        self._unwatch()
        # Portals first: later clients reach the next process, or another mode, when they repeat their SYN.
        for family in self._families.values():
            family.disconnect()
        self._workers.close()
        for family in self._families.values():
            family.close()

    def _state_of(self, family: Family) -> FamilyState:
        """Return the state of *family*, made at the first call. Raises Unsupported or SyncFailed."""
        state = self._families.get(family)
        if state is None:
            portals = Portals()
            if self._settings.listen is None:
                portals = open_portals(family, self._settings.bind_in(family), self._own)
            state = self._families[family] = FamilyState(family, portals, self._workers, self._settings)
        return state

    def _unwatch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
