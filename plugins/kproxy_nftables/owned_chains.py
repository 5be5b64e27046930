"""The chains, maps and sets that belong to one service port, for session affinity and source ranges.

They are written in the same transaction as the elements that refer to them, and deleted in another one after
those elements.
"""

from collections.abc import Iterable, Mapping

from kproxy_core.host.nftables.objects import Chain, Container, Object
from kproxy_core.host.nftables.rules import (
    ADDRESS,
    DESTINATION_PORT,
    DROP,
    L4_PROTOCOL,
    Rule,
    Statement,
    among,
    destination_address,
    dnat_to_address,
    equals,
    goto,
    original_source,
    source_address,
    update,
)
from kproxy_core.model.endpoint import Destination
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_nftables.names import ADMITTED
from kproxy_nftables.wanted import affinity_groups, ranges_chain, record_chain

AFFINITY_SIZE = 65536
"""Clients recorded per affinity group; beyond it new clients are not pinned."""

Owned = Mapping[str, Object]
"""Objects by name. Insertion order is creation order."""


def all_owned(plans: Iterable[ServicePlan]) -> Owned:
    """Return the objects that belong to one of *plans* alone."""
    return {name: item for plan in plans for name, item in owned_objects(plan).items()}


def owned_objects(plan: ServicePlan) -> Owned:
    """Return the objects that belong to *plan* alone; most plans need none."""
    if not plan.affinity_seconds and not plan.source_ranges:
        return {}
    containers: list[Object] = []
    chains: list[Object] = []
    family = plan.family
    address, source, destination = ADDRESS[family], source_address(family), destination_address(family)
    record: list[Rule] = []
    groups = _group_endpoints(plan)
    for group, endpoints in groups.items():
        pin: list[Rule] = []
        for port in sorted({where.port for where in endpoints}):
            name = _affinity_map(plan, group, port)
            containers.append(
                Container(name, (address,), (address,), dynamic=True, size=AFFINITY_SIZE))
            among_own: tuple[Statement, ...] = ()
            if len(groups) > 1:  # The connection may have been sent to an endpoint of the other group.
                own = Container(f"endpoints-{group}/{port}", (address,), constant=tuple(
                    where.address for where in endpoints if where.port == port))
                containers.append(own)
                among_own = (among((destination,), own.name),)
            # After DNAT the destination is the endpoint; ct original still holds the client.
            pinned = update(
                name, (original_source(family),), value=destination, seconds=plan.affinity_seconds)
            record.append((equals(DESTINATION_PORT, port), *among_own, pinned))
            pin.append((
                equals(L4_PROTOCOL, plan.key.protocol), dnat_to_address(family, (source,), name, port)))
        chains.append(Chain(f"pin-{group}", tuple(pin)))
    if groups:
        chains.append(Chain(record_chain(plan), tuple(record)))
    if plan.source_ranges and plan.load_balancer_ips:
        admitted: list[Rule] = [(equals(source, cidr), goto(ADMITTED)) for cidr in plan.source_ranges]
        chains.append(Chain(ranges_chain(plan), (*admitted, (DROP,))))
    return {item.name: item for item in (*containers, *chains)}


def affinity_maps(plan: ServicePlan) -> dict[str, frozenset[bytes]]:
    """Return the maps that pin clients of *plan*, with the endpoint addresses that each may hold.

    There is one map for each endpoint port, because nft 1.0.6 cannot record an IPv6 address together with a
    port. Nearly all plans have one.
    """
    return {
        _affinity_map(plan, group, port): frozenset(w.address for w in endpoints if w.port == port)
        for group, endpoints in _group_endpoints(plan).items()
        for port in {where.port for where in endpoints}
    }


def _group_endpoints(plan: ServicePlan) -> dict[str, tuple[Destination, ...]]:
    """Return the endpoints to which clients of each affinity group may be pinned."""
    groups = zip(affinity_groups(plan), (plan.cluster, plan.local), strict=True)
    return {name: endpoints for name, endpoints in groups if name}


def _affinity_map(plan: ServicePlan, group: str, port: int) -> str:
    """Return a map's name, which includes the timeout so that a new one applies to all clients."""
    return f"affinity-{group}/{port}/{plan.affinity_seconds}s"
