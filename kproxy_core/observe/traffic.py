"""Traffic of Services: counts of the serving backend, added up, kept across restarts, and their metrics."""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from operator import add, sub
from pathlib import Path
from typing import NamedTuple

import msgspec
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.errors import BackendError
from kproxy_core.contract.values import Connections, Failure, Handshake
from kproxy_core.linux.conntrack import (
    ACCT_SYSCTL,
    NO_VOLUME,
    NatBinding,
    ResetConnection,
    ResetWatch,
    Volume,
    Volumes,
    accounting_enabled,
    read_unanswered,
    read_volumes,
)
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.files import read_private, replace_private
from kproxy_core.linux.namespaces import namespace_name
from kproxy_core.model.address import Family, Protocol, format_socket
from kproxy_core.model.service import Destination, ServicePortKey
from kproxy_core.plan.service_plan import Frontend, ServicePlan
from kproxy_core.sync.observer import Synced, SyncObserver

log = logging.getLogger("kproxy.run")

KEPT = 3600.0
"""Seconds after its last connection for which the total of a former endpoint or service port is kept."""
INTERVAL = 15.0
"""Interval in seconds between periodic readings."""
FRESH = 1.0
"""Seconds for which a reading answers every request."""


# Totals. Pure.

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


# The file that keeps totals from one process to the next, until the machine restarts.

_MOST_BYTES = 256 << 20


class Stored(NamedTuple):
    """The content of the file, apart from the machine's boot id."""

    mode: str | None = None
    """The mode that counted; "": its counts could not be read; None: no process has counted."""
    totals: dict[ServicePortKey, Total] = {}  # noqa: RUF012 - immutable by agreement
    counts: Sequence[tuple[Family, Connections]] = ()
    """The last counts of that mode."""
    alive: Volumes = {}  # noqa: RUF012
    """See `VolumeReader.alive`."""

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode((_boot_id(), self))


class StoredTotals:
    """Reads and writes the file. Its totals and counts are of the same reading.

    If the kernel counts without the process too, the totals are exact again after the next reading,
    even if the file is old.
    """

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / f"traffic-{namespace_name()}.msgpack"
        self._failed = False

    def read(self, now: float) -> Stored:
        """Return the content; empty if there is no such file.

        *now* is the time that all totals get as that of their last connection.
        """
        try:
            content = read_private(self._path, _MOST_BYTES)
            boot, found = msgspec.msgpack.decode(content, type=tuple[str, Stored])
            if boot != _boot_id():
                return Stored()
        except FileNotFoundError:
            return Stored()
        except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
            log.warning("traffic totals of the last process are not used", extra={
                "fields": {"file": str(self._path), "error": str(error)}})
            return Stored()
        for total in found.totals.values():
            total.resume(now)
        return found

    def write(self, content: bytes) -> None:
        """Replace the file by `Stored.encoded`. A failure is logged once."""
        try:
            replace_private(self._path, content)
        except OSError as error:
            level = logging.DEBUG if self._failed else logging.WARNING
            log.log(level, "cannot keep traffic totals across a restart", extra={
                "fields": {"file": str(self._path), "error": error.strerror}})
            self._failed = True


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


# Owners of frontends.

_REMEMBERED = 600.0
"""Seconds for which the owner of a removed frontend is remembered: counts are read after rules change."""


class _OfFamily:
    def __init__(self) -> None:
        self.plans: dict[ServicePortKey, ServicePlan] = {}
        self.owners: dict[Frontend, ServicePortKey] = {}
        self.removed: dict[Frontend, float] = {}
        """Time until which the owner of a removed frontend is remembered."""


