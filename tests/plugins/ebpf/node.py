"""A node with two pods, other endpoints, and a kproxy in ebpf mode for sockets in a cgroup of the test."""

import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

from kproxy_core.model.address import Protocol, parse_address
from kproxy_ebpf import names
from kproxy_ebpf.batch import frontend_key, parse_service, slot_key
from kproxy_ebpf.kernel import bpf
from tests.core.bpf_places import inside, new_bpf_file_system, new_cgroup
from tests.core.namespaces import Namespace, namespace
from tests.core.processes import KPROXY, Proxy, started
from tests.patience import PATIENCE
from tests.plugins.ebpf.sockets import Sockets, sockets_in

NODE, NODE6 = "203.0.113.1", "fd00:203::1"
POD, POD6 = "10.244.1.11", "fd00:244:1::11"
NEIGHBOUR, NEIGHBOUR6 = "10.244.1.12", "fd00:244:1::12"
"""The other pod of the node."""
_HERE = (POD, POD6, NEIGHBOUR, NEIGHBOUR6)
REMOTE = tuple(f"10.244.2.{number}" for number in range(11, 16))
REMOTE6 = tuple(f"fd00:244:2::{number}" for number in range(11, 16))
PORT = 8080

Json = dict[str, Any]


class Node:
    """The namespaces of node, pods and another node, the endpoints in them, and the cluster's objects."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self._stack = stack
        self._directory = directory
        self.cgroup = stack.enter_context(new_cgroup())
        self.pins = stack.enter_context(new_bpf_file_system(directory / "bpf")) / "kproxy"
        self.host, self.pod, self.neighbour, self.elsewhere = (
            stack.enter_context(namespace()) for _ in range(4))
        _connect(self.host, self.pod, self.neighbour, self.elsewhere)
        self.config = directory / "config.json"
        self.manifests = directory / "manifests"
        self.manifests.mkdir()
        self.have_pod_network(None)
        self.echo = stack.enter_context(echo(self.elsewhere, (*REMOTE, *REMOTE6)))
        stack.enter_context(echo(self.pod, (POD, POD6)))
        stack.enter_context(echo(self.neighbour, (NEIGHBOUR, NEIGHBOUR6)))

    def sockets(self, where: Namespace, *, translated: bool = True) -> Sockets:
        """Return a maker of sockets in *where*. *translated*: inside the cgroup."""
        return self._stack.enter_context(sockets_in(where, self.cgroup if translated else None))

    @contextmanager
    def proxy(
        self, options: Mapping[str, object] = {}, settings: Mapping[str, object] = {},
        kproxy: Mapping[str, object] = {}, under: Sequence[str] = (),
    ) -> Iterator[Proxy]:  # fmt: skip
        """Start a kproxy, ready to serve, with *options* of the mode, its own and other *settings*.

        *under*: the command that starts it.
        """
        backends = {"ebpf": {"cgroup": str(self.cgroup), "pinDirectory": str(self.pins), **options}}
        state = str(self._directory / "state")
        self.config.write_text(json.dumps({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
            "mode": "ebpf", "clusterCIDR": "10.244.0.0/16,fd00:244::/32", "conntrack": {"maxPerCore": 0},
            "kproxy": {"stateDirectory": state, "backendOptions": backends, **kproxy},
            **settings,
        }))  # fmt: skip
        command = [*under, "ip", "netns", "exec", self.host.name, KPROXY, "--config", str(self.config),
                   "--manifests", str(self.manifests), "--hostname-override", "here"]  # fmt: skip
        with started(self.host, inside(self.cgroup, command)) as proxy:
            proxy.await_health()
            yield proxy

    def serve(
        self, name: str, cluster_ip: str, endpoints: Sequence[str], *, protocol: str = "TCP", **spec: object
    ) -> None:
        """Write a Service with one port, 80, and its endpoints."""
        node_port = spec.pop("node_port", None)
        port: Json = {"port": 80, "protocol": protocol} | ({"nodePort": node_port} if node_port else {})
        kind = "NodePort" if node_port else "ClusterIP"
        self._write(f"{name}-service", {
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "default"},
            "spec": {"clusterIP": cluster_ip, "type": kind, "ports": [port], **spec},
        })  # fmt: skip
        self._write(f"{name}-slice", {
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": f"{name}-1", "namespace": "default",
                         "labels": {"kubernetes.io/service-name": name}},
            "addressType": "IPv6" if ":" in cluster_ip else "IPv4",
            "endpoints": [
                {"addresses": [a], "nodeName": "here" if a in _HERE else "elsewhere"} for a in endpoints
            ],
            "ports": [{"port": PORT, "protocol": protocol}],
        })  # fmt: skip

    def have_pod_network(self, cidr: str | None) -> None:
        """Write the Node object."""
        self._write("node", {
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": "here"},
            "spec": {"podCIDRs": [cidr]} if cidr else {},
            "status": {"addresses": [{"type": "InternalIP", "address": a} for a in (NODE, NODE6)]},
        })  # fmt: skip

    def await_endpoints(
        self, cluster_ip: str, *endpoints: str, protocol: Protocol = Protocol.UDP
    ) -> None:  # fmt: skip
        """Wait until programs choose among these endpoints for a Service."""
        key = frontend_key(parse_address(cluster_ip), protocol, 80)
        until(lambda: self._behind(key) == set(endpoints))

    def _behind(self, frontend: bytes) -> set[str]:
        """Return the addresses to which the maps lead from a frontend, "" where rules decide.

        An endpoint that is removed leaves its slot before the rules and the frontend change.
        """
        contents = {}
        for name in (names.FRONTENDS, names.SLOTS):
            (path,) = self.pins.glob(f"*/maps-*/{name}")
            descriptor = bpf.open_pin(str(path))
            contents[name] = dict(bpf.elements(descriptor, bpf.map_definition(descriptor)))
            os.close(descriptor)
        if frontend not in contents[names.FRONTENDS]:
            return set()
        service = parse_service(contents[names.FRONTENDS][frontend])
        slots = [slot_key(service.identity, index) for index in range(service.endpoints)]
        values = [contents[names.SLOTS].get(slot) for slot in slots]
        addresses = [value and IPv6Address(value[:16]) for value in values]
        return {str(address.ipv4_mapped or address) if address else "" for address in addresses}

    def _write(self, name: str, content: Json) -> None:
        scratch = self._directory / "scratch"
        scratch.write_text(json.dumps(content))
        scratch.rename(self.manifests / f"{name}.json")


class Echo:
    """A server that answers with its own address and the client's."""

    def __init__(self, addresses: Sequence[str], port: int = PORT) -> None:
        self._poll = selectors.DefaultSelector()
        self._held: list[tuple[socket.socket, bytes, Any]] = []
        self._opened: list[socket.socket] = []
        self._ended = False
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, port), family=family, backlog=1024)
            self._add(listener, self._accept, address)
            datagrams = socket.socket(family, socket.SOCK_DGRAM)
            datagrams.bind((address, port))
            self._add(datagrams, self._answer, address)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Send the answers to all datagrams that asked for a late one."""
        for sock, answer, to in self._held:
            sock.sendto(answer, to)
        self._held.clear()

    def await_held(self, number: int) -> None:
        """Wait until so many answers wait for `release`."""
        until(lambda: len(self._held) >= number)

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        self._poll.close()
        for opened in self._opened:
            opened.close()

    def _run(self) -> None:
        while not self._ended:
            for key, _ in self._poll.select(0.1):
                act, address = key.data
                act(key.fileobj, address)

    def _add(self, sock: socket.socket, act: Any, address: str) -> None:
        self._opened.append(sock)
        self._poll.register(sock, selectors.EVENT_READ, (act, address))

    def _accept(self, listener: socket.socket, address: str) -> None:
        connection, client = listener.accept()
        connection.sendall(f"{address} {client[0]}\n".encode())
        self._add(connection, self._hear, address)

    def _hear(self, connection: socket.socket, _: str) -> None:
        try:
            heard = connection.recv(100)
            if heard:
                connection.sendall(heard)
        except OSError:
            heard = b""
        if not heard:
            self._poll.unregister(connection)
            self._opened.remove(connection)
            connection.close()

    def _answer(self, sock: socket.socket, address: str) -> None:
        said, client = sock.recvfrom(100)
        answer = f"{address} {client[0]}\n".encode()
        if said == b"late":
            self._held.append((sock, answer, client))
        else:
            sock.sendto(answer, client)


@contextmanager
def echo(where: Namespace, addresses: Sequence[str], port: int = PORT) -> Iterator[Echo]:
    """Answer at *addresses*, over TCP and UDP."""
    answering = where.inside(partial(Echo, addresses, port))
    try:
        yield answering
    finally:
        answering.close()


def until(condition: Callable[[], bool]) -> None:
    """Wait for *condition*."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def node(directory: Path) -> Iterator[Node]:
    with ExitStack() as stack:
        yield Node(stack, directory)


