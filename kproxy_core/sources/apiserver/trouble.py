"""Says once what is wrong with an API server, however many threads meet it and however often."""

import logging
import threading

log = logging.getLogger("kproxy.sources")

_MOST_REMEMBERED = 50


class Trouble:
    """What is wrong, of all kinds that are followed together. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._met: dict[str, set[str]] = {}
        """What each resource has met since it was last followed."""
        self._missing: set[str] = set()

    def met(self, resource: str, problem: str, retry_in: float) -> None:
        """*resource* can't be followed; it is tried again in so many seconds."""
        with self._lock:
            known = any(problem in problems for problems in self._met.values())
            problems = self._met.setdefault(resource, set())
            if not known and len(problems) >= _MOST_REMEMBERED:
                problems.clear()
            problems.add(problem)
        if not known:
            log.warning("can't follow the API server", extra={"fields": {
                "resource": resource, "problem": problem, "retry_in": round(retry_in, 1)}})

    def missing(self, resource: str, problem: str) -> None:
        """*resource* is not to be had from this server, which is no trouble."""
        with self._lock:
            known = resource in self._missing
            self._missing.add(resource)
        if not known:
            log.info("the API server does not show this, and it is not needed",
                     extra={"fields": {"resource": resource, "answer": problem}})

    def over(self, resource: str) -> None:
        """*resource* is followed."""
        with self._lock:
            self._missing.discard(resource)
            last = self._met.pop(resource, None) is not None and not self._met
        if last:
            log.info("following the API server again")