class FrontendOwners(SyncObserver):
    """The service port that owns each frontend, remembered for a while after the frontend is removed.

    Follows the acknowledged plans. Any thread may look up.
    """

    def __init__(self, families: Sequence[Family], clock: Callable[[], float]) -> None:
        """*clock*: monotonic seconds."""
        self._clock = clock
        self._of = {family: _OfFamily() for family in families}
        self.before_move: Callable[[], object] = lambda: None
        """Called before frontends get another owner: earlier connections count for the former."""

    def sync_succeeded(self, synced: Synced) -> None:
        if not synced.steps:
            return
        of, now = self._of[synced.family], self._clock()
        if of.owners and any(
            self.owner(synced.family, frontend) not in (None, step.key)
            for step in synced.steps if step.after is not None for frontend in step.after.frontends()
        ):
            self.before_move()
        for step in synced.steps:
            for frontend in step.before.frontends() if step.before else ():
                if of.owners.get(frontend) == step.key:
                    of.removed[frontend] = now + _REMEMBERED
        for step in synced.steps:
            if step.after is None:
                of.plans.pop(step.key, None)
                continue
            of.plans[step.key] = step.after
            for frontend in step.after.frontends():
                of.owners[frontend] = step.key
                of.removed.pop(frontend, None)
        for frontend in [frontend for frontend, until in of.removed.items() if until < now]:
            del of.removed[frontend], of.owners[frontend]

    def owner(self, family: Family, frontend: Frontend) -> ServicePortKey | None:
        """Return the service port that owns *frontend*, or did until recently.

        An address that belongs to no service port is the node's, dialled at a node port.
        """
        owners = self._of[family].owners
        return owners.get(frontend) or owners.get(frontend._replace(address=None))

    def exists(self, key: ServicePortKey) -> bool:
        return any(key in of.plans for of in self._of.values())

    def uses(self, key: ServicePortKey, where: Destination) -> bool:
        """Return whether *where* is an endpoint of *key* that connections may have."""
        found = [of.plans[key] for of in self._of.values() if key in of.plans]
        return any(where in plan.reachable or where in plan.resting for plan in found)


# Volumes: bytes and packets.

class Growth:
    """Computes the growth since the last reading from the sums over ended and over living connections. Pure.

    A connection that ends during a reading may be in neither sum. Then the sums of its NAT binding shrink,
    and the difference is subtracted from the ended connections of the next reading, which include it; not
    from later ones, as the kernel may have lost the event.
    """

    def __init__(self, alive: Volumes) -> None:
        """*alive*: sums that have been counted already."""
        self.alive = alive
        self._short: dict[NatBinding, Volume] = {}

    def add(self, ended: Volumes, alive: Volumes) -> Iterator[tuple[NatBinding, Volume]]:
        """Record a reading and yield the growth. *ended*: sums since the last reading."""
        before, self.alive = self.alive, alive
        short, self._short = self._short, {}
        for nat in {**before, **alive, **ended, **short}:
            new = _limited(ended.get(nat, NO_VOLUME).plus(short.get(nat, NO_VOLUME)), max)
            grown = new.plus(alive.get(nat, NO_VOLUME)).minus(before.get(nat, NO_VOLUME))
            if min(grown) < 0:
                self._short[nat] = _limited(grown, min)
            if max(grown) > 0:
                yield nat, _limited(grown, max)


def _limited(volume: Volume, limit: Callable[[int, int], int]) -> Volume:
    """Return *volume* without negative numbers if *limit* is max, without positive ones if it is min."""
    return Volume(*(limit(0, number) for number in volume))


