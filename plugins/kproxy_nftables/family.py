"""One IP family's table: its known state, and the steps that bring it to the plans."""

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from kproxy_core.backend.api import SyncReport
from kproxy_core.backend.errors import SyncFailed, TrustLost
from kproxy_core.model.address import Family
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_nftables import names, skeleton
from kproxy_nftables.applied import Applied, Contents, Difference, compare_all
from kproxy_nftables.batch import MOST_ELEMENTS
from kproxy_nftables.kernel import Kernel
from kproxy_nftables.names import Template
from kproxy_nftables.owned_chains import affinity_maps, all_owned, delete_objects
from kproxy_nftables.settings import FLOWTABLE
from kproxy_nftables.skeleton import Extras
from kproxy_nftables.wanted import Element, node_elements

log = logging.getLogger("kproxy.nftables")

_ATTEMPTS = 3
"""Writes tried before giving up because a pinned client expired between the read and the write."""

Pinned = Mapping[str, frozenset[bytes]]
"""Affinity map -> the endpoint addresses that its clients may be pinned to."""


class FamilyState:
    """The table ``kproxy`` of one IP family."""

    def __init__(self, family: Family, kernel: Kernel, extras: Extras) -> None:
        self._family = family
        self._kernel = kernel
        self._extras = extras
        self._in_effect = extras
        """`_extras` without devices that did not exist at the last resync."""
        self._applied = Applied()
        self._node: NodeView | None = None
        """The node for which the table was last written; None: the next sync must be a resync."""
        self._rules: tuple[bytes, bytes] | None = None
        """Digest of the constant rules that the last resync wrote, and `Kernel.fingerprint` after it; None:
        other processes may have changed them."""
        self._templates: set[Template] = set()
        """Template chains that exist in the kernel."""
        self._stale: list[str] = []
        """Unreferenced owned objects that could not be deleted yet."""
        self.cleanup_failures = 0
        """Failed attempts to delete unreferenced objects."""

    def must_resync(self, _node: NodeView) -> bool:
        """Return True before the first successful resync, and after a failed one.

        A changed node needs none: `change` writes what differs.
        """
        return self._node is None

    def change(self, node: NodeView, changed: Mapping[ServicePortKey, ServicePlan | None]) -> SyncReport:
        """Write the differences made by *changed* plans and by a changed node. O(changed).

        Raises SyncFailed, TrustLost.
        """
        before = self._node
        if before is None:
            raise TrustLost("the table has not been read yet")
        difference = self._applied.difference(changed)
        templates = skeleton.templates_behind(v for _, _, v in difference.adds if isinstance(v, str))
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
        """Reconcile the table with *plans* from a fresh read of the kernel, without a gap in service.

        Writes only what differs, except that the first resync of a process always writes the constant rules.
        Raises SyncFailed, TrustLost.
        """
        self._node = None
        templates = skeleton.templates_of(plans.values())
        self._find_devices()
        owned = all_owned(plans.values())
        wanted = skeleton.object_names(templates, owned, self._in_effect)
        rules = skeleton.rules_text(node, templates, owned, self._in_effect)
        self._bring_rules(rules, wanted)
        actual: Contents = {
            container: self._kernel.elements(self._family, container)
            for container in names.ELEMENT_CONTAINERS
        }
        deletes: list[Element] = []
        adds: list[Element] = []
        operations = 0
        if any(actual.values()):
            applied, deletes, adds = compare_all(plans, node_elements(node), actual)
        else:
            applied = Applied()
            parts = chain([node_elements(node)], applied.fill(plans, MOST_ELEMENTS // 4))
            operations = self._kernel.fill(self._family, parts)
        del actual
        pinned: dict[str, frozenset[bytes]] = {}
        for plan in plans.values():
            if plan.affinity_seconds:
                pinned |= affinity_maps(plan)
        self._write(deletes, adds, pinned)
        self._applied, self._templates, self._node, self._stale = applied, templates, node, []
        # Our table belongs to us as a whole.
        unwanted = self._kernel.unwanted(self._family, wanted)
        self._clean_up(skeleton.delete_foreign(self._family, *unwanted))
        return SyncReport(operations + len(deletes) + len(adds))

    def _rules_change(
        self, before: NodeView, node: NodeView, templates: set[Template], difference: Difference
    ) -> str:
        """Return the commands that must run before the elements are written; mostly none."""
        text = ""
        if skeleton.rules_differ(before, node):
            text = skeleton.skeleton(node, self._in_effect)
            text += skeleton.templates(node, self._templates | templates)
        elif not templates <= self._templates:
            text = skeleton.templates(node, templates - self._templates)
        if node.service_cidrs != before.service_cidrs:
            text += skeleton.service_cidrs(node)
        return text + "".join(difference.owned.values())

    def _find_devices(self) -> None:
        if not self._extras.flowtable:
            return
        known, self._in_effect = self._in_effect, self._extras.limited_to(self._kernel.devices())
        missing = set(self._extras.flowtable).difference(self._in_effect.flowtable)
        if missing and known != self._in_effect:
            log.warning("no such network device", extra={"fields": {
                "option": FLOWTABLE, "devices": ",".join(sorted(missing)), "family": self._family.label}})

    def _bring_rules(self, text: str, wanted: Collection[str]) -> None:
        """Write the constant rules, unless the kernel still holds them as they were last written.

        *wanted* are the names of the objects that *text* defines.
        """
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        known, self._rules = self._rules, None
        if known is not None and known == (digest, self._kernel.fingerprint(self._family, wanted)):
            self._rules = known
            return
        before = self._kernel.generation()
        try:
            self._kernel.apply_text(text)
        except SyncFailed:
            # The table has another layout, so none of it can be kept.
            self._kernel.apply_text(skeleton.delete_table(self._family) + text)
        written = self._kernel.fingerprint(self._family, wanted)
        if self._kernel.generation() == before + 1:  # Otherwise another process may have changed our rules.
            self._rules = digest, written

    def _write(self, deletes: Sequence[Element], adds: Sequence[Element], pinned: Pinned) -> None:
        """Write elements, and unpin clients from endpoints outside *pinned* in the same transaction."""
        for attempt in range(_ATTEMPTS):
            forgotten = self._outdated_clients(pinned)
            try:
                self._kernel.write(self._family, [*deletes, *forgotten], adds)
                break
            except TrustLost:
                if not forgotten or attempt == _ATTEMPTS - 1:
                    raise
        # A client may have been pinned between the read and the commit.
        self._kernel.write(self._family, self._outdated_clients(pinned), ())

    def _outdated_clients(self, pinned: Pinned) -> list[Element]:
        return [
            (container, client, where)
            for container, allowed in pinned.items()
            for client, where in self._kernel.elements(self._family, container).items()
            if where not in allowed
        ]

    def _shrunken_maps(self, difference: Difference) -> Pinned:
        """Return the affinity maps that lose endpoints but are kept."""
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
        """Delete owned objects that are no longer referenced.

        Kernels before 6.2 may report them busy for a moment; the next change then tries again.
        """
        if self._stale or difference.disowned:
            stale = dict.fromkeys([*self._stale, *difference.disowned])
            self._stale = [name for name in stale if name not in difference.owned]
            if self._clean_up(delete_objects(self._family, self._stale)):
                self._stale = []

    def _clean_up(self, text: str) -> bool:
        """Run deletions that may be delayed without harm; return False if they fail."""
        try:
            self._kernel.apply_text(text)
        except SyncFailed:
            self.cleanup_failures += 1
            return False
        return True