def _connect(host: Namespace, pod: Namespace, neighbour: Namespace, elsewhere: Namespace) -> None:
    for one in (host, pod, neighbour, elsewhere):  # Link-local addresses can be used at once.
        one.run("sysctl", "-qw", "net.ipv6.conf.default.accept_dad=0", "net.ipv6.conf.all.accept_dad=0")
    host.run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
    host.ip(
        *_to_pod("pod", pod, "10.244.1.1", "fd00:244:1::1", POD, POD6),
        *_to_pod("neighbour", neighbour, "10.244.1.2", "fd00:244:1::2", NEIGHBOUR, NEIGHBOUR6),
        f"link add out type veth peer eth0 netns {elsewhere.name}", "link set out up",
        f"addr add {NODE}/24 dev out", f"addr add {NODE6}/64 dev out nodad",
    )  # fmt: skip
    pod.ip(*_of_pod("10.244.1.1", "fd00:244:1::1", POD, POD6))
    neighbour.ip(*_of_pod("10.244.1.2", "fd00:244:1::2", NEIGHBOUR, NEIGHBOUR6))
    elsewhere.ip(
        "link set eth0 up", "addr add 203.0.113.2/24 dev eth0", "addr add fd00:203::2/64 dev eth0 nodad",
        *(f"addr add {address}/32 dev lo" for address in REMOTE),
        *(f"addr add {address}/128 dev lo nodad" for address in REMOTE6),
        f"route add default via {NODE}", f"route add default via {NODE6}",
    )  # fmt: skip
    host.ip("route add default via 203.0.113.2", "route add default via fd00:203::2")


def _to_pod(
    name: str, pod: Namespace, gateway: str, gateway6: str, address: str, address6: str
) -> tuple[str, ...]:
    """Return the commands that connect the node to a pod, whose gateways are addresses of the node."""
    return (
        f"link add {name} type veth peer eth0 netns {pod.name}", f"link set {name} up",
        f"addr add {gateway}/32 dev {name}", f"addr add {gateway6}/128 dev {name} nodad",
        f"route add {address}/32 dev {name}", f"route add {address6}/128 dev {name}",
    )


def _of_pod(gateway: str, gateway6: str, address: str, address6: str) -> tuple[str, ...]:
    """Return the commands that connect a pod to its node."""
    return (
        "link set eth0 up", f"addr add {address}/32 dev eth0", f"addr add {address6}/128 dev eth0 nodad",
        f"route add {gateway}/32 dev eth0", f"route add {gateway6}/128 dev eth0",
        f"route add default via {gateway}", f"route add default via {gateway6}",
    )