class VolumeReader:
    """Reads the kernel's byte and packet counts. `add_ended` may be called from any thread."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families
        self._growth = Growth({})
        self.is_counted = False
        """The kernel counts bytes. If not, `read` returns nothing."""
        self._ended: dict[NatBinding, Volume] = {}
        self._lock = threading.Lock()

    @property
    def alive(self) -> Volumes:
        """The sums over the connections in the table, as of the last reading."""
        return self._growth.alive

    def check(self) -> None:
        """Set `is_counted`."""
        self.is_counted = accounting_enabled()
        if not self.is_counted:
            log.info("bytes are not counted", extra={"fields": {"because": f"{ACCT_SYSCTL} is not 1"}})

    def start(self, alive: Volumes) -> None:
        """Start counting if the kernel does. `add_ended` may have been called before.

        *alive*: sums that an earlier process has counted; empty: everything in the table counts as counted.
        """
        if not self.is_counted:
            return
        try:
            self._growth = Growth(alive or self._read())
        except HostError as error:
            self.is_counted = False
            log.warning("bytes are not counted", extra={"fields": {"error": str(error)}})

    def add_ended(self, volumes: Volumes) -> None:
        """Add the sums over connections that have ended."""
        with self._lock:
            for nat, volume in volumes.items():
                self._ended[nat] = self._ended.get(nat, NO_VOLUME).plus(volume)

    def read(self) -> Sequence[tuple[NatBinding, Volume]]:
        """Return the growth since the last reading, by NAT binding."""
        if not self.is_counted:
            return ()
        with self._lock:
            ended, self._ended = self._ended, {}
        try:
            return list(self._growth.add(ended, self._read()))
        except HostError as error:
            log.debug("cannot read bytes of connections", extra={"fields": {"error": str(error)}})
            self.add_ended(ended)
            return ()

    def _read(self) -> Mapping[NatBinding, Volume]:
        found: dict[NatBinding, Volume] = {}
        for family in self._families:
            found |= read_volumes(family)
        return found


# Failed connections.

_SYN_TIMEOUT = Path("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_syn_sent")
_USUAL_SYN_TIMEOUT = 120

Report = Callable[[Family, Frontend, Destination, Failure], None]


class Failures:
    """Reports each connection that connection tracking saw fail, once. Any thread may call *report*."""

    def __init__(self, families: Sequence[Family], report: Report) -> None:
        self._families = families
        self._report = report
        self._unanswered: dict[Family, frozenset[bytes]] = {}
        """Reported connections that the table still holds."""
        self._lock = threading.Lock()
        self._watch: ResetWatch | None = None
        self.lost = 0
        """Number of times that the kernel dropped events because they were not read fast enough."""

    def start(self, add_volumes: Callable[[Volumes], None] | None) -> None:
        """Start following events. Without them, which is logged, only unanswered connections are reported.

        *add_volumes*: see `ResetWatch`.
        """
        try:
            self._watch = ResetWatch(self._ended, add_volumes)
        except HostError as error:
            log.warning("refused and reset connections are not counted", extra={
                "fields": {"error": str(error)}})

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def read(self) -> None:
        timeout = _syn_timeout()
        for family in self._families:
            try:
                found = read_unanswered(family, timeout)
            except HostError as error:
                log.debug("cannot read unanswered connections", extra={"fields": {"error": str(error)}})
                continue
            with self._lock:
                known = self._unanswered.get(family, frozenset())
                self._unanswered[family] = frozenset(one.id for one in found)
            for one in found:
                if one.id not in known:
                    self._report(family, one.dialled, one.endpoint, Failure.UNANSWERED)

    def _ended(self, found: Sequence[ResetConnection], lost: bool) -> None:
        self.lost += lost
        for one in found:
            failure = Failure.RESET if one.established else Failure.REFUSED
            self._report(one.family, one.dialled, one.endpoint, failure)


def _syn_timeout() -> int:
    try:
        return int(_SYN_TIMEOUT.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return _USUAL_SYN_TIMEOUT


# The recorder.

_READINGS_UNTIL_WRITTEN = 4
_PROTOCOLS = frozenset(map(int, Protocol))
_MOST_FAILURES = 1 << 20
"""Limit for failed connections kept between two readings."""


class TrafficRecorder:
    """Reads the counts of the serving backend and adds them to the totals. Any thread may call."""

    def __init__(
        self, families: Sequence[Family], instance: BackendInstance, owners: FrontendOwners,
        stored: StoredTotals, clock: Callable[[], float],
    ) -> None:
        """*instance* serves. *clock*: monotonic seconds."""
        self.owners = owners
        owners.before_move = lambda: self.read(fresh=0.0)
        self._families = families
        self._stored = stored
        self._clock = clock
        self._lock = threading.Lock()
        """The loop's thread waits for it: nothing is written to a file while it is held."""
        self._storing = threading.Lock()
        """Taken before the other one."""
        self._totals = Totals()
        earlier = stored.read(clock())
        self._totals.of = dict(earlier.totals)
        self._instance = instance
        self._counts = Counts(earlier.counts if earlier.mode == instance.mode else ())
        """Of `_instance`, as they were read last."""
        is_other = earlier.mode is not None and earlier.mode != instance.mode
        self._skip = set(families) if is_other else set[Family]()
        """Families whose counts of `_instance` in the kernel may have been added already."""
        self.failures = Failures(families, self._failed)
        self._alive = earlier.alive
        self._volumes = VolumeReader(families)
        self._read_at = float("-inf")
        """Time of the last reading of all."""
        self._problem = ""
        self._silent: set[str] = set()
        """Modes that do not count, as logged."""
        self._unsorted: deque[tuple[Family, Frontend, Destination, Failure]] = deque(maxlen=_MOST_FAILURES)
        self._started = False
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start reading at intervals, once the owners of all frontends are known."""
        with self._lock:
            is_other = bool(self._skip)
            if is_other:
                self._read()  # Now, so that no connection from here on is taken for an old one.
            self._started = True
            self._volumes.check()
            self.failures.start(self._volumes.add_ended if self._volumes.is_counted else None)
            self._volumes.start(self._alive)
        threading.Thread(target=self._run, args=(is_other,), name="kproxy-traffic", daemon=True).start()

    def stop(self) -> None:
        """Read once more, and keep the totals for the next process."""
        self._stopped.set()
        if self._started:
            self.failures.close()
            self.read(fresh=0.0)
            self._write()

    def read(self, *, fresh: float = FRESH) -> dict[ServicePortKey, Total]:
        """Return the totals of a reading that is at most *fresh* seconds old."""
        with self._lock:
            now = self._clock()
            if self._started and now - self._read_at >= fresh:
                self._read()
                self._count_failures(now)
                self._count_volumes(now)
                self._totals.forget(self.owners.exists, self.owners.uses, now)
                self._totals.settle(now - self._read_at)
                self._read_at = now
            return dict(self._totals.of)

    def switched(self, instance: BackendInstance, *, shares: bool) -> None:
        """Count with *instance* from now on. *shares*: it, or its base, has the same counters as the last
        one.

        Counts of a layer end with their mode: those of a later instance may be larger, and do not continue
        them. While both modes' rules exist, each counts the connections that either of them translates.
        """
        with self._lock:
            self._read()
            known = [(family, one) for family, one in self._counts if shares and not one.layer]
            self._instance, self._counts = instance, Counts(known)
            if not shares:
                self._skip = set(self._families)
                self._read()
        self._write()

    def _failed(self, family: Family, frontend: Frontend, where: Destination, failure: Failure) -> None:
        """Remember a failed connection until the counts of its endpoint have been read."""
        self._unsorted.append((family, frontend, where, failure))

    def _count_failures(self, now: float) -> None:
        self.failures.read()
        while self._unsorted:
            family, frontend, where, failure = self._unsorted.popleft()
            key = self.owners.owner(family, frontend)
            if key is None or self._totals.fail(key, where, failure):
                continue
            if failure is Failure.REFUSED and not self.owners.uses(key, where):
                # The rules lead to a port of this node at which nothing listens: a relay without endpoints.
                self._totals.reject(key, now)

    def _count_volumes(self, now: float) -> None:
        for nat, volume in self._volumes.read():
            if nat.protocol not in _PROTOCOLS:
                continue
            port, endpoint_port = (int.from_bytes(port, "big") for port in (nat.port, nat.endpoint_port))
            key = self.owners.owner(nat.family, Frontend(nat.destination, Protocol(nat.protocol), port))
            if key is not None:
                where = Destination(nat.endpoint, endpoint_port)
                self._totals.carry(key, where, volume, now, is_endpoint=self.owners.uses(key, where))

    def _run(self, must_write: bool) -> None:
        if must_write:
            self._write()
        for readings in itertools.count(1):
            if self._stopped.wait(INTERVAL):
                return
            self.read(fresh=INTERVAL / 2)
            if readings % _READINGS_UNTIL_WRITTEN == 0:
                self._write()

    def _read(self) -> None:
        now, mode = self._clock(), self._instance.mode
        for family in self._families:
            try:
                reading = self._instance.traffic(family)
            except (BackendError, HostError) as error:
                if str(error) != self._problem:
                    self._problem = str(error)
                    log.warning("cannot read counts of connections", extra={"fields": {
                        "mode": mode, "ip_family": family.label, "error": self._problem}})
                continue
            if reading is None and mode not in self._silent:
                self._silent.add(mode)
                log.warning("this mode does not count connections", extra={"fields": {"mode": mode}})
            if family in self._skip:
                self._skip.discard(family)
                self._counts.remember(family, reading or ())
            else:
                self._totals.add(family, self._counts.new(family, reading or ()), self.owners.owner, now)

    def _write(self) -> None:
        """Write everything to the state directory. Whoever reads or switches modes does not wait for it."""
        with self._storing:
            with self._lock:
                mode = "" if self._skip else self._instance.mode
                stored = Stored(mode, self._totals.of, list(self._counts), self._volumes.alive)
                content = stored.encoded()
            self._stored.write(content)


# Metrics of the traffic of Services, with a limited number of series.

_SERVICE = ("namespace", "service", "port", "protocol")
_ENDPOINT = (*_SERVICE, "endpoint")

OTHER = "other"
"""Value of the label ``service`` of the series that sums up all those beyond the limit."""

_BOUNDS = tuple(one.value for one in Handshake if one is not Handshake.MICROSECONDS)
_SERIES_OF_HISTOGRAM = len(_BOUNDS) + 2


@dataclass(frozen=True, slots=True, eq=False)
class _Series:
    """A series that rows have."""

    metric: str
    last: str
    """Value of the metric's last label if it is an outcome, a reason or a direction."""
    numbers: slice
    """Of a row's values: one number of a counter; of a histogram one for each `Handshake`."""
    exists_with: tuple[int, ...]
    """Places of values: the series exists while one of them is not 0. Empty: as long as the row."""


