"""The plans whose elements the kernel has acknowledged for one family, and the difference to others. Pure.

Keys and values depend on the plans alone, so a restart finds them unchanged. A choice that a socket or a
client remembers is valid as long as its endpoint exists, in whatever slot.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kproxy_core.contract import Protocol, ServicePlan, ServicePortKey
from kproxy_ebpf import batch, names
from kproxy_ebpf.wanted import wanted

Contents = dict[str, dict[bytes, bytes]]
"""Map -> key -> value."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Elements to write, in three steps, the order in which they are safe.

    A program that finds an empty slot keeps the destination, and the rules decide.
    """

    withdrawn: Contents
    """Frontends, endpoints and their slots to delete first, before the rules change."""
    updates: Contents
    """Endpoints, then slots, then frontends to set after the rules changed."""
    unused: Contents
    """Slots to delete last."""

    @property
    def operations(self) -> int:
        parts = (self.withdrawn, self.updates, self.unused)
        return sum(len(elements) for part in parts for elements in part.values())


class Applied:
    """The plans of one family whose elements are in the maps. Changed by `acknowledge` alone."""

    def __init__(self, plans: Mapping[ServicePortKey, ServicePlan] = {}) -> None:
        self._plans = dict(plans)

    def difference(self, changed: Mapping[ServicePortKey, ServicePlan | None]) -> Difference:
        """Return the difference to the *changed* plans. O(their endpoints)."""
        before = (self._plans[key] for key in changed if key in self._plans)
        return compare(contents(before), contents(plan for plan in changed.values() if plan is not None))

    def acknowledge(self, changed: Mapping[ServicePortKey, ServicePlan | None]) -> None:
        """Record the plans whose elements the kernel holds."""
        for key, plan in changed.items():
            if plan is None:
                self._plans.pop(key, None)
            else:
                self._plans[key] = plan


def contents(plans: Iterable[ServicePlan]) -> Contents:
    frontends: dict[bytes, bytes] = {}
    slots: dict[bytes, bytes] = {}
    endpoints: dict[bytes, bytes] = {}
    for plan in plans:
        # A client on this node may be the endpoint itself, for which the rules decide.
        local = frozenset(plan.hairpins)
        # Sockets or clients keep to the endpoint that was chosen for them.
        is_remembered = bool(plan.affinity_seconds) or plan.key.protocol is Protocol.UDP
        for group in wanted(plan):
            service = batch.service_id(f"{'/'.join(map(str, plan.key))}/{group.name}", plan.family)
            count, has_local = len(group.endpoints), False
            for index, endpoint in enumerate(group.endpoints):
                is_local = bool(local) and endpoint.address in local
                has_local = has_local or is_local
                value = batch.endpoint_value(endpoint, is_local=is_local)
                slots[batch.slot_key(service, index)] = value
                if is_remembered:
                    endpoints[batch.endpoint_key(value, service)] = batch.PRESENT
            if plan.key.protocol is Protocol.UDP:  # Sockets keep those of weight 0.
                for endpoint in plan.resting:
                    value = batch.endpoint_value(endpoint, is_local=bool(local) and endpoint.address in local)
                    endpoints[batch.endpoint_key(value, service)] = batch.PRESENT
            for frontend in group.frontends:
                frontends[frontend.key] = batch.ServiceValue(
                    service, count, plan.affinity_seconds, has_local, frontend.flags
                ).encode()
    return {names.ENDPOINTS: endpoints, names.SLOTS: slots, names.FRONTENDS: frontends}


def compare(before: Contents, after: Contents) -> Difference:
    """Return the difference between two contents of the maps."""
    withdrawn: Contents = {}
    for name in (names.FRONTENDS, names.ENDPOINTS):
        old, new = before.get(name, {}), after[name]
        withdrawn[name] = {key: value for key, value in old.items() if key not in new}
    slots = after[names.SLOTS]
    changed = {key: value for key, value in before.get(names.SLOTS, {}).items() if slots.get(key) != value}
    remaining = {batch.endpoint_key_of_slot(*slot) for slot in slots.items()} if changed else ()
    withdrawn[names.SLOTS], unused = {}, {}
    for key, value in changed.items():
        if batch.endpoint_key_of_slot(key, value) not in remaining:
            withdrawn[names.SLOTS][key] = value
        elif key not in slots:
            unused[key] = value
    updates = {}
    for name, elements in after.items():
        old = before.get(name, {})
        updates[name] = {key: value for key, value in elements.items() if old.get(key) != value}
    return Difference(withdrawn, updates, {names.SLOTS: unused})
