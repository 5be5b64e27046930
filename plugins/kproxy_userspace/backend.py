"""The backend instance: relays in worker processes, and one `FamilyState` for each IP family."""

from collections.abc import Sequence

from kproxy_core.contract import values
from kproxy_core.contract.errors import SyncFailed
from kproxy_core.contract.hooks import hookimpl
from kproxy_core.contract.values import sync_family
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.programs import OwnProcesses
from kproxy_core.model.address import Family
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import Frontend
from kproxy_userspace.explain import explain, frontends
from kproxy_userspace.family import FamilyState
from kproxy_userspace.kernel.portals import Portals, open_portals
from kproxy_userspace.kernel.workers import WorkerPool
from kproxy_userspace.metrics import measurements
from kproxy_userspace.render import complaint_about, preview, render_text
from kproxy_userspace.retire import Retirement
from kproxy_userspace.settings import read_settings
from kproxy_userspace.traffic import Traffic
from kproxy_userspace.watch import Watch


class UserspaceBackend:
    """Relays all traffic itself; see `kproxy_core.contract.hooks` for the contract."""

    def __init__(self, settings: values.BackendSettings) -> None:
        """Raises InvalidOption."""
        self._served = settings.families
        self._settings = read_settings(settings)
        self._workers = WorkerPool(self._settings.workers, self._settings.of_workers)
        self._traffic = Traffic(self._workers)
        self._families: dict[Family, FamilyState] = {}
        self._own = OwnProcesses()
        self._watch: Watch | None = None
        self._retirement: Retirement | None = None

    @hookimpl
    def kproxy_begin(self) -> bool:
        """Choose between iptables and netlink for each family. Raises Unsupported or SyncFailed."""
        for family in self._served:
            self._state_of(family)
        return True

    @hookimpl
    def kproxy_sync(self, update: values.Update) -> values.SyncReport:
        """Bring one family's relays and portals to *update*. Raises Unsupported at the first call."""
        family = self._state_of(update.family)
        try:
            return sync_family(family, update)
        except HostError as error:
            raise SyncFailed(str(error)) from error

    @hookimpl
    def kproxy_relays(self, family: Family, key: ServicePortKey) -> frozenset[int]:
        state = self._families.get(family)
        return frozenset() if state is None else state.listening_ports(key)

    @hookimpl
    def kproxy_render(self, update: values.Update) -> str:
        return render_text(update, self._settings)

    @hookimpl
    def kproxy_check_text(self, update: values.Update) -> str | None:
        return complaint_about(update, self._settings)

    @hookimpl
    def kproxy_preview(self, update: values.Update) -> values.Preview:
        return preview(update, self._settings)

    @hookimpl
    def kproxy_explain(self, questions: Sequence[values.Question], live: bool) -> Sequence[values.KernelSide]:
        state = self._families.get(questions[0].node.family)
        relays = {} if state is None else state.relays_by_port()
        return explain(questions, self._settings, relays, self._workers.kept, live=live)

    @hookimpl
    def kproxy_frontends(self, family: Family) -> Sequence[Frontend]:
        return frontends(family)

    @hookimpl
    def kproxy_traffic(self, family: Family) -> Sequence[values.Connections]:
        state = self._families.get(family)
        return self._traffic.read(family, frozenset() if state is None else state.refusing_ports())

    @hookimpl
    def kproxy_watch(self, damaged: values.Damage) -> bool:
        """Report workers that exit, and portals that another program changes."""
        seconds = self._settings.check_seconds if self._settings.listen is None else None
        self._watch = Watch(self._families, self._workers, damaged, seconds, self._own)
        return True

    @hookimpl
    def kproxy_retire(self) -> values.Leftovers:
        self._unwatch()
        if self._retirement is None:
            self._retirement = Retirement(
                self._families.values(), self._workers, has_portals=self._settings.listen is None
            )
        return self._retirement.advance()

    @hookimpl
    def kproxy_measure(self) -> Sequence[values.Measurement]:
        unserved = sum(len(family.unserved) for family in list(self._families.values()))
        return measurements(self._workers.count, unserved)

    @hookimpl
    def kproxy_close(self) -> None:
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
