"""The last syncs, for operators."""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kproxy_core.sync.observer import Synced, SyncFailure, SyncObserver

log = logging.getLogger("kproxy.run")

_KEPT = 120
_NAMED = 5
"""Limit for the service ports named in a record."""
_LOGGED = 20
"""Limit for the service ports named in a log line."""


class SyncRecord(NamedTuple):
    """One sync that wrote something, or failed."""

    at: float
    """Seconds since the epoch."""
    family: str
    scope: str
    seconds: float
    operations: int
    changed: int
    """Service ports that changed."""
    names: tuple[str, ...]
    """Names of the first changed service ports."""
    problem: str
    """"": it succeeded, and everything is served."""


class ChangeLog(SyncObserver):
    """Logs each sync that changed service ports, with their names."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._number = 0

    def sync_succeeded(self, synced: Synced) -> None:
        if not synced.steps:
            return
        self._number += 1
        if log.isEnabledFor(logging.DEBUG):
            fields: dict[str, object] = {
                "sync": self._number, "ip_family": synced.family.label, "changed": len(synced.steps),
                "names": [str(step.key) for step in synced.steps[:_LOGGED]],
                "operations": synced.report.operations if synced.report else 0,
            }
            if synced.named:
                fields["objects"] = list(synced.named)
            if synced.trigger_times:
                fields["since_change"] = round(self._wall() - min(synced.trigger_times), 3)
            log.debug("programmed", extra={"fields": fields})


class SyncHistory(SyncObserver):
    """Keeps the last syncs. Any thread may read."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._kept: deque[SyncRecord] = deque(maxlen=_KEPT)

    @property
    def records(self) -> list[SyncRecord]:
        """The last syncs, the newest last."""
        return list(self._kept)

    def sync_succeeded(self, synced: Synced) -> None:
        if synced.report is None:
            return
        names = tuple(str(step.key) for step in synced.steps[:_NAMED])
        self._kept.append(SyncRecord(
            self._wall(), synced.family.label, synced.scope.value, synced.seconds, synced.report.operations,
            len(synced.steps), names, synced.problem))

    def sync_failed(self, failure: SyncFailure) -> None:
        self._kept.append(SyncRecord(
            self._wall(), failure.family.label, failure.scope.value, failure.seconds, 0, 0, (),
            str(failure.error)))
