"""Connections counted by programs, beside those that the rules count."""

import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy_ebpf.kernel import bpf
from tests.core.processes import KPROXY
from tests.plugins.ebpf.node import NODE, REMOTE, Node, node
from tests.plugins.ebpf.sockets import Sockets
from tests.plugins.ebpf.test_translation import UDP, V4, ask, dial

WEB, DNS = "10.96.0.10", "10.96.0.53"
NODE_PORT = 30080
COUNTED = {"trafficMetrics": "endpoint"}


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path) as made:
        made.serve("web", WEB, REMOTE, node_port=NODE_PORT)
        made.serve("dns", DNS, REMOTE, protocol="UDP")
        yield made


def connect(sockets: Sockets, times: int) -> Counter[str]:
    """Connect to the web, and return the number of connections by endpoint."""
    return Counter(dial(sockets, V4, WEB)[0] for _ in range(times))


def counted(where: Node) -> dict[str, Counter[str]]:
    """Return the connections by Service, and those by endpoint, as the metrics have them."""
    time.sleep(1.1)  # A reading answers every scrape of a second.
    text = where.host.run("curl", "-s", "http://127.0.0.1:10249/metrics")
    result = {"service": Counter[str](), "endpoint": Counter[str]()}
    pattern = r"^kproxy_(service|endpoint)_connections_total\{(.*)\} (\d+)$"
    for kind, labels, value in re.findall(pattern, text, re.MULTILINE):
        values = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if kind == "service" or values["service"] == "web":
            result[kind][values["service"] if kind == "service" else values["endpoint"]] += int(value)
    return result


def switch(where: Node, mode: str) -> None:
    where.host.run(KPROXY, "switch", mode)


def test_no_connection_is_lost_or_counted_twice(where: Node) -> None:
    pod, outside = where.sockets(where.pod), where.sockets(where.pod, translated=False)
    with where.proxy(kproxy=COUNTED) as proxy:
        made = connect(pod, 20) + connect(outside, 5)
        made[dial(pod, V4, NODE, NODE_PORT)[0]] += 1
        for _ in range(3):
            with pod.open(socket.AF_INET, UDP) as client:
                for _ in range(4):
                    ask(client, DNS)
        found = counted(where)
        assert found["service"] == {"web": 26, "dns": 3}
        assert found["endpoint"] == {f"{endpoint}:8080": number for endpoint, number in made.items()}
        where.serve("web", WEB, REMOTE[1:], node_port=NODE_PORT)
        where.serve("dns", DNS, REMOTE[1:], protocol="UDP")
        where.await_endpoints(DNS, *REMOTE[1:])
        connect(pod, 4)
        assert counted(where)["service"]["web"] == 30
        proxy.end(signal.SIGKILL)
    connect(pod, 3)
    with where.proxy(kproxy=COUNTED):
        assert counted(where)["service"] == {"web": 33, "dns": 3}
        expected = 33
        for mode in ("nftables", "ebpf", "nftables"):
            switch(where, mode)
            assert counted(where)["service"]["web"] == expected
            connect(pod, 2)
            connect(outside, 1)
            expected += 3
            assert counted(where)["service"]["web"] == expected


def test_nothing_is_counted_without_the_option(where: Node) -> None:
    with where.proxy(kproxy={"trafficMetrics": "off"}):
        connect(where.sockets(where.pod), 3)
        (path,) = where.pins.glob("*/maps-*/connections")
        found = bpf.open_pin(str(path))
        assert list(bpf.elements(found, bpf.map_definition(found))) == []
        os.close(found)
