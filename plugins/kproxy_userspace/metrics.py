"""Metrics of the relays."""

from collections.abc import Callable

from kproxy_core.contract import Measurement
from kproxy_core.linux.relay.counts import GAUGES, Counter

_PREFIX = "kproxy_userspace_"
_METRICS = {
    Counter.CONNECTIONS: ("connections", "Open TCP connections", ""),
    Counter.ACCEPTED: ("accepted_connections_total", "Accepted TCP connections", ""),
    Counter.DIAL_FAILURES: (
        "dial_failures_total", "Attempts to reach an endpoint that were refused or timed out", ""),
    Counter.GIVEN_UP: ("abandoned_connections_total", "TCP connections for which no endpoint answered", ""),
    Counter.BYTES_TO_ENDPOINTS: ("bytes_total", "Bytes of TCP connections", "endpoint"),
    Counter.BYTES_TO_CLIENTS: ("bytes_total", "Bytes of TCP connections", "client"),
    Counter.FLOWS: ("udp_flows", "UDP clients that have an endpoint now", ""),
    Counter.DATAGRAMS_TO_ENDPOINTS: ("datagrams_total", "UDP datagrams", "endpoint"),
    Counter.DATAGRAMS_TO_CLIENTS: ("datagrams_total", "UDP datagrams", "client"),
    Counter.SHORTAGES: (
        "shortages_total", "Times that a worker ran out of file descriptors, memory or local ports", ""),
    Counter.HALF_CLOSED_TIMEOUTS: (
        "half_closed_timeouts_total", "TCP connections reset because they were half-closed and idle", ""),
}  # fmt: skip
"""Name, description, and value of the label ``to``."""


def measurements(count: Callable[[Counter], int], unserved: int) -> list[Measurement]:
    """Return all metrics. *count* sums a counter over the workers, *unserved* counts service ports."""
    found = [
        Measurement(
            _PREFIX + name, about, "gauge" if counter in GAUGES else "counter", count(counter),
            {"to": to} if to else {},
        )
        for counter, (name, about, to) in _METRICS.items()
    ]
    about = "Service ports that are not, or only partly, served"
    return [*found, Measurement(f"{_PREFIX}unserved_service_ports", about, "gauge", unserved)]
