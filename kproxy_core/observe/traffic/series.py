"""Metrics of the traffic of Services, with a limited number of series."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import sub
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kproxy_core.contract.values import Failure, Handshake
from kproxy_core.model.address import format_socket
from kproxy_core.model.service import Destination, ServicePortKey
from kproxy_core.observe.traffic.recorder import TrafficRecorder
from kproxy_core.observe.traffic.totals import EndpointTotal, Total

_SERVICE = ("namespace", "service", "port", "protocol")
_ENDPOINT = (*_SERVICE, "endpoint")

OTHER = "other"
"""Value of the label ``service`` of the series that sums up all those beyond the limit."""

_BOUNDS = tuple(one.value for one in Handshake if one is not Handshake.MICROSECONDS)
_SERIES_OF_HISTOGRAM = len(_BOUNDS) + 2


@dataclass(frozen=True, slots=True, eq=False)
class _Series:
    """A series that rows have."""

    metric: str
    last: str
    """Value of the metric's last label if it is an outcome, a reason or a direction."""
    numbers: slice
    """Of a row's values: one number of a counter; of a histogram one for each `Handshake`."""
    exists_with: tuple[int, ...]
    """Places of values: the series exists while one of them is not 0. Empty: as long as the row."""


class Chosen(NamedTuple):
    metric: str
    labels: tuple[str, ...]
    values: tuple[int, ...]


Rows = dict[Destination | None, tuple[int, ...]]
"""The numbers of one service port's endpoints and, with None, its own."""


@dataclass(slots=True)
class _State:
    """One row over time."""

    values: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    """Empty until a series is listed."""
    filled: tuple[bool, ...] = ()
    """The values that were not 0 when series were listed last."""
    listed: tuple[_Series, ...] = ()
    others: tuple[_Series, ...] = ()
    summed: tuple[int, ...] = ()
    """The values that the sums contain: 0 for those of listed series. Empty: none."""


class _Sums:
    """The sums over the series that are not listed, of all rows that have the same series."""

    def __init__(self, series: Sequence[_Series]) -> None:
        self.series = series
        self.rows: list[tuple[int, ...]] = []
        """Values to be added up: the earlier sums first."""

    def add_up(self) -> tuple[int, ...]:
        if len(self.rows) > 1:
            self.rows = [tuple(map(sum, zip(*self.rows, strict=True)))]
        return self.rows[0]


