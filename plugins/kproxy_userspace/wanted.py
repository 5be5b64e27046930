"""What a service plan wants: relays, and the portals that lead to them. Pure.

As in kube-proxy's userspace mode, but node port addresses and source ranges are respected, and a service port
without endpoints refuses clients instead of accepting and hanging up.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kproxy_core.model.address import Address, Cidr, Protocol, format_address, is_loopback
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_userspace.names import Endpoint


class Portal(NamedTuple):
    """A frontend whose traffic is redirected to a relay."""

    protocol: Protocol
    address: Address | None
    """None: every local address, for a node port."""
    port: int
    owner: str
    """The service port, for people who read the rules."""
    external: bool = False
    """An external IP: what this node forwards between bridged pods is not redirected."""
    source: Cidr | None = None
    """Only for clients from here."""


class RelayName(NamedTuple):
    """What identifies a relay. One that would change in any of this is replaced by another."""

    key: ServicePortKey
    port: int = 0
    """Where it is bound; 0: anywhere."""
    alone: bool = False
    """Connections are accepted by one worker only. Who is on the way to the others must not be refused."""


@dataclass(frozen=True, slots=True)
class WantedRelay:
    """One relay as it must be."""

    protocol: Protocol
    endpoints: tuple[Endpoint, ...]
    affinity_seconds: int
    portals: tuple[Portal, ...]


def wanted_relays(plan: ServicePlan, node: NodeView, listen: Address | None) -> dict[RelayName, WantedRelay]:
    """The relays for one service port: none for SCTP.

    With *listen* they are bound to the service port's own numbers at this address, and there are no portals.
    """
    protocol = plan.key.protocol
    if protocol is Protocol.SCTP:
        return {}
    # Policies are not for this mode: it does not preserve client addresses anyway.
    endpoints = tuple((format_address(d.address), d.port) for d in plan.cluster or plan.local)
    if listen is None:
        portals = tuple(_portals(plan, node))
        name = RelayName(plan.key, alone=protocol is Protocol.TCP and bool(plan.affinity_seconds))
        return {name: WantedRelay(protocol, endpoints, plan.affinity_seconds, portals)}
    if len(listen) != plan.family.size:
        return {}
    relay = WantedRelay(protocol, endpoints, plan.affinity_seconds, ())
    return {RelayName(plan.key, port): relay for port in (plan.port, plan.node_port) if port}


def _portals(plan: ServicePlan, node: NodeView) -> Iterator[Portal]:
    protocol, owner = plan.key.protocol, str(plan.key)
    if plan.cluster_ip is not None:
        yield Portal(protocol, plan.cluster_ip, plan.port, owner)
    for address in plan.load_balancer_ips:
        for source in _outermost(plan.source_ranges) or (None,):
            yield Portal(protocol, address, plan.port, owner, source=source)
    for address in plan.external_ips:
        yield Portal(protocol, address, plan.port, owner, external=True)
    if plan.node_port:
        for where in _node_port_addresses(node):
            yield Portal(protocol, where, plan.node_port, owner)


def _outermost(ranges: Sequence[Cidr]) -> list[Cidr]:
    """Those that are within no other: nftables takes none that overlap."""
    return [
        one for one in dict.fromkeys(ranges)
        if not any(one.network in other and one.prefix > other.prefix for other in ranges)
    ]  # fmt: skip


def _node_port_addresses(node: NodeView) -> tuple[Address | None, ...]:
    if node.node_ports_anywhere:
        return (None,)
    loopback = (node.family.loopback,) if node.node_ports_on_loopback else ()
    return tuple(a for a in node.node_port_addresses if not is_loopback(a)) + loopback
