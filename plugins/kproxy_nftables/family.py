"""One IP family's table: its known state, and the steps that bring it to the plans."""

import logging
from collections.abc import Mapping, Sequence
from itertools import chain

from kproxy_core.contract import (
    Family,
    NodeView,
    ServicePlan,
    ServicePortKey,
    SyncFailed,
    SyncReport,
    TrustLost,
)
from kproxy_core.nft.elements import PlainElement
from kproxy_core.nft.listing import HeldTable
from kproxy_core.nft.messages import Command
from kproxy_core.nft.objects import Layout, Leftover, Object
from kproxy_core.nft.rules import Verdict
from kproxy_core.nft.transaction import (
    MOST_ELEMENTS,
    Replacement,
    constants,
    count_changes,
    difference,
    replacement,
    unwanted,
)
from kproxy_nftables import names, skeleton
from kproxy_nftables.applied import Applied, Contents, Difference, compare
from kproxy_nftables.detect import HASH, lacking
from kproxy_nftables.kernel import Busy, ForeignOwner, Kernel
from kproxy_nftables.names import Template
from kproxy_nftables.settings import FLOWTABLE, Settings
from kproxy_nftables.skeleton import affinity_maps, all_owned
from kproxy_nftables.wanted import node_elements

log = logging.getLogger("kproxy.nftables")

_ATTEMPTS = 3
"""Limit for writes that fail because a pinned client expired between the read and the write."""

LONG_DUMP = 1 << 16
"""Size of a map above which a dump takes longer than `Kernel.holds_only`."""

Pinned = Mapping[str, frozenset[bytes]]
"""Affinity map -> endpoint addresses to which its clients may be pinned."""

Plans = Mapping[ServicePortKey, ServicePlan]


