"""One family's table: what it is known to hold, and how it gets to what is wanted."""

from collections.abc import Mapping, Sequence

from kproxy_core.backend.api import SyncReport
from kproxy_core.backend.errors import SyncFailed, TrustLost
from kproxy_core.model.address import Family
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_nftables import names, skeleton
from kproxy_nftables.applied import Applied, Contents, Difference, compare_all, recover_all
from kproxy_nftables.kernel import Kernel
from kproxy_nftables.names import Template
from kproxy_nftables.owned_chains import (
    affinity_maps,
    delete_objects,
    owned_objects,
)
from kproxy_nftables.render import rules_text, used_templates
from kproxy_nftables.wanted import Element, node_elements, verdicts

_ATTEMPTS = 3
"""How often to look again for clients of gone endpoints because one of them expired meanwhile."""

Pinned = Mapping[str, frozenset[bytes]]
"""Affinity map -> the endpoint addresses that its clients may be pinned to."""


class FamilyTable:
    """The table ``kproxy`` of one family."""

    def __init__(self, family: Family, kernel: Kernel) -> None:
        self._family = family
        self._kernel = kernel
        self._applied = Applied()
        self._node: NodeView | None = None
        """The node that the table was last made for; None: only a resync will do."""
        self._templates: set[Template] = set()
        """Template chains that exist."""
        self._stale: list[str] = []
        """Owned objects that nothing leads to any more, still to be deleted."""
        self.cleanup_failures = 0
        """Times that something which nothing leads to any more could not be deleted."""

    def change(self, node: NodeView, changed: Mapping[ServicePortKey, ServicePlan | None]) -> SyncReport:
        """Write what the changed plans and a changed node need. O(changed).

        Raises SyncFailed, TrustLost.
        """
        before = self._node
        if before is None:
            raise TrustLost("the table has not been read yet")
        difference = self._applied.difference(changed)
        templates = skeleton.template_closure(
            used_templates(v for _, _, v in difference.adds if isinstance(v, str))
        )
        self._kernel.apply_text(self._rules_change(before, node, templates, difference))
        self._templates |= templates

        deletes, adds = difference.deletes, difference.adds
        if node.node_port_addresses != before.node_port_addresses:
            old, new = node_elements(before), node_elements(node)
            deletes = deletes + [element for element in old if element not in new]
            adds = adds + [element for element in new if element not in old]
        self._write(deletes, adds, self._shrunken_maps(difference))
        self._applied.acknowledge(difference)
        self._node = node
        self._delete_stale(difference)
        return SyncReport(len(deletes) + len(adds))

    def resync(self, node: NodeView, plans: Mapping[ServicePortKey, ServicePlan]) -> SyncReport:
        """Make the table right whatever it holds, without a gap for what is right already.

        Raises SyncFailed, TrustLost.
        """
        self._node = None
        templates = skeleton.template_closure(
            used_templates(verdict for plan in plans.values() for verdict in verdicts(plan))
        )
        self._apply_all_rules(rules_text(node, templates, plans.values()))
        actual: Contents = {
            container: dict(self._kernel.elements(self._family, container))
            for container in names.ELEMENT_CONTAINERS
        }
        applied = Applied(recover_all(plans, actual))
        deletes, adds = compare_all(actual, applied.elements(), node_elements(node))
        del actual
        pinned: dict[str, frozenset[bytes]] = {}
        for plan in plans.values():
            pinned |= affinity_maps(plan)
        self._write(deletes, adds, pinned)
        self._applied, self._templates, self._node, self._stale = applied, templates, node, []
        self._sweep(plans)
        return SyncReport(len(deletes) + len(adds))

    def _rules_change(
        self, before: NodeView, node: NodeView, templates: set[Template], difference: Difference
    ) -> str:
        """The text that must precede the elements; mostly empty."""
        text = ""
        if skeleton.rules_differ(before, node):
            text = skeleton.skeleton(node) + skeleton.templates(node, self._templates | templates)
        elif not templates <= self._templates:
            text = skeleton.templates(node, templates - self._templates)
        if node.service_cidrs != before.service_cidrs:
            text += skeleton.service_cidrs(node)
        return text + "".join(difference.owned.values())

    def _apply_all_rules(self, text: str) -> None:
        try:
            self._kernel.apply_text(text)
        except SyncFailed:
            # A table of another layout: nothing in it can be kept.
            self._kernel.apply_text(skeleton.delete_table(self._family) + text)

    def _write(self, deletes: Sequence[Element], adds: Sequence[Element], pinned: Pinned) -> None:
        """Write elements; in the same transaction forget the clients of endpoints no longer *pinned*."""
        for attempt in range(_ATTEMPTS):
            forgotten = self._clients_elsewhere(pinned)
            try:
                self._kernel.write(self._family, [*deletes, *forgotten], adds)
                break
            except TrustLost:
                if not forgotten or attempt == _ATTEMPTS - 1:
                    raise
        # A client may have been remembered between the look and the commit.
        self._kernel.write(self._family, self._clients_elsewhere(pinned), ())

    def _clients_elsewhere(self, pinned: Pinned) -> list[Element]:
        return [
            (container, client, where)
            for container, allowed in pinned.items()
            for client, where in self._kernel.elements(self._family, container)
            if where not in allowed
        ]

    def _shrunken_maps(self, difference: Difference) -> Pinned:
        """The affinity maps that lost endpoints and go on living."""
        found: dict[str, frozenset[bytes]] = {}
        for key, held in difference.held.items():
            old = self._applied.held.get(key)
            if held is None or old is None or not old.plan.affinity_seconds:
                continue
            before = affinity_maps(old.plan)
            found |= {
                name: allowed
                for name, allowed in affinity_maps(held.plan).items()
                if not before.get(name, allowed) <= allowed
            }
        return found

    def _delete_stale(self, difference: Difference) -> None:
        """Delete what nothing leads to any more.

        A kernel before 6.2 may call it busy for a moment; then it is tried again at the next change.
        """
        if self._stale or difference.disowned:
            stale = dict.fromkeys([*self._stale, *difference.disowned])
            self._stale = [name for name in stale if name not in difference.owned]
            if self._clean_up(delete_objects(self._family, self._stale)):
                self._stale = []

    def _sweep(self, plans: Mapping[ServicePortKey, ServicePlan]) -> None:
        """Delete chains, maps and sets in our table that are not wanted: all that is there is ours."""
        wanted = {name for plan in plans.values() for name in owned_objects(plan)}
        wanted |= skeleton.chain_names() | {template.name for template in self._templates}
        wanted |= {*names.ELEMENT_CONTAINERS, names.SERVICE_CIDRS}
        chains = self._kernel.chains(self._family) - wanted
        containers = self._kernel.containers(self._family) - wanted
        self._clean_up(skeleton.delete_foreign(self._family, chains, containers))

    def _clean_up(self, text: str) -> bool:
        """Delete what harms nobody if it stays for a while; False if it does.

        What is busy for a moment (see above) a resync finds again.
        """
        try:
            self._kernel.apply_text(text)
        except SyncFailed:
            self.cleanup_failures += 1
            return False
        return True
