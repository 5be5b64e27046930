"""Sockets of pods that are left to the rules."""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.core.namespaces import Namespace
from tests.plugins.ebpf.node import (
    NEIGHBOUR,
    NEIGHBOUR6,
    NODE,
    NODE6,
    PORT,
    REMOTE,
    REMOTE6,
    Node,
    node,
    until,
)
from tests.plugins.ebpf.test_translation import MAPPED, V4, V6, dial

WEB = "10.96.0.10"


def dialled(node: Node, where: Namespace) -> str:
    """Return the address to which packets of a connection to the Service are sent."""
    with node.sockets(where).open(socket.AF_INET, socket.SOCK_STREAM) as client:
        client.connect((WEB, 80))
        assert client.recv(100).decode().split()[0] in REMOTE
        _, port = client.getsockname()
        return where.run("ss", "-tnH", "sport", "=", f":{port}").split()[4]


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"clients": "node"}, {}),
        ({}, {"nftables": {"masqueradeAll": True}}),
        ({"clients": "all"}, {"nftables": {"masqueradeAll": True}}),
        ({}, {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "pod"}}),
    ],
    ids=["clients: node", "masqueradeAll", "masqueradeAll and clients: all", "detectLocalMode by interface"],
)
def test_sockets_of_pods_are_left_to_the_rules(
    tmp_path: Path, options: Mapping[str, object], settings: Mapping[str, object]
) -> None:
    with node(tmp_path) as where:
        where.serve("web", WEB, REMOTE)
        with where.proxy(options, settings):
            assert dialled(where, where.pod) == f"{WEB}:80"
            assert dialled(where, where.host) in {f"{endpoint}:{PORT}" for endpoint in REMOTE}


NODE_PORT = 30080


@pytest.mark.parametrize(
    ("options", "cluster_cidr", "recognised"),
    [
        ({}, "10.244.0.0/16,fd00:244::/32", {"IPv4", "IPv6"}),
        ({}, "10.244.0.0/16", {"IPv4"}),
        ({"clients": "all"}, "", set()),
    ],
    ids=["both families", "IPv4 only", "neither, clients: all"],
)
def test_policy_local_keeps_pods_to_their_node_where_the_rules_cannot_recognise_them(
    tmp_path: Path, options: Mapping[str, object], cluster_cidr: str, recognised: set[str]
) -> None:
    """The node itself reaches all endpoints."""
    local: dict[str, Any] = {"node_port": NODE_PORT, "externalTrafficPolicy": "Local"}
    with node(tmp_path) as where:
        where.serve("web", WEB, [NEIGHBOUR, REMOTE[0]], **local)
        where.serve("web6", "fd00:96::10", [NEIGHBOUR6, REMOTE6[0]], **local)
        with where.proxy(options, {"clusterCIDR": cluster_cidr}):
            pod, host = where.sockets(where.pod), where.sockets(where.host)
            for family, way, address, here, elsewhere in (
                ("IPv4", V4, NODE, NEIGHBOUR, REMOTE[0]),
                ("IPv4", MAPPED, NODE, NEIGHBOUR, REMOTE[0]),
                ("IPv6", V6, NODE6, NEIGHBOUR6, REMOTE6[0]),
            ):
                reached = {dial(pod, way, address, NODE_PORT)[0] for _ in range(40)}
                assert reached == ({here, elsewhere} if family in recognised else {here})
                assert {dial(host, way, address, NODE_PORT)[0] for _ in range(40)} == {here, elsewhere}


def test_pods_are_recognised_as_soon_as_the_node_has_a_pod_network(tmp_path: Path) -> None:
    with node(tmp_path) as where:
        where.serve("web", WEB, [NEIGHBOUR, REMOTE[0]], node_port=NODE_PORT, externalTrafficPolicy="Local")
        with where.proxy(settings={"clusterCIDR": "", "detectLocalMode": "NodeCIDR"}):
            pod = where.sockets(where.pod)
            assert {dial(pod, V4, NODE, NODE_PORT)[0] for _ in range(20)} == {NEIGHBOUR}
            where.have_pod_network("10.244.1.0/24")
            until(lambda: dial(pod, V4, NODE, NODE_PORT)[0] == REMOTE[0])
