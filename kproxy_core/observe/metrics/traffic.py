"""Metrics of the traffic of Services, with a limited number of series."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import sub
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.registry import Collector

from kproxy_core.backend.api import Handshake
from kproxy_core.model.address import format_socket
from kproxy_core.model.service import ServicePortKey
from kproxy_core.traffic.recorder import TrafficRecorder
from kproxy_core.traffic.totals import Total

_SERVICE = ("namespace", "service", "port", "protocol")

OTHER = "other"
"""Value of the label ``service`` of the series that sums up all those beyond the limit."""

_RANGES = tuple(handshake for handshake in Handshake if handshake is not Handshake.MICROSECONDS)
_SERIES_OF_HISTOGRAM = len(_RANGES) + 2


class _Series(NamedTuple):
    metric: str
    labels: tuple[str, ...]
    values: tuple[int, ...]
    """One number of a counter; of a histogram one for each `Handshake`."""


class LimitedSeries:
    """The listed series, and the sums of all others. No sum ever falls."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._listed: set[tuple[str, tuple[str, ...]]] = set()
        self._summed: dict[tuple[str, tuple[str, ...]], tuple[int, ...]] = {}
        """Series in the sums, with the values that the sum of their metric contains."""
        self._sums: dict[tuple[str, str], tuple[int, ...]] = {}
        """By metric and outcome or reason, if the metric has one."""

    @property
    def summed(self) -> int:
        """Series that are not listed now."""
        return len(self._summed)

    def choose(self, series: Sequence[_Series]) -> Iterator[_Series]:
        """Yield the listed ones of *series*, then the sums. A series is listed if there was room at first."""
        names = [one[:2] for one in series]
        present = set(names)
        self._listed &= present
        for gone in self._summed.keys() - present:
            del self._summed[gone]
        grown: dict[tuple[str, str], list[tuple[int, ...]]] = {}
        shrunk: dict[tuple[str, str], list[tuple[int, ...]]] = {}
        for name, one in zip(names, series, strict=True):
            if name in self._listed:
                yield one
            elif name not in self._summed and len(self._listed) < self._limit:
                self._listed.add(name)
                yield one
            elif (before := self._summed.get(name)) != one.values:
                of = one.metric, one.labels[-1] if _METRICS[one.metric][1][-1] in _DIVIDING else ""
                grown.setdefault(of, []).append(one.values)
                if before is not None:
                    shrunk.setdefault(of, []).append(before)
                self._summed[name] = one.values
        for of, rows in grown.items():
            none = (0,) * len(rows[0])
            sums = _added(self._sums.get(of, none), *rows)
            self._sums[of] = tuple(map(sub, sums, _added(none, *shrunk.get(of, ()))))
        for (metric, last), values in self._sums.items():
            empty = [""] * (len(_METRICS[metric][1]) - 2 - bool(last))
            yield _Series(metric, ("", OTHER, *empty, *filter(None, (last,))), values)


def _added(*rows: tuple[int, ...]) -> Iterator[int]:
    """Return the sum of each column."""
    return map(sum, zip(*rows, strict=True))


SERVICE_CONNECTIONS = "kproxy_service_connections"
SERVICE_FAILURES = "kproxy_service_failures"
SERVICE_BYTES = "kproxy_service_bytes"
SERVICE_PACKETS = "kproxy_service_packets"
ENDPOINT_CONNECTIONS = "kproxy_endpoint_connections"
ENDPOINT_FAILURES = "kproxy_endpoint_failures"
ENDPOINT_BYTES = "kproxy_endpoint_bytes"
ENDPOINT_PACKETS = "kproxy_endpoint_packets"
SERVICE_HANDSHAKES = "kproxy_service_handshake_duration_seconds"
ENDPOINT_HANDSHAKES = "kproxy_endpoint_handshake_duration_seconds"
_DIVIDING = ("outcome", "reason", "direction")
"""Labels whose values are summed up apart."""
_METRICS = {
    SERVICE_CONNECTIONS: ("New connections to Services, or flows of UDP, by outcome", (*_SERVICE, "outcome")),
    SERVICE_FAILURES: ("Forwarded TCP connections that failed, by reason", (*_SERVICE, "reason")),
    ENDPOINT_CONNECTIONS: (
        "New connections, or flows of UDP, forwarded to endpoints", (*_SERVICE, "endpoint")),
    ENDPOINT_FAILURES: (
        "TCP connections to endpoints that failed, by reason", (*_SERVICE, "endpoint", "reason")),
    SERVICE_BYTES: ("Bytes between clients and Services, by direction", (*_SERVICE, "direction")),
    SERVICE_PACKETS: ("Packets between clients and Services, by direction", (*_SERVICE, "direction")),
    ENDPOINT_BYTES: (
        "Bytes between clients and endpoints, by direction", (*_SERVICE, "endpoint", "direction")),
    ENDPOINT_PACKETS: (
        "Packets between clients and endpoints, by direction", (*_SERVICE, "endpoint", "direction")),
    SERVICE_HANDSHAKES: ("Duration of TCP handshakes with endpoints of Services", _SERVICE),
    ENDPOINT_HANDSHAKES: ("Duration of TCP handshakes with endpoints", (*_SERVICE, "endpoint")),
}  # fmt: skip


