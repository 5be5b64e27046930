"""Pods behind interfaces of the node with no address but a link-local one of IPv6, as Calico makes them."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.core.namespaces import Namespace, namespace
from tests.core.processes import KPROXY, Proxy, kproxy, started
from tests.listeners import accepting

POD, OTHER, NODE, VIP = "10.244.1.11", "10.244.1.12", "192.0.2.1", "10.96.0.1"
POD6, OTHER6, VIP6 = "fd00:10:244:1::11", "fd00:10:244:1::12", "fd00:96::1"
MAC, ROUTER6 = "ee:ee:ee:ee:ee:ee", "fe80::ecee:eeff:feee:eeee"
OBJECTS = f"""
apiVersion: v1
kind: Service
metadata: {{name: web, namespace: default}}
spec: {{clusterIP: {VIP}, ports: [{{port: 80}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: web-1, namespace: default, labels: {{kubernetes.io/service-name: web}}}}
addressType: IPv4
endpoints: [{{addresses: [{OTHER}]}}]
ports: [{{port: 8080}}]
---
apiVersion: v1
kind: Service
metadata: {{name: dns, namespace: default}}
spec: {{clusterIP: "{VIP6}", ipFamilies: [IPv6], ports: [{{port: 53, protocol: UDP}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: dns-1, namespace: default, labels: {{kubernetes.io/service-name: dns}}}}
addressType: IPv6
endpoints: [{{addresses: ["{OTHER6}"]}}]
ports: [{{port: 9053, protocol: UDP}}]
"""


class Node(NamedTuple):
    host: Namespace
    pod: Namespace
    other: Namespace
    directory: Path

    @contextmanager
    def proxy(self, *, mode: str = "userspace", **options: str) -> Iterator[Proxy]:
        config = self.directory / "config.json"
        config.write_text(json.dumps({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
            "mode": mode, "kproxy": {
                "stateDirectory": str(self.directory / "state"), "backendOptions": {"userspace": options}},
        }))  # fmt: skip
        command = ["ip", "netns", "exec", self.host.name, KPROXY, "--config", str(config), "--manifests",
                   str(self.directory / "manifests"), "--hostname-override", "here"]  # fmt: skip
        with started(self.host, command) as proxy:
            proxy.await_health()
            yield proxy

    def is_answered(self) -> bool:
        """Return whether the pod reaches the Service, with a SYN or with the next one, a second later."""
        with self.pod.inside(lambda: socket.socket(socket.AF_INET)) as client:
            client.settimeout(2)
            try:
                client.connect((VIP, 80))
            except TimeoutError:
                return False
            return client.recv(1) == b"."


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A node with two pods that reach it by proxy ARP for an address that nobody has."""
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests/web.yaml").write_text(OBJECTS)
    with ExitStack() as stack:
        host, pod, other = (stack.enter_context(namespace()) for _ in range(3))
        host.run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
        for each in (host, pod, other):
            each.run("sysctl", "-qw", "net.ipv6.conf.default.accept_dad=0")
        host.ip("link add eth0 type veth peer lan", "link set eth0 up", "link set lan up",
                f"addr add {NODE}/24 dev eth0", "route add default via 192.0.2.254",
                "addr add fd00:192::1/64 dev eth0")  # fmt: skip
        for name, where, address, six in (("cali1", pod, POD, POD6), ("cali2", other, OTHER, OTHER6)):
            host.ip(f"link add {name} address {MAC} type veth peer eth0 netns {where.name}",
                    f"link set {name} up", f"route add {address}/32 dev {name}",
                    f"route add {six}/128 dev {name}")  # fmt: skip
            host.run("sysctl", "-qw", f"net.ipv4.conf.{name}.proxy_arp=1",
                     f"net.ipv4.neigh.{name}.proxy_delay=0")
            where.ip("link set eth0 up", f"addr add {address}/32 dev eth0", "route add 169.254.1.1 dev eth0",
                     "route add default via 169.254.1.1", f"addr add {six}/128 dev eth0",
                     f"route add default via {ROUTER6} dev eth0")  # fmt: skip
        server = other.inside(lambda: socket.create_server((OTHER, 8080)))
        stack.enter_context(accepting(server, answer))
        yield Node(host, pod, other, tmp_path)


def answer(client: socket.socket) -> None:
    with client:
        client.sendall(b".")


def checks(node: Node) -> dict[str, list[str]]:
    """Return the evidence of each check of the doctor."""
    found = json.loads(kproxy("doctor", "-o", "json", node=node.host).stdout)
    return {each["check"]: each["evidence"] for each in found["findings"]}


def explained(node: Node) -> str:
    return kproxy("explain", POD, f"{VIP}:80", node=node.host).stdout


def test_the_start_the_doctor_and_explain_say_that_pods_are_not_served(node: Node) -> None:
    with node.proxy() as proxy:
        assert not node.is_answered()
        assert checks(node)["interface-address"] == ["no IPv4 address: cali1, cali2"]
        assert "the packet is dropped, and should be forwarded" in explained(node)
        assert "interface cali1" in explained(node)
        _, log = proxy.end()
    assert 'not served, set bindAddress mode=userspace ip_family=IPv4 interfaces="cali1, cali2"' in log


def test_a_switch_to_the_mode_says_it_and_one_from_it_does_not(node: Node) -> None:
    with node.proxy(mode="nftables") as proxy:
        assert node.is_answered()
        assert kproxy("switch", "userspace", node=node.host).returncode == 0
        assert kproxy("switch", "nftables", node=node.host).returncode == 0
        assert node.is_answered()
        _, log = proxy.end()
    warnings = [line for line in log.splitlines() if "not served, set bindAddress" in line]
    assert len(warnings) == 1
    assert 'mode=userspace ip_family=IPv4 interfaces="cali1, cali2"' in warnings[0]


def test_datagrams_of_ipv6_are_answered(node: Node) -> None:
    """From the link-local address of the interface, to which they are redirected."""
    server = node.other.inside(lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
    client = node.pod.inside(lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
    with server, client, node.proxy():
        server.bind((OTHER6, 9053))
        client.connect((VIP6, 53))
        client.settimeout(5)
        client.send(b"?")
        _, asker = server.recvfrom(8)
        server.sendto(b".", asker)
        assert client.recv(8) == b"."


def test_pods_are_served_at_an_address_of_the_node(node: Node) -> None:
    with node.proxy(bindAddress=NODE) as proxy:
        assert node.is_answered()
        assert "interface-address" not in checks(node)
        assert "is dropped" not in explained(node)
        _, log = proxy.end()
    assert "not served, set bindAddress" not in log


def test_interfaces_with_an_address_are_not_named(node: Node) -> None:
    node.host.ip(*(f"addr add 10.244.1.1/32 dev {name}" for name in ("cali1", "cali2")))
    with node.proxy():
        assert node.is_answered()
        assert "interface-address" not in checks(node)
        assert "is dropped" not in explained(node)
