"""The elements that the kernel has acknowledged for one IP family, and the difference to the plans. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import NamedTuple

from msgspec import Struct, field

from kproxy_core.contract import Destination, ServicePlan, ServicePortKey
from kproxy_core.nft.elements import Data, Found, PlainElement
from kproxy_core.nft.objects import Object
from kproxy_nftables import names
from kproxy_nftables.skeleton import owned_objects
from kproxy_nftables.wanted import Slot, elements, endpoint_key, index, parse_destination, shared_elements

Slots = tuple[Destination, ...]
"""Endpoints in the order of their indices; those with a weight at several."""

_Data = dict[tuple[str, bytes], Data]
"""Data of elements by container and key."""

Contents = dict[str, dict[bytes, Found]]
"""Elements by container, as read from the kernel."""

_ABSENT = object()
_BLOCK = 64
"""Number of endpoints compared at once."""


class Held(NamedTuple):
    """A service port in the kernel."""

    plan: ServicePlan
    cluster: Slots
    local: Slots


class Difference(Struct):
    """Changes to write to the kernel, and the state that is acknowledged after them."""

    deletes: list[PlainElement] = field(default_factory=list)
    adds: list[PlainElement] = field(default_factory=list)
    owned: dict[str, Object] = field(default_factory=dict)
    """Owned objects to create or rewrite, by name."""
    disowned: dict[str, Object] = field(default_factory=dict)
    """Owned objects that are no longer referenced afterwards."""
    held: dict[ServicePortKey, Held | None] = field(default_factory=dict)
    counts: dict[PlainElement, int] = field(default_factory=dict)
    """New owner counts of shared elements."""


class Applied:
    """The acknowledged state of one family."""

    def __init__(self) -> None:
        self.held: dict[ServicePortKey, Held] = {}
        self.shared: dict[PlainElement, int] = {}
        """Elements that several service ports may share, with the number of owners."""

    def put(self, key: ServicePortKey, held: Held) -> None:
        """Add a service port that is not held yet."""
        self.held[key] = held
        for element in shared_elements(held.plan):
            self.shared[element] = self.shared.get(element, 0) + 1

    def fill(self, plans: Mapping[ServicePortKey, ServicePlan], size: int) -> Iterator[list[PlainElement]]:
        """Put *plans*, each with its endpoints in their order. Yield all elements in lists of about *size*.

        A service port is not split. The elements of a large cluster take more memory than its plans, and the
        kernel can process a list while the next one is made.
        """
        part: list[PlainElement] = []
        for key, plan in plans.items():
            held = hold(plan, None)
            self.put(key, held)
            part += held_elements(held)
            if len(part) >= size:
                yield part
                part = []
        yield [*part, *self.shared]

    def difference(self, changed: Mapping[ServicePortKey, ServicePlan | None]) -> Difference:
        """Return the difference between this state and the *changed* plans. O(changed)."""
        result = Difference()
        for key, plan in changed.items():
            old = self.held.get(key)
            new = None if plan is None else hold(plan, old)
            result.held[key] = new
            before, after = _differing(old, new)
            _compare(before, after, result)
            self._count(old, new, result)
            owned_before = owned_objects(old.plan) if old else {}
            owned_after = owned_objects(new.plan) if new else {}
            for name, item in owned_after.items():
                if owned_before.get(name) != item:
                    result.owned[name] = item
            result.disowned |= {
                name: item for name, item in owned_before.items() if name not in owned_after}
        self._settle(result)
        return result

    def _count(self, old: Held | None, new: Held | None, result: Difference) -> None:
        before = shared_elements(old.plan) if old else []
        after = shared_elements(new.plan) if new else []
        if before == after:
            return
        for element, step in [(e, 1) for e in after] + [(e, -1) for e in before]:
            have = result.counts.get(element, self.shared.get(element, 0))
            result.counts[element] = have + step

    def _settle(self, result: Difference) -> None:
        """Add the shared elements that gain a first owner, delete those that lose their last."""
        for element, owners in result.counts.items():
            had = self.shared.get(element, 0)
            if owners and not had:
                result.adds.append(element)
            elif had and not owners:
                result.deletes.append(element)

    def acknowledge(self, result: Difference) -> None:
        for key, held in result.held.items():
            if held is None:
                self.held.pop(key, None)
            else:
                self.held[key] = held
        for element, owners in result.counts.items():
            if owners:
                self.shared[element] = owners
            else:
                self.shared.pop(element, None)


def held_elements(held: Held) -> list[PlainElement]:
    """Return the elements that belong to this service port alone."""
    return elements(held.plan, enumerate(held.cluster), enumerate(held.local))


def hold(plan: ServicePlan, old: Held | None) -> Held:
    """Return *plan* with its endpoints at the indices that need the fewest writes.

    With weights or a hash, they are at the indices that the plan says.
    """
    if old is None or not (plan.has_plain_choice and old.plan.has_plain_choice):
        return Held(plan, plan.cluster_slots, plan.local_slots)
    return Held(
        plan,
        _follow(old.cluster, old.plan.cluster, plan.cluster), _follow(old.local, old.plan.local, plan.local))


def _follow(old: Slots, before: Slots, after: Slots) -> Slots:
    """Return the endpoints *after* in the order that *old* has for the endpoints *before*.

    Both are sorted. Skips equal blocks: few of a Service's thousands of endpoints change at a time.
    """
    gone: set[Destination] = set()
    new: list[Destination] = []
    i = j = 0
    while i < len(before) and j < len(after):
        end = i + _BLOCK
        if before[i:end] == after[j : j + _BLOCK]:
            i, j = end, j + _BLOCK
            continue
        while i < min(end, len(before)) and j < len(after):
            one, other = before[i], after[j]
            if one == other:
                i, j = i + 1, j + 1
            elif one < other:
                gone.add(one)
                i += 1
            else:
                new.append(other)
                j += 1
    gone.update(before[i:])
    new += after[j:]
    return _reorder(old, gone, new, after)


def arrange(old: Slots, wanted: Slots) -> Slots:
    """Return *wanted* in the order that keeps as many endpoints of *old* as possible at their index."""
    known, staying = set(old), set(wanted)
    if len(known) < len(old):  # Damage: an endpoint has two indices.
        return wanted
    return _reorder(old, known - staying, [where for where in wanted if where not in known], wanted)


def _reorder(old: Slots, gone: Set[Destination], new: Sequence[Destination], wanted: Slots) -> Slots:
    """Return *wanted* in the order of *old*, which lacks the *new* endpoints and has those that are *gone*.

    A new endpoint takes the index of a removed one. If endpoints become fewer, those with the highest
    indices move into the gaps.
    """
    if not gone and not new:
        return old
    count = len(wanted)
    slots = list(old[:count])
    newcomers = iter([*(where for where in old[count:] if where not in gone), *new])
    for start in range(0, len(slots), _BLOCK):
        block = slots[start : start + _BLOCK]
        if not gone.isdisjoint(block):
            slots[start : start + _BLOCK] = [next(newcomers) if where in gone else where for where in block]
    arranged = (*slots, *newcomers)
    return wanted if arranged == wanted else arranged


def _differing(old: Held | None, new: Held | None) -> tuple[_Data, _Data]:
    """Return the elements of both; if the frontends are the same, without those of equal slots.

    The cost is that of the differences: a Service may have thousands of endpoints.
    """
    if old is None or new is None or _frontend_fields(old.plan) != _frontend_fields(new.plan):
        return _values(old), _values(new)
    cluster, local = _changed(old.cluster, new.cluster), _changed(old.local, new.local)
    before = elements(old.plan, _at(old.cluster, cluster), _at(old.local, local))
    after = elements(new.plan, _at(new.cluster, cluster), _at(new.local, local))
    return dict_of(before), dict_of(after)


def _values(held: Held | None) -> _Data:
    return dict_of(held_elements(held)) if held is not None else {}


def _frontend_fields(plan: ServicePlan) -> tuple[object, ...]:
    """Return the fields that decide in which maps the endpoints of *plan* are."""
    return (
        plan.cluster_ip, plan.port, plan.external_addresses, plan.node_port,
        plan.internal_policy_local, plan.external_policy_local,
    )  # fmt: skip


def _changed(old: Slots, new: Slots) -> list[int]:
    if old is new:
        return []
    longer = max(len(old), len(new))
    return [
        at for start in range(0, longer, _BLOCK) if old[start : start + _BLOCK] != new[start : start + _BLOCK]
        for at in range(start, min(start + _BLOCK, longer)) if old[at : at + 1] != new[at : at + 1]
    ]


def _at(slots: Slots, indices: Iterable[int]) -> list[Slot]:
    return [(at, slots[at]) for at in indices if at < len(slots)]


def dict_of(items: Iterable[PlainElement]) -> _Data:
    return {(container, key): value for container, key, value in items}


def _compare(
    before: _Data, after: _Data, result: Difference
) -> None:
    for at, value in after.items():
        if at not in before:
            result.adds.append((*at, value))
        elif before[at] != value:
            result.deletes.append((*at, before[at]))
            result.adds.append((*at, value))
    result.deletes += [(*at, value) for at, value in before.items() if at not in after]


def compare(
    plans: Mapping[ServicePortKey, ServicePlan], others: Iterable[PlainElement], actual: Contents
) -> tuple[Applied, list[PlainElement], list[PlainElement]]:
    """Return the state to write, and the (deletes, adds) that turn *actual* into it. Consumes *actual*.

    *others* are elements that belong to no plan. Endpoints stay at the indices that they have in *actual*.
    """
    applied = Applied()
    deletes: list[PlainElement] = []
    adds: list[PlainElement] = []
    for key, plan in plans.items():
        held = hold(plan, None)
        if not _take(held_elements(held), actual):
            held = recover(plan, actual)
            _replace(held_elements(held), actual, deletes, adds)
        applied.put(key, held)
    _replace(chain(applied.shared, others), actual, deletes, adds)
    for container, rest in actual.items():
        deletes += [(container, key, None) for key in rest]
    return applied, deletes, adds


def _take(wanted: Sequence[PlainElement], actual: Contents) -> bool:
    """Remove *wanted* from *actual* if all exist with their values."""
    for container, key, value in wanted:
        if actual[container].get(key, _ABSENT) != value:
            return False
    for container, key, _ in wanted:
        del actual[container][key]
    return True


def _replace(
    wanted: Iterable[PlainElement], actual: Contents, deletes: list[PlainElement], adds: list[PlainElement]
) -> None:
    """Remove the keys of *wanted* from *actual*. Append to *deletes* and *adds* where the values differ."""
    for element in wanted:
        container, key, value = element
        have = actual[container].pop(key, _ABSENT)
        if have is _ABSENT:
            adds.append(element)
        elif have != value:
            deletes.append((container, key, value))
            adds.append(element)


def recover(plan: ServicePlan, actual: Contents) -> Held:
    """Return *plan* with its endpoints at the indices that they have in the kernel, as `hold` does."""
    if not plan.has_plain_choice:
        return hold(plan, None)
    cluster: Slots = ()
    local: Slots = ()
    protocol = plan.key.protocol
    for maps, key, is_internal in _frontends(plan):
        if not cluster and not (is_internal and plan.internal_policy_local):
            cluster = _indexed(actual[maps.endpoints[protocol]], key)
        if not local and (plan.internal_policy_local if is_internal else plan.external_policy_local):
            local = _indexed(actual[maps.local_endpoints[protocol]], key)
    return Held(plan, arrange(cluster, plan.cluster), arrange(local, plan.local))


def _frontends(plan: ServicePlan) -> Iterator[tuple[names.FrontendMaps, bytes, bool]]:
    """Yield the maps, the key and True for the ClusterIP of each frontend."""
    if plan.cluster_ip is not None:
        yield names.VIP_MAPS, endpoint_key(plan.cluster_ip, plan.port), True
    for address in plan.external_addresses:
        yield names.VIP_MAPS, endpoint_key(address, plan.port), False
    if plan.node_port:
        yield names.NODE_PORT_MAPS, endpoint_key(b"", plan.node_port), False


def _indexed(contents: Mapping[bytes, Found], frontend: bytes) -> Slots:
    """Return the endpoints of *frontend* at indices 0, 1, ... up to the first gap."""
    found: list[Destination] = []
    while isinstance(value := contents.get(frontend + index(len(found))), bytes):
        found.append(parse_destination(value))
    return tuple(found)
