"""The last syncs, for people."""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kproxy_core.model.address import Family
from kproxy_core.sync.observer import Synced, SyncFailure, SyncObserver

_KEPT = 120
_NAMED = 5
"""Service ports of a sync that are named."""


class SyncRecord(NamedTuple):
    """One sync that wrote something, or failed."""

    at: float
    """Seconds since the epoch."""
    family: Family
    scope: str
    seconds: float
    operations: int
    changed: int
    """Service ports that changed."""
    names: tuple[str, ...]
    """The first of them."""
    problem: str
    """"": it succeeded, and everything is served."""


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
            self._wall(), synced.family, synced.scope.value, synced.seconds, synced.report.operations,
            len(synced.steps), names, synced.problem))

    def sync_failed(self, failure: SyncFailure) -> None:
        self._kept.append(SyncRecord(
            self._wall(), failure.family, failure.scope.value, failure.seconds, 0, 0, (), str(failure.error)))
