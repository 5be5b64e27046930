"""The CPU time of a scrape with ``trafficMetrics``, and of the reading before it.

    .venv/bin/python -m tests.bench.scrapes [PAIRS [accounting]]

As root: the counts of the ebpf mode are read from a BPF map, which no program uses. Those of rules are in
memory. *accounting*: programs count packets and bytes, too. *moving*: each pair of frontend and endpoint had
a connection since the last reading.
"""

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from kproxy_conformance.processes import own_name
from kproxy_core.contract.values import Connections
from kproxy_core.model.address import Address, Family, Protocol
from kproxy_core.model.service import Destination, ServicePortKey
from kproxy_core.observe.metrics import Metrics
from kproxy_core.observe.traffic.recorder import FrontendOwners, StoredTotals, TrafficRecorder
from kproxy_core.observe.traffic.series import TrafficCollector
from kproxy_core.plan.service_plan import Frontend, ServicePlan
from kproxy_ebpf.batch import endpoint_value, frontend_key
from kproxy_ebpf.kernel import bpf
from kproxy_ebpf.settings import Settings
from kproxy_ebpf.traffic import Traffic

ROUNDS = 9
_LRU_HASH = 9

Read = Callable[[Family], Sequence[Connections]]


class Pair:
    """One Service with one endpoint, and its connections."""

    def __init__(self, number: int) -> None:
        low = bytes(divmod(number, 250))
        self.key = ServicePortKey("default", f"service-{number}", "http", Protocol.TCP)
        self.address = Address(bytes([10, 96]) + low)
        self.frontend = Frontend(self.address, Protocol.TCP, 80)
        self.endpoint = Destination(Address(bytes([10, 1]) + low), 8080)
        self.connections = 1 + number % 7

    def plan(self) -> ServicePlan:
        return ServicePlan(
            key=self.key, family=Family.IPV4, created="", port=80, cluster_ip=self.address,
            cluster=(self.endpoint,), has_endpoints=True)

    def element(self, *, accounting: bool) -> tuple[bytes, bytes]:
        """Return key and value of the map of programs."""
        made = self.connections
        volume = [700 * made, 5000 * made, 5 * made, 4 * made] if accounting else [0] * 4
        numbers = [made, 0, 0, 0, *volume, made, *([0] * 7), 2000 * made]
        key = frontend_key(self.address, Protocol.TCP, 80) + endpoint_value(self.endpoint, is_local=False)
        return key, b"".join(number.to_bytes(8, sys.byteorder) for number in numbers)


@contextmanager
def _programs(pairs: Sequence[Pair], accounting: bool) -> Iterator[tuple[Read, Callable[[], None]]]:
    """Yield a function that reads counts, and one that brings them up to date."""
    key, value = pairs[0].element(accounting=accounting)
    definition = bpf.MapDefinition(_LRU_HASH, len(key), len(value), 32768, 0)
    counts = bpf.create_map("kproxy_bench", definition)

    @contextmanager
    def pinned(_: Settings) -> Iterator[Any]:
        yield SimpleNamespace(elements=lambda name: bpf.elements(counts, definition))

    with mock.patch("kproxy_ebpf.traffic.pinned_maps", pinned):
        yield Traffic(Settings()).read, lambda: bpf.update_all(
            counts, dict(pair.element(accounting=accounting) for pair in pairs))
    os.close(counts)


@contextmanager
def _rules(pairs: Sequence[Pair], _: bool) -> Iterator[tuple[Read, Callable[[], None]]]:
    def read(family: Family) -> Sequence[Connections]:
        return [Connections(pair.frontend, pair.endpoint, pair.connections) for pair in pairs
                if family is Family.IPV4]

    yield read, lambda: None


def main(number: int, accounting: bool) -> None:
    """Print medians of seconds."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # As the process does.
    pairs = [Pair(one) for one in range(number)]
    for name, source in (("rules", _rules), ("ebpf", _programs)):
        for level in ("service", "endpoint"):
            with source(pairs, accounting) as (read, update):
                for moving in (True, False):
                    found = _measure(pairs, read, update, endpoints=level == "endpoint", moving=moving)
                    print(f"{name:5} {level:8} {'moving' if moving else 'still':6}", found)


def _measure(
    pairs: Sequence[Pair], read: Read, update: Callable[[], None], *, endpoints: bool, moving: bool
) -> str:
    owners = FrontendOwners(tuple(Family), time.monotonic)
    steps = [SimpleNamespace(key=pair.key, before=None, after=pair.plan()) for pair in pairs]
    owners.sync_succeeded(SimpleNamespace(family=Family.IPV4, steps=steps))  # type: ignore[arg-type]
    instance: Any = SimpleNamespace(mode="bench", traffic=read)
    metrics = Metrics("bench", "")
    reading: list[float] = []
    writing: list[float] = []
    with tempfile.TemporaryDirectory(prefix=f"{own_name('bench')}-") as directory:
        recorder = TrafficRecorder(tuple(Family), instance, owners, StoredTotals(directory), time.monotonic)
        with mock.patch.multiple(recorder.failures, start=mock.DEFAULT, read=mock.DEFAULT):
            recorder.start()
            metrics.registry.register(TrafficCollector(recorder, endpoints=endpoints, limit=10_000))
            for _ in range(ROUNDS):
                for pair in pairs if moving else ():
                    pair.connections += 1
                update()
                begun = time.thread_time()
                recorder.read(fresh=0.0)
                read_at = time.thread_time()
                metrics.exposition()
                reading.append(read_at - begun)
                writing.append(time.thread_time() - read_at)
            size = len(metrics.exposition()[0]) / 1e6
            recorder.stop()
    parts = statistics.median(reading), statistics.median(writing)
    return "reading {:.3f} s, writing {:.3f} s, both {:.3f} s, {:.1f} MB".format(*parts, sum(parts), size)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000, "accounting" in sys.argv)