class Chosen(NamedTuple):
    metric: str
    labels: tuple[str, ...]
    values: tuple[int, ...]


Rows = dict[Destination | None, tuple[int, ...]]
"""The numbers of one service port's endpoints and, with None, its own."""


@dataclass(slots=True)
class _State:
    """One row over time."""

    values: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    """Empty until a series is listed."""
    filled: tuple[bool, ...] = ()
    """The values that were not 0 when series were listed last."""
    listed: tuple[_Series, ...] = ()
    others: tuple[_Series, ...] = ()
    summed: tuple[int, ...] = ()
    """The values that the sums contain: 0 for those of listed series. Empty: none."""


class _Sums:
    """The sums over the series that are not listed, of all rows that have the same series."""

    def __init__(self, series: Sequence[_Series]) -> None:
        self.series = series
        self.rows: list[tuple[int, ...]] = []
        """Values to be added up: the earlier sums first."""

    def add_up(self) -> tuple[int, ...]:
        if len(self.rows) > 1:
            self.rows = [tuple(map(sum, zip(*self.rows, strict=True)))]
        return self.rows[0]


class LimitedSeries:
    """The listed series, and the sums of all others. No sum ever falls."""

    def __init__(self, limit: int, service: Sequence[_Series], endpoint: Sequence[_Series]) -> None:
        """*service* and *endpoint*: the series of each service port, and of each endpoint."""
        self._limit = limit
        self._listed = 0
        self.summed = 0
        """Series that are not listed now."""
        self._states: dict[ServicePortKey, dict[Destination | None, _State]] = {}
        self._service, self._endpoint = _Sums(service), _Sums(endpoint)
        self._with_sum: set[_Series] = set()
        """Series that some row had while they were not listed."""

    def update(self, key: ServicePortKey, rows: Rows) -> None:
        """Replace the rows of *key*. A series is listed if there was room at first."""
        states = self._states.setdefault(key, {})
        for endpoint in states.keys() - rows.keys():
            gone = states.pop(endpoint)
            self._listed -= len(gone.listed)
            self.summed -= len(gone.others)
        for endpoint, values in rows.items():
            state = states.get(endpoint)
            if state is None:
                state = states[endpoint] = _State()
            elif state.values == values:
                continue
            state.values = values
            sums = self._service if endpoint is None else self._endpoint
            filled = tuple(map(bool, values))
            if filled != state.filled:
                state.filled = filled
                self._list(state, sums.series, key, endpoint)
            if not state.others and not state.summed:
                continue
            if state.listed:
                hidden = [0] * len(values)
                for one in state.others:
                    hidden[one.numbers] = values[one.numbers]
                values = tuple(hidden)
            grown = tuple(map(sub, values, state.summed or repeat(0)))
            if min(grown) < 0:  # A forgotten endpoint is counted from 0 again.
                grown = tuple([now if more < 0 else more for now, more in zip(values, grown, strict=True)])
            sums.rows.append(grown)
            state.summed = values
        if not rows:
            del self._states[key]

    def chosen(self) -> Iterator[Chosen]:
        """Yield the listed series, then the sums."""
        for states in self._states.values():
            for state in states.values():
                for one in state.listed:
                    yield Chosen(one.metric, (*state.labels, one.last) if one.last else state.labels,
                                 state.values[one.numbers])
        for sums in (self._service, self._endpoint):
            for one in sums.series:
                if one in self._with_sum:
                    empty = [""] * (len(_METRICS[one.metric][1]) - 2 - bool(one.last))
                    yield Chosen(one.metric, ("", OTHER, *empty, *filter(None, (one.last,))),
                                 sums.add_up()[one.numbers])

    def _list(
        self, state: _State, series: Sequence[_Series], key: ServicePortKey, endpoint: Destination | None
    ) -> None:
        """List the series of a row that did not exist before, as far as there is room."""
        values = state.values
        existing = [one for one in series if not one.exists_with or any(values[at] for at in one.exists_with)]
        listed = [one for one in state.listed if one in existing]
        self._listed -= len(state.listed) - len(listed)
        new = [one for one in existing if one not in listed and one not in state.others]
        fitting = new[:max(0, self._limit - self._listed)]
        self._listed += len(fitting)
        listed += fitting
        others = [one for one in existing if one not in listed]
        self._with_sum.update(others)
        self.summed += len(others) - len(state.others)
        state.listed, state.others = tuple(listed), tuple(others)
        if listed and not state.labels:
            where = () if endpoint is None else (format_socket(*endpoint),)
            state.labels = key.namespace, key.name, key.port_name, key.protocol.name, *where


