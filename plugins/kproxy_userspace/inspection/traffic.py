"""Serves the hook `kproxy_traffic`: the connections that relays report."""

import threading
import time
from uuid import uuid4

from kproxy_core.backend.api import Connections, Failure
from kproxy_core.model.address import Address, Family, Protocol, parse_address
from kproxy_core.model.endpoint import Destination
from kproxy_core.plan.service_plan import Frontend
from kproxy_userspace.kernel.workers import WorkerPool
from kproxy_userspace.worker.wire import Count

_KEPT = 3600.0
"""Seconds after its last connection for which a count is kept."""


class Traffic:
    """All counts of one backend instance. Any thread may call."""

    def __init__(self, workers: WorkerPool) -> None:
        self._workers = workers
        self._instance = uuid4().hex
        self._lock = threading.Lock()
        self._found: dict[tuple[Frontend, Destination, Failure | None], tuple[int, float]] = {}
        """Numbers, and the times of their last changes."""

    def read(self, family: Family) -> list[Connections]:
        """Return the connections of one family since this instance started."""
        with self._lock:
            now = time.monotonic()
            for count in self._workers.report():
                failure = Failure(count.failure) if count.failure else None
                key = _frontend(count), _destination(count), failure
                number, _ = self._found.get(key, (0, now))
                self._found[key] = number + count.number, now
            self._found = {key: found for key, found in self._found.items() if found[1] >= now - _KEPT}
            return [
                Connections(frontend, where, number, self._instance, failure)
                for (frontend, where, failure), (number, _) in self._found.items()
                if len(where.address) == family.size
            ]  # fmt: skip


def _frontend(count: Count) -> Frontend:
    address, port = count.frontend
    dialled: Address | None = parse_address(address) if address else None
    return Frontend(dialled, Protocol.UDP if count.udp else Protocol.TCP, port)


def _destination(count: Count) -> Destination:
    address, port = count.endpoint
    return Destination(parse_address(address), port)
