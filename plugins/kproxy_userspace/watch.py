"""Detection of workers that exit or run short of resources, and of portals that another program deletes."""

import logging
import os
import select
import threading
import time
from collections.abc import Mapping

from kproxy_core.backend.api import Damage
from kproxy_core.backend.errors import SyncFailed
from kproxy_core.host.errors import HostError
from kproxy_core.model.address import Family
from kproxy_userspace.family import FamilyState
from kproxy_userspace.kernel.workers import Worker, WorkerPool
from kproxy_userspace.worker.counters import Counter

log = logging.getLogger("kproxy.userspace")

_POLL_SECONDS = 1.0
"""Interval at which new workers are noticed, and counts are read."""

_SHORTAGE_SECONDS = 30.0
"""Least time between two log lines about a shortage in one worker."""


class Watch:
    """A thread that reports damage until it is closed."""

    def __init__(
        self, families: Mapping[Family, FamilyState], workers: WorkerPool, damaged: Damage,
        portal_seconds: float | None,
    ) -> None:
        """Start watching. Compare the portals every *portal_seconds*; None: there are no portals."""
        self._families = families
        self._workers = workers
        self._damaged = damaged
        self._portal_seconds = portal_seconds
        self._reported: set[int] = set()
        """Process ids of workers whose exit was reported."""
        self._shortages: dict[int, tuple[int, float]] = {}
        """Last reported count and its time, by process id."""
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="kproxy-relays", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. No report follows."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)

    def _run(self) -> None:
        due = time.monotonic() + (self._portal_seconds or 0.0)
        while not self._wait(due):
            for worker in self._workers.running():
                self._check_shortage(worker)
            if self._portal_seconds is not None and time.monotonic() >= due:
                self._check_portals()
                due = time.monotonic() + self._portal_seconds

    def _wait(self, due: float) -> bool:
        """Wait for a worker's exit, at most until *due*. Return True to stop."""
        poll = select.poll()
        poll.register(self._stop, select.POLLIN)
        watched: dict[int, Worker] = {}
        for worker in self._workers.running():
            fd = worker.control.fileno()
            if worker.process.pid not in self._reported and fd >= 0:
                poll.register(fd, 0)  # A hang-up is always reported.
                watched[fd] = worker
        seconds = _POLL_SECONDS
        if self._portal_seconds is not None:
            seconds = min(seconds, max(0.0, due - time.monotonic()))
        for fd, _ in poll.poll(seconds * 1000):
            if fd == self._stop:
                return True
            self._report_exit(watched[fd])
        return False

    def _report_exit(self, worker: Worker) -> None:
        self._reported.add(worker.process.pid)
        log.error("relay worker exited", extra={"fields": {"pid": worker.process.pid}})
        for family in list(self._families):
            self._damaged(family, "a relay worker exited")

    def _check_shortage(self, worker: Worker) -> None:
        count, now = worker.counts[Counter.SHORTAGES], time.monotonic()
        reported, last = self._shortages.get(worker.process.pid, (0, -_SHORTAGE_SECONDS))
        if count > reported and now - last >= _SHORTAGE_SECONDS:
            self._shortages[worker.process.pid] = count, now
            fields = {
                "pid": worker.process.pid, "connections": worker.counts[Counter.CONNECTIONS],
                "shortages": count - reported,
            }  # fmt: skip
            log.warning("relay worker out of file descriptors or memory", extra={"fields": fields})

    def _check_portals(self) -> None:
        for family, state in list(self._families.items()):
            try:
                if not state.is_intact():
                    self._damaged(family, "portals are missing")
                state.close_departed()
            except (HostError, SyncFailed) as error:
                log.warning("could not check portals", extra={"fields": {"error": str(error)}})
