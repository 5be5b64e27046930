"""Service plans: the decision for one service port in one family, as backends receive it."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from kproxy_core.model.address import Address, Cidr, Family, Protocol, family_of, is_loopback, outermost
from kproxy_core.model.node import NodePortAddresses, NodeView
from kproxy_core.model.service import Destination, EndpointSlice, PortSpec, Service, ServicePortKey
from kproxy_core.plan.budget import OF_PORT, OF_RANGE, Fit, fit
from kproxy_core.plan.endpoints import Candidates, categorize, endpoints_of, slices_by_port
from kproxy_core.plan.hashing import HashBy, count_hash_slots, hash_slots
from kproxy_core.plan.quarantine import Quarantined, Sentence
from kproxy_core.plan.shares import MOST_SLOTS, Weights, reduce_weights, repeated, weights_of

_new = tuple.__new__  # half the time of a NamedTuple's constructor, which is a Python function


class Frontend(NamedTuple):
    """The address, protocol and port that clients dial. ``address`` None: a node port."""

    address: Address | None
    protocol: Protocol
    port: int


class ServicePlan(Struct, frozen=True, gc=False, kw_only=True):
    """The desired state of one service port in one family.

    Three kinds of frontend: the ClusterIP (internal), external addresses (external IPs and load balancer IPs)
    and the node port. The properties tell which endpoints serve each, and what happens without any; see
    kube-proxy 1.36, pkg/proxy/topology.go and KEP-1669, KEP-2086, KEP-2433.
    """

    key: ServicePortKey
    family: Family
    created: str
    port: int
    """Port of the ClusterIP and of all external addresses."""
    cluster_ip: Address | None
    """None if an older Service owns this frontend, as for the next three fields; and for a Forward."""
    external_ips: tuple[Address, ...] = ()
    """None of them is the ClusterIP or a load balancer IP."""
    load_balancer_ips: tuple[Address, ...] = ()
    """None of them is the ClusterIP."""
    node_port: int = 0
    source_ranges: tuple[Cidr, ...] = ()
    """Sources that may use the load balancer IPs; empty: all."""
    affinity_seconds: int = 0
    internal_policy_local: bool = False
    external_policy_local: bool = False
    health_check_node_port: int = 0
    resets_removed: bool = False
    """Connections to removed endpoints are reset (see `removed_endpoints`)."""

    cluster: tuple[Destination, ...] = ()
    """Usable endpoints anywhere, in the order of their addresses and ports."""
    local: tuple[Destination, ...] = ()
    """Usable endpoints on this node, in that order; only computed when a policy is Local."""
    hairpins: tuple[Address, ...] = ()
    """Addresses of this node's endpoints among `cluster` and `local`."""
    has_endpoints: bool = False
    """An endpoint on some node is usable, regardless of the policies."""
    avoids_silent: bool = False
    """Endpoints that do not answer are put into quarantine (`plan.quarantine`)."""
    quarantined: tuple[tuple[Destination, Sentence], ...] = ()
    """Those of `resting` that are in quarantine; otherwise they would be usable."""
    cluster_weights: Weights = ()
    """Those of `cluster`, as `reduce_weights` returns them; (): all are equal."""
    local_weights: Weights = ()
    """Those of `local`."""
    resting: tuple[Destination, ...] = ()
    """Endpoints of weight 0 or in quarantine. They get no new connections and keep those that they have."""
    hash_by: HashBy = ""
    """Endpoints are chosen by a hash of the client or the flow; "": by chance."""
    left_out: tuple[str, ...] = ()
    """What the Service asks for beyond its limits (`plan.budget`): addresses, source ranges, endpoints, hash,
    exact weights."""

    @property
    def external_addresses(self) -> tuple[Address, ...]:
        return self.external_ips + self.load_balancer_ips

    @property
    def has_internal_endpoints(self) -> bool:
        """Traffic to the ClusterIP can be forwarded; else it is dropped, or rejected without any endpoint."""
        return self.has_endpoints and not (self.internal_policy_local and not self.local)

    @property
    def has_external_endpoints(self) -> bool:
        """Traffic from outside to the other frontends can be forwarded; else as above."""
        return self.has_endpoints and not (self.external_policy_local and not self.local)

    @property
    def reachable(self) -> tuple[Destination, ...]:
        """Every endpoint that some traffic may reach."""
        if not self.local:
            return self.cluster
        known = set(self.cluster)
        return self.cluster + tuple(d for d in self.local if d not in known)

    @property
    def relayed_to(self) -> tuple[Destination, ...]:
        """The endpoints to which the core relays the node port on loopback, where it does.

        With the external traffic policy Local, these are on this node (KEP-6032); rules take such clients for
        internal ones, who reach all.
        """
        if not self.node_port or self.key.protocol is Protocol.SCTP:
            return ()
        return self.local if self.external_policy_local else self.cluster

    @property
    def has_plain_choice(self) -> bool:
        """Endpoints have equal shares and are chosen by chance: slots are the endpoints, in any order."""
        return not (self.cluster_weights or self.local_weights or self.hash_by)

    @property
    def cluster_slots(self) -> tuple[Destination, ...]:
        """The table from which endpoints of `cluster` are chosen, each slot as often as any other."""
        return self._slots(self.cluster, self.cluster_weights)

    @property
    def local_slots(self) -> tuple[Destination, ...]:
        """The same of `local`."""
        return self._slots(self.local, self.local_weights)

    @property
    def elements(self) -> int:
        """About as many elements of the kernel as this takes in any mode (see `plan.budget`)."""
        slots = 0
        for endpoints, weights in ((self.cluster, self.cluster_weights), (self.local, self.local_weights)):
            slots += count_hash_slots(len(endpoints)) if self.hash_by else sum(weights) or len(endpoints)
        addresses = (self.cluster_ip is not None) + len(self.external_ips) + len(self.load_balancer_ips)
        return (OF_PORT + (addresses + (self.node_port > 0)) * (1 + slots)
                + OF_RANGE * len(self.load_balancer_ips) * len(self.source_ranges))

    def _slots(self, endpoints: tuple[Destination, ...], weights: Weights) -> tuple[Destination, ...]:
        if self.hash_by:
            return hash_slots(endpoints, weights)
        return repeated(endpoints, weights) if weights else endpoints

    def frontends(self) -> Iterator[Frontend]:
        protocol = self.key.protocol
        if self.cluster_ip is not None:
            yield _new(Frontend, (self.cluster_ip, protocol, self.port))
        for address in self.external_addresses:
            yield Frontend(address, protocol, self.port)
        if self.node_port:
            yield Frontend(None, protocol, self.node_port)


