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

_SERVICE = ("namespace", "service", "port", "protocol", "outcome")
_ENDPOINT = ("namespace", "service", "port", "protocol", "endpoint")

OTHER = "other"
"""Value of the label ``service`` of the series that sums up all those beyond the limit."""


class _Series(NamedTuple):
    metric: str
    labels: tuple[str, ...]
    value: int


class LimitedSeries:
    """Which series are listed, and the sums of all others. No sum ever falls."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._listed: set[tuple[str, tuple[str, ...]]] = set()
        self._summed: dict[tuple[str, tuple[str, ...]], int] = {}
        """Series in the sums, with the value that the sum of their metric contains."""
        self._sums: dict[tuple[str, str], int] = {}
        """By metric and outcome ("" for endpoints)."""

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
                of = one.metric, one.labels[-1] if one.metric == SERVICE_CONNECTIONS else ""
                self._sums[of] = self._sums.get(of, 0) + one.value - self._summed.get(name, 0)
                self._summed[name] = one.value
        for (metric, last), value in self._sums.items():
            yield _Series(metric, ("", OTHER, "", "", last), value)


SERVICE_CONNECTIONS = "kproxy_service_connections"
ENDPOINT_CONNECTIONS = "kproxy_endpoint_connections"


class TrafficCollector(Collector):
    """Connections by service port, and with *endpoints* by endpoint."""

    def __init__(self, recorder: TrafficRecorder, *, endpoints: bool, limit: int) -> None:
        self._recorder = recorder
        self._endpoints = endpoints
        self._series = LimitedSeries(limit)
        self._lock = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        """Return the families of all metrics."""
        with self._lock:
            return list(self._collect())

    def _collect(self) -> Iterator[Metric]:
        series = list(_series(self._recorder.read(), endpoints=self._endpoints))
        families = {
            SERVICE_CONNECTIONS: Metric(
                SERVICE_CONNECTIONS, "New connections to Services, or flows of UDP, by outcome", "counter"),
            ENDPOINT_CONNECTIONS: Metric(
                ENDPOINT_CONNECTIONS, "New connections, or flows of UDP, forwarded to endpoints", "counter"),
        }
        for metric, values, value in self._series.choose(series):
            names = _SERVICE if metric == SERVICE_CONNECTIONS else _ENDPOINT
            families[metric].add_sample(
                f"{metric}_total", dict(zip(names, values, strict=True)), value)
        yield families[SERVICE_CONNECTIONS]
        if self._endpoints:
            yield families[ENDPOINT_CONNECTIONS]
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
        if total.refused:
            yield _Series(SERVICE_CONNECTIONS, (*labels, "refused"), total.refused)
        if endpoints:
            for where, to in list(total.endpoints.items()):
                yield _Series(ENDPOINT_CONNECTIONS, (*labels, format_socket(*where)), to.forwarded)
