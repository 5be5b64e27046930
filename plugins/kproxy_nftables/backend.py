"""The backend: render, compare, send, remember what was acknowledged."""

import logging

from kproxy_core.backend.api import (
    BackendSettings,
    Damage,
    Measurement,
    Scope,
    SyncReport,
    Update,
)
from kproxy_core.backend.errors import Unsupported
from kproxy_core.backend.hookspecs import hookimpl
from kproxy_core.host import privileges
from kproxy_nftables.family import FamilyTable
from kproxy_nftables.features import PERMISSION, lacking
from kproxy_nftables.kernel import Kernel
from kproxy_nftables.render import render_text
from kproxy_nftables.watch import Watcher

log = logging.getLogger("kproxy.nftables")


class NftablesBackend:
    """Programs one table per family; see `kproxy_core.backend.hookspecs` for the contract."""

    def __init__(self, settings: BackendSettings) -> None:
        self._kernel = Kernel()
        self._tables = {family: FamilyTable(family, self._kernel) for family in settings.families}
        self._watcher: Watcher | None = None
        self._generation = 0

    @hookimpl
    def kproxy_begin(self) -> bool:
        """Have the kernel take what the rules need, and give it up again. Raises Unsupported."""
        if "CAP_NET_ADMIN" not in privileges.held():
            raise Unsupported(f"permission denied, {PERMISSION}")
        missing = lacking(self._kernel, tuple(self._tables))
        if missing:
            raise Unsupported("; ".join(missing))
        return True

    @hookimpl
    def kproxy_sync(self, update: Update) -> SyncReport:
        """Bring one family's table to *update*."""
        table = self._tables[update.family]
        if update.scope is Scope.RESYNC:
            report = table.resync(update.node, update.plans)
        else:
            report = table.change(update.node, update.changed)
        if self._watcher is None:
            self._generation = self._kernel.generation()
        return report

    @hookimpl
    def kproxy_render(self, update: Update) -> str:
        """The whole table as nft text that `nft -f` takes."""
        return render_text(update)

    @hookimpl
    def kproxy_watch(self, damaged: Damage) -> bool:
        """Watch our tables; what happened between the last sync and now counts as damage."""
        try:
            self._watcher = Watcher(self._kernel.own_ports, damaged)
        except OSError as error:
            log.warning("rule changes by others cannot be watched", extra={"fields": {"error": str(error)}})
            return False
        if self._kernel.generation() != self._generation:
            for family in self._tables:
                damaged(family, "rules changed while the watch began")
        return True

    @hookimpl
    def kproxy_measure(self) -> list[Measurement]:
        """Clean-ups that failed."""
        return [
            Measurement(
                "kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total",
                "Failures to delete what nothing leads to any more", "counter",
                table.cleanup_failures, {"ip_family": family.label},
            )
            for family, table in self._tables.items()
        ]  # fmt: skip

    @hookimpl
    def kproxy_close(self) -> None:
        """Close sockets and end the watch; the tables stay."""
        if self._watcher is not None:
            self._watcher.close()
        self._kernel.close()
