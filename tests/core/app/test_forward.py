"""A load balancer for one machine: clients do not meet a server whose check has failed."""

import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.core.namespaces import Namespace, namespace
from tests.core.processes import KPROXY, Proxy, running
from tests.listeners import accepting
from tests.patience import PATIENCE

FORWARD = """\
apiVersion: kproxy.dev/v1
kind: Forward
name: web
listen: ["203.0.113.20:443", "node:8443"]
to: ["10.0.0.11:8443", "10.0.0.12:8443"]
check: {tcp: 100ms}
"""
FRONTENDS = (("203.0.113.20", 443), ("192.0.2.1", 8443))
ONE, OTHER = "10.0.0.11", "10.0.0.12"


@pytest.fixture
def hosts() -> Iterator[tuple[Namespace, Namespace, Namespace]]:
    """The load balancer, which has one of its addresses, a client and the host of both servers."""
    with namespace() as box, namespace() as client, namespace() as servers:
        box.forward()
        for number, (host, device) in enumerate(((client, "clients"), (servers, "servers"))):
            box.add_veth(device, host, "eth0")
            box.add_address(("192.0.2.1/24", "10.0.0.1/24")[number], device)
        box.add_route("0.0.0.0/0", via="192.0.2.2")  # which tells what the address of the node is
        box.add_address("203.0.113.20/32", "lo")
        client.add_address("192.0.2.2/24", "eth0")
        client.add_route("203.0.113.20/32", via="192.0.2.1")
        for server in (ONE, OTHER):
            servers.add_address(f"{server}/24", "eth0")
        yield box, client, servers


@contextmanager
def server(host: Namespace, address: str) -> Iterator[None]:
    """A server that says its address to each client."""
    def serve(client: socket.socket) -> None:
        with client:
            client.sendall(address.encode())

    with accepting(host.inside(lambda: socket.create_server((address, 8443), backlog=512)), serve):
        yield


def answers(host: Namespace, times: int = 20) -> Counter[str]:
    """Return who answers, and why nobody does, to *times* requests to each frontend."""
    def ask() -> Counter[str]:
        found: Counter[str] = Counter()
        for frontend in FRONTENDS * times:
            try:
                with socket.create_connection(frontend, timeout=PATIENCE) as connection:
                    found[connection.recv(100).decode()] += 1
            except OSError as error:
                found[str(error)] += 1
        return found

    return host.inside(ask)


def await_not_chosen(box: Namespace, *endpoints: str) -> None:
    """Return once *endpoints* are those left out, by the plans and in the kernel."""
    wanted = [{"endpoint": f"{endpoint}:8443", "because": "its check fails"} for endpoint in endpoints]
    gives_up = time.monotonic() + PATIENCE
    while True:
        found = json.loads(box.run(KPROXY, "explain", "outside", "203.0.113.20:443", "-o", "json"))
        (packet,) = found["packets"]
        if packet["not_chosen"] == wanted and packet["kernel"]["verdict"] == "agrees":
            return
        assert time.monotonic() < gives_up, packet


def metric(proxy: Proxy, name: str) -> list[str]:
    _, text = proxy.get(10249, "/metrics")
    return [line for line in text.splitlines() if line.startswith(name)]


def test_no_request_fails_once_a_stopped_server_is_left_out(
    hosts: tuple[Namespace, Namespace, Namespace], tmp_path: Path
) -> None:
    box, client, servers = hosts
    (tmp_path / "web.yaml").write_text(FORWARD)
    with running(box, "--mode=nftables", f"--manifests={tmp_path}") as proxy, server(servers, ONE):
        with server(servers, OTHER):
            proxy.await_health()
            proxy.await_log("first sync")
            for host in (client, box):
                assert answers(host).keys() == {ONE, OTHER}
        proxy.await_log("endpoint is left out, its check fails")
        await_not_chosen(box, OTHER)
        for host in (client, box):
            assert answers(host) == {ONE: 40}
        labels = f'endpoint="{OTHER}:8443",forward="web"'
        assert metric(proxy, "kproxy_forward_endpoint_left_out{" + labels) == [
            f"kproxy_forward_endpoint_left_out{{{labels}}} 1"]
        assert len(metric(proxy, "kproxy_forward_checks_total{" + labels)) == 3
        with server(servers, OTHER):
            proxy.await_log("endpoint is used again")
            await_not_chosen(box)
            assert answers(client).keys() == {ONE, OTHER}


def test_a_start_leaves_out_a_server_that_is_dead(
    hosts: tuple[Namespace, Namespace, Namespace], tmp_path: Path
) -> None:
    box, client, servers = hosts
    (tmp_path / "web.yaml").write_text(FORWARD)
    with server(servers, OTHER), running(box, "--mode=nftables", f"--manifests={tmp_path}") as proxy:
        proxy.await_health()
        assert answers(client) == {OTHER: 40}
