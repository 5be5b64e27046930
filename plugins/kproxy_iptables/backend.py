"""The backend: render, compare, send, remember what was acknowledged."""

import logging

from kproxy_core.backend.api import BackendSettings, Damage, Measurement, Scope, SyncReport, Update
from kproxy_core.backend.errors import Unsupported
from kproxy_core.backend.hookspecs import hookimpl
from kproxy_iptables.counts import measurements
from kproxy_iptables.kernel import Processes, Tables, find_variant
from kproxy_iptables.settings import read_settings
from kproxy_iptables.table import FamilyTables
from kproxy_iptables.text import render_text
from kproxy_iptables.watch import Watcher, generation

log = logging.getLogger("kproxy.iptables")


class IptablesBackend:
    """Programs kube-proxy's chains and rules; see `kproxy_core.backend.hookspecs` for the contract."""

    def __init__(self, settings: BackendSettings) -> None:
        """Choose between nf_tables and legacy. Raises Unsupported without a working iptables."""
        self._processes = Processes()
        variant = find_variant(self._processes)
        self._settings = read_settings(settings)
        self._kernels = {family: Tables(family, variant, self._processes) for family in settings.families}
        for kernel in self._kernels.values():
            if problem := kernel.problem():
                raise Unsupported(f"{variant} has no nat table for {kernel.family.label}: {problem}")
        self._tables = {
            family: FamilyTables(kernel, localhost_node_ports=self._settings.localhost_node_ports)
            for family, kernel in self._kernels.items()
        }
        self._watcher: Watcher | None = None
        self._generation = 0
        log.info("rules are written by %s", variant)

    @hookimpl
    def kproxy_sync(self, update: Update) -> SyncReport:
        """Bring one family's tables to *update*."""
        tables = self._tables[update.family]
        if update.scope is Scope.RESYNC or tables.must_resync(update.node):
            report = tables.resync(update.node, update.plans)
        else:
            report = tables.change(update.node, update.changed)
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
        period = self._settings.canary_period
        self._watcher = Watcher(self._kernels.values(), self._processes, damaged, period)
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
