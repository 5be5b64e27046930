"""The expected fate of a packet that opens a connection to a frontend, the same in every mode. Pure.

Sources as in `service_plan`; kube-proxy 1.36 makes these decisions in its rules only.
"""

import enum
from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

from kproxy_core.model.address import Address, Cidr, Family, Protocol, family_of, is_loopback, parse_address
from kproxy_core.model.node import LocalSource, NodeView
from kproxy_core.model.service import Destination
from kproxy_core.plan.service_plan import Frontend, ServicePlan


class Origin(enum.Enum):
    """The side from which a packet reaches this node's rules."""

    POD = "pod"
    """A pod of this node, or of the network that the configuration calls local."""
    NODE = "node"
    """A process in the node's network namespace."""
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


class FrontendKind(enum.Enum):
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


class EndpointShare(NamedTuple):
    where: Destination
    share: float
    """Fraction of new connections, 0 to 1."""
    masqueraded: bool
    """The endpoint sees an address of the node as the source."""


class Policy(enum.Enum):
    INTERNAL = "internal traffic policy Cluster"
    INTERNAL_LOCAL = "internal traffic policy Local"
    EXTERNAL = "external traffic policy Cluster"
    EXTERNAL_LOCAL = "external traffic policy Local"
    SHORT_CIRCUIT = "external traffic policy Local, short circuit for the node and its pods"


class Fate(NamedTuple):
    outcome: Outcome
    because: str
    choices: tuple[EndpointShare, ...] = ()
    policy: Policy | None = None
    """None: refused or dropped before a policy matters, or no Service's frontend."""


def kind_of(frontend: Frontend, plan: ServicePlan) -> FrontendKind:
    if frontend.address is None:
        return FrontendKind.NODE_PORT
    if frontend.address == plan.cluster_ip:
        return FrontendKind.CLUSTER_IP
    if frontend.address in plan.load_balancer_ips:
        return FrontendKind.LOAD_BALANCER_IP
    return FrontendKind.EXTERNAL_IP


def origin_of(
    source: Address, node: NodeView, addresses: Collection[Address],
    is_behind_pod_interface: Callable[[LocalSource], bool],
) -> Origin:  # fmt: skip
    """Return the origin of packets from *source*. *addresses* are those of the node's interfaces.

    *is_behind_pod_interface* is called where pods are recognised by an interface.
    """
    local = node.local_source
    if is_own(source, node, addresses):
        return Origin.NODE
    if local is None:
        return Origin.OUTSIDE
    is_pod = is_behind_pod_interface(local) if local.cidr is None else source in local.cidr
    return Origin.POD if is_pod else Origin.OUTSIDE


def is_own(address: Address, node: NodeView, addresses: Collection[Address]) -> bool:
    """Return whether the node receives packets to *address*. *addresses*: of its interfaces; (): unknown."""
    # Those that serve node ports are some of them.
    known = addresses or node.node_port_addresses
    return address == node.node_ip or address in known or is_loopback(address)


def stand_in(origin: Origin, node: NodeView) -> Address:
    """Return an example sender of *origin*; for the outside, a documentation address."""
    local = node.local_source
    if origin is Origin.NODE:
        return node.node_ip or next(iter(node.node_port_addresses), node.family.loopback)
    if origin is Origin.POD and local is not None and local.cidr is not None:
        return _last_host(local.cidr)
    # Not one of the node's own, from which rules would take it for the node.
    examples = ("192.0.2.1", "192.0.2.2") if node.family is Family.IPV4 else ("2001:db8::1", "2001:db8::2")
    first, second = map(parse_address, examples)
    return second if first == node.node_ip or first in node.node_port_addresses else first


def comes_from_pods(packet: Packet, node: NodeView) -> bool:
    """Return whether *packet* matches the node's mark of local traffic."""
    local = node.local_source
    if local is None:
        return False
    return packet.source in local.cidr if local.cidr is not None else packet.origin is Origin.POD