class LimitedSeries:
    """The listed series, and the sums of all others. No sum ever falls."""

    def __init__(self, limit: int, service: Sequence[_Series], endpoint: Sequence[_Series]) -> None:
        """*service* and *endpoint*: the series of each service port, and of each endpoint."""
        self._limit = limit
        self._listed = 0
        self.summed = 0
        """Series that are not listed now."""
        self._states: dict[ServicePortKey, dict[Destination | None, _State]] = {}
        self._service, self._endpoint = _Sums(service), _Sums(endpoint)
        self._with_sum: set[_Series] = set()
        """Series that some row had while they were not listed."""

    def update(self, key: ServicePortKey, rows: Rows) -> None:
        """Replace the rows of *key*. A series is listed if there was room at first."""
        states = self._states.setdefault(key, {})
        for endpoint in states.keys() - rows.keys():
            gone = states.pop(endpoint)
            self._listed -= len(gone.listed)
            self.summed -= len(gone.others)
        for endpoint, values in rows.items():
            state = states.get(endpoint)
            if state is None:
                state = states[endpoint] = _State()
            elif state.values == values:
                continue
            state.values = values
            sums = self._service if endpoint is None else self._endpoint
            filled = tuple(map(bool, values))
            if filled != state.filled:
                state.filled = filled
                self._list(state, sums.series, key, endpoint)
            if not state.others and not state.summed:
                continue
            if state.listed:
                hidden = [0] * len(values)
                for one in state.others:
                    hidden[one.numbers] = values[one.numbers]
                values = tuple(hidden)
            grown = tuple(map(sub, values, state.summed or repeat(0)))
            if min(grown) < 0:  # A forgotten endpoint is counted from 0 again.
                grown = tuple([now if more < 0 else more for now, more in zip(values, grown, strict=True)])
            sums.rows.append(grown)
            state.summed = values
        if not rows:
            del self._states[key]

    def chosen(self) -> Iterator[Chosen]:
        """Yield the listed series, then the sums."""
        for states in self._states.values():
            for state in states.values():
                for one in state.listed:
                    yield Chosen(one.metric, (*state.labels, one.last) if one.last else state.labels,
                                 state.values[one.numbers])
        for sums in (self._service, self._endpoint):
            for one in sums.series:
                if one in self._with_sum:
                    empty = [""] * (len(_METRICS[one.metric][1]) - 2 - bool(one.last))
                    yield Chosen(one.metric, ("", OTHER, *empty, *filter(None, (one.last,))),
                                 sums.add_up()[one.numbers])

    def _list(
        self, state: _State, series: Sequence[_Series], key: ServicePortKey, endpoint: Destination | None
    ) -> None:
        """List the series of a row that did not exist before, as far as there is room."""
        values = state.values
        existing = [one for one in series if not one.exists_with or any(values[at] for at in one.exists_with)]
        listed = [one for one in state.listed if one in existing]
        self._listed -= len(state.listed) - len(listed)
        new = [one for one in existing if one not in listed and one not in state.others]
        fitting = new[:max(0, self._limit - self._listed)]
        self._listed += len(fitting)
        listed += fitting
        others = [one for one in existing if one not in listed]
        self._with_sum.update(others)
        self.summed += len(others) - len(state.others)
        state.listed, state.others = tuple(listed), tuple(others)
        if listed and not state.labels:
            where = () if endpoint is None else (format_socket(*endpoint),)
            state.labels = key.namespace, key.name, key.port_name, key.protocol.name, *where


_METRICS = {
    "kproxy_service_connections": (
        "New connections to Services, or flows of UDP, by outcome", (*_SERVICE, "outcome")),
    "kproxy_service_failures": ("Forwarded TCP connections that failed, by reason", (*_SERVICE, "reason")),
    "kproxy_endpoint_connections": ("New connections, or flows of UDP, forwarded to endpoints", _ENDPOINT),
    "kproxy_endpoint_failures": (
        "TCP connections to endpoints that failed, by reason", (*_ENDPOINT, "reason")),
    "kproxy_service_bytes": ("Bytes between clients and Services, by direction", (*_SERVICE, "direction")),
    "kproxy_service_packets": (
        "Packets between clients and Services, by direction", (*_SERVICE, "direction")),
    "kproxy_endpoint_bytes": (
        "Bytes between clients and endpoints, by direction", (*_ENDPOINT, "direction")),
    "kproxy_endpoint_packets": (
        "Packets between clients and endpoints, by direction", (*_ENDPOINT, "direction")),
    "kproxy_service_handshake_duration_seconds": (
        "Duration of TCP handshakes with endpoints of Services", _SERVICE),
    "kproxy_endpoint_handshake_duration_seconds": ("Duration of TCP handshakes with endpoints", _ENDPOINT),
}  # fmt: skip


def _counters_of(row: str, *outcomes: str) -> tuple[_Series, ...]:
    """Return the series of connections, of each `Failure`, and of a `Volume` of packets and bytes."""
    volume = f"{row}_packets", f"{row}_bytes"
    names = [
        *((f"{row}_connections", outcome) for outcome in outcomes),
        *((f"{row}_failures", failure.value) for failure in Failure),
        *((metric, direction) for direction in ("to_endpoint", "from_endpoint") for metric in volume),
    ]
    return tuple(
        _Series(metric, last, slice(at, at + 1), () if not last else tuple(
            other for other, name in enumerate(names) if metric in volume and name[0] == metric) or (at,))
        for at, (metric, last) in enumerate(names)
    )  # fmt: skip


