"""Slow answers: which is made next, and for whom. No I/O, no threads."""

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

from msgspec import Struct, field

from kproxy_core.observe.http.messages import Request, Slow, Turn

_Client = TypeVar("_Client", bound=Hashable)

_MOST_WAITING = 16
"""Answers that wait to be made."""
_REST_SHARE = 4
"""Rest this many times as long as an answer took: answers cost at most a fifth of one CPU."""
_LONGEST_REST = 10.0
"""Seconds."""


class Job(Struct, Generic[_Client], eq=False):
    """One answer, and the clients that wait for it."""

    request: Request
    slow: Slow
    clients: dict[_Client, None] = field(default_factory=dict)
    abandoned: threading.Event = field(default_factory=threading.Event)
    """Set once no client waits."""


class SlowAnswers(Generic[_Client]):
    """Makes one answer at a time, each for all clients that want the same. All methods belong to one thread.

    A client that has gone waits for nothing: its answer is not made. Those of `Turn.FIRST` rest for their own
    kind's cost only, so that requests for pages do not delay a scrape.
    """

    def __init__(self) -> None:
        self._waiting: list[Job[_Client]] = []
        self._of: dict[_Client, Job[_Client]] = {}
        """The job of each client."""
        self._making: Job[_Client] | None = None
        """Apart from those of `Turn.AT_ONCE`."""
        self._first_at = self._next_at = 0.0
        """Times from which an answer of `Turn.FIRST`, and any other, may be made."""

    def add(self, request: Request, slow: Slow, client: _Client) -> bool:
        """Have *client* wait for an answer. Return False if too many wait."""
        job = next((job for job in self._waiting
                    if slow.same is not None and job.slow.same == slow.same), None)  # fmt: skip
        if job is None:
            if len(self._waiting) >= _MOST_WAITING and slow.turn is Turn.IN_ORDER:
                return False
            job = Job[_Client](request, slow)
            self._waiting.append(job)
        job.clients[client] = None
        self._of[client] = job
        return True

    def leave(self, client: _Client) -> None:
        """Have *client* wait no more."""
        job = self._of.pop(client, None)
        if job is None:
            return
        del job.clients[client]
        if not job.clients:
            job.abandoned.set()
            if job in self._waiting:
                self._waiting.remove(job)

    def take(self, now: float) -> Job[_Client] | None:
        """Return the answer to be made next, if it may be made now."""
        job = self._next(now)
        if job is not None:
            self._waiting.remove(job)
            if job.slow.turn is not Turn.AT_ONCE:
                self._making = job
        return job

    def made(self, job: Job[_Client], cost: float, now: float) -> list[_Client]:
        """Take note that *job* has been made for *cost* seconds. Return the clients that still wait."""
        if self._making is job:
            self._making = None
        rest = min(_REST_SHARE * cost, _LONGEST_REST)
        self._next_at = max(self._next_at, now) + rest
        if job.slow.turn is Turn.FIRST:
            self._first_at = now + rest
        clients = list(job.clients)
        for client in clients:
            self.leave(client)
        return clients

    def next_at(self) -> float | None:
        """Return the time at which `take` returns an answer, unless something else happens; None: never."""
        times = [self._start(job) for job in self._waiting]
        return min((at for at in times if at is not None), default=None)

    def _next(self, now: float) -> Job[_Client] | None:
        ready = [job for job in self._waiting if (at := self._start(job)) is not None and at <= now]
        return min(ready, key=lambda job: job.slow.turn.value, default=None)

    def _start(self, job: Job[_Client]) -> float | None:
        """Return the time from which *job* may be made; None: once another is done."""
        if job.slow.turn is Turn.AT_ONCE:
            return 0.0
        if self._making is not None:
            return None
        return self._first_at if job.slow.turn is Turn.FIRST else self._next_at
