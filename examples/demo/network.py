"""The network around the shop.

                 bank 198.51.100.50   customer 198.51.100.7
                        \\               /
                         --- router ---
                         |             |   172.30.0.0/24; to node1 also 203.0.113.0/24, the load
                       node1         node2   balancer addresses, and 10.96.0.0/16, the ClusterIPs
        web-a checkout-a cart-a shell | web-b web-c checkout-b cart-b names-a
                 10.1.1.0/24          |            10.1.2.0/24

kproxy runs on node1. Pods hang on their node by a cable each, as with a point-to-point CNI plugin.
"""

from dataclasses import dataclass

from kproxy_conformance.network.namespaces import Namespace


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod: where it is, and the ports it serves."""

    name: str
    node: str
    ipv4: str
    ipv6: str
    tcp: tuple[int, ...] = ()
    udp: tuple[int, ...] = ()


def _pod(name: str, node: int, number: int, tcp: tuple[int, ...] = (), udp: tuple[int, ...] = ()) -> Pod:
    return Pod(name, f"node{node}", f"10.1.{node}.{number}", f"fd00:10:1:{node}::{number}", tcp, udp)


PODS = (
    _pod("shell", 1, 99),
    _pod("web-a", 1, 11, tcp=(8080,)),
    _pod("web-b", 2, 11, tcp=(8080,)),
    _pod("web-c", 2, 12, tcp=(8080,)),
    _pod("checkout-a", 1, 21, tcp=(8443,)),
    _pod("checkout-b", 2, 21, tcp=(8443,)),
    _pod("cart-a", 1, 31, tcp=(8080,)),
    _pod("cart-b", 2, 31, tcp=(8080,)),
    _pod("names-a", 2, 53, udp=(5353,)),
)
BANK = Pod("bank", "", "198.51.100.50", "", tcp=(9443,))

CUSTOMER = "198.51.100.7"
NODE = {"node1": "172.30.0.1", "node2": "172.30.0.2"}
_NODE_IPV6 = {"node1": "fd00:172:30::1", "node2": "fd00:172:30::2"}
_GATEWAY = {"node1": ("10.1.1.1", "fd00:10:1:1::1"), "node2": ("10.1.2.1", "fd00:10:1:2::1")}
"""How a pod's router is called on each node."""

ANY = ("0.0.0.0/0", "::/0")

NAMES = (
    {pod.ipv4: pod.name for pod in PODS}
    | {pod.ipv6: pod.name for pod in PODS}
    | {address: node for node, address in (*NODE.items(), *_NODE_IPV6.items())}
    | {address: node for node, pair in _GATEWAY.items() for address in pair}
    | {CUSTOMER: "customer", BANK.ipv4: "bank"}
)
"""Whose address it is."""


def build() -> dict[str, Namespace]:
    """Return every host, by name, connected and with all addresses and routes."""
    names = ("router", "node1", "node2", "customer", "bank", *(pod.name for pod in PODS))
    hosts = {name: Namespace(name) for name in names}
    _outside(hosts)
    for node in NODE:
        _node(hosts, node)
    for pod in PODS:
        _connect(hosts, pod)
    return hosts


def _outside(hosts: dict[str, Namespace]) -> None:
    router = hosts["router"]
    router.forward()
    for bridge, names in (("lan", ("node1", "node2")), ("wan", ("customer", "bank"))):
        for name in names:
            router.add_veth(f"to-{name}", hosts[name], "eth0")
        router.add_bridge(bridge, *(f"to-{name}" for name in names))
    router.add_address("172.30.0.254/24", "lan")
    router.add_address("fd00:172:30::fe/64", "lan")
    router.add_address("198.51.100.1/24", "wan")
    for network in ("203.0.113.0/24", "10.96.0.0/16", "10.1.1.0/24"):
        router.add_route(network, via=NODE["node1"])
    router.add_route("10.1.2.0/24", via=NODE["node2"])
    for name, address in (("customer", CUSTOMER), ("bank", BANK.ipv4)):
        hosts[name].add_address(f"{address}/24", "eth0")
        hosts[name].add_route(ANY[0], via="198.51.100.1")


def _node(hosts: dict[str, Namespace], node: str) -> None:
    host = hosts[node]
    other = "node1" if node == "node2" else "node2"
    host.forward()
    host.add_address(f"{NODE[node]}/24", "eth0")
    host.add_address(f"{_NODE_IPV6[node]}/64", "eth0")
    host.add_route(ANY[0], via="172.30.0.254")
    host.add_route(ANY[1], via="fd00:172:30::fe")
    host.add_route(f"10.1.{other[-1]}.0/24", via=NODE[other])
    host.add_route(f"fd00:10:1:{other[-1]}::/64", via=_NODE_IPV6[other])


def _connect(hosts: dict[str, Namespace], pod: Pod) -> None:
    node, host = hosts[pod.node], hosts[pod.name]
    node.add_veth(pod.name, host, "eth0")
    for address, router, bits, anywhere in zip(
        (pod.ipv4, pod.ipv6), _GATEWAY[pod.node], (32, 128), ANY, strict=True
    ):
        node.add_address(f"{router}/{bits}", pod.name)
        node.add_route(f"{address}/{bits}", device=pod.name)
        host.add_address(f"{address}/{bits}", "eth0")
        host.add_route(f"{router}/{bits}", device="eth0")
        host.add_route(anywhere, via=router)
