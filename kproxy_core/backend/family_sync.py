"""The first decision of every sync: changed service ports only, or everything against a fresh dump."""

from collections.abc import Mapping
from typing import Protocol

from kproxy_core.backend.api import Scope, SyncReport, Update
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan


class SyncedFamily(Protocol):
    """One family's kernel state, as a backend keeps it."""

    def must_resync(self, node: NodeView, /) -> bool:
        """Return whether *node* affects more than the rules of its changed service ports."""

    def resync(self, node: NodeView, plans: Mapping[ServicePortKey, ServicePlan]) -> SyncReport:
        """Reconcile with *plans* from a fresh read of the kernel."""

    def change(self, node: NodeView, changed: Mapping[ServicePortKey, ServicePlan | None]) -> SyncReport:
        """Write the difference that *changed* makes. Costs O(changed)."""


def sync_family(state: SyncedFamily, update: Update) -> SyncReport:
    """Bring *state* to *update*, partially if that is enough. Raises whatever *state* raises."""
    if update.scope is Scope.RESYNC or state.must_resync(update.node):
        return state.resync(update.node, update.plans)
    return state.change(update.node, update.changed)