class FamilyState:
    """The table ``kproxy`` of one IP family."""

    def __init__(self, family: Family, kernel: Kernel, settings: Settings, *, owned: bool = False) -> None:
        """*owned*: see `skeleton.table`."""
        self._family = family
        self._table = skeleton.table(family, owned=owned)
        self._kernel = kernel
        self._settings = settings
        self._in_effect = settings
        """`_settings` without devices that did not exist at the last resync."""
        self._hash_tried = False
        self._applied = Applied()
        self._node: NodeView | None = None
        """The node of the last write; None: the next sync must be a resync."""
        self._templates: set[Template] = set()
        """Template chains that exist in the kernel."""
        self._stale: dict[str, Leftover] = {}
        """Unreferenced objects that could not be deleted yet."""
        self._refusals = 0
        """Resyncs in a row after which the kernel was not known to be as wanted; see `resync`."""
        self.cleanup_failures = 0
        """Failed attempts to delete unreferenced objects."""

    @property
    def is_relayed(self) -> bool:
        """Whether node ports are relayed on loopback, where rules count what is not. From any thread."""
        return self._node is not None and self._node.relays_node_ports

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
        changes = self._applied.difference(changed)
        templates = skeleton.templates_behind(v for _, _, v in changes.adds if isinstance(v, Verdict))
        self._try_hash(templates)
        commands = self._rules_change(before, node, templates, changes)
        deletes, adds = changes.deletes, changes.adds
        if node.node_port_addresses != before.node_port_addresses:
            old, new = node_elements(before), node_elements(node)
            deletes = deletes + [element for element in old if element not in new]
            adds = adds + [element for element in new if element not in old]
        self._write(commands, deletes, adds, self._shrunken_maps(changes))
        self._templates |= templates
        self._applied.acknowledge(changes)
        self._node = node
        self._delete_stale(changes)
        return SyncReport(len(deletes) + len(adds))

    def resync(self, node: NodeView, plans: Plans) -> SyncReport:
        """Reconcile the table with *plans* from a fresh read of the kernel, without a gap in service.

        Writes only what differs. A table whose contents cannot be read or corrected is replaced: at once, or
        if the kernel may only be busy, in the second such resync in a row. Claiming the table and deleting
        objects of Services that have changed are not counted as operations. Raises SyncFailed, TrustLost.
        """
        self._node = None
        self._find_devices()
        templates = skeleton.templates_of(plans.values())
        self._try_hash(templates)
        layout = skeleton.layout(node, templates, all_owned(plans.values()), self._in_effect)
        before, self._refusals = self._refusals, self._refusals + 1
        try:
            held = self._kernel.held(self._family, constants(layout))
            applied, operations = self._reconcile(node, plans, layout, held)
            others = unwanted(held, layout) if held is not None else []  # We own the table as a whole.
            stale, deleted = self._delete(others, may_be_busy=not before)
            operations += deleted
        except ForeignOwner:
            raise
        except (Replacement, SyncFailed) as reason:
            if isinstance(reason, TrustLost) and not before:
                raise
            applied, operations = self._replace(node, plans, layout, reason)
            stale = {}
        self._applied, self._templates, self._node, self._stale = applied, templates, node, stale
        if not stale:
            self._refusals = 0
        return SyncReport(operations)

    def _delete(self, others: Sequence[Leftover], *, may_be_busy: bool) -> tuple[dict[str, Leftover], int]:
        """Delete objects that are not wanted. Return those that must be deleted later, and the foreign ones.

        Raises SyncFailed; if the kernel *may be busy* with them, only for other reasons.
        """
        foreign = sum(not names.may_be_left(item.name) for item in others)
        try:
            self._kernel.run(list(self._table.remove(others)))
        except Busy:
            self.cleanup_failures += 1
            if not may_be_busy:
                raise
            return {item.name: item for item in others}, foreign
        return {}, foreign

    def have_flows_meet_rules(self) -> None:
        """Empty the flowtable, so that packets of all established flows meet the rules again.

        From any thread. Raises SyncFailed.
        """
        objects = skeleton.offloading(self._in_effect)
        if objects:
            with Kernel() as kernel:
                kernel.run([self._table.flush_chain(names.OFFLOADING), *self._table.write(objects)])

    def _reconcile(
        self, node: NodeView, plans: Plans, layout: Layout, held: HeldTable | None
    ) -> tuple[Applied, int]:
        """Bring the *held* table to *layout* and *plans*. Return the state, and the number of operations.

        Raises Replacement if a new table is needed, SyncFailed, TrustLost.
        """
        if held is not None:
            self._kernel.check_owner(self._family, held)
        commands = difference(self._table, layout, held)
        deletes: list[PlainElement] = []
        adds: list[PlainElement] = []
        applied = None
        if held is not None and not count_changes(self._table, commands, held):
            applied = self._as_filled(node, plans)
        if applied is None:
            actual: Contents = {
                container: self._kernel.elements(self._family, container) if held is not None else {}
                for container in names.ELEMENT_CONTAINERS
            }
            if not any(actual.values()):
                applied = Applied()
                parts = chain([node_elements(node)], applied.fill(plans, MOST_ELEMENTS // 4))
                return applied, count_changes(self._table, commands, held) + self._kernel.fill(
                    self._family, parts, commands)
            applied, deletes, adds = compare(plans, node_elements(node), actual)
            del actual
        pinned: dict[str, frozenset[bytes]] = {}
        for plan in plans.values():
            if plan.affinity_seconds:
                pinned |= affinity_maps(plan)
        self._write(commands, deletes, adds, pinned)
        return applied, count_changes(self._table, commands, held) + len(deletes) + len(adds)

    def _as_filled(self, node: NodeView, plans: Plans) -> Applied | None:
        """Return the state if all maps, one of which is long, are as a first resync fills them; else None."""
        counts = self._kernel.counts(self._family)
        counts = {name: counts[name] for name in names.ELEMENT_CONTAINERS if name in counts}
        if max(counts.values(), default=0) < LONG_DUMP:
            return None
        applied = Applied()
        parts = chain([node_elements(node)], applied.fill(plans, MOST_ELEMENTS))
        return applied if self._kernel.holds_only(self._family, parts, counts) else None

    def _replace(
        self, node: NodeView, plans: Plans, layout: Layout, reason: Replacement | SyncFailed
    ) -> tuple[Applied, int]:
        """Replace the table with everything in it in one transaction, so that there is no gap in service.

        Clients lose their session affinity. Raises *reason* if there is no table, SyncFailed, TrustLost.
        """
        if isinstance(reason, Replacement):
            log.info("replacing table of another layout", extra={"fields": {"table": self._table.where}})
        elif not self._kernel.has_table(self._family, self._table.name):
            raise reason
        else:
            log.warning("replacing table that cannot be corrected", extra={
                "fields": {"table": self._table.where, "error": str(reason)}})
        commands = replacement(self._table, layout)
        applied = Applied()
        adds = [*node_elements(node), *chain.from_iterable(applied.fill(plans, MOST_ELEMENTS))]
        self._kernel.write(self._family, (), adds, commands, whole=True)
        return applied, count_changes(self._table, commands, None) + len(adds)

    def _rules_change(
        self, before: NodeView, node: NodeView, templates: set[Template], changes: Difference
    ) -> list[Command]:
        """Return the commands that must precede the elements; usually none."""
        objects: list[Object] = []
        if skeleton.rules_differ(before, node):
            objects += skeleton.skeleton(node, self._in_effect)
            objects += skeleton.templates(node, self._templates | templates, self._in_effect)
        else:
            if not templates <= self._templates:
                objects += skeleton.templates(node, templates - self._templates, self._in_effect)
            if node.service_cidrs != before.service_cidrs:
                objects.append(skeleton.service_cidrs(node))
        return list(self._table.write([*objects, *changes.owned.values()]))

    def _try_hash(self, templates: set[Template]) -> None:
        """Try whether the kernel can hash clients, once, when a Service is the first to need it."""
        if self._hash_tried or not any(template.hash_by for template in templates):
            return
        self._hash_tried = True
        if problems := lacking(self._kernel, (self._family,), (HASH,)):
            self._settings = self._settings._replace(without_hash=True)
            self._in_effect = self._in_effect._replace(without_hash=True)
            log.error("the annotation kproxy.dev/hash has no effect", extra={
                "fields": {"family": self._family.label, "error": "; ".join(problems)}})

    def _find_devices(self) -> None:
        if not self._settings.flowtable:
            return
        known, self._in_effect = self._in_effect, self._settings.limited_to(self._kernel.devices())
        missing = set(self._settings.flowtable).difference(self._in_effect.flowtable)
        if missing and known != self._in_effect:
            log.warning("no such network device", extra={"fields": {
                "option": FLOWTABLE, "devices": ",".join(sorted(missing)), "family": self._family.label}})

    def _write(
        self, commands: Sequence[Command], deletes: Sequence[PlainElement], adds: Sequence[PlainElement],
        pinned: Pinned,
    ) -> None:  # fmt: skip
        """Run *commands*, write elements, and unpin clients from endpoints outside *pinned*, all at once."""
        for attempt in range(_ATTEMPTS):
            forgotten = self._outdated_clients(pinned)
            try:
                self._kernel.write(self._family, [*deletes, *forgotten], adds, commands)
                break
            except TrustLost:
                if not forgotten or attempt == _ATTEMPTS - 1:
                    raise
        # A client may have been pinned between the read and the commit.
        self._kernel.write(self._family, self._outdated_clients(pinned), ())

    def _outdated_clients(self, pinned: Pinned) -> list[PlainElement]:
        return [
            (container, client, None)
            for container, allowed in pinned.items()
            for client, where in self._kernel.elements(self._family, container).items()
            if where not in allowed
        ]

    def _shrunken_maps(self, changes: Difference) -> Pinned:
        """Return the affinity maps that lose endpoints but are kept."""
        found: dict[str, frozenset[bytes]] = {}
        for key, held in changes.held.items():
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

    def _delete_stale(self, changes: Difference) -> None:
        """Delete owned objects that are no longer referenced.

        Kernels before 6.2 may report them busy for a moment; the next change then tries again.
        """
        if self._stale or changes.disowned:
            stale = self._stale | changes.disowned
            self._stale = {name: item for name, item in stale.items() if name not in changes.owned}
            if self._clean_up(list(self._table.remove(self._stale.values()))):
                self._stale = {}
                self._refusals = 0

    def _clean_up(self, commands: Sequence[Command]) -> bool:
        """Run deletions that may be delayed; return False if they fail."""
        try:
            self._kernel.run(commands)
        except SyncFailed:
            self.cleanup_failures += 1
            return False
        return True
