"""Logs each problem with an API server once, however many threads meet it and however often."""

import logging
import threading

log = logging.getLogger("kproxy.sources")

_MOST_REMEMBERED = 50


class Trouble:
    """The problems of all kinds that are followed together. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._problems: dict[str, set[str]] = {}
        """Problems of each resource since it was last followed."""
        self._not_served: set[str] = set()

    def failed(self, resource: str, problem: str, retry_in: float) -> None:
        """Log *problem*, because of which *resource* is followed only after *retry_in* seconds."""
        with self._lock:
            known = any(problem in problems for problems in self._problems.values())
            problems = self._problems.setdefault(resource, set())
            if not known and len(problems) >= _MOST_REMEMBERED:
                problems.clear()
            problems.add(problem)
        if not known:
            log.warning("cannot follow the API server", extra={"fields": {
                "resource": resource, "problem": problem, "retry_in": round(retry_in, 1)}})

    def not_served(self, resource: str, answer: str) -> None:
        """Log that the server does not serve *resource*, which is optional."""
        with self._lock:
            known = resource in self._not_served
            self._not_served.add(resource)
        if not known:
            log.info("optional resource not served by the API server",
                     extra={"fields": {"resource": resource, "answer": answer}})

    def recovered(self, resource: str) -> None:
        """Log that the server is followed again, once all resources are."""
        with self._lock:
            self._not_served.discard(resource)
            last = self._problems.pop(resource, None) is not None and not self._problems
        if last:
            log.info("following the API server again")