_METRICS = {
    "kproxy_service_connections": (
        "New connections to Services, or flows of UDP, by outcome", (*_SERVICE, "outcome")),
    "kproxy_service_failures": ("Forwarded TCP connections that failed, by reason", (*_SERVICE, "reason")),
    "kproxy_endpoint_connections": ("New connections, or flows of UDP, forwarded to endpoints", _ENDPOINT),
    "kproxy_endpoint_failures": (
        "TCP connections to endpoints that failed, by reason", (*_ENDPOINT, "reason")),
    "kproxy_service_bytes": ("Bytes between clients and Services, by direction", (*_SERVICE, "direction")),
    "kproxy_service_packets": (
        "Packets between clients and Services, by direction", (*_SERVICE, "direction")),
    "kproxy_endpoint_bytes": (
        "Bytes between clients and endpoints, by direction", (*_ENDPOINT, "direction")),
    "kproxy_endpoint_packets": (
        "Packets between clients and endpoints, by direction", (*_ENDPOINT, "direction")),
    "kproxy_service_handshake_duration_seconds": (
        "Duration of TCP handshakes with endpoints of Services", _SERVICE),
    "kproxy_endpoint_handshake_duration_seconds": ("Duration of TCP handshakes with endpoints", _ENDPOINT),
}  # fmt: skip


