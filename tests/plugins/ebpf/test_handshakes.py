"""Durations of handshakes, as programs count them and the kernel tells the client."""

import re
import signal
import socket
import struct
import time
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kproxy_core.contract.values import Handshake
from tests.core.late_endpoints import Lateness, handshake_of, late_endpoints
from tests.plugins.ebpf.node import Node, node
from tests.plugins.ebpf.sockets import Sockets
from tests.plugins.ebpf.test_traffic import COUNTED, NO_LISTENER, metrics, refused, switch

LATE = {
    "198.18.0.1": Lateness(0), "198.18.0.2": Lateness(0.002), "198.18.0.3": Lateness(0.02),
    "198.18.0.4": Lateness(0.1), "198.18.0.5": Lateness(0.3),
    "198.18.0.6": Lateness(0, lost=1), "198.18.0.7": Lateness(0, lost=2), "198.18.0.8": Lateness(1.3),
}  # fmt: skip
BOUNDS = [float(bound.value) for bound in Handshake if bound is not Handshake.MICROSECONDS]
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER for a reset at close(2)."""


@dataclass
class Handshakes:
    """The handshakes of all services."""

    counts: Counter[tuple[str, float]] = field(default_factory=Counter)
    """By service and upper bound."""
    microseconds: Counter[str] = field(default_factory=Counter)
    """The sum of their times, by service."""

    def connect(self, sockets: Sockets, number: int) -> None:
        """Connect to the service of this number, and add what the client's kernel has measured."""
        name, (seconds, lost) = f"late{number}", LATE[f"198.18.0.{number}"]
        with sockets.open(socket.AF_INET, socket.SOCK_STREAM) as client:
            begun = time.monotonic()
            client.connect((f"10.96.1.{number}", 80))
            elapsed = time.monotonic() - begun
            round_trip, again = handshake_of(client)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        took = max(round_trip, again * 1_000_000)
        most = elapsed * 1_000_000 + (1000 if again else 0)  # Timestamps count milliseconds.
        assert max(seconds, lost) * 1_000_000 <= took <= most
        self.counts[name, BOUNDS[bisect(BOUNDS, took / 1_000_000)]] += 1
        self.microseconds[name] += took


def shown(where: Node) -> Handshakes:
    """Return the histograms of services. Those of endpoints add up to the same."""
    text = metrics(where)
    found = {"service": Handshakes(), "endpoint": Handshakes()}
    for kind, of in found.items():
        name = rf"^kproxy_{kind}_handshake_duration_seconds"
        below: Counter[str] = Counter()
        for bound, service, value in re.findall(
            rf'{name}_bucket\{{.*le="([^"]+)".*service="(\w+)".*\}} (\d+)$', text, re.MULTILINE
        ):
            of.counts[service, float(bound)] += int(value) - below[service]
            below[service] = int(value)
        of.counts = +of.counts
        sums = re.findall(rf'{name}_sum\{{.*service="(\w+)".*\}} ([\d.]+)$', text, re.MULTILINE)
        for service, value in sums:
            of.microseconds[service] += round(float(value) * 1_000_000)
        counts = re.findall(rf'{name}_count\{{.*service="(\w+)".*\}} (\d+)$', text, re.MULTILINE)
        assert {service: int(value) for service, value in counts} == below
    assert found["service"] == found["endpoint"]
    return found["service"]


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path) as made, late_endpoints(made.host, LATE):
        for address in LATE:
            number = address.rpartition(".")[2]
            made.serve(f"late{number}", f"10.96.1.{number}", [address])
        yield made


def test_each_handshake_is_counted_once_with_its_duration(where: Node) -> None:
    pod, outside = where.sockets(where.pod), where.sockets(where.pod, translated=False)
    where.serve("closed", "10.96.1.99", [NO_LISTENER])
    expected = Handshakes()
    with where.proxy(kproxy=COUNTED) as proxy:
        for number in (1, 1, 2, 3, 3, 3, 4, 5, 6, 7, 8):
            expected.connect(pod, number)
        refused(pod, "10.96.1.99", 2)
        Handshakes().connect(outside, 1)
        assert shown(where) == expected
        proxy.end(signal.SIGKILL)
    expected.connect(pod, 3)
    with where.proxy(kproxy=COUNTED):
        assert shown(where) == expected
        expected.connect(pod, 2)
        switch(where, "nftables")
        assert shown(where) == expected
        Handshakes().connect(pod, 2)  # By the rules.
        switch(where, "ebpf")
        expected.connect(pod, 2)
        assert shown(where) == expected
