"""The kernel objects for one service plan: virtual servers, set entries, and addresses on the device.

Source: kube-proxy 1.36, pkg/proxy/ipvs/proxier.go, except for policy Local: see the README.
"""

from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Struct, field

from kproxy_core.contract import (
    Address,
    Destination,
    Family,
    NodeView,
    Protocol,
    ServicePlan,
    Weights,
    format_address,
    is_link_local,
    shares,
)
from kproxy_ipvs import names
from kproxy_ipvs.names import SetKind

PERSISTENT, HASH_FALLBACK, HASH_PORT = 0x1, 0x8, 0x10
"""linux/ip_vs.h: IP_VS_SVC_F_PERSISTENT, IP_VS_SVC_F_SCHED_MH_FALLBACK and IP_VS_SVC_F_SCHED_MH_PORT."""

_HASHING = {"sh": HASH_FALLBACK, "mh": HASH_FALLBACK | HASH_PORT}
"""Without a fallback, new connections that hash to a draining real server are dropped."""

_BY_HASH = {"client": HASH_FALLBACK, "flow": HASH_FALLBACK | HASH_PORT}
"""Flags of mh for a Service with consistent hashing."""

_BY_WEIGHT = {"rr": "wrr", "lc": "wlc"}
"""The schedulers that respect weights instead of those that do not."""


def schedulers(configured: str) -> tuple[str, ...]:
    """Return the schedulers that the mode needs if *configured* is that of Services."""
    return tuple(dict.fromkeys((configured, _source_hashing(configured))))


def schedulers_for(plan: ServicePlan, configured: str) -> frozenset[str]:
    """Return the schedulers that *plan* needs beside `schedulers`, for its hash or weights."""
    if plan.has_plain_choice:
        return frozenset()
    of_plan = "mh" if plan.hash_by else _BY_WEIGHT.get(configured, configured)
    return frozenset((of_plan,)).difference(schedulers(configured))


class ServerKey(NamedTuple):
    """The identity of a virtual server: either address, protocol and port, or a mark."""

    family: Family
    mark: int
    address: Address | None
    protocol: int
    port: int

    @classmethod
    def marked(cls, family: Family, mark: int) -> "ServerKey":
        return cls(family, mark, None, 0, 0)

    def __str__(self) -> str:
        if self.address is None:
            return f"mark {self.mark:#x}"
        return f"{format_address(self.address)}:{self.port}/{Protocol(self.protocol).name}"


class Scheduling(NamedTuple):
    """The scheduler of a virtual server and its options."""

    scheduler: str
    flags: int = 0
    timeout: int = 0
    """Seconds of persistence."""


class VirtualServer(NamedTuple):
    """One virtual server. Its real servers are reached by NAT."""

    scheduling: Scheduling
    graceful: bool
    """Removed real servers drain: they get no new connections and are deleted when the last one ends."""
    destinations: tuple[Destination, ...]
    of_node_port: bool = False
    """It yields to a VIP that is also an address of the node."""
    weights: Weights = ()
    """Of each of `destinations`; (): 1."""
    resting: tuple[Destination, ...] = ()
    """Real servers of weight 0."""

    @property
    def real_servers(self) -> dict[Destination, int]:
        """All real servers with their weights."""
        return dict.fromkeys(self.resting, 0) | shares(self.destinations, self.weights)


class SetEntry(NamedTuple):
    """One entry of a set, as ipset prints it."""

    set: SetKind
    entry: str
    mark: int = 0


class Wanted(Struct, frozen=True):
    """The kernel objects for one service port."""

    servers: dict[ServerKey, VirtualServer] = field(default_factory=dict)
    elements: frozenset[SetEntry] = frozenset()
    addresses: frozenset[Address] = frozenset()
    """The addresses that the device must hold."""
    mark: int = 0
    """The mark of the short circuit; 0 without one."""


class Style(Struct, frozen=True, kw_only=True):
    """Parameters that all service ports of one family share."""

    family: Family
    scheduler: str
    node_ip: Address | None
    node_port_addresses: tuple[Address, ...]
    masquerade_bit: int
    elsewhere: frozenset[Address] = frozenset()
    """Addresses of other interfaces, which the device must not hold."""
    missing: frozenset[str] = frozenset()
    """Schedulers that the kernel lacks, of those that only some Services need."""


_PROTOCOLS = {protocol: protocol.name.lower() for protocol in Protocol}


def make_style(
    node: NodeView, scheduler: str, elsewhere: frozenset[Address] = frozenset(),
    missing: frozenset[str] = frozenset(),
) -> Style:  # fmt: skip
    """Return the style for a node that has the addresses *elsewhere*, beside the device.

    *missing*: see `Style`.
    """
    addresses = node.node_port_addresses
    if node.family is Family.IPV6:
        addresses = tuple(address for address in addresses if not is_link_local(address))
    return Style(
        family=node.family, scheduler=scheduler, node_ip=node.node_ip, node_port_addresses=addresses,
        masquerade_bit=node.masquerade_bit, elsewhere=elsewhere, missing=missing,
    )  # fmt: skip


def wanted(plan: ServicePlan, style: Style, mark: int) -> Wanted:
    """Return all kernel objects for *plan*. *mark* is the mark of its short circuit; 0 without one."""
    return Wanted(
        dict(_servers(plan, style, mark)),
        frozenset(_elements(plan, style, mark)),
        frozenset(_addresses(plan, style)),
        mark,
    )


def has_short_circuit(plan: ServicePlan) -> bool:
    """Return whether this node's own traffic reaches other endpoints than external traffic does."""
    return plan.external_policy_local and plan.local != plan.cluster and bool(plan.cluster)