def _histogram_of(row: str) -> tuple[_Series, ...]:
    return (_Series(f"{row}_handshake_duration_seconds", "", slice(None), ()),)


SERVICE_COUNTERS = _counters_of("kproxy_service", "forwarded", "rejected")
_ENDPOINT_COUNTERS = _counters_of("kproxy_endpoint", "")
SERVICE_HISTOGRAM = _histogram_of("kproxy_service")
_ENDPOINT_HISTOGRAM = _histogram_of("kproxy_endpoint")
_NO_FAILURES = (0,) * len(Failure)


class TrafficCollector(Collector):
    """Connections by service port, and with *endpoints* by endpoint."""

    def __init__(self, recorder: TrafficRecorder, *, endpoints: bool, limit: int) -> None:
        self._recorder = recorder
        self._endpoints = endpoints
        self._counters = LimitedSeries(limit, SERVICE_COUNTERS, _ENDPOINT_COUNTERS)
        self._histograms = LimitedSeries(
            max(1, limit // (4 * _SERIES_OF_HISTOGRAM)), SERVICE_HISTOGRAM, _ENDPOINT_HISTOGRAM)
        """A quarter as many series, of their own: each would displace ten counters."""
        self._seen: dict[ServicePortKey, tuple[Total, int]] = {}
        """Each total, and `Total.changes` as of the last scrape."""
        self._lock = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            return list(self._collect())

    def _collect(self) -> Iterator[Metric]:
        self._update(self._recorder.read())
        counters, histograms = {}, {}
        for name, (about, labels) in _METRICS.items():
            if self._endpoints or name.startswith("kproxy_service_"):
                if name.endswith("_seconds"):
                    histograms[name] = HistogramMetricFamily(name, about, labels=labels)
                else:
                    counters[name] = CounterMetricFamily(name, about, labels=labels)
        for metric, labels, (value,) in self._counters.chosen():
            counters[metric].add_metric(labels, value)
        for metric, labels, (*counts, microseconds) in self._histograms.chosen():
            buckets = list(zip(_BOUNDS, accumulate(counts), strict=True))
            histograms[metric].add_metric(labels, buckets, microseconds / 1_000_000)
        yield from (*counters.values(), *histograms.values())
        yield CounterMetricFamily(
            "kproxy_conntrack_events_lost", "Times that events of connection tracking were lost",
            self._recorder.failures.lost)
        yield GaugeMetricFamily(
            "kproxy_traffic_series_summed", "Series beyond maxSeries, summed in 'other'",
            self._counters.summed + self._histograms.summed * _SERIES_OF_HISTOGRAM)

    def _update(self, totals: Mapping[ServicePortKey, Total]) -> None:
        """Bring the rows to *totals*. Those that have not changed cost little."""
        for key in self._seen.keys() - totals.keys():
            del self._seen[key]
            for series in (self._counters, self._histograms):
                series.update(key, {})
        for key, total in totals.items():
            seen = self._seen.get(key)
            if seen is None or seen[0] is not total or seen[1] != total.changes:
                self._seen[key] = total, total.changes
                endpoints = list(total.endpoints.items()) if self._endpoints else []
                self._counters.update(key, _counters(total, endpoints))
                self._histograms.update(key, _histograms(total, endpoints))


def _counters(total: Total, endpoints: Iterable[tuple[Destination, EndpointTotal]]) -> Rows:
    rows: Rows = {None: (total.forwarded, total.rejected, *_failed(total), *total.volume)}
    for where, to in endpoints:
        rows[where] = to.forwarded, *_failed(to), *to.volume
    return rows


def _failed(total: Total | EndpointTotal) -> Iterable[int]:
    return [total.failed.get(failure, 0) for failure in Failure] if total.failed else _NO_FAILURES


def _histograms(total: Total, endpoints: Iterable[tuple[Destination, EndpointTotal]]) -> Rows:
    rows: Rows = {None: total.handshakes} if total.handshakes else {}
    for where, to in endpoints:
        if to.handshakes:
            rows[where] = to.handshakes
    return rows
