"""One instance of the backend; a `FamilyState` per IP family."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import product

from kproxy_core.contract import (
    Backend,
    BackendSettings,
    Connections,
    Damage,
    Family,
    Frontend,
    HostError,
    KernelSide,
    Measurement,
    Preview,
    Protocol,
    Question,
    Scope,
    SyncFailed,
    SyncReport,
    Unsupported,
    Update,
    sync_family,
)
from kproxy_core.linux.modules import Modules
from kproxy_ipvs.explain import explain, frontends
from kproxy_ipvs.family import FamilyState
from kproxy_ipvs.kernel import device, requirements, sets
from kproxy_ipvs.kernel.servers import VirtualServers, try_server
from kproxy_ipvs.names import SETS
from kproxy_ipvs.render import preview, render_text
from kproxy_ipvs.settings import read_settings
from kproxy_ipvs.wanted import schedulers
from kproxy_ipvs.watch import Watcher
from kproxy_nft.table import Counting, clean_up_counts
from kproxy_xtables.tables import open_tables

log = logging.getLogger("kproxy.ipvs")


class IpvsBackend(Backend):
    """Programs virtual servers, sets, addresses and rules."""

    def __init__(self, settings: BackendSettings) -> None:
        """Raises Unsupported for settings that this mode does not know."""
        self._given = settings
        self._settings = read_settings(settings)
        self._counting = Counting(ipvs=True)
        self._servers: VirtualServers | None = None
        self._families: dict[Family, FamilyState] = {}
        self._watch: Watcher | None = None

    def begin(self) -> bool:
        """Try the mode's requirements, load IPVS, and set the sysctls. Raises Unsupported or SyncFailed."""
        tables = open_tables(self._given.families)
        try:
            sets.existing(SETS)
        except HostError as error:
            remedy = "install ipset, and use a kernel with CONFIG_IP_SET"
            raise Unsupported(f"no ipsets: {error}; {remedy}") from error
        try:
            requirements.load_modules(self._settings.scheduler)
            for family, name in product(self._given.families, schedulers(self._settings.scheduler)):
                problem = f"no virtual servers for {family.label}: "
                with _needed("ip_vs", f"ip_vs_{name}", problem=problem, of=family):
                    try_server(name, family)
            with _needed("dummy"):
                device.ensure()
            servers = VirtualServers()
            requirements.ensure_settings(self._settings)
        except HostError as error:
            raise SyncFailed(str(error)) from error
        if any(self._settings.timeouts):
            try:
                servers.set_timeouts(*self._settings.timeouts)
            except HostError as error:
                log.warning("connection timeouts could not be set", extra={"fields": {"error": str(error)}})
        if not self._given.count_traffic:
            clean_up_counts("ipvs", dry_run=False, ipvs=True)  # An earlier process may have counted.
        self._families = {
            family: FamilyState(family, self._settings, servers, of_family)
            for family, of_family in tables.items()
        }
        self._servers = servers
        return True

    def sync(self, update: Update) -> SyncReport:
        """Bring one family to *update*. Raises Unsupported at the first call, or SyncFailed."""
        if self._servers is None:
            self.begin()
        state = self._families[update.family]
        try:
            if update.scope is Scope.RESYNC:
                requirements.ensure_settings(self._settings)
            with self._counting.during(update) if self._given.count_traffic else nullcontext():
                return sync_family(state, update)
        except HostError as error:
            raise SyncFailed(str(error)) from error

    def wants_relays(self, family: Family, protocol: Protocol) -> bool:
        return True

    def render(self, update: Update) -> str:
        """Return all kernel objects as input for ipvsadm, ipset, ip and iptables-restore."""
        return render_text(update, self._settings)

    def preview(self, update: Update) -> Preview:
        return preview(update, self._settings)

    def explain(self, questions: Sequence[Question], *, live: bool) -> Sequence[KernelSide]:
        return explain(questions, self._settings, live=live)

    def frontends(self, family: Family) -> Sequence[Frontend]:
        return frontends(family)

    def traffic(self, family: Family) -> Sequence[Connections]:
        return self._counting.read(family)

    def watch(self, damaged: Damage) -> bool:
        """Report changes of the device. The kernel announces no others: full syncs find those."""
        try:
            self._watch = Watcher(self._families.values(), damaged)
        except HostError as error:
            log.warning(str(error))
        return False

    def measure(self) -> list[Measurement]:
        """Return failure counts under kube-proxy's name (1.36, pkg/proxy/metrics/metrics.go)."""
        return [
            Measurement(
                "kubeproxy_sync_proxy_rules_iptables_restore_failures_total", "Failures of iptables-restore",
                "counter", state.restore_failures, {"ip_family": family.label},
            )
            for family, state in self._families.items()
        ]  # fmt: skip

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        for state in self._families.values():
            state.close()
        if self._servers is not None:
            self._servers.close()


@contextmanager
def _needed(*modules: str, problem: str = "", of: Family | None = None) -> Iterator[None]:
    """Turn a HostError into Unsupported, with the remedies for missing *modules*."""
    try:
        yield
    except HostError as error:
        remedies = "; ".join(map(Modules().remedy, modules))
        raise Unsupported(f"{problem}{error}; {remedies}", of) from error
