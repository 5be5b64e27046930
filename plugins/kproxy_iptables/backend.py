"""The backend instance: one `FamilyState` for each IP family."""

import logging
from collections.abc import Sequence
from contextlib import nullcontext

from kproxy_core.contract import (
    Address,
    Backend,
    BackendSettings,
    Connections,
    Damage,
    Family,
    Frontend,
    HostError,
    KernelSide,
    Measurement,
    NodeView,
    Preview,
    Protocol,
    Question,
    SyncFailed,
    SyncReport,
    Update,
    sync_family,
)
from kproxy_core.linux.programs import OwnProcesses
from kproxy_iptables.explain import explain, frontends
from kproxy_iptables.family import FamilyState
from kproxy_iptables.metrics import measurements
from kproxy_iptables.render import preview, render_text
from kproxy_iptables.settings import read_settings
from kproxy_iptables.skeleton import serves_loopback
from kproxy_iptables.watch import Watcher, read_generation
from kproxy_nft.table import Counting, clean_up_counts
from kproxy_xtables.tables import Tables, open_tables
from kproxy_xtables.variant import find_variant

log = logging.getLogger("kproxy.iptables")


class IptablesBackend(Backend):
    """Programs kube-proxy's chains and rules."""

    def __init__(self, settings: BackendSettings) -> None:
        self._given = settings
        self._settings = read_settings(settings)
        self._own = OwnProcesses()
        self._families: dict[Family, FamilyState] = {}
        """Empty until the variant of iptables has been chosen."""
        self._watcher: Watcher | None = None
        self._generation = 0
        """Last commit to nf_tables before the watch."""
        self._counting = Counting(own=self._own)

    def begin(self) -> bool:
        """Choose a variant of iptables. Raises Unsupported, or SyncFailed while its lock is held."""
        found = open_tables(self._given.families, self._own)
        if not self._given.count_traffic:
            clean_up_counts("iptables", dry_run=False)  # An earlier process may have counted.
        variant = str(next(iter(found.values())).variant)
        log.info("iptables variant chosen", extra={"fields": {"variant": variant}})
        localhost = self._settings.localhost_node_ports
        self._families = {
            family: FamilyState(tables, localhost_node_ports=localhost) for family, tables in found.items()}
        return True

    def sync(self, update: Update) -> SyncReport:
        """Bring one family's tables to *update*. The first call does what `begin` does."""
        if not self._families:
            self.begin()
        family = self._families[update.family]
        try:
            with self._counting.during(update) if self._given.count_traffic else nullcontext():
                report = sync_family(family, update)
        except HostError as error:
            raise SyncFailed(str(error)) from error
        if self._watcher is None:
            self._generation = read_generation()
        return report

    def wants_relays(self, family: Family, protocol: Protocol) -> bool:
        return family is Family.IPV6  # for which there is no route_localnet

    def serves_on_loopback(self, node: NodeView, address: Address, protocol: Protocol) -> bool:
        enabled = self._settings.localhost_node_ports
        return serves_loopback(node, enabled=enabled) and (
            node.node_ports_anywhere or address == node.family.loopback)

    def render(self, update: Update) -> str:
        return render_text(update, self._settings)

    def preview(self, update: Update) -> Preview:
        return preview(update, self._settings)

    def explain(self, questions: Sequence[Question], *, live: bool) -> Sequence[KernelSide]:
        tables = self._tables(questions[0].node.family) if live else None
        return explain(questions, self._settings, tables)

    def frontends(self, family: Family) -> Sequence[Frontend]:
        return frontends(self._tables(family))

    def traffic(self, family: Family) -> Sequence[Connections]:
        return self._counting.read(family)

    def watch(self, damaged: Damage) -> bool:
        """Watch our chains, by notifications of nf_tables and by canaries.

        A commit between the last sync and the start of the watch is reported as damage.
        """
        tables = [family.tables for family in self._families.values()]
        self._watcher = Watcher(tables, self._own, damaged, self._settings.canary_period)
        if read_generation() != self._generation:
            for family in self._families:
                damaged(family, "rules changed before the watch started")
        return True

    def measure(self) -> list[Measurement]:
        """Return numbers of rules, failures and lock timeouts, and packets counted by the kernel."""
        return list(measurements(self._families.values()))

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()

    def _tables(self, family: Family) -> Tables:
        """Return the tables in use. To find out which these are takes long. Raises HostError."""
        state = self._families.get(family)
        return state.tables if state is not None else Tables(family, find_variant())
