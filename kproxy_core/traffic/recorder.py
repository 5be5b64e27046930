"""Reads the counts of the backend that serves, and adds them up."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kproxy_core.backend.api import Failure
from kproxy_core.backend.errors import BackendError
from kproxy_core.backend.instance import BackendInstance
from kproxy_core.host.errors import HostError
from kproxy_core.model.address import Family, Protocol
from kproxy_core.model.endpoint import Destination
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import Frontend
from kproxy_core.traffic.failures import Failures
from kproxy_core.traffic.owners import FrontendOwners
from kproxy_core.traffic.stored import Stored, StoredTotals
from kproxy_core.traffic.totals import Counts, Total, Totals
from kproxy_core.traffic.volumes import VolumeReader

log = logging.getLogger("kproxy.run")

INTERVAL = 15.0
"""Seconds between two periodic readings."""
FRESH = 1.0
"""Seconds for which a reading answers every request."""
_READINGS_UNTIL_WRITTEN = 4
_PROTOCOLS = frozenset(map(int, Protocol))
_MOST_FAILURES = 1 << 20
"""Failed connections kept between two readings."""


class TrafficRecorder:
    """The totals of one process. Any thread may call."""

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
        self._totals = Totals()
        earlier = stored.read(clock())
        self._totals.of = dict(earlier.totals)
        self._instance = instance
        self._counts = Counts(earlier.counts if earlier.mode == instance.mode else ())
        """Of `_instance`, as they were read last."""
        is_other = earlier.mode is not None and earlier.mode != instance.mode
        self._skip = set(families) if is_other else set[Family]()
        """Families of which the kernel may hold counts of `_instance` that have been added already."""
        self.failures = Failures(families, self._failed)
        self._alive = earlier.alive
        self._volumes = VolumeReader(families)
        self._read_at = float("-inf")
        """Time of the last reading of all."""
        self._readings = 0
        self._problem = ""
        self._silent: set[str] = set()
        """Modes that do not count, which has been logged."""
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
            if is_other:
                self._write()
        threading.Thread(target=self._run, name="kproxy-traffic", daemon=True).start()

    def stop(self) -> None:
        """Read once more, and keep the totals for the next process."""
        self._stopped.set()
        if self._started:
            self.failures.close()
            self.read(fresh=0.0)
            with self._lock:
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
        """Count with *instance* from now on. *shares*: its base, or itself, counts where the last one's did.

        Counts of a layer end with their mode: those of a later instance may be larger, and are no sequel.
        While both modes' rules exist, each counts what either of them translates.
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
        for way, volume in self._volumes.read():
            if way.protocol not in _PROTOCOLS:
                continue
            port, endpoint_port = (int.from_bytes(port, "big") for port in (way.port, way.endpoint_port))
            key = self.owners.owner(way.family, Frontend(way.destination, Protocol(way.protocol), port))
            if key is not None:
                where = Destination(way.endpoint, endpoint_port)
                self._totals.carry(key, where, volume, now, is_endpoint=self.owners.uses(key, where))

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL):
            self.read(fresh=INTERVAL / 2)
            with self._lock:
                self._readings += 1
                if self._readings % _READINGS_UNTIL_WRITTEN == 0:
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
        mode = "" if self._skip else self._instance.mode
        self._stored.write(Stored(mode, self._totals.of, list(self._counts), self._volumes.alive))
