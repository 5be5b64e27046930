"""ClusterIPs that the node has itself, as with NodeLocal DNSCache, which listens there without NAT."""

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.core.processes import KPROXY, kproxy
from tests.plugins.ebpf.node import REMOTE, REMOTE6, Node, echo, node, until
from tests.plugins.ebpf.sockets import Sockets

DNS, DNS6, WEB = "10.96.0.10", "fd00:96::10", "10.96.0.20"
_ENDPOINTS = {DNS: REMOTE, DNS6: REMOTE6, WEB: REMOTE}


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path) as made:
        for name, address in (("dns", DNS), ("dns6", DNS6)):
            for protocol in ("TCP", "UDP"):
                made.serve(f"{name}-{protocol.lower()}", address, _ENDPOINTS[address], protocol=protocol)
        made.serve("web", WEB, REMOTE)
        yield made


@contextmanager
def cache(where: Node) -> Iterator[None]:
    """Serve the ClusterIPs of the DNS on the node itself, with the rules that NodeLocal DNSCache makes."""
    with ExitStack() as stack:
        for program, address, prefix in (("iptables", DNS, "32"), ("ip6tables", DNS6, "128")):
            for protocol in ("tcp", "udp"):
                for chain, *matches in (
                    ("PREROUTING", "-d", address, "--dport"), ("OUTPUT", "-d", address, "--dport"),
                    ("OUTPUT", "-s", address, "--sport"),
                ):
                    rule = (chain, "-p", protocol, *matches, "80", "-j", "NOTRACK")
                    where.host.run(program, "-t", "raw", "-A", *rule)
                    stack.callback(where.host.run, program, "-t", "raw", "-D", *rule)
            where.host.ip(f"addr add {address}/{prefix} dev lo")
            stack.callback(where.host.ip, f"addr del {address}/{prefix} dev lo")
        stack.enter_context(echo(where.host, (DNS, DNS6), 80))
        yield


def answers(client: Sockets, address: str) -> list[str]:
    """Return who answers over TCP, to a datagram, and to one of a connected socket."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with client.open(family, socket.SOCK_STREAM) as connection:
        connection.connect((address, 80))
        found = [connection.recv(100)]
    kind = socket.SOCK_DGRAM
    with client.open(family, kind) as datagrams, client.open(family, kind) as dialled:
        datagrams.sendto(b"now", (address, 80))
        found.append(datagrams.recv(100))
        dialled.connect((address, 80))
        dialled.send(b"now")
        found.append(dialled.recv(100))
    return [answer.decode().split()[0] for answer in found]


def reaches_cache(clients: list[Sockets]) -> bool:
    return all(answers(client, address) == [address] * 3 for client in clients for address in (DNS, DNS6))


def reaches_endpoints(clients: list[Sockets]) -> bool:
    return all(
        {*answers(client, address)} <= {*_ENDPOINTS[address]}
        for client in clients for address in (DNS, DNS6))


def explained(where: Node, client: str, address: str) -> str:
    frontend = f"[{address}]:80" if ":" in address else f"{address}:80"
    return where.host.run(KPROXY, "explain", client, frontend)


def test_clients_reach_a_cache_on_the_node_while_it_is_there(where: Node) -> None:
    clients = [where.sockets(where.host), where.sockets(where.pod)]
    with where.proxy():
        assert reaches_endpoints(clients)
        assert "BPF map frontends" in explained(where, "pod", DNS)
        with cache(where):
            until(lambda: reaches_cache(clients))
            for address in (DNS, DNS6):
                for client in ("pod", "node"):
                    answer = explained(where, client, address)
                    assert "BPF map" not in answer
                    assert "exempts it from translation" in answer
            assert "BPF map frontends" in explained(where, "pod", WEB)
            where.host.run(KPROXY, "diff")
            found = json.loads(kproxy("doctor", "-o", "json", node=where.host).stdout)["findings"]
            assert {each["check"] for each in found} <= {"clock"}
        until(lambda: reaches_endpoints(clients))
        assert "BPF map frontends" in explained(where, "pod", DNS)


def test_clients_reach_a_cache_whatever_becomes_of_the_proxy(where: Node) -> None:
    clients = [where.sockets(where.host), where.sockets(where.pod)]
    with cache(where):
        with where.proxy() as proxy:
            assert reaches_cache(clients)
            proxy.end(signal.SIGKILL)
            assert reaches_cache(clients)
        with where.proxy():
            assert reaches_cache(clients)
    with where.proxy():
        until(lambda: reaches_endpoints(clients))


def test_a_cache_that_begins_while_no_proxy_runs_is_reached_by_the_next(where: Node) -> None:
    clients = [where.sockets(where.host), where.sockets(where.pod)]
    with where.proxy() as proxy:
        proxy.end(signal.SIGKILL)
    with cache(where), where.proxy():
        assert reaches_cache(clients)


def test_a_service_that_begins_at_an_address_of_the_node_is_left_to_the_rules(where: Node) -> None:
    """And a datagram's socket that was translated before the node had the address."""
    pod = where.sockets(where.pod)
    with where.proxy(), pod.open(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.sendto(b"now", (DNS, 80))
        assert client.recv(100).decode().split()[0] in REMOTE
        with cache(where):
            where.host.ip("addr add 10.96.0.30/32 dev lo")
            where.serve("late", "10.96.0.30", REMOTE)
            until(lambda: "10.96.0.30:80" in explained(where, "pod", "10.96.0.30"))
            assert "BPF map" not in explained(where, "pod", "10.96.0.30")
            until(lambda: reaches_cache([pod]))
            client.sendto(b"now", (DNS, 80))
            assert client.recv(100).decode().split()[0] == DNS
