"""The metrics of traffic equal the connections made, across new endpoints, restarts and switches of modes."""

import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.switch.room import NODE, Proxy, Room, room

COUNTED = {"trafficMetrics": "endpoint"}
WEB, CART = ("10.96.0.10", 80), ("10.96.0.20", 80)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Room]:
    with room(tmp_path) as made:
        yield made


def dial(node: Room, where: tuple[str, int], times: int) -> None:
    for _ in range(times):
        node.client.inside(lambda: socket.create_connection(where, 5)).close()


def counted(proxy: Proxy) -> dict[str, int]:
    """Return the connections by service port, and the sum over all endpoints."""
    time.sleep(1.1)  # A reading answers every scrape of a second.
    status, text = proxy._get(10249, "/metrics")
    assert status == 200
    found = re.findall(r'^kproxy_(service|endpoint)_connections_total\{(.*)\} (\d+)$', text, re.MULTILINE)
    result: dict[str, int] = {}
    for kind, labels, value in found:
        values = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        name = f"{values['service']} {values['outcome']}" if kind == "service" else "endpoints"
        result[name] = result.get(name, 0) + int(value)
    return result


def test_no_connection_is_lost_or_counted_twice(node: Room) -> None:
    manifest = node.manifests / "all.yaml"
    with node.proxy("nftables", COUNTED) as proxy:
        dial(node, WEB, 7)
        dial(node, (NODE, 30080), 3)
        assert counted(proxy) == {"web forwarded": 10, "endpoints": 10}
        manifest.write_text(manifest.read_text().replace("10.244.2.12", "10.244.1.11"))
        time.sleep(1)
        dial(node, WEB, 2)
        assert counted(proxy)["web forwarded"] == 12
    dial(node, WEB, 4)
    with node.proxy("nftables", COUNTED) as proxy:
        dial(node, CART, 1)
        wanted = {"web forwarded": 16, "cart forwarded": 1, "endpoints": 17}
        assert counted(proxy) == wanted
        assert node.kproxy("switch", "iptables").returncode == 0
        assert node.kproxy("switch", "nftables").returncode == 0
        assert counted(proxy) == wanted
        dial(node, WEB, 3)
        assert counted(proxy) == wanted | {"web forwarded": 19, "endpoints": 20}


def test_a_process_that_is_killed_loses_no_count(node: Room) -> None:
    with node.proxy("nftables", COUNTED) as proxy:
        dial(node, WEB, 5)
        assert counted(proxy)["web forwarded"] == 5
        proxy.process.kill()
        proxy.process.wait()
    dial(node, WEB, 2)
    with node.proxy("nftables", COUNTED) as proxy:
        assert counted(proxy)["web forwarded"] == 7


def test_off_has_no_series(node: Room) -> None:
    with node.proxy("nftables", {"trafficMetrics": "off"}) as proxy:
        dial(node, WEB, 1)
        assert "kproxy_service_connections" not in proxy._get(10249, "/metrics")[1]