def _counters_of(row: str, *outcomes: str) -> tuple[_Series, ...]:
    """Return the series of connections, of each `Failure`, and of a `Volume` of packets and bytes."""
    volume = f"{row}_packets", f"{row}_bytes"
    names = [
        *((f"{row}_connections", outcome) for outcome in outcomes),
        *((f"{row}_failures", failure.value) for failure in Failure),
        *((metric, direction) for direction in ("to_endpoint", "from_endpoint") for metric in volume),
    ]
    return tuple(
        _Series(metric, last, slice(at, at + 1), () if not last else tuple(
            other for other, name in enumerate(names) if metric in volume and name[0] == metric) or (at,))
        for at, (metric, last) in enumerate(names)
    )  # fmt: skip


def _histogram_of(row: str) -> tuple[_Series, ...]:
    return (_Series(f"{row}_handshake_duration_seconds", "", slice(None), ()),)


SERVICE_COUNTERS = _counters_of("kproxy_service", "forwarded", "rejected")
_ENDPOINT_COUNTERS = _counters_of("kproxy_endpoint", "")
SERVICE_HISTOGRAM = _histogram_of("kproxy_service")
_ENDPOINT_HISTOGRAM = _histogram_of("kproxy_endpoint")
_NO_FAILURES = (0,) * len(Failure)