def plan_service(
    service: Service, slices: Mapping[str, EndpointSlice] | None, node: NodeView,
    quarantined: Quarantined | None = None, fitting: Fit | None = None,
) -> tuple[ServicePlan, ...]:
    """Plan all ports of *service* in the family of *node*.

    *slices* are the service's EndpointSlices of that family by name. *quarantined*: the endpoints of any
    Service that are in quarantine; None: this one uses all of its own. *fitting*: the part of the Service
    that is served; None: as if it were alone on the node. Empty if the Service has no ClusterIP in the
    family. A Forward has none at all: its ports are planned if they are served at an address of the family,
    or at a node port with endpoints of the family.
    """
    cluster_ip = service.cluster_ip(node.family)
    if cluster_ip is None and service.cluster_ips:
        return ()
    if fitting is None:
        fitting = fit(service, slices, node.family)
    # Each address is served in one way. Source ranges also apply to a load balancer IP that is an
    # external IP.
    own = (cluster_ip,) if cluster_ip is not None else ()
    load_balancer_ips = of_family(service.load_balancer_ips, node.family, own)
    external_ips = of_family(service.external_ips, node.family, (*own, *load_balancer_ips))
    load_balancer_ips = load_balancer_ips[:fitting.load_balancer_ips]
    external_ips = external_ips[:fitting.external_addresses - len(load_balancer_ips)]
    source_ranges = _source_ranges(service, load_balancer_ips, node, fitting.ranges)
    by_port = slices_by_port(slices) if slices and len(service.ports) > 1 else None
    plans: list[ServicePlan] = []
    for port in service.ports:
        of_port = of_family(port.addresses, node.family)[:fitting.load_balancer_ips]
        if own or of_port or (port.node_port and slices):
            pieces = slices if by_port is None else by_port.get((port.name, port.protocol))
            plans.append(_plan_port(
                service, port, endpoints_of(port, pieces), weights_of(port, pieces), node, cluster_ip,
                external_ips, load_balancer_ips or of_port, source_ranges, quarantined, fitting))
    return tuple(plans)


