"""The network of the cluster: a bridge, and at it the control plane, a client outside and the nodes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from kproxy_conformance.network.namespaces import Namespace

CONTROL_PLANE = 10
OUTSIDE = 100
SERVICES = ("10.96.0.0/16", "fd00:10:96::/112")
PODS = ("10.244.0.0/16", "fd00:10:244::/48")
REMOTE = "10.20.0.10"
"""A further address of the control plane, in no network of the nodes."""
_GATEWAY = ("10.10.0.254", "fd00:10:10::fe")
"""A host that does not exist, so that packets to unknown destinations leave as on a real machine."""


def addresses(number: int) -> tuple[str, str]:
    """Return the IPv4 and IPv6 address of a host."""
    return f"10.10.0.{number}", f"fd00:10:10::{number}"


def pod_networks(node: int) -> tuple[str, str]:
    return f"10.244.{node}.0/24", f"fd00:10:244:{node}::/64"


@dataclass(frozen=True, slots=True)
class Fabric:
    control_plane: Namespace
    outside: Namespace
    nodes: dict[int, Namespace]
    """By number, from 1."""


@contextmanager
def fabric(nodes: int) -> Iterator[Fabric]:
    with ExitStack() as stack:

        def namespace(name: str) -> Namespace:
            made = Namespace(name)
            stack.callback(made.close)
            return made

        lan = namespace("lan")
        made = Fabric(
            namespace("control-plane"), namespace("outside"),
            {number: namespace(f"node{number}") for number in range(1, nodes + 1)})  # fmt: skip
        hosts = {CONTROL_PLANE: made.control_plane, OUTSIDE: made.outside, **made.nodes}
        for number, host in hosts.items():
            lan.add_veth(f"v{number}", host, "eth0")
            for address, length in zip(addresses(number), (24, 64), strict=True):
                host.add_address(f"{address}/{length}", "eth0")
        lan.add_bridge("br0", *(f"v{number}" for number in hosts))
        for number, host in hosts.items():
            for node in made.nodes:
                if node != number:
                    for network, via in zip(pod_networks(node), addresses(node), strict=True):
                        host.add_route(network, via=via)
            for network, via in zip(("0.0.0.0/0", "::/0"), _GATEWAY, strict=True):
                host.add_route(network, via=via)
        made.control_plane.add_address(f"{REMOTE}/32", "eth0")
        for host in made.nodes.values():
            host.add_route(f"{REMOTE}/32", via=addresses(CONTROL_PLANE)[0])
            host.forward()
        yield made