class TrafficCollector(Collector):
    """Connections by service port, and with *endpoints* by endpoint."""

    def __init__(self, recorder: TrafficRecorder, *, endpoints: bool, limit: int) -> None:
        self._recorder = recorder
        self._endpoints = endpoints
        self._counters = LimitedSeries(limit)
        self._histograms = LimitedSeries(max(1, limit // (4 * _SERIES_OF_HISTOGRAM)))
        """A quarter as many series, of their own: each would displace ten counters."""
        self._lock = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            return list(self._collect())

    def _collect(self) -> Iterator[Metric]:
        totals = self._recorder.read()
        families = {
            name: Metric(name, about, "histogram" if name.endswith("_seconds") else "counter")
            for name, (about, _) in _METRICS.items() if self._endpoints or name.startswith("kproxy_service_")
        }
        counters: list[_Series] = []
        histograms: list[_Series] = []
        for one in _series(totals, endpoints=self._endpoints):
            (counters if len(one.values) == 1 else histograms).append(one)
        for metric, named, (value,) in self._counters.choose(counters):
            labels = dict(zip(_METRICS[metric][1], named, strict=True))
            families[metric].add_sample(f"{metric}_total", labels, value)
        for metric, named, (*counts, microseconds) in self._histograms.choose(histograms):
            labels = dict(zip(_METRICS[metric][1], named, strict=True))
            for bound, count in zip(_RANGES, accumulate(counts), strict=True):
                families[metric].add_sample(f"{metric}_bucket", {**labels, "le": bound.value}, count)
            families[metric].add_sample(f"{metric}_count", labels, sum(counts))
            families[metric].add_sample(f"{metric}_sum", labels, microseconds / 1_000_000)
        yield from families.values()
        lost = Metric("kproxy_conntrack_events_lost", "Times that events of connection tracking were lost",
                      "counter")
        lost.add_sample("kproxy_conntrack_events_lost_total", {}, self._recorder.failures.lost)
        yield lost
        summed = Metric("kproxy_traffic_series_summed", "Series beyond maxSeries, summed in 'other'", "gauge")
        number = self._counters.summed + self._histograms.summed * _SERIES_OF_HISTOGRAM
        summed.add_sample("kproxy_traffic_series_summed", {}, number)
        yield summed

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering must not read any counts."""
        return ()


def _series(totals: Mapping[ServicePortKey, Total], *, endpoints: bool) -> Iterator[_Series]:
    for key, total in totals.items():
        labels = key.namespace, key.name, key.port_name, key.protocol.name
        if total.forwarded:
            yield _Series(SERVICE_CONNECTIONS, (*labels, "forwarded"), (total.forwarded,))
        if total.rejected:
            yield _Series(SERVICE_CONNECTIONS, (*labels, "rejected"), (total.rejected,))
        for failure, number in list(total.failed.items()):
            yield _Series(SERVICE_FAILURES, (*labels, failure.value), (number,))
        yield from _volume(SERVICE_PACKETS, SERVICE_BYTES, labels, total.volume)
        if total.handshakes:
            yield _Series(SERVICE_HANDSHAKES, labels, tuple(total.handshakes))
        for where, to in list(total.endpoints.items()) if endpoints else ():
            name = format_socket(*where)
            yield _Series(ENDPOINT_CONNECTIONS, (*labels, name), (to.forwarded,))
            for failure, number in list(to.failed.items()):
                yield _Series(ENDPOINT_FAILURES, (*labels, name, failure.value), (number,))
            yield from _volume(ENDPOINT_PACKETS, ENDPOINT_BYTES, (*labels, name), to.volume)
            if to.handshakes:
                yield _Series(ENDPOINT_HANDSHAKES, (*labels, name), tuple(to.handshakes))


def _volume(packets: str, octets: str, labels: tuple[str, ...], volume: Sequence[int]) -> Iterator[_Series]:
    """Yield the four series of one volume; none while it is empty, as where the kernel does not count."""
    for first, metric in enumerate((packets, octets)):
        numbers = volume[first::2]
        if any(numbers):
            for direction, number in zip(("to_endpoint", "from_endpoint"), numbers, strict=True):
                yield _Series(metric, (*labels, direction), (number,))