def _plan_port(
    service: Service, port: PortSpec, endpoints: Candidates, weights: Mapping[Destination, int],
    node: NodeView, cluster_ip: Address | None, external_ips: tuple[Address, ...],
    load_balancer_ips: tuple[Address, ...], source_ranges: tuple[Cidr, ...],
    quarantined: Quarantined | None, fitting: Fit,
) -> ServicePlan:
    if port.protocol is not Protocol.TCP:
        quarantined = None
    resting: tuple[Destination, ...] = ()
    if weights:
        # For the choice, it is as if those of weight 0 did not exist: neither hints nor policies find them.
        resting = tuple([
            where for where, endpoint in endpoints
            if not weights[where] and (endpoint.ready or endpoint.serving)])
        endpoints = [item for item in endpoints if weights[item[0]]]
    accessible = bool(port.node_port or external_ips or load_balancer_ips)
    chosen = categorize(
        endpoints,
        node,
        use_cluster=accessible or not service.internal_policy_local,
        use_local=service.internal_policy_local or (accessible and service.external_policy_local),
        quarantined=quarantined,
    )
    sets = [each for each in (chosen.cluster, chosen.local) if each]
    left_out = fitting.left_out
    hash_by: HashBy = service.hash_by
    if hash_by and any(count_hash_slots(len(each)) > fitting.slots for each in sets):
        hash_by, left_out = "", (*left_out, "hash")
    most_weighted = min(MOST_SLOTS, fitting.slots)
    if weights and most_weighted < MOST_SLOTS and any(
        _reduced(weights, each, MOST_SLOTS) != _reduced(weights, each, most_weighted) for each in sets
    ):
        left_out = (*left_out, "exact weights")
    return ServicePlan(
        key=_new(ServicePortKey, (*service.name, port.name, port.protocol)),
        family=node.family,
        created=service.created,
        port=port.port,
        cluster_ip=cluster_ip,
        external_ips=external_ips,
        load_balancer_ips=load_balancer_ips,
        node_port=port.node_port,
        source_ranges=source_ranges,
        affinity_seconds=service.affinity_seconds,
        internal_policy_local=service.internal_policy_local,
        external_policy_local=service.external_policy_local and accessible,
        health_check_node_port=service.health_check_node_port,
        resets_removed=(service.removed_endpoints or node.removed_endpoints) == "reset",
        cluster=chosen.cluster,
        local=chosen.local,
        hairpins=chosen.hairpins,
        has_endpoints=chosen.any,
        avoids_silent=quarantined is not None,
        quarantined=chosen.quarantined,
        cluster_weights=_reduced(weights, chosen.cluster, most_weighted),
        local_weights=_reduced(weights, chosen.local, most_weighted),
        resting=resting + tuple([where for where, _ in chosen.quarantined]),
        hash_by=hash_by,
        left_out=left_out,
    )


def _reduced(
    weights: Mapping[Destination, int], endpoints: tuple[Destination, ...], most: int
) -> Weights:
    return reduce_weights([weights[where] for where in endpoints], most) if weights else ()


def of_family(
    addresses: Sequence[Address], family: Family, other_than: Sequence[Address] = ()
) -> tuple[Address, ...]:
    """Return the *addresses* of one *family*, in their order and without duplicates."""
    if not addresses:
        return ()
    others = frozenset(other_than)
    return tuple(dict.fromkeys([a for a in addresses if family_of(a) is family and a not in others]))


