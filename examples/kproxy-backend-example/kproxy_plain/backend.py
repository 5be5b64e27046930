"""The backend: compares the desired rules with the kernel's, writes the difference and remembers it."""

from collections.abc import Sequence

from kproxy_core.contract import (
    Backend,
    Family,
    Protocol,
    Scope,
    ServicePortKey,
    SyncReport,
    TrustLost,
    Update,
)
from kproxy_plain.rules import Rules, base_rules, count_changes, service_rules, table_text, together
from kproxy_plain.table import read_table, write_table


class PlainBackend(Backend):
    """Remembers what the kernel has acknowledged: the constant rules, and those of each service port.

    It cannot tell what other processes change: the full sync every syncPeriod repairs that.
    """

    def __init__(self, families: Sequence[Family], masquerade_bit: int) -> None:
        self._bit = masquerade_bit
        self._base: dict[Family, Rules] = {}
        self._held: dict[Family, dict[ServicePortKey, Rules]] = {family: {} for family in families}

    def sync(self, update: Update) -> SyncReport:
        """Write the difference to the kernel's rules in a full sync, or else to the remembered ones."""
        family, held = update.family, self._held[update.family]
        base = base_rules(update.node, self._bit)
        if update.scope is Scope.RESYNC:
            parts = self._rules(update)
            old, new = read_table(family), together([base, *parts.values()])
            write_table(family, old, new)
            self._base[family], self._held[family] = base, parts
            return SyncReport(count_changes(old or Rules(), new))
        if family not in self._base:
            raise TrustLost("no full sync yet")
        # The rules of a service port depend on the node as well: when it changes, compare all.
        keys = {*update.changed, *update.plans} if update.node_changed else {*update.changed}
        parts = {
            key: service_rules(plan, update.node, self._bit)
            for key in keys if (plan := update.plans.get(key)) is not None
        }  # fmt: skip
        before = together([self._base[family], *(held[key] for key in keys if key in held)])
        after = together([base, *parts.values()])
        write_table(family, before, after)
        # Only now: a failed sync must remember nothing.
        self._base[family] = base
        for key in keys:
            held.pop(key, None)
        held.update(parts)
        return SyncReport(count_changes(before, after))

    def wants_relays(self, family: Family, protocol: Protocol) -> bool:
        """Have kproxy relay node ports on localhost: rules cannot serve them there."""
        return True

    def render(self, update: Update) -> str:
        """Return the whole table in the syntax of ``nft -f``."""
        return table_text(
            update.family, together([base_rules(update.node, self._bit), *self._rules(update).values()])
        )

    def _rules(self, update: Update) -> dict[ServicePortKey, Rules]:
        return {key: service_rules(plan, update.node, self._bit) for key, plan in update.plans.items()}