class TrafficCollector(Collector):
    """Connections by service port, and with *endpoints* by endpoint."""

    def __init__(self, recorder: TrafficRecorder, *, endpoints: bool, limit: int) -> None:
        self._recorder = recorder
        self._endpoints = endpoints
        self._counters = LimitedSeries(limit, SERVICE_COUNTERS, _ENDPOINT_COUNTERS)
        self._histograms = LimitedSeries(
            max(1, limit // (4 * _SERIES_OF_HISTOGRAM)), SERVICE_HISTOGRAM, _ENDPOINT_HISTOGRAM)
        """A quarter as many series, of their own: each would displace ten counters."""
        self._seen: dict[ServicePortKey, tuple[Total, int]] = {}
        """Each total, and `Total.changes` as of the last scrape."""
        self._lock = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            return list(self._collect())

    def _collect(self) -> Iterator[Metric]:
        self._update(self._recorder.read())
        counters, histograms = {}, {}
        for name, (about, labels) in _METRICS.items():
            if self._endpoints or name.startswith("kproxy_service_"):
                if name.endswith("_seconds"):
                    histograms[name] = HistogramMetricFamily(name, about, labels=labels)
                else:
                    counters[name] = CounterMetricFamily(name, about, labels=labels)
        for metric, labels, (value,) in self._counters.chosen():
            counters[metric].add_metric(labels, value)
        for metric, labels, (*counts, microseconds) in self._histograms.chosen():
            buckets = list(zip(_BOUNDS, accumulate(counts), strict=True))
            histograms[metric].add_metric(labels, buckets, microseconds / 1_000_000)
        yield from (*counters.values(), *histograms.values())
        yield CounterMetricFamily(
            "kproxy_conntrack_events_lost", "Times that events of connection tracking were lost",
            self._recorder.failures.lost)
        yield GaugeMetricFamily(
            "kproxy_traffic_series_summed", "Series beyond maxSeries, summed in 'other'",
            self._counters.summed + self._histograms.summed * _SERIES_OF_HISTOGRAM)

    def _update(self, totals: Mapping[ServicePortKey, Total]) -> None:
        """Bring the rows to *totals*. Those that have not changed cost little."""
        for key in self._seen.keys() - totals.keys():
            del self._seen[key]
            for series in (self._counters, self._histograms):
                series.update(key, {})
        for key, total in totals.items():
            seen = self._seen.get(key)
            if seen is None or seen[0] is not total or seen[1] != total.changes:
                self._seen[key] = total, total.changes
                endpoints = list(total.endpoints.items()) if self._endpoints else []
                self._counters.update(key, _counters(total, endpoints))
                self._histograms.update(key, _histograms(total, endpoints))


def _counters(total: Total, endpoints: Iterable[tuple[Destination, EndpointTotal]]) -> Rows:
    rows: Rows = {None: (total.forwarded, total.rejected, *_failed(total), *total.volume)}
    for where, to in endpoints:
        rows[where] = to.forwarded, *_failed(to), *to.volume
    return rows


def _failed(total: Total | EndpointTotal) -> Iterable[int]:
    return [total.failed.get(failure, 0) for failure in Failure] if total.failed else _NO_FAILURES


def _histograms(total: Total, endpoints: Iterable[tuple[Destination, EndpointTotal]]) -> Rows:
    rows: Rows = {None: total.handshakes} if total.handshakes else {}
    for where, to in endpoints:
        if to.handshakes:
            rows[where] = to.handshakes
    return rows
