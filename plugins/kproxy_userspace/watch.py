"""Detection of workers that exit, hang or lack resources, and of foreign changes to portals.

nf_tables announces every commit. A commit to our chains is damage. After a commit that may have deleted a
jump to them, the portals are compared with the kernel at once. Legacy iptables announces nothing; there they
are compared every `syncPeriod`.
"""

import logging
import math
import os
import select
import threading
import time
from collections.abc import Iterable, Mapping

from kproxy_core.contract import Damage, Family, HostError
from kproxy_core.linux.process import cpu_seconds
from kproxy_core.linux.programs import OwnProcesses
from kproxy_core.linux.relay.counts import Counter
from kproxy_core.linux.relay.pool import Worker, WorkerPool
from kproxy_core.nft.watch import Change, ChangeKind, Commit, CommitWatch
from kproxy_userspace.family import FamilyState
from kproxy_userspace.names import OUR_CHAINS, TABLE
from kproxy_userspace.skeleton import JUMPS

log = logging.getLogger("kproxy.userspace")

_POLL_SECONDS = 1.0
"""Interval in seconds at which new and hanging workers are noticed, and counts are read."""

_SHORTAGE_SECONDS = 30.0
"""Minimum seconds between log lines about a shortage in one worker."""

_SHARE = 0.2
_BURST = 2.5
"""Seconds of CPU time that comparisons may use in advance."""

_BUILT_IN = frozenset((jump.table, jump.chain) for jump in JUMPS)
_IPTABLES = frozenset(table for table, _ in OUR_CHAINS)


class Watcher:
    """Reports damage from a thread of its own until it is closed."""

    def __init__(
        self, families: Mapping[Family, FamilyState], workers: WorkerPool, damaged: Damage,
        portal_seconds: float | None, own: OwnProcesses, share: float = _SHARE,
    ) -> None:
        """Start watching. Compare the portals every *portal_seconds*; None: there are no portals.

        Ignores commits of *own* processes. *share* of one CPU is the limit for comparisons after foreign
        commits: commits in a loop cost no more.
        """
        self._share = share
        self._families = families
        self._workers = workers
        self._damaged = damaged
        self._portal_seconds = math.inf if portal_seconds is None else portal_seconds
        self._watched: list[Worker] = []
        """Workers at the last check."""
        self._shortages: dict[int, tuple[int, float]] = {}
        """Last logged count and its time, by PID."""
        self._suspicions: dict[Family, str] = {}
        """Foreign commits since the last comparison of the portals that may have deleted a jump."""
        self._stopped = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._commits = None if portal_seconds is None else self._watch_commits(own)
        self._thread = threading.Thread(target=self._run, name="kproxy-relays", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. No report follows."""
        if self._commits is not None:
            self._commits.close()
        self._stopped = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._watched = []  # A worker's counts are freed with it; `_commits` refers to this watcher.

    def _run(self) -> None:
        used = time.monotonic()
        due = used + self._portal_seconds
        while self._wait(min(due, used - _BURST) if self._suspicions else due):
            for worker in self._workers.running():
                self._check_shortage(worker)
            if self._workers.check():
                for family in list(self._families):
                    self._damaged(family, "a relay worker answers again")
            began, before = time.monotonic(), cpu_seconds()
            if began >= due:
                self._check_portals(list(self._families))
                due = time.monotonic() + self._portal_seconds
            elif self._suspicions and began >= used - _BURST:
                self._check_portals(list(self._suspicions))
            used = max(used, began) + (cpu_seconds() - before) / self._share

    def _wait(self, due: float) -> bool:
        """Wait for a worker's exit or a foreign commit, at most until *due*. Return False once closed."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        watched: dict[int, Worker] = {}
        for worker in self._look_at_workers():
            if worker.exit_reported:
                continue
            fd = worker.control.fileno()
            if fd < 0:  # It did not answer.
                self._report_exit(worker)
            else:
                poll.register(fd, 0)  # A hang-up is always reported.
                watched[fd] = worker
        seconds = min(_POLL_SECONDS, max(0.0, due - time.monotonic()))
        for fd, _ in poll.poll(seconds * 1000):
            if fd == self._wake:
                os.eventfd_read(self._wake)
            else:
                self._report_exit(watched[fd])
        return not self._stopped

    # Portals --------------------------------------------------------------------------------

    def _watch_commits(self, own: OwnProcesses) -> CommitWatch | None:
        try:
            return CommitWatch("userspace-watch", own, self._judge, self._families, self._damaged)
        except OSError as error:
            log.warning("cannot watch nf_tables commits", extra={"fields": {"error": str(error)}})
            return None

    def _judge(self, commit: Commit) -> None:
        damage, suspicions = commit.summary(_concerns_portals), commit.summary(_may_delete_jump)
        for family in list(self._families):
            if family in damage:
                self._damaged(family, damage[family])
            elif family in suspicions:
                self._suspicions[family] = suspicions[family]
        if self._suspicions:
            os.eventfd_write(self._wake, 1)

    def _check_portals(self, families: Iterable[Family]) -> None:
        for family in families:
            suspicion = self._suspicions.pop(family, "")
            state = self._families[family]
            try:
                if not state.is_intact():
                    self._damaged(family, suspicion or "portals are missing")
                state.close_departed()
            except HostError as error:
                log.warning("could not check portals", extra={"fields": {"error": str(error)}})
                if suspicion:  # A sync is retried until it succeeds.
                    self._damaged(family, suspicion)

    # Workers --------------------------------------------------------------------------------

    def _look_at_workers(self) -> list[Worker]:
        """Return the running workers. Report exited ones that a sync noticed first and replaced."""
        before, self._watched = self._watched, self._workers.running()
        for worker in before:
            if worker not in self._watched and not worker.exit_reported:
                self._report_exit(worker)
        return self._watched

    def _report_exit(self, worker: Worker) -> None:
        worker.exit_reported = True
        self._shortages.pop(worker.process.pid, None)  # which may return
        log.error("relay worker exited", extra={"fields": {"pid": worker.process.pid}})
        for family in list(self._families):
            self._damaged(family, "a relay worker exited")

    def _check_shortage(self, worker: Worker) -> None:
        count, now = worker.counts[Counter.SHORTAGES], time.monotonic()
        reported, last = self._shortages.get(worker.process.pid, (0, -_SHORTAGE_SECONDS))
        if count > reported and now - last >= _SHORTAGE_SECONDS:
            self._shortages[worker.process.pid] = count, now
            log.warning("relay worker out of file descriptors, memory or local ports", extra={"fields": {
                "pid": worker.process.pid, "connections": worker.counts[Counter.CONNECTIONS],
                "shortages": count - reported,
            }})  # fmt: skip


def _concerns_portals(change: Change) -> bool:
    if change.table == TABLE or (change.table, change.name) in OUR_CHAINS:
        return True
    # "Added": flags changed, such as dormant.
    return change.table in _IPTABLES and change.kind in (ChangeKind.TABLE_ADDED, ChangeKind.TABLE_DELETED)


def _may_delete_jump(change: Change) -> bool:
    """Return whether a jump to our chains may be deleted: the contents of rules are not announced."""
    return change.kind is ChangeKind.RULE_DELETED and (change.table, change.name) in _BUILT_IN
