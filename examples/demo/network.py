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

from examples.demo.sandbox import Host


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

NAMES = (
    {pod.ipv4: pod.name for pod in PODS}
    | {pod.ipv6: pod.name for pod in PODS}
    | {address: node for node, address in (*NODE.items(), *_NODE_IPV6.items())}
    | {address: node for node, pair in _GATEWAY.items() for address in pair}
    | {CUSTOMER: "customer", BANK.ipv4: "bank"}
)
"""Whose address it is."""


def build() -> dict[str, Host]:
    """Every host, by name, connected and with all addresses and routes."""
    names = ("router", "node1", "node2", "customer", "bank", *(pod.name for pod in PODS))
    hosts = {name: Host(name) for name in names}
    _outside(hosts)
    for node in NODE:
        _node(hosts, node)
    for pod in PODS:
        _connect(hosts, pod)
    return hosts


def _outside(hosts: dict[str, Host]) -> None:
    router = hosts["router"]
    router.forward()
    router.ip("link add lan type bridge", "link set lan up", "link add wan type bridge", "link set wan up")
    for name, bridge in (("node1", "lan"), ("node2", "lan"), ("customer", "wan"), ("bank", "wan")):
        router.link(f"to-{name}", hosts[name], "eth0")
        router.ip(f"link set to-{name} master {bridge}")
    router.ip(
        "addr add 172.30.0.254/24 dev lan",
        "addr add fd00:172:30::fe/64 dev lan",
        "addr add 198.51.100.1/24 dev wan",
        f"route add 203.0.113.0/24 via {NODE['node1']}",
        f"route add 10.96.0.0/16 via {NODE['node1']}",
        f"route add 10.1.1.0/24 via {NODE['node1']}",
        f"route add 10.1.2.0/24 via {NODE['node2']}",
    )
    for name, address in (("customer", CUSTOMER), ("bank", BANK.ipv4)):
        hosts[name].ip(f"addr add {address}/24 dev eth0", "route add default via 198.51.100.1")


def _node(hosts: dict[str, Host], node: str) -> None:
    host = hosts[node]
    other = "node1" if node == "node2" else "node2"
    number = other[-1]
    host.forward()
    host.ip(
        f"addr add {NODE[node]}/24 dev eth0",
        f"addr add {_NODE_IPV6[node]}/64 dev eth0",
        "route add default via 172.30.0.254",
        "route add default via fd00:172:30::fe",
        f"route add 10.1.{number}.0/24 via {NODE[other]}",
        f"route add fd00:10:1:{number}::/64 via {_NODE_IPV6[other]}",
    )


def _connect(hosts: dict[str, Host], pod: Pod) -> None:
    node, host = hosts[pod.node], hosts[pod.name]
    router4, router6 = _GATEWAY[pod.node]
    node.link(pod.name, host, "eth0")
    node.ip(
        f"addr add {router4}/32 dev {pod.name}",
        f"addr add {router6}/128 dev {pod.name}",
        f"route add {pod.ipv4}/32 dev {pod.name}",
        f"route add {pod.ipv6}/128 dev {pod.name}",
    )
    host.ip(
        f"addr add {pod.ipv4}/32 dev eth0",
        f"addr add {pod.ipv6}/128 dev eth0",
        f"route add {router4}/32 dev eth0",
        f"route add default via {router4}",
        f"route add {router6}/128 dev eth0",
        f"route add default via {router6}",
    )
