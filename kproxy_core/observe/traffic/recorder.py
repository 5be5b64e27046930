"""The recorder of traffic: reads all counts at intervals, adds them to the totals of the service ports that
own the frontends, and keeps these from one process to the next.
"""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.errors import BackendError
from kproxy_core.contract.values import Connections, Failure
from kproxy_core.linux.conntrack_volumes import Volumes
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.files import read_private, replace_private
from kproxy_core.linux.namespaces import namespace_name
from kproxy_core.model.address import Family, Protocol
from kproxy_core.model.service import Destination, ServicePortKey
from kproxy_core.observe.traffic.totals import Counts, Total, Totals
from kproxy_core.observe.traffic.tracked import Failures, VolumeReader
from kproxy_core.plan.service_plan import Frontend, ServicePlan
from kproxy_core.sync.observer import Synced, SyncObserver

log = logging.getLogger("kproxy.run")

INTERVAL = 15.0
"""Interval in seconds between periodic readings."""
FRESH = 1.0
"""Seconds for which a reading answers every request."""


# The file, which is kept until the machine restarts.

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
