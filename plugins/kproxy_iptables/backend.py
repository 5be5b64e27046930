"""The backend: render, compare, send, remember what was acknowledged."""

import logging

from kproxy_core.backend.api import BackendSettings, Damage, Measurement, Scope, SyncReport, Update
from kproxy_core.backend.errors import SyncFailed, Unsupported
from kproxy_core.backend.hookspecs import hookimpl
from kproxy_core.host.errors import HostError
from kproxy_core.host.programs import OwnProcesses
from kproxy_core.model.address import Family
from kproxy_iptables.metrics import measurements
from kproxy_iptables.family import FamilyTables
from kproxy_iptables.render import render_text
from kproxy_iptables.settings import read_settings
from kproxy_iptables.watch import Watcher, generation
from kproxy_xtables.tables import Busy, Tables, Unusable
from kproxy_xtables.variant import NoVariant, find_variant

log = logging.getLogger("kproxy.iptables")


class IptablesBackend:
    """Programs kube-proxy's chains and rules; see `kproxy_core.backend.hookspecs` for the contract."""

    def __init__(self, settings: BackendSettings) -> None:
        self._families = settings.families
        self._settings = read_settings(settings)
        self._own = OwnProcesses()
        self._tables: dict[Family, FamilyTables] = {}
        """Empty until the first sync, which chooses between nf_tables and legacy."""
        self._watcher: Watcher | None = None
        self._generation = 0

    @hookimpl
    def kproxy_begin(self) -> bool:
        """Choose between nf_tables and legacy. Raises Unsupported without a working iptables, SyncFailed
        while others hold its lock."""
        self._tables = self._choose()
        return True

    @hookimpl
    def kproxy_sync(self, update: Update) -> SyncReport:
        """Bring one family's tables to *update*. Raises Unsupported without a working iptables."""
        if not self._tables:
            self._tables = self._choose()
        tables = self._tables[update.family]
        try:
            if update.scope is Scope.RESYNC or tables.must_resync(update.node):
                report = tables.resync(update.node, update.plans)
            else:
                report = tables.change(update.node, update.changed)
        except HostError as error:
            raise SyncFailed(str(error)) from error
        if self._watcher is None:
            self._generation = generation()
        return report

    @hookimpl
    def kproxy_render(self, update: Update) -> str:
        """The complete input for iptables-restore."""
        return render_text(update, localhost=self._settings.localhost_node_ports)

    @hookimpl
    def kproxy_watch(self, damaged: Damage) -> bool:
        """Watch our chains: by notification where the kernel offers that, and by canaries.

        What happened between the last sync and now counts as damage.
        """
        kernels = [tables.kernel for tables in self._tables.values()]
        self._watcher = Watcher(kernels, self._own, damaged, self._settings.canary_period)
        if generation() != self._generation:
            for family in self._tables:
                damaged(family, "rules changed while the watch began")
        return True

    @hookimpl
    def kproxy_measure(self) -> list[Measurement]:
        """Rules, failures, lock contention, and packets that the kernel counted for us."""
        return list(measurements(tables.counts for tables in self._tables.values()))

    @hookimpl
    def kproxy_close(self) -> None:
        """End the watch; the rules stay."""
        if self._watcher is not None:
            self._watcher.close()

    def _choose(self) -> dict[Family, FamilyTables]:
        try:
            variant = find_variant()
        except NoVariant as missing:
            raise Unsupported(str(missing)) from missing
        kernels = [Tables(family, variant, self._own) for family in self._families]
        for kernel in kernels:
            try:
                kernel.check()
            except Busy as busy:
                raise SyncFailed(f"{kernel.program}: {busy}") from busy
            except Unusable as error:
                problem = f"{variant} has no nat table for {kernel.family.label}: {error}"
                raise Unsupported(problem, kernel.family) from error
        log.info("rules are written by %s", variant)
        localhost = self._settings.localhost_node_ports
        return {k.family: FamilyTables(k, localhost_node_ports=localhost) for k in kernels}
