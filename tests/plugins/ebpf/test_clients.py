"""Settings with which the sockets of pods are left to the rules."""

import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.core.namespaces import Namespace
from tests.plugins.ebpf.node import PORT, REMOTE, Node, node

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