def decide(
    packet: Packet, frontend: Frontend, plan: ServicePlan, node: NodeView, addresses: Collection[Address] = ()
) -> Fate:
    """Return the fate of *packet*, which is for a *frontend* of *plan*.

    *addresses* are those of the node's interfaces, as far as they are known.
    """
    kind = kind_of(frontend, plan)
    ranges = plan.source_ranges if kind is FrontendKind.LOAD_BALANCER_IP else ()
    if ranges and not any(packet.source in cidr for cidr in ranges):
        named = ", ".join(map(str, ranges))
        return Fate(Outcome.DROPPED, f"the source is not in loadBalancerSourceRanges ({named})")
    if not plan.has_endpoints:
        resting = ": those that were have weight 0" if plan.resting else ""
        return Fate(Outcome.REFUSED, f"no endpoint is usable on any node{resting}")
    policy, masqueraded = (_internal if kind is FrontendKind.CLUSTER_IP else _external)(packet, plan, node)
    is_local = policy in (Policy.INTERNAL_LOCAL, Policy.EXTERNAL_LOCAL)
    among = plan.local if is_local else plan.cluster
    if not among:
        return Fate(Outcome.DROPPED, f"{policy.value}, and no usable endpoint is on this node", policy=policy)

    def is_masqueraded(to: Address) -> bool:
        # Only packets that leave the node reach the postrouting hook, and those that it sends.
        if packet.origin is not Origin.NODE and is_own(to, node, addresses):
            return False
        return masqueraded or (to == packet.source and to in plan.hairpins)

    slots = plan.local_slots if is_local else plan.cluster_slots
    share = 1 / len(slots)
    held = dict.fromkeys(among, 1) if slots is among else Counter(slots)
    choices = tuple(
        EndpointShare(where, held[where] * share, is_masqueraded(where.address)) for where in among)
    return Fate(Outcome.FORWARDED, policy.value + _BY_HASH[plan.hash_by], choices, policy)


_BY_HASH = {
    "": "", "client": "; a hash of the client's address decides",
    "flow": "; a hash of the client's address and port decides",
}  # fmt: skip


def decide_unowned(packet: Packet, cluster_ips: bool, node: NodeView) -> Fate:
    """Return the fate of *packet*, which is for no frontend.

    *cluster_ips*: its destination is the ClusterIP of a Service that lacks this port.
    """
    if cluster_ips:
        return Fate(Outcome.REFUSED, "no Service with this ClusterIP has this port")
    if any(packet.destination in cidr for cidr in node.service_cidrs):
        return Fate(Outcome.DROPPED, "the address is in a ServiceCIDR, but no Service has it")
    return Fate(Outcome.UNTOUCHED, "no Service has a frontend there")


def _internal(packet: Packet, plan: ServicePlan, node: NodeView) -> tuple[Policy, bool]:
    """Return the policy for *packet* to a ClusterIP, and whether it is masqueraded if it leaves the node."""
    masqueraded = node.masquerade_all or (node.local_source is not None and not comes_from_pods(packet, node))
    return (Policy.INTERNAL_LOCAL if plan.internal_policy_local else Policy.INTERNAL), masqueraded


def _external(packet: Packet, plan: ServicePlan, node: NodeView) -> tuple[Policy, bool]:
    """Return the same for *packet* to another frontend."""
    if not plan.external_policy_local:
        return Policy.EXTERNAL, True
    if comes_from_pods(packet, node):
        return Policy.SHORT_CIRCUIT, False
    if packet.origin is Origin.NODE:
        return Policy.SHORT_CIRCUIT, True
    return Policy.EXTERNAL_LOCAL, False


def _last_host(cidr: Cidr) -> Address:
    spare = len(cidr.network) * 8 - cidr.prefix
    value = int.from_bytes(cidr.network, "big") | ((1 << spare) - 1)
    return Address((value - (spare > 1)).to_bytes(len(cidr.network), "big"))
