"""Relays and portals of a service plan. Pure.

As in kube-proxy's userspace mode, except that node port addresses and source ranges are respected, and a
service port without endpoints refuses clients instead of accepting and closing.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from kproxy_core.contract import (
    Address,
    Cidr,
    Destination,
    Frontend,
    HashBy,
    NodeView,
    Protocol,
    ServicePlan,
    ServicePortKey,
    format_address,
    is_loopback,
    outermost,
)
from kproxy_core.linux.relay.orders import Endpoint


class Portal(NamedTuple):
    """A frontend whose traffic is redirected to a relay."""

    protocol: Protocol
    address: Address | None
    """None for a node port at every local address."""
    port: int
    owner: str
    """The service port, shown in the rules."""
    external: bool = False
    """An external IP. Traffic forwarded between bridged pods is not redirected."""
    source: Cidr | None = None
    """Clients that may use the portal; None: all."""

    @property
    def frontend(self) -> Frontend:
        return Frontend(self.address, self.protocol, self.port)


class Redirect(NamedTuple):
    """A portal with its destination."""

    portal: Portal
    port: int
    """The relay's port."""
    at: Address | None = None
    """The relay's address; None: every local address."""


class RelayName(NamedTuple):
    """The identity of a relay. A relay is replaced if any of this changes."""

    key: ServicePortKey
    port: int = 0
    """The port to bind; 0: any."""
    alone: bool = False
    """One worker accepts all connections. Clients connecting to another worker must not be refused."""
    frontend: Frontend | None = None
    """The only frontend of this relay, for which its connections are counted; None: it serves several."""


class Wanted(Struct, frozen=True):
    protocol: Protocol
    endpoints: tuple[Endpoint, ...]
    """Of each slot."""
    affinity_seconds: int
    portals: tuple[Portal, ...]
    frontend: Frontend | None = None
    """The frontend that connections are counted for; None: they are not counted."""
    resting: tuple[Endpoint, ...] = ()
    """Endpoints of weight 0."""
    hash_by: HashBy = ""


def wanted(
    plan: ServicePlan, node: NodeView, listen: Address | None, *, counted: bool = False
) -> dict[RelayName, Wanted]:
    """Return the relays of one service port; none for SCTP.

    With *listen*, relays are bound to the service port's own ports at that address, without portals. If
    connections are *counted*, each frontend has a relay: a datagram does not tell what its client dialled,
    and asking that of a TCP socket costs more than counting.
    """
    protocol = plan.key.protocol
    if protocol is Protocol.SCTP:
        return {}
    # Traffic policies require the client's address, which this mode does not preserve.
    endpoints = _endpoints(plan.cluster_slots if plan.cluster else plan.local_slots)
    resting = _endpoints(plan.resting)
    if listen is None:
        portals = tuple(_portals(plan, node))
        alone = protocol is Protocol.TCP and bool(plan.affinity_seconds)
        return {
            RelayName(plan.key, alone=alone, frontend=frontend):
                Wanted(protocol, endpoints, plan.affinity_seconds, of, frontend, resting, plan.hash_by)
            for frontend, of in (_by_frontend(portals) if counted else {None: portals}).items()
        }
    if len(listen) != plan.family.size:
        return {}
    last_first = reversed(list(plan.frontends())) if counted else ()
    by_port = {frontend.port: frontend for frontend in last_first}  # of equal ports, the first one
    return {
        RelayName(plan.key, port):
            Wanted(protocol, endpoints, plan.affinity_seconds, (), by_port.get(port), resting, plan.hash_by)
        for port in (plan.port, plan.node_port) if port
    }


def _endpoints(destinations: Sequence[Destination]) -> tuple[Endpoint, ...]:
    return tuple((format_address(where.address), where.port) for where in destinations)


def _by_frontend(portals: Sequence[Portal]) -> dict[Frontend, tuple[Portal, ...]]:
    found: dict[Frontend, list[Portal]] = {}
    for portal in portals:
        found.setdefault(portal.frontend, []).append(portal)
    return {frontend: tuple(of) for frontend, of in found.items()}


def _portals(plan: ServicePlan, node: NodeView) -> Iterator[Portal]:
    protocol, owner = plan.key.protocol, str(plan.key)
    if plan.cluster_ip is not None:
        yield Portal(protocol, plan.cluster_ip, plan.port, owner)
    for address in plan.load_balancer_ips:
        for source in outermost(plan.source_ranges) or (None,):  # nftables rejects overlapping intervals.
            yield Portal(protocol, address, plan.port, owner, source=source)
    for address in plan.external_ips:
        yield Portal(protocol, address, plan.port, owner, external=True)
    if plan.node_port:
        for local in _node_port_addresses(node):
            yield Portal(protocol, local, plan.node_port, owner)


def _node_port_addresses(node: NodeView) -> tuple[Address | None, ...]:
    if node.node_ports_anywhere:
        return (None,)
    loopback = (node.family.loopback,) if node.node_ports_on_loopback else ()
    return tuple(a for a in node.node_port_addresses if not is_loopback(a)) + loopback
