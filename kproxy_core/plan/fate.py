"""The fate of a packet that opens a connection to a frontend: pure, and the same for every mode.

Sources as in `service_plan`; kube-proxy 1.36 has the same decisions in its rules only.
"""

import enum
from collections.abc import Iterable
from typing import NamedTuple

from kproxy_core.model.address import Address, Cidr, Family, Protocol, family_of, is_loopback, parse_address
from kproxy_core.model.endpoint import Destination
from kproxy_core.model.node import NodeView
from kproxy_core.plan.service_plan import Frontend, ServicePlan


class Origin(enum.Enum):
    """The side from which a packet reaches this node's rules."""

    POD = "pod"
    """A pod of this node, or of the network that the configuration calls local."""
    NODE = "node"
    """A process in the node's own network namespace."""
    OUTSIDE = "outside"


class Packet(NamedTuple):
    """The first packet of a connection or flow."""

    origin: Origin
    source: Address
    destination: Address
    protocol: Protocol
    port: int

    @property
    def family(self) -> Family:
        return family_of(self.destination)


class Kind(enum.Enum):
    CLUSTER_IP = "ClusterIP"
    EXTERNAL_IP = "external IP"
    LOAD_BALANCER_IP = "load balancer IP"
    NODE_PORT = "node port"


class Outcome(enum.Enum):
    """The end of a packet's way through the rules."""

    FORWARDED = "forwarded"
    REFUSED = "refused"
    """The client gets an error at once."""
    DROPPED = "dropped"
    """The client gets no answer."""
    UNTOUCHED = "not touched"
    """No rule for a Service applies."""


class Choice(NamedTuple):
    where: Destination
    share: float
    """Its part of new connections, 0 to 1."""
    masqueraded: bool
    """The endpoint sees an address of the node instead of the client's."""


class Policy(enum.Enum):
    INTERNAL = "internal traffic policy Cluster"
    INTERNAL_LOCAL = "internal traffic policy Local"
    EXTERNAL = "external traffic policy Cluster"
    EXTERNAL_LOCAL = "external traffic policy Local"
    SHORT_CIRCUIT = "external traffic policy Local, short circuit for the node and its pods"


class Fate(NamedTuple):
    outcome: Outcome
    because: str
    choices: tuple[Choice, ...] = ()
    policy: Policy | None = None
    """None: refused or dropped before a policy matters, or no Service's frontend."""


def kind_of(frontend: Frontend, plan: ServicePlan) -> Kind:
    if frontend.address is None:
        return Kind.NODE_PORT
    if frontend.address == plan.cluster_ip:
        return Kind.CLUSTER_IP
    return Kind.LOAD_BALANCER_IP if frontend.address in plan.load_balancer_ips else Kind.EXTERNAL_IP


def origin_of(source: Address, node: NodeView, endpoints_here: Iterable[Address] = ()) -> Origin:
    """Return the origin of packets from *source*, without knowledge of interfaces.

    *endpoints_here* are addresses of this node's pods, as far as they are known.
    """
    local = node.local_source
    if local is not None and local.cidr is not None and source in local.cidr:
        return Origin.POD
    if is_loopback(source) or source == node.node_ip or source in node.node_port_addresses:
        return Origin.NODE
    if local is not None and local.cidr is None and source in endpoints_here:
        return Origin.POD
    return Origin.OUTSIDE


def stand_in(origin: Origin, node: NodeView) -> Address:
    """Return the address that stands for any sender of *origin*; outside, a documentation address."""
    local = node.local_source
    if origin is Origin.NODE:
        return node.node_ip or next(iter(node.node_port_addresses), node.family.loopback)
    if origin is Origin.POD and local is not None and local.cidr is not None:
        return _last_host(local.cidr)
    return parse_address("192.0.2.1" if node.family is Family.IPV4 else "2001:db8::1")


def comes_from_pods(packet: Packet, node: NodeView) -> bool:
    """Return whether *packet* matches the node's mark of local traffic."""
    local = node.local_source
    if local is None:
        return False
    return packet.source in local.cidr if local.cidr is not None else packet.origin is Origin.POD


def decide(packet: Packet, frontend: Frontend, plan: ServicePlan, node: NodeView) -> Fate:
    """Return the fate of *packet*, which is for a *frontend* of *plan*."""
    kind = kind_of(frontend, plan)
    ranges = plan.source_ranges if kind is Kind.LOAD_BALANCER_IP else ()
    if ranges and not any(packet.source in cidr for cidr in ranges):
        named = ", ".join(map(str, ranges))
        return Fate(Outcome.DROPPED, f"the source is not in loadBalancerSourceRanges ({named})")
    if not plan.has_endpoints:
        return Fate(Outcome.REFUSED, "no endpoint is usable on any node")
    if kind is Kind.CLUSTER_IP:
        return _internal(packet, plan, node)
    return _external(packet, plan, node)


def decide_unowned(packet: Packet, cluster_ips: bool, node: NodeView) -> Fate:
    """Return the fate of *packet*, which is for no frontend.

    *cluster_ips*: its destination is the ClusterIP of a Service that lacks this port.
    """
    if cluster_ips:
        return Fate(Outcome.REFUSED, "no Service with this ClusterIP has this port")
    if any(packet.destination in cidr for cidr in node.service_cidrs):
        return Fate(Outcome.DROPPED, "the address is in a ServiceCIDR, but no Service has it")
    return Fate(Outcome.UNTOUCHED, "no Service has a frontend there")


def _internal(packet: Packet, plan: ServicePlan, node: NodeView) -> Fate:
    masqueraded = node.masquerade_all or (node.local_source is not None and not comes_from_pods(packet, node))
    if not plan.internal_policy_local:
        return _forward(packet, plan, plan.cluster, Policy.INTERNAL, masqueraded=masqueraded)
    return _forward(packet, plan, plan.local, Policy.INTERNAL_LOCAL, masqueraded=masqueraded)


def _external(packet: Packet, plan: ServicePlan, node: NodeView) -> Fate:
    if not plan.external_policy_local:
        return _forward(packet, plan, plan.cluster, Policy.EXTERNAL, masqueraded=True)
    if comes_from_pods(packet, node):
        return _forward(packet, plan, plan.cluster, Policy.SHORT_CIRCUIT, masqueraded=False)
    if packet.origin is Origin.NODE:
        return _forward(packet, plan, plan.cluster, Policy.SHORT_CIRCUIT, masqueraded=True)
    return _forward(packet, plan, plan.local, Policy.EXTERNAL_LOCAL, masqueraded=False)


def _forward(
    packet: Packet, plan: ServicePlan, among: tuple[Destination, ...], policy: Policy, *, masqueraded: bool
) -> Fate:
    if not among:
        return Fate(Outcome.DROPPED, f"{policy.value}, and no usable endpoint is on this node", policy=policy)
    share = 1 / len(among)
    hairpin = packet.source if packet.source in plan.hairpins else None
    choices = tuple(Choice(where, share, masqueraded or where.address == hairpin) for where in among)
    return Fate(Outcome.FORWARDED, policy.value, choices, policy)


def _last_host(cidr: Cidr) -> Address:
    spare = len(cidr.network) * 8 - cidr.prefix
    value = int.from_bytes(cidr.network, "big") | ((1 << spare) - 1)
    return Address((value - (spare > 1)).to_bytes(len(cidr.network), "big"))
