"""What the relays count, as metrics."""

from kproxy_core.backend.api import Measurement
from kproxy_userspace.kernel.workers import Workers
from kproxy_userspace.worker.counters import GAUGES, Counter

_PREFIX = "kproxy_userspace_"
_METRICS = {
    Counter.CONNECTIONS: ("connections", "TCP connections that are relayed now", ""),
    Counter.ACCEPTED: ("accepted_connections_total", "TCP connections that were accepted", ""),
    Counter.DIAL_FAILURES: (
        "dial_failures_total", "Attempts to reach an endpoint that were refused or took too long", ""),
    Counter.GIVEN_UP: ("abandoned_connections_total", "TCP connections for which no endpoint answered", ""),
    Counter.BYTES_TO_ENDPOINTS: ("bytes_total", "Bytes of TCP connections", "endpoint"),
    Counter.BYTES_TO_CLIENTS: ("bytes_total", "Bytes of TCP connections", "client"),
    Counter.FLOWS: ("udp_flows", "UDP clients that have an endpoint now", ""),
    Counter.DATAGRAMS_TO_ENDPOINTS: ("datagrams_total", "UDP datagrams", "endpoint"),
    Counter.DATAGRAMS_TO_CLIENTS: ("datagrams_total", "UDP datagrams", "client"),
}  # fmt: skip
"""Name, meaning, and whom it went to."""


def measurements(workers: Workers, unserved: int) -> list[Measurement]:
    """All metrics; *unserved*: service ports without a relay. From any thread."""
    found = [
        Measurement(
            _PREFIX + name, about, "gauge" if counter in GAUGES else "counter", workers.count(counter),
            {"to": to} if to else {},
        )
        for counter, (name, about, to) in _METRICS.items()
    ]
    about = "Service ports without a relay, as no port could be had"
    return [*found, Measurement(f"{_PREFIX}unserved_service_ports", about, "gauge", unserved)]
