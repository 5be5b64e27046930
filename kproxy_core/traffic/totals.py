"""Totals of connections by service port and endpoint, from counts that may begin again at 0. Pure."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kproxy_core.backend.api import Carried, Connections, Failure, Handshake
from kproxy_core.host.conntrack.volumes import NO_VOLUME, Volume
from kproxy_core.model.address import Family
from kproxy_core.model.endpoint import Destination
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import Frontend

KEPT = 3600.0
"""Seconds after its last connection for which the total of a former endpoint or service port is kept."""
_MISSING_FOR = 3
"""Consecutive readings without a count after which it is forgotten: a dump may lack an element."""

_PLACES = {handshake: place for place, handshake in enumerate(Handshake)}

OwnerOf = Callable[[Family, Frontend], ServicePortKey | None]


class Pair(NamedTuple):
    """The subject of one count."""

    family: Family
    frontend: Frontend
    endpoint: Destination | None
    layer: str = ""
    """See `Connections.layer`."""
    failure: Failure | None = None
    """See `Connections.failure`."""
    carried: Carried | None = None
    """See `Connections.carried`."""
    handshake: Handshake | None = None
    """See `Connections.handshake`."""


@dataclass(slots=True)
class EndpointTotal:
    """Connections to one endpoint of a service port."""

    forwarded: int = 0
    failed: dict[Failure, int] = field(default_factory=dict)
    """Since this process started."""
    last: float = 0.0
    """Time of the reading that saw the last new connection; monotonic seconds."""
    volume: Volume = NO_VOLUME
    handshakes: list[int] = field(default_factory=list)
    """A number for each `Handshake`; empty before the first one."""


@dataclass(slots=True)
class Total:
    """Connections to one service port."""

    forwarded: int = 0
    """To an endpoint, former ones included."""
    rejected: int = 0
    """For lack of endpoints."""
    last: float = 0.0
    """See `EndpointTotal`."""
    endpoints: dict[Destination, EndpointTotal] = field(default_factory=dict)
    failed: dict[Failure, int] = field(default_factory=dict)
    """See `EndpointTotal`."""
    rate: float = field(default=0.0, compare=False)
    """New connections a second, rejected ones included, between the last two readings."""
    settled: int = field(default=0, compare=False)
    """Connections as of the last `Totals.settle`."""
    volume: Volume = NO_VOLUME
    handshakes: list[int] = field(default_factory=list)
    """See `EndpointTotal`."""

    @property
    def failures(self) -> int:
        return sum(self.failed.values())


@dataclass(slots=True)
class _Count:
    number: int
    missing: int = 0
    """Consecutive readings that lacked it."""


class Counts:
    def __init__(self, known: Iterable[tuple[Pair, int]] = ()) -> None:
        self._counts = {pair: _Count(number) for pair, number in known}

    def __iter__(self) -> Iterator[tuple[Pair, int]]:
        return iter([(pair, count.number) for pair, count in self._counts.items()])

    def new(self, family: Family, reading: Iterable[Connections]) -> list[tuple[Pair, int]]:
        """Take in a *reading* of one family. Return the connections made since the last one, by pair."""
        found: list[tuple[Pair, int]] = []
        counts = self._counts
        numbers: dict[Pair, int] = {}
        for frontend, endpoint, number, layer, failure, carried, handshake in reading:
            pair = Pair(family, frontend, endpoint, layer, failure, carried, handshake)
            numbers[pair] = numbers.get(pair, 0) + number
        for pair, number in numbers.items():
            known = counts.get(pair)
            if known is None:
                counts[pair] = _Count(number)
                found.append((pair, number))
            elif number != known.number:
                found.append((pair, number - known.number if number > known.number else number))
                known.number, known.missing = number, 0
        if len(numbers) == len(counts):
            return found
        for pair in [pair for pair in counts if pair.family is family and pair not in numbers]:
            counts[pair].missing += 1
            if counts[pair].missing >= _MISSING_FOR:
                del counts[pair]
        return found


class Totals:
    """All totals. They only grow, until a service port has been gone for an hour."""

    def __init__(self) -> None:
        self.of: dict[ServicePortKey, Total] = {}
        self.unknown = 0
        """Connections to frontends that no service port owned."""
        self._moving: set[ServicePortKey] = set()
        """Service ports with connections since the last reading but one."""

    def add(self, made: Iterable[tuple[Pair, int]], owner_of: OwnerOf, now: float) -> None:
        """Add connections to the totals of the service ports that own the frontends.

        Failures, bytes and handshakes of a pair follow its connections.
        """
        for (family, frontend, endpoint, _, failure, carried, handshake), number in made:
            key = owner_of(family, frontend)
            if key is None:
                is_made = failure is None and carried is None and handshake is None
                self.unknown += number if is_made else 0
            elif number and handshake is not None and endpoint is not None:
                self._shake(key, endpoint, handshake, number)
            elif number and carried is not None and endpoint is not None:
                volume = NO_VOLUME._replace(**{f"bytes_{carried.value}": number})
                self.carry(key, endpoint, volume, now, is_endpoint=False)
            elif number and failure is not None and endpoint is not None:
                self.fail(key, endpoint, failure, number)
            elif number:
                if endpoint is None:
                    self.reject(key, now, number)
                    continue
                total = self._met(key, now)
                total.forwarded += number
                if endpoint not in total.endpoints:
                    total.endpoints[endpoint] = EndpointTotal()
                to = total.endpoints[endpoint]
                to.forwarded += number
                to.last = now

    def reject(self, key: ServicePortKey, now: float, number: int = 1) -> None:
        """Count connections that were rejected for lack of endpoints."""
        self._met(key, now).rejected += number

    def fail(self, key: ServicePortKey, where: Destination, failure: Failure, number: int = 1) -> bool:
        """Count failed connections to *where*. Return False if it has never been an endpoint of *key*."""
        total = self.of.get(key)
        to = total.endpoints.get(where) if total is not None else None
        if total is None or to is None:
            return False
        for failed in (total.failed, to.failed):
            failed[failure] = failed.get(failure, 0) + number
        return True

    def _shake(self, key: ServicePortKey, where: Destination, handshake: Handshake, number: int) -> None:
        total = self.of.get(key)
        to = total.endpoints.get(where) if total is not None else None
        if total is not None and to is not None:
            for handshakes in (total.handshakes, to.handshakes):
                if not handshakes:
                    handshakes += [0] * len(Handshake)
                handshakes[_PLACES[handshake]] += number

    def carry(
        self, key: ServicePortKey, where: Destination, volume: Volume, now: float, *, is_endpoint: bool
    ) -> None:
        """Add packets and bytes exchanged with *where*, for the service port alone if it is none."""
        total = self.of.setdefault(key, Total(last=now))
        total.volume = total.volume.plus(volume)
        if is_endpoint or where in total.endpoints:
            to = total.endpoints.setdefault(where, EndpointTotal(last=now))
            to.volume = to.volume.plus(volume)

    def _met(self, key: ServicePortKey, now: float) -> Total:
        """Return the total of a service port with new connections."""
        total = self.of.get(key)
        if total is None:
            total = self.of[key] = Total()
        total.last = now
        self._moving.add(key)
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
