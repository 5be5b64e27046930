"""Totals of connections, and how the counts of a backend add up to them. Pure."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from operator import add, sub

from kproxy_core.contract.values import Connections, Failure
from kproxy_core.linux.conntrack_volumes import NO_VOLUME, Volume
from kproxy_core.model.address import Family
from kproxy_core.model.service import Destination, ServicePortKey
from kproxy_core.plan.service_plan import Frontend

KEPT = 3600.0
"""Seconds after its last connection for which the total of a former endpoint or service port is kept."""
_MISSING_FOR = 3
"""Consecutive readings without a count after which it is forgotten: a dump may lack an element."""

OwnerOf = Callable[[Family, Frontend], ServicePortKey | None]


@dataclass(slots=True)
class EndpointTotal:
    """Connections to one endpoint of a service port."""

    forwarded: int = 0
    failed: dict[Failure, int] = field(default_factory=dict)
    """Since this process started."""
    last: float = 0.0
    """Time of the reading that saw the last new connection; monotonic seconds."""
    volume: Volume = NO_VOLUME
    handshakes: tuple[int, ...] = ()
    """A number for each `Handshake`; empty before the first one."""

    def count(self, made: Connections, now: float) -> None:
        """Count new connections to an endpoint, with their failures, volume and handshakes."""
        if made.number:
            self.forwarded += made.number
            self.last = now
        if any(made.failed):
            for failure, number in zip(Failure, made.failed, strict=True):
                if number:
                    self.failed[failure] = self.failed.get(failure, 0) + number
        if any(made.carried):
            self.volume = self.volume.plus(Volume._make(made.carried))
        if any(made.handshakes):
            self.handshakes = tuple(map(add, self.handshakes or repeat(0), made.handshakes))


@dataclass(slots=True)
class Total(EndpointTotal):
    """Connections to one service port: to its endpoints, former ones included, and rejected ones."""

    rejected: int = 0
    """Connections rejected for lack of endpoints."""
    endpoints: dict[Destination, EndpointTotal] = field(default_factory=dict)
    rate: float = field(default=0.0, compare=False)
    """New connections a second, rejected ones included, between the last two readings."""
    settled: int = field(default=0, compare=False)
    """Connections as of the last `Totals.settle`."""
    changes: int = field(default=0, compare=False)
    """Incremented when a number changes or an endpoint is dropped."""

    @property
    def failures(self) -> int:
        return sum(self.failed.values())

    def resume(self, now: float) -> None:
        """Continue a total of an earlier process. Failures and the rate restart at 0."""
        self.rate, self.settled = 0.0, self.forwarded + self.rejected
        for one in (self, *self.endpoints.values()):
            one.failed, one.last = {}, now


_Name = tuple[Frontend, Destination | None, str]
"""A pair of frontend and endpoint, and the layer."""


@dataclass(slots=True, eq=False)
class _Count:
    told: Connections
    """Sum over the elements of the pair in the last reading that had any."""
    missing: int = 0
    """Consecutive readings without an element."""


class Counts:
    """The last counts of a backend, which may restart at 0."""

    def __init__(self, known: Iterable[tuple[Family, Connections]] = ()) -> None:
        """*known*: elements of one pair add up."""
        self._of: dict[Family, dict[_Name, _Count]] = {family: {} for family in Family}
        elements = list(known)
        for family in Family:
            self.remember(family, [one for of, one in elements if of is family])

    def __iter__(self) -> Iterator[tuple[Family, Connections]]:
        return iter([(family, count.told) for family, counts in self._of.items()
                     for count in counts.values()])  # fmt: skip

    def remember(self, family: Family, reading: Iterable[Connections]) -> None:
        """Record a *reading* of one family whose counts are not new."""
        for _ in self.new(family, reading):
            pass

    def new(self, family: Family, reading: Iterable[Connections]) -> Iterator[Connections]:
        """Record a *reading* of one family. Yield the growth since the last one.

        Growth that the caller does not consume is yielded after the next reading. A number that is absent
        while its pair has others restarts at 0.
        """
        counts = self._of[family]
        sums: dict[_Count, Connections] = {}
        for one in reading:
            name = one.frontend, one.endpoint, one.layer
            count = counts.get(name)
            if count is None:
                count = counts[name] = _Count(Connections(one.frontend, one.endpoint, 0, one.layer))
            other = sums.get(count)
            sums[count] = one if other is None else _sum(other, one)
        forgotten: list[_Name] = []
        for name, count in counts.items():
            present = sums.get(count)
            if present is None:
                count.missing += 1
                if count.missing >= _MISSING_FOR:
                    forgotten.append(name)
                continue
            told, count.told, count.missing = count.told, present, 0
            if present != told:
                yield _growth(told, present)
        for name in forgotten:
            del counts[name]


def _sum(one: Connections, other: Connections) -> Connections:
    parts = [tuple(map(add, *both)) if all(both) else both[0] or both[1]
             for both in zip(one[4:], other[4:], strict=True)]  # fmt: skip
    return Connections(one.frontend, one.endpoint, one.number + other.number, one.layer, *parts)


def _growth(told: Connections, now: Connections) -> Connections:
    number = now.number - told.number if now.number >= told.number else now.number
    return Connections(now.frontend, now.endpoint, number, now.layer, _added(told.failed, now.failed),
                       _added(told.carried, now.carried), _added(told.handshakes, now.handshakes))


def _added(told: tuple[int, ...], now: tuple[int, ...]) -> tuple[int, ...]:
    """Return the growth of each number: all of one that restarted. Empty without growth."""
    if not told:
        return now
    if told == now:
        return ()
    added = tuple(map(sub, now, told))
    if now and min(added) < 0:
        added = tuple([number if more < 0 else more for number, more in zip(now, added, strict=True)])
    return added


class Totals:
    """The totals of all service ports. They only grow, and are dropped an hour after a service port."""

    def __init__(self) -> None:
        self.of: dict[ServicePortKey, Total] = {}
        self.unknown = 0
        """Connections to frontends that no service port owned."""
        self._moving: set[ServicePortKey] = set()
        """Service ports with connections in the last two readings."""

    def add(self, family: Family, made: Iterable[Connections], owner_of: OwnerOf, now: float) -> None:
        """Add connections to the totals of the service ports that own the frontends.

        Those to an endpoint that was dropped are added to the service port alone until it has a new one.
        """
        for one in made:
            key = owner_of(family, one.frontend)
            if key is None:
                self.unknown += one.number
                continue
            if one.endpoint is None:
                if one.number:
                    self.reject(key, now, one.number)
                continue
            total = self._met(key, now) if one.number else self._total(key, now)
            total.count(one, now)
            to = total.endpoints.get(one.endpoint)
            if to is None and one.number:
                to = total.endpoints[one.endpoint] = EndpointTotal()
            if to is not None:
                to.count(one, now)
            total.changes += 1

    def reject(self, key: ServicePortKey, now: float, number: int = 1) -> None:
        """Count connections that were rejected for lack of endpoints."""
        total = self._met(key, now)
        total.rejected += number
        total.changes += 1

    def fail(self, key: ServicePortKey, where: Destination, failure: Failure) -> bool:
        """Count a failed connection to *where*. Return False if it has never been an endpoint of *key*."""
        total = self.of.get(key)
        to = total.endpoints.get(where) if total is not None else None
        if total is None or to is None:
            return False
        for failed in (total.failed, to.failed):
            failed[failure] = failed.get(failure, 0) + 1
        total.changes += 1
        return True

    def carry(
        self, key: ServicePortKey, where: Destination, volume: Volume, now: float, *, is_endpoint: bool
    ) -> None:
        """Add packets and bytes exchanged with *where*; to the service port alone if that is no endpoint."""
        total = self._total(key, now)
        total.volume = total.volume.plus(volume)
        if is_endpoint or where in total.endpoints:
            to = total.endpoints.get(where)
            if to is None:
                to = total.endpoints[where] = EndpointTotal(last=now)
            to.volume = to.volume.plus(volume)
        total.changes += 1

    def _met(self, key: ServicePortKey, now: float) -> Total:
        """Return the total of a service port with new connections."""
        total = self._total(key, now)
        total.last = now
        self._moving.add(key)
        return total

    def _total(self, key: ServicePortKey, now: float) -> Total:
        total = self.of.get(key)
        if total is None:
            total = self.of[key] = Total(last=now)
        return total

    def settle(self, seconds: float) -> None:
        """Compute rates after a reading that is *seconds* later than the last one."""
        moving, self._moving = self._moving, set()
        for key in moving:
            total = self.of.get(key)
            if total is not None:
                number = total.forwarded + total.rejected
                total.rate = (number - total.settled) / seconds if seconds > 0 else 0.0
                total.settled = number
                if total.rate:
                    self._moving.add(key)

    def forget(
        self, exists: Callable[[ServicePortKey], bool], uses: Callable[[ServicePortKey, Destination], bool],
        now: float,
    ) -> None:
        """Drop former service ports and endpoints that had no connection for an hour."""
        for key, total in list(self.of.items()):
            if total.last + KEPT < now and not exists(key):
                del self.of[key]
                continue
            for where, to in list(total.endpoints.items()):
                if to.last + KEPT < now and not uses(key, where):
                    del total.endpoints[where]
                    total.changes += 1
