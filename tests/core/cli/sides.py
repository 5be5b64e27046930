"""A node with a client on each side: pods behind a bridge and behind a pair, itself, and another machine."""

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.core.namespaces import Namespace, namespace

VIP = {"ip": "10.96.0.10", "ip6": "fd00:96::10"}
NODE = {"ip": "192.0.2.1", "ip6": "fd00:c0::1"}
ENDPOINT = {"ip": "10.244.3.2", "ip6": "fd00:244:3::2"}
"""A pod behind a pair of its own."""
SENDERS = ("bridge", "veth", "node", "outside")
NODE_PORT = 30080
UDP_PORT = 53


def manifest(*, ip6: bool = True, target: int = 8080, ports: str = "") -> str:
    """Return Service shop/web with a node port, and its endpoint for each family."""
    ports = ports or (
        f"[{{name: http, port: 80, nodePort: {NODE_PORT}}}, "
        f"{{name: dns, port: {UDP_PORT}, protocol: UDP, nodePort: 30053}}]")
    vips = [VIP["ip"], VIP["ip6"]] if ip6 else [VIP["ip"]]
    found = f"""
apiVersion: v1
kind: Service
metadata: {{name: web, namespace: shop}}
spec: {{type: NodePort, clusterIP: "{vips[0]}", clusterIPs: {vips!r}, ports: {ports}}}
"""
    for family, endpoint in ENDPOINT.items() if ip6 else [("ip", ENDPOINT["ip"])]:
        found += f"""---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: web-{family}, namespace: shop, labels: {{kubernetes.io/service-name: web}}}}
addressType: {"IPv6" if family == "ip6" else "IPv4"}
endpoints: [{{addresses: ["{endpoint}"], conditions: {{ready: true}}}}]
ports: [{{name: http, port: {target}}}, {{name: dns, port: {target}, protocol: UDP}}]
"""
    return found


FLAGS = ("--cluster-cidr=10.244.0.0/16,fd00:244::/32", "--hostname-override=n1",
         "--nodeport-addresses=0.0.0.0/0,::/0")


class Sides(NamedTuple):
    node: Namespace
    clients: Mapping[str, Namespace]
    """By the names in `SENDERS`."""
    endpoint: Namespace

    def dial(
        self, sender: str, family: str, port: int = 80, *, host: str = "", udp: bool = False,
        source_port: int = 0, count: int = 1,
    ) -> str:
        """Return what came of a connection or of *count* datagrams to the VIP, or to *host*."""
        def act() -> str:
            kind = socket.SOCK_DGRAM if udp else socket.SOCK_STREAM
            with contextlib.closing(socket.socket(
                    socket.AF_INET6 if family == "ip6" else socket.AF_INET, kind)) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if source_port:
                    sock.bind(("", source_port))
                sock.settimeout(0.7)
                try:
                    sock.connect((host or VIP[family], port))
                    for _ in range(count if udp else 0):
                        sock.send(b"question")
                        sock.recv(100)
                except TimeoutError:
                    return "silence"
                except OSError as error:
                    return str(error.strerror)
                return "answered"

        return self.clients[sender].inside(act)


@contextmanager
def sides() -> Iterator[Sides]:
    """Yield a node that forwards between its clients and an endpoint, which answers at port 8080."""
    with ExitStack() as stack:
        node, bridged, routed, outside, endpoint = (stack.enter_context(namespace()) for _ in range(5))
        node.ip(
            "link add cni0 type bridge", "address add 10.244.1.1/24 dev cni0",
            "address add fd00:244:1::1/64 dev cni0 nodad", "link set cni0 up",
            f"link add port1 type veth peer name eth0 netns {bridged.name}", "link set port1 master cni0",
            "link set port1 type bridge_slave hairpin on", "link set port1 up",
            f"link add pod2 type veth peer name eth0 netns {routed.name}",
            f"link add pod3 type veth peer name eth0 netns {endpoint.name}",
            f"link add uplink type veth peer name eth0 netns {outside.name}",
        )
        for device, network4, network6 in (
                ("pod2", "10.244.2", "fd00:244:2"), ("pod3", "10.244.3", "fd00:244:3"),
                ("uplink", "192.0.2", "fd00:c0")):
            node.ip(f"address add {network4}.1/24 dev {device}",
                    f"address add {network6}::1/64 dev {device} nodad", f"link set {device} up")
        for client, network4, network6 in (
                (bridged, "10.244.1", "fd00:244:1"), (routed, "10.244.2", "fd00:244:2"),
                (endpoint, "10.244.3", "fd00:244:3"), (outside, "192.0.2", "fd00:c0")):
            client.ip(f"address add {network4}.2/24 dev eth0", f"address add {network6}::2/64 dev eth0 nodad",
                      "link set eth0 up", f"route add default via {network4}.1",
                      f"route add default via {network6}::1")
        node.ip("route add default via 192.0.2.2", "route add default via fd00:c0::2")
        settings = ("net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1",
                    "net.bridge.bridge-nf-call-iptables=1", "net.bridge.bridge-nf-call-ip6tables=1")
        node.run("sysctl", "-qw", *settings)
        stack.enter_context(_answering(endpoint))
        clients = dict(zip(SENDERS, (bridged, routed, node, outside), strict=True))
        yield Sides(node, clients, endpoint)


@contextmanager
def _answering(endpoint: Namespace) -> Iterator[None]:
    with ExitStack() as stack:
        stream, datagrams = endpoint.inside(lambda: (
            socket.create_server(("::", 8080), family=socket.AF_INET6, dualstack_ipv6=True),
            socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)))
        stack.enter_context(stream)
        stack.enter_context(datagrams)
        datagrams.bind(("::", 8080))
        threading.Thread(target=_echo, args=(datagrams,), daemon=True).start()
        yield
        with contextlib.suppress(OSError):  # It wakes the thread, and fails: there is no peer.
            datagrams.shutdown(socket.SHUT_RDWR)


def _echo(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            data, sender = sock.recvfrom(100)
            if sender is None:
                return
            sock.sendto(data, sender)


def write(directory: Path, **given: object) -> None:
    (directory / "web.yaml").write_text(manifest(**given))  # type: ignore[arg-type]
