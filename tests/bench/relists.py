"""The spread of the lists that nodes send to an API server which was away and lost its history.

    .venv/bin/python -m tests.bench.relists

Needs no privileges and takes a minute. The first rows come from 300 reflectors, a thread each, and the API
server of the tests, which share one interpreter; the others from the same delays without clients or time.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence

from kproxy_conformance.apiserver import objects
from kproxy_conformance.apiserver.server import Server
from kproxy_conformance.apiserver.store import Store
from kproxy_core.kube.access import CurrentAccess
from kproxy_core.kube.decode import ENDPOINT_SLICES
from kproxy_core.kube.reflector import RELIST_SPREAD, ProblemLog, Reflector
from kproxy_core.kube.requests import ApiRequests
from kproxy_core.kube.transport import JSON, Response
from kproxy_core.model.timing import Backoff, TokenBucket

CLIENTS, NODES = 300, 5000
AWAY = (1.0, 10.0, 60.0)
"""Seconds without a server."""
SPREADS = (RELIST_SPREAD, 0.0)


def main() -> None:
    """Print a table."""
    print("                nodes  away  spread  busiest 0.1 s   90% of lists in")
    for away in AWAY[:2]:
        _report("clients", CLIENTS, away, RELIST_SPREAD, _followed(away))
    for nodes in (CLIENTS, NODES):
        for away in AWAY:
            for spread in SPREADS:
                times = [_simulated(away, spread) for _ in range(nodes)]
                _report("simulation", nodes, away, spread, times)


def _report(how: str, nodes: int, away: float, spread: float, times: Sequence[float]) -> None:
    assert len(times) == nodes, f"{len(times)} lists"
    ordered = sorted(times)
    busiest = max(Counter(int(at * 10) for at in times).values())
    most = ordered[nodes * 95 // 100] - ordered[nodes * 5 // 100]
    print(f"{how:14} {nodes:6} {away:3.0f} s {spread:5.0f} s "
          f"{busiest:6} ({busiest / nodes:4.0%}) {most:14.2f} s")


def _simulated(away: float, spread: float) -> float:
    """Return the seconds after which a node lists again whose watch breaks as the server goes *away*."""
    backoff = Backoff(random.random)
    at = backoff.delay(lasted=300.0)
    while at < away:
        at += backoff.delay()
    return at + spread * random.random()


class _Requests(ApiRequests):
    """Requests that note when everything is asked for."""

    def __init__(self, access: CurrentAccess, times: list[float]) -> None:
        super().__init__(access, TokenBucket(0.0, 10), lambda request: None, JSON)
        self._times = times

    def watch(self, target: str) -> Response:
        response = super().watch(target)
        if "sendInitialEvents" in target:
            self._times.append(time.monotonic())
        return response


def _followed(away: float) -> list[float]:
    """Return when clients of a server list again that is *away* for so long, in seconds from its stop."""
    store = Store(objects.generate(objects.Options(services=10)))
    server = Server(("127.0.0.1", 0), store)
    server.start()
    access = CurrentAccess(f"http://127.0.0.1:{server.port}", None)
    times: list[float] = []
    reflectors = [
        Reflector(ENDPOINT_SLICES, {}, _Requests(access, times), lambda events: None, ProblemLog(),
                  random.random)
        for _ in range(CLIENTS)
    ]  # fmt: skip
    for reflector in reflectors:
        threading.Thread(target=reflector.run, daemon=True).start()
    _wait_for(times)
    time.sleep(6)  # from then on a watch that breaks was a good one
    times.clear()
    stopped = time.monotonic()
    server.stop()
    time.sleep(away)
    server = Server(("127.0.0.1", server.port), store)
    server.start()
    _wait_for(times)
    for reflector in reflectors:
        reflector.stop()
    server.stop()
    return [at - stopped for at in times]


def _wait_for(times: Sequence[float]) -> None:
    while len(times) < CLIENTS:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
