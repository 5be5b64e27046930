"""Limits of what Services may take of a node, counted in elements of the kernel.

A Service whose ports are dialled at many addresses, whose source ranges are many, or whose endpoints have
weights or are chosen by a hash, takes far more elements than its objects have bytes: its frontends times its
endpoints, slots and source ranges. Beyond the limits, a part of it is not served, and the field is named.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from math import gcd, isqrt
from typing import NamedTuple

from kproxy_core.model.address import Address, Family, outermost
from kproxy_core.model.service import DEFAULT_WEIGHT, EndpointSlice, Service, ServiceName
from kproxy_core.plan.endpoints import MOST_DESTINATIONS, count_destinations
from kproxy_core.plan.hashing import count_hash_slots
from kproxy_core.plan.shares import MOST_SLOTS

GIANT = 10_000
"""Threshold in elements for a giant: a change of such a Service takes some 0.1 s."""

OF_PORT = 10
"""Elements that a service port counts for besides its own: it has chains, sets or relays."""

OF_RANGE = 10
"""Elements that a source range counts for: it is a rule in most modes."""

MOST_OF_NODE = 1_000_000
"""Limit for the elements of all Services of a family, of which `ORDINARY` of each Service do not count."""

MOST_OF_NAMESPACE = MOST_OF_NODE // 2
"""The same limit for the Services of one namespace."""

ORDINARY = 1_000
"""Elements that a Service may have whatever others have."""


class Budget(NamedTuple):
    """What one Service may take in one family. Each limit is for all of its ports together."""

    frontends: int
    elements: int
    """Limit for its endpoints times the frontends of their ports."""
    ranges: int
    """Limit for its source ranges times the load balancer IPs of its ports."""
    slots: int
    """Limit for the slots of weights and hashes times the frontends of their ports; 0: none has a table."""


WHOLE = Budget(frontends=32_768, elements=400_000, ranges=16_384, slots=65_536)
_WITHOUT_SLOTS = WHOLE._replace(slots=0)
_SMALLEST = Budget(frontends=100, elements=400, ranges=40, slots=0)
"""At most `ORDINARY` elements, unless there are very many ports."""


_LIMITS = {
    "addresses": f"{WHOLE.frontends:,} ports times addresses",
    "source ranges": f"{WHOLE.ranges:,} source ranges times ports and load balancer IPs",
    "endpoints": f"{MOST_DESTINATIONS:,} endpoints times ports, {WHOLE.elements:,} times addresses",
    "hash": f"{WHOLE.slots:,} slots times ports and addresses",
    "exact weights": f"{WHOLE.slots:,} slots times ports and addresses",
}
"""By the words of `ServicePlan.left_out`."""
_LIMIT_OF_ALL = f"{MOST_OF_NODE:,} elements for all Services, {MOST_OF_NAMESPACE:,} for those of a namespace"


def describe(left_out: Iterable[str], *, because_of_others: bool) -> str:
    """Return what is left out, and the limits, for people."""
    if because_of_others:
        return f"{', '.join(left_out)}: at most {_LIMIT_OF_ALL}"
    return ", ".join(f"{what}: at most {_LIMITS[what]}" for what in left_out)


class Fit(NamedTuple):
    """The part of a Service that fits into a budget."""

    load_balancer_ips: int
    external_addresses: int
    """Number of external IPs and load balancer IPs at which each port is served."""
    ranges: int
    """Number of source ranges that admit clients; at least 1, because none would admit all."""
    destinations: int
    """Endpoints times ports."""
    slots: int
    """Limit for the table of each port."""
    elements: int
    """Upper bound of the elements that all this takes."""
    left_out: tuple[str, ...]
    """What does not fit, in the words of `ServicePlan.left_out`; slots are not named here."""


def fit(
    service: Service, slices: Mapping[str, EndpointSlice] | None, family: Family, budget: Budget = WHOLE
) -> Fit:
    """Return the part of a Service with *slices* that fits into *budget*."""
    ports = max(1, len(service.ports))
    has_node_port, of_port = False, 0
    for port in service.ports:
        has_node_port = has_node_port or port.node_port > 0
        if port.addresses:
            of_port = max(of_port, _count(port.addresses, family))
    balancers = _count(service.load_balancer_ips, family) or of_port
    external = balancers + _count(service.external_ips, family)
    ranges = sum(each.family is family for each in service.source_ranges) if balancers else 0
    most_external = min(external, max(0, budget.frontends // ports - 2))
    most_balancers = min(balancers, most_external)
    most_ranges = ranges
    if ranges:
        # A range that covers the node makes each load balancer IP a source, too.
        most_balancers = min(most_balancers, max(1, isqrt(budget.ranges // ports)))
        most_ranges = max(1, budget.ranges // (ports * max(1, most_balancers)))
        if ranges > most_ranges:
            ranges = len(outermost(each for each in service.source_ranges if each.family is family))
        most_ranges = min(ranges, most_ranges)
    most_external = min(most_external, most_balancers + external - balancers)
    frontends = max(1, most_external + (service.cluster_ip(family) is not None) + has_node_port)
    destinations = count_destinations(slices)
    most_destinations = min(MOST_DESTINATIONS, max(ports, budget.elements // frontends))
    lists = 2 if service.external_policy_local or service.internal_policy_local else 1
    slots = budget.slots // (frontends * ports * lists)
    left_out: list[str] = []
    if most_external < external:
        left_out.append("addresses")
    if most_ranges < ranges:
        left_out.append("source ranges")
    if most_destinations < destinations:
        left_out.append("endpoints")
    elements = ports * OF_PORT + frontends * (
        ports * (1 + lists * _count_slots(service, slices, slots))
        + lists * min(destinations, most_destinations))
    if ranges:
        elements += OF_RANGE * ports * most_balancers * (most_ranges + most_balancers)
    return Fit(
        most_balancers, most_external, most_ranges, most_destinations, slots, elements, tuple(left_out))


def _count(addresses: Collection[Address], family: Family) -> int:
    return sum(len(each) == family.size for each in addresses) if addresses else 0


def _count_slots(service: Service, slices: Mapping[str, EndpointSlice] | None, most: int) -> int:
    """Return the size of the table of each port; 0 without one, or if it is larger than *most*."""
    if not slices or not most:
        return 0
    if service.hash_by:
        endpoints = sum(len(piece.endpoints) for piece in slices.values())
        size = count_hash_slots(min(endpoints, MOST_DESTINATIONS))
        if size <= most:
            return size
    elif len(slices) == 1:
        return 0  # All endpoints of a slice have the same weight.
    given = [(DEFAULT_WEIGHT if piece.weight is None else piece.weight, len(piece.endpoints))
             for piece in slices.values() if piece.endpoints]
    if len({weight for weight, _ in given if weight}) < 2:
        return 0
    divisor = gcd(*(weight for weight, _ in given))
    return min(sum(weight * count for weight, count in given) // divisor, most, MOST_SLOTS)


class NodeBudget:
    """What all Services take in one family. The first come is served in full."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._taken: dict[ServiceName, int] = {}
        """Elements beyond `ORDINARY`, of the Services that have any."""
        self._of_namespace: Counter[str] = Counter()
        self._total = 0
        self._limited: dict[ServiceName, int] = {}
        """Services that are not served in full because of others, and what they would take."""
        self._was_freed = False
        self._giants: set[ServiceName] = set()
        self.left_out: dict[ServiceName, tuple[str, ...]] = {}
        """`ServicePlan.left_out` of Services that are not served in full."""
        self._new_left_out: set[ServiceName] = set()

    def fit(self, service: Service, slices: Mapping[str, EndpointSlice] | None) -> Fit:
        """Return the part of a Service that has room, and take that room."""
        name = service.name
        before = self._taken.get(name, 0)
        self._limited.pop(name, None)
        for budget in (WHOLE, _WITHOUT_SLOTS, _SMALLEST):
            found = fit(service, slices, self._family, budget)
            extra = max(0, found.elements - ORDINARY)
            if extra <= before or self._has_room(name, extra - before):
                break
            self._limited.setdefault(name, extra)
        self._take(name, extra)
        (self._giants.add if found.elements > GIANT else self._giants.discard)(name)
        return found

    def release(self, name: ServiceName) -> None:
        """Take back the room of a Service that does not exist any more."""
        self._limited.pop(name, None)
        self._take(name, 0)
        self._giants.discard(name)
        self.note_left_out(name, ())

    def is_limited(self, name: ServiceName) -> bool:
        """Return whether a Service is not served in full because of others."""
        return name in self._limited

    def is_giant(
        self, name: ServiceName, service: Service | None, slices: Mapping[str, EndpointSlice] | None
    ) -> bool:
        """Return whether *service*, called *name*, would be a giant, or was one at its last `fit`."""
        if name in self._giants or service is None:
            return name in self._giants
        return fit(service, slices, self._family).elements > GIANT

    def note_left_out(self, name: ServiceName, left_out: tuple[str, ...]) -> None:
        """Record what the plans of a Service leave out."""
        if left_out != self.left_out.get(name, ()):
            self._new_left_out.add(name)
            self.left_out.pop(name, None)
            if left_out:
                self.left_out[name] = left_out

    def take_left_out(self) -> list[ServiceName]:
        """Return the Services of which something else is left out since the last call."""
        taken, self._new_left_out = self._new_left_out, set()
        return sorted(taken)

    def describe(self, name: ServiceName) -> str:
        """Return what a Service asks for beyond its limits, and these, for people; "" if nothing."""
        return describe(self.left_out.get(name, ()), because_of_others=self.is_limited(name))

    def take_fitting(self) -> list[ServiceName]:
        """Return limited Services that have room since another took less."""
        if not self._was_freed:
            return []
        self._was_freed = False
        promised: list[ServiceName] = []
        room = MOST_OF_NODE - self._total
        for name, extra in self._limited.items():
            more = extra - self._taken.get(name, 0)
            if more <= room and self._has_room(name, more):
                promised.append(name)
                room -= more
        return promised

    def _has_room(self, name: ServiceName, more: int) -> bool:
        return (self._total + more <= MOST_OF_NODE
                and self._of_namespace[name.namespace] + more <= MOST_OF_NAMESPACE)

    def _take(self, name: ServiceName, extra: int) -> None:
        before = self._taken.get(name, 0)
        if extra != before:
            if extra:
                self._taken[name] = extra
            else:
                del self._taken[name]
            self._total += extra - before
            self._of_namespace[name.namespace] += extra - before
            if not self._of_namespace[name.namespace]:
                del self._of_namespace[name.namespace]
            self._was_freed = self._was_freed or extra < before
