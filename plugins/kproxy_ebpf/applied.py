"""The elements that the kernel has acknowledged for one family, and the difference to what is wanted. Pure.

Ids are counted up and never used again while the maps live. A choice that a socket or a client remembers is
valid as long as its endpoint's id exists, whatever slot that endpoint has by then.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kproxy_core.model.address import Family
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_ebpf import names
from kproxy_ebpf.batch import (
    endpoint_value,
    first_id,
    number,
    parse_number,
    service_of,
    service_of_slot,
    service_value,
    slot_key,
)
from kproxy_ebpf.wanted import Group, Target, wanted

Contents = dict[str, dict[bytes, bytes]]
"""Map -> key -> value."""


class Held(NamedTuple):
    """One group of frontends as it is in the maps."""

    service: int
    """Its id."""
    group: Group
    endpoints: tuple[int, ...]
    """The ids of its targets, in the order of the slots."""

    def contents(self) -> Iterator[tuple[str, bytes, bytes]]:
        """Yield the elements of this group as map, key and value."""
        group = self.group
        has_local = any(target.is_local for target in group.targets)
        for frontend in group.frontends:
            yield (
                names.FRONTENDS,
                frontend.key,
                service_value(
                    self.service,
                    len(group.targets),
                    group.affinity_seconds,
                    has_local=has_local,
                    masquerades_pods=frontend.masquerades_pods,
                ),
            )
        for index, (target, identity) in enumerate(zip(group.targets, self.endpoints, strict=True)):
            address, port = target.destination
            yield names.SLOTS, slot_key(self.service, index), number(identity)
            yield (
                names.ENDPOINTS,
                number(identity),
                endpoint_value(address, port, is_local=target.is_local, service=self.service),
            )


GroupKey = tuple[ServicePortKey, str]


@dataclass(slots=True)
class Difference:
    """Elements to write, in the three steps in which they are safe.

    A program that finds no endpoint behind a slot leaves the destination as it is, and the rules decide.
    """

    withdrawn: Contents
    """Frontends and endpoints to delete first, before the rules change. Values are those known so far."""
    updates: Contents
    """To set after the rules changed: endpoints, then slots, then frontends."""
    unused: Contents
    """Slots to delete at last."""
    held: dict[GroupKey, Held | None] = field(default_factory=dict)
    """The groups that change by it; None: gone."""
    next_service: int = 0
    next_endpoint: int = 0

    @property
    def operations(self) -> int:
        """Number of elements written or deleted."""
        parts = (self.withdrawn, self.updates, self.unused)
        return sum(len(elements) for part in parts for elements in part.values())


class Applied:
    """The elements of one family in the maps. Changed by `acknowledge` alone."""

    def __init__(self, family: Family) -> None:
        self._held: dict[GroupKey, Held] = {}
        self._groups: dict[ServicePortKey, tuple[str, ...]] = {}
        self._next_service = self._next_endpoint = first_id(family)

    def difference(self, changed: Mapping[ServicePortKey, ServicePlan | None]) -> Difference:
        """Return what *changed* plans make different. Costs what their endpoints cost."""
        ids = _Ids(self._next_service, self._next_endpoint)
        held: dict[GroupKey, Held | None] = {}
        before: list[Held] = []
        after: list[Held] = []
        for key, plan in changed.items():
            groups = {group.name: group for group in wanted(plan)} if plan is not None else {}
            for name in dict.fromkeys((*self._groups.get(key, ()), *groups)):
                known, group = self._held.get((key, name)), groups.get(name)
                new = None if group is None else arrange(group, known, ids)
                if new == known:
                    continue
                held[key, name] = new
                before += [known] if known is not None else []
                after += [new] if new is not None else []
        return compare(_contents(before), _contents(after), held, ids)

    def endpoint_ids(self) -> set[int]:
        """Return the ids of all endpoints."""
        return {identity for held in self._held.values() for identity in held.endpoints}

    def acknowledge(self, difference: Difference) -> None:
        """Take over what the kernel has done."""
        for (key, name), held in difference.held.items():
            names_ = dict.fromkeys(self._groups.get(key, ()))
            if held is None:
                self._held.pop((key, name), None)
                names_.pop(name, None)
            else:
                self._held[key, name] = held
                names_[name] = None
            if names_:
                self._groups[key] = tuple(names_)
            else:
                self._groups.pop(key, None)
        self._next_service, self._next_endpoint = difference.next_service, difference.next_endpoint


class _Ids:
    """Hands out ids."""

    def __init__(self, service: int, endpoint: int) -> None:
        self.next_service = service
        self.next_endpoint = endpoint

    def service(self) -> int:
        """Return an id for a service."""
        self.next_service += 1
        return self.next_service - 1

    def endpoint(self) -> int:
        """Return an id for an endpoint."""
        self.next_endpoint += 1
        return self.next_endpoint - 1


def recover(family: Family, plans: Mapping[ServicePortKey, ServicePlan], actual: Contents) -> Difference:
    """Return the difference between the maps' *actual* contents and all *plans*.

    Ids that are in the maps are used again where they fit, so that a restart keeps what sockets and clients
    remember.
    """
    ids = _Ids(_after(family, _service_ids(actual)), _after(family, _endpoint_ids(actual)))
    held: dict[GroupKey, Held | None] = {}
    taken: set[int] = set()
    for key, plan in plans.items():
        for group in wanted(plan):
            known = _recognize(group, actual, taken)
            new = arrange(group, known, ids)
            taken.add(new.service)
            held[key, group.name] = new
    return compare(actual, _contents(h for h in held.values() if h is not None), held, ids)


def arrange(group: Group, known: Held | None, ids: _Ids) -> Held:
    """Return *group* with ids.

    Endpoints that are *known* keep theirs, and their slots where these still exist.
    """
    if known is None:
        return Held(ids.service(), group, tuple(ids.endpoint() for _ in group.targets))
    identities = dict(zip(known.group.targets, known.endpoints, strict=True))
    count = len(group.targets)
    remaining = dict.fromkeys(group.targets)
    slots: list[Target | None] = [None] * count
    for index, target in enumerate(known.group.targets[:count]):
        if target in remaining:
            slots[index] = target
            del remaining[target]
    rest = iter(remaining)
    targets = tuple(target if target is not None else next(rest) for target in slots)
    return Held(
        known.service,
        group._replace(targets=targets),
        tuple(identities[t] if t in identities else ids.endpoint() for t in targets),
    )


def compare(before: Contents, after: Contents, held: dict[GroupKey, Held | None], ids: _Ids) -> Difference:
    """Return what leads from one content of the maps to another."""
    withdrawn: Contents = {}
    unused: Contents = {}
    updates: Contents = {}
    for name in (names.ENDPOINTS, names.SLOTS, names.FRONTENDS):
        old, new = before.get(name, {}), after.get(name, {})
        going = {key: value for key, value in old.items() if key not in new}
        if going:
            (unused if name == names.SLOTS else withdrawn)[name] = going
        coming = {key: value for key, value in new.items() if old.get(key) != value}
        if coming:
            updates[name] = coming
    return Difference(withdrawn, updates, unused, held, ids.next_service, ids.next_endpoint)


def _contents(held: Iterable[Held]) -> Contents:
    found: Contents = {}
    for one in held:
        for name, key, value in one.contents():
            found.setdefault(name, {})[key] = value
    return found


def _recognize(group: Group, actual: Contents, taken: set[int]) -> Held | None:
    """Return the group as the maps have it, if any of its frontends is there with a service of its own."""
    frontends = actual.get(names.FRONTENDS, {})
    for frontend in group.frontends:
        value = frontends.get(frontend.key)
        if value is None:
            continue
        service, count = service_of(value)
        if service in taken:
            continue
        found = list(_present(group, service, count, actual))
        targets = tuple(target for target, _ in found)
        return Held(service, group._replace(targets=targets), tuple(identity for _, identity in found))
    return None


def _present(group: Group, service: int, count: int, actual: Contents) -> Iterator[tuple[Target, int]]:
    """Yield the targets of *group* that are in the slots of *service*, with their ids."""
    by_value = {
        endpoint_value(*target.destination, is_local=target.is_local, service=service): target
        for target in group.targets
    }
    for index in range(count):
        identity = actual.get(names.SLOTS, {}).get(slot_key(service, index))
        value = actual.get(names.ENDPOINTS, {}).get(identity) if identity is not None else None
        target = by_value.pop(value, None) if value is not None else None
        if target is not None and identity is not None:
            yield target, parse_number(identity)


def _service_ids(actual: Contents) -> Iterator[int]:
    yield from (service_of(value)[0] for value in actual.get(names.FRONTENDS, {}).values())
    yield from (service_of_slot(key) for key in actual.get(names.SLOTS, {}))


def _endpoint_ids(actual: Contents) -> Iterator[int]:
    yield from (parse_number(key) for key in actual.get(names.ENDPOINTS, {}))


def _after(family: Family, ids: Iterator[int]) -> int:
    """Return the first id after all *ids*."""
    return max(ids, default=first_id(family) - 1) + 1