def _servers(plan: ServicePlan, style: Style, mark: int) -> Iterator[tuple[ServerKey, VirtualServer]]:
    # Others are deleted at once, as by kube-proxy: UDP has no end of a connection. The scheduler dh may hash
    # all connections to a VIP to the draining real server, and has no fallback.
    graceful = plan.key.protocol is Protocol.TCP and style.scheduler != "dh"

    def virtual(*, is_local: bool, is_marked: bool = False) -> VirtualServer:
        endpoints, weights = (
            (plan.local, plan.local_weights) if is_local else (plan.cluster, plan.cluster_weights))
        scheduling = _scheduling(plan, style, weights, is_marked=is_marked)
        resting = plan.resting if scheduling.scheduler != "dh" else ()
        return VirtualServer(scheduling, graceful, endpoints, weights=weights, resting=resting)

    def key(address: Address, port: int) -> ServerKey:
        return ServerKey(style.family, 0, address, plan.key.protocol, port)

    external = virtual(is_local=plan.external_policy_local)
    # Such a server yields to a VIP that is an address of the node and has the same port number.
    for address in style.node_port_addresses if plan.node_port else ():
        yield key(address, plan.node_port), external._replace(of_node_port=True)
    for address in plan.external_addresses:
        yield key(address, plan.port), external
    if plan.cluster_ip is not None:
        yield key(plan.cluster_ip, plan.port), virtual(is_local=plan.internal_policy_local)
    if has_short_circuit(plan):
        yield ServerKey.marked(style.family, mark), virtual(is_local=False, is_marked=True)


def _scheduling(
    plan: ServicePlan, style: Style, weights: Weights, *, is_marked: bool
) -> Scheduling:  # fmt: skip
    """Return the scheduling among endpoints with *weights*. *is_marked*: of the short circuit."""
    scheduler = style.scheduler
    if weights and (weighted := _BY_WEIGHT.get(scheduler, scheduler)) not in style.missing:
        scheduler = weighted
    flags = _HASHING.get(scheduler, 0)
    if plan.hash_by:
        flags = _BY_HASH[plan.hash_by]
        scheduler = "sh" if "mh" in style.missing else "mh"
    if not plan.affinity_seconds:
        return Scheduling(scheduler, flags)
    if is_marked:
        # A persistent virtual server with a mark sends connections to the dialled port of its real servers
        # instead of the endpoint's port (ip_vs_sched_persist in ip_vs_core.c).
        return Scheduling(_source_hashing(scheduler), HASH_FALLBACK)
    return Scheduling(scheduler, flags | PERSISTENT, plan.affinity_seconds)


def _source_hashing(configured: str) -> str:
    """Return the scheduler that hashes the client's address."""
    return configured if configured in _HASHING else "sh"


def _addresses(plan: ServicePlan, style: Style) -> Iterator[Address]:
    if plan.cluster_ip is not None:
        yield plan.cluster_ip
    yield from (address for address in plan.external_addresses if address not in style.elsewhere)


def _elements(plan: ServicePlan, style: Style, mark: int) -> Iterator[SetEntry]:
    protocol = _PROTOCOLS[plan.key.protocol]

    def at(address: Address, port: int) -> str:
        return f"{format_address(address)},{protocol}:{port}"

    hairpins = set(plan.hairpins)
    for where in plan.reachable:
        if where.address in hairpins:
            entry = f"{at(where.address, where.port)},{format_address(where.address)}"
            yield SetEntry(names.LOOP_BACK, entry)
    for address in _addresses(plan, style):
        yield SetEntry(names.IPVS_IPS, format_address(address))
    if plan.cluster_ip is not None:
        entry = at(plan.cluster_ip, plan.port)
        yield SetEntry(names.CLUSTER_IP, entry)
        if plan.has_endpoints and not plan.has_internal_endpoints:
            yield SetEntry(names.NO_LOCAL, entry)
    local = plan.external_policy_local
    external: list[str] = []
    for address in plan.external_ips:
        external.append(at(address, plan.port))
        yield SetEntry(names.EXTERNAL_IP_LOCAL if local else names.EXTERNAL_IP, external[-1])
    for address in plan.load_balancer_ips:
        external.append(at(address, plan.port))
        yield SetEntry(names.LOAD_BALANCER_SET, external[-1])
        if local:
            yield SetEntry(names.LOAD_BALANCER_LOCAL, external[-1])
        if plan.source_ranges:
            yield from _source_ranges(plan, style, format_address(address), external[-1])
    if plan.node_port:
        external += [at(address, plan.node_port) for address in style.node_port_addresses]
        for kind in names.NODE_PORT_SETS[plan.key.protocol][: 2 if local else 1]:
            if kind.type == "bitmap:port":
                yield SetEntry(kind, str(plan.node_port))
            else:
                for address in style.node_port_addresses:
                    yield SetEntry(kind, at(address, plan.node_port))
    if plan.health_check_node_port:
        yield SetEntry(names.HEALTH_CHECK, str(plan.health_check_node_port))
    for entry in external:
        if has_short_circuit(plan):
            yield SetEntry(names.SHORT_CIRCUIT, entry, mark)
        if plan.has_endpoints and not plan.has_external_endpoints:
            yield SetEntry(names.NO_LOCAL, entry)


def _source_ranges(plan: ServicePlan, style: Style, vip: str, entry: str) -> Iterator[SetEntry]:
    yield SetEntry(names.LOAD_BALANCER_FW, entry)
    for cidr in plan.source_ranges:
        yield SetEntry(names.SOURCE_CIDR, f"{entry},{cidr.listed}")
    # The node's own packets to a VIP have that VIP as their source address, because the device holds it.
    if any(style.node_ip in cidr for cidr in plan.source_ranges):
        yield SetEntry(names.SOURCE_IP, f"{entry},{vip}")
