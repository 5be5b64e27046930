"""Metrics of the traffic of Services, with a limited number of series."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.registry import Collector

from kproxy_core.model.address import format_socket
from kproxy_core.model.service import ServicePortKey
from kproxy_core.traffic.recorder import TrafficRecorder
from kproxy_core.traffic.totals import Total

_SERVICE = ("namespace", "service", "port", "protocol")

OTHER = "other"
"""Value of the label ``service`` of the series that sums up all those beyond the limit."""


class _Series(NamedTuple):
    metric: str
    labels: tuple[str, ...]
    value: int


class LimitedSeries:
    """The listed series, and the sums of all others. No sum ever falls."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._listed: set[tuple[str, tuple[str, ...]]] = set()
        self._summed: dict[tuple[str, tuple[str, ...]], int] = {}
        """Series in the sums, with the value that the sum of their metric contains."""
        self._sums: dict[tuple[str, str], int] = {}
        """By metric and outcome or reason, if the metric has one."""

    @property
    def summed(self) -> int:
        """Series that are not listed now."""
        return len(self._summed)

    def choose(self, series: Sequence[_Series]) -> Iterator[_Series]:
        """Yield the listed ones of *series*, then the sums. A series is listed if there was room at first."""
        present = {one[:2] for one in series}
        self._listed &= present
        for gone in self._summed.keys() - present:
            del self._summed[gone]
        for one in series:
            name = one[:2]
            if name in self._listed:
                yield one
            elif name not in self._summed and len(self._listed) < self._limit:
                self._listed.add(name)
                yield one
            else:
                of = one.metric, one.labels[-1] if _METRICS[one.metric][1][-1] != "endpoint" else ""
                self._sums[of] = self._sums.get(of, 0) + one.value - self._summed.get(name, 0)
                self._summed[name] = one.value
        for (metric, last), value in self._sums.items():
            between = [""] * (len(_METRICS[metric][1]) - len(_SERVICE) - 1)
            yield _Series(metric, ("", OTHER, "", "", *between, last), value)


SERVICE_CONNECTIONS = "kproxy_service_connections"
SERVICE_FAILURES = "kproxy_service_failures"
SERVICE_BYTES = "kproxy_service_bytes"
SERVICE_PACKETS = "kproxy_service_packets"
ENDPOINT_CONNECTIONS = "kproxy_endpoint_connections"
ENDPOINT_FAILURES = "kproxy_endpoint_failures"
ENDPOINT_BYTES = "kproxy_endpoint_bytes"
ENDPOINT_PACKETS = "kproxy_endpoint_packets"
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
}  # fmt: skip


class TrafficCollector(Collector):
    """Connections by service port, and with *endpoints* by endpoint."""

    def __init__(self, recorder: TrafficRecorder, *, endpoints: bool, limit: int) -> None:
        self._recorder = recorder
        self._endpoints = endpoints
        self._series = LimitedSeries(limit)
        self._lock = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            return list(self._collect())

    def _collect(self) -> Iterator[Metric]:
        series = list(_series(self._recorder.read(), endpoints=self._endpoints))
        families = {
            name: Metric(name, about, "counter") for name, (about, _) in _METRICS.items()
            if self._endpoints or name.startswith("kproxy_service_")
        }
        for metric, values, value in self._series.choose(series):
            labels = dict(zip(_METRICS[metric][1], values, strict=True))
            families[metric].add_sample(f"{metric}_total", labels, value)
        yield from families.values()
        lost = Metric("kproxy_conntrack_events_lost", "Times that events of connection tracking were lost",
                      "counter")
        lost.add_sample("kproxy_conntrack_events_lost_total", {}, self._recorder.failures.lost)
        yield lost
        summed = Metric("kproxy_traffic_series_summed", "Series beyond maxSeries, summed in 'other'", "gauge")
        summed.add_sample("kproxy_traffic_series_summed", {}, self._series.summed)
        yield summed

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering must not read any counts."""
        return ()


def _series(totals: Mapping[ServicePortKey, Total], *, endpoints: bool) -> Iterator[_Series]:
    for key, total in totals.items():
        labels = key.namespace, key.name, key.port_name, key.protocol.name
        if total.forwarded:
            yield _Series(SERVICE_CONNECTIONS, (*labels, "forwarded"), total.forwarded)
        if total.rejected:
            yield _Series(SERVICE_CONNECTIONS, (*labels, "rejected"), total.rejected)
        for failure, number in list(total.failed.items()):
            yield _Series(SERVICE_FAILURES, (*labels, failure.value), number)
        yield from _volume(SERVICE_PACKETS, SERVICE_BYTES, labels, total.volume)
        for where, to in list(total.endpoints.items()) if endpoints else ():
            name = format_socket(*where)
            yield _Series(ENDPOINT_CONNECTIONS, (*labels, name), to.forwarded)
            for failure, number in list(to.failed.items()):
                yield _Series(ENDPOINT_FAILURES, (*labels, name, failure.value), number)
            yield from _volume(ENDPOINT_PACKETS, ENDPOINT_BYTES, (*labels, name), to.volume)


def _volume(packets: str, octets: str, labels: tuple[str, ...], volume: Sequence[int]) -> Iterator[_Series]:
    """Yield the four series of one volume; none while it is empty, as where the kernel does not count."""
    for first, metric in enumerate((packets, octets)):
        numbers = volume[first::2]
        if any(numbers):
            for direction, number in zip(("to_endpoint", "from_endpoint"), numbers, strict=True):
                yield _Series(metric, (*labels, direction), number)