def _source_ranges(
    service: Service, load_balancer_ips: tuple[Address, ...], node: NodeView, most: int
) -> tuple[Cidr, ...]:
    """Return the sources that may use the load balancer IPs, *most* of them; () admits all.

    A range that covers the node also admits the load balancer IP as a source: if that address is local, the
    node's own connections come from it.
    """
    if not service.source_ranges or not load_balancer_ips:
        return ()
    ranges = tuple(r for r in service.source_ranges if r.family is node.family)
    if any(r.prefix == 0 for r in ranges):
        return ()
    if len(ranges) > most:
        ranges = outermost(ranges)[:most]
    if node.node_ip is not None and any(node.node_ip in r for r in ranges):
        ranges += tuple(Cidr(address, node.family.bits) for address in load_balancer_ips)
    return ranges


def serving_destinations(endpoints: Candidates) -> frozenset[Destination]:
    """Return the serving *endpoints* of a service port regardless of policies: valid UDP destinations."""
    return frozenset(where for where, endpoint in endpoints if endpoint.serving)


def count_ready_local(slices: Mapping[str, EndpointSlice] | None, node: NodeView) -> int:
    """Return the number of distinct addresses of ready endpoints on *node*, without those of weight 0.

    Slices without ports do not count; those with ports that the Service lacks do (kube-proxy 1.36,
    pkg/proxy/endpointschangetracker.go, LocalReadyEndpoints).
    """
    if not node.name or not slices:
        return 0
    return len({
        endpoint.address for piece in slices.values() if piece.ports and piece.weight != 0
        for endpoint in piece.endpoints if endpoint.ready and endpoint.node == node.name
    })


# Node port addresses.

class NodePortSelection(NamedTuple):
    """The addresses of the node that serve node ports of one family."""

    addresses: tuple[Address, ...]
    """Sorted, without loopback."""
    anywhere: bool = False
    """Every local address except loopback serves, including those that no interface has."""
    problem: str = ""
    """The reason why node ports are not served, for the operator; "" if they are."""


def select_node_port_addresses(
    wanted: NodePortAddresses, own: Address | None, addresses: Collection[Address], family: Family
) -> NodePortSelection:
    """Select among the node's *addresses*. *own* is its address in *family*; None: unknown.

    As kube-proxy 1.36 (pkg/proxy/util/nodeport_addresses.go), with the combinations that 1.37 allows. But a
    family serves no node ports if they are restricted to an unknown set of addresses: with ``primary`` alone
    while the node's address is unknown, and with networks of the other family only.
    """
    networks = _networks(wanted, family)
    if not wanted or any(network.prefix == 0 for network in networks):
        return NodePortSelection(_within([Cidr(family.unspecified, 0)], addresses), anywhere=True)
    is_primary = "primary" in wanted
    if is_primary and own is not None:
        networks.append(Cidr(own, family.bits))
    chosen = _within(networks, addresses)
    if chosen:
        return NodePortSelection(chosen)
    if is_primary and own is None:
        return NodePortSelection((), problem=f"the node's own {family.label} address is not known")
    if not networks:
        return NodePortSelection((), problem=f"nodePortAddresses has no {family.label} network")
    return NodePortSelection((), problem=f"no address of this node is in {', '.join(map(str, networks))}")


def includes_loopback(wanted: NodePortAddresses, family: Family) -> bool:
    first = family.loopback_cidr.network
    return not wanted or any(first in n or is_loopback(n.network) for n in _networks(wanted, family))


def names_loopback(wanted: NodePortAddresses, family: Family) -> bool:
    """Return whether *wanted* includes loopback other than as one of all addresses."""
    found = [network for network in _networks(wanted, family) if network.prefix]
    return bool(found) and includes_loopback(tuple(found), family)


def _networks(wanted: NodePortAddresses, family: Family) -> list[Cidr]:
    return [network for network in wanted if network != "primary" and network.family is family]


def _within(networks: Collection[Cidr], addresses: Iterable[Address]) -> tuple[Address, ...]:
    return tuple(sorted({
        address for address in addresses
        if not is_loopback(address) and any(address in network for network in networks)
    }))
