"""The chains and maps that belong to one service port, for session affinity and source ranges.

They are written as nft text in a transaction of their own before the elements that refer to them, and
deleted in another transaction after those elements.
"""

from collections.abc import Iterable, Mapping

from kproxy_core.model.address import Family, format_address
from kproxy_core.model.endpoint import Destination
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_nft.counting import ADDRESS_TYPE
from kproxy_nftables.names import ADMITTED, TABLE
from kproxy_nftables.wanted import affinity_groups, ranges_chain, record_chain

AFFINITY_SIZE = 65536
"""Clients recorded per affinity group; beyond it new clients are not pinned."""

_AFFINITY = "affinity-"

Owned = Mapping[str, str]
"""Name of an object -> its definition in nft text. Insertion order is creation order."""


def all_owned(plans: Iterable[ServicePlan]) -> Owned:
    """Return the objects that belong to one of *plans* alone."""
    return {name: text for plan in plans for name, text in owned_objects(plan).items()}


def owned_objects(plan: ServicePlan) -> Owned:
    """Return the objects that belong to *plan* alone; most plans need none."""
    if not plan.affinity_seconds and not plan.source_ranges:
        return {}
    maps: dict[str, str] = {}
    chains: dict[str, list[str]] = {}
    ip = plan.family.ip
    protocol = plan.key.protocol.name.lower()
    record: list[str] = []
    groups = _group_endpoints(plan)
    for group, endpoints in groups.items():
        pin: list[str] = []
        for port in sorted({where.port for where in endpoints}):
            name = _affinity_map(plan, group, port)
            maps[name] = (
                f"add map {ip} {TABLE} {name} {{ type {ADDRESS_TYPE[plan.family]} : "
                f"{ADDRESS_TYPE[plan.family]}; flags dynamic,timeout; size {AFFINITY_SIZE}; }}\n"
            )
            # The connection may have been sent to an endpoint of the other group.
            own = [format_address(where.address) for where in endpoints if where.port == port]
            among = f"{ip} daddr {{ {', '.join(own)} }} " if len(groups) > 1 else ""
            # After DNAT the destination is the endpoint; ct original still holds the client.
            record.append(
                f"th dport {port} {among}update @{name} "
                f"{{ ct original {ip} saddr timeout {plan.affinity_seconds}s : {ip} daddr }}"
            )
            pin.append(f"meta l4proto {protocol} dnat {ip} to {ip} saddr map @{name} : {port}")
        chains[f"pin-{group}"] = pin
    if groups:
        chains[record_chain(plan)] = record
    if plan.source_ranges and plan.load_balancer_ips:
        admitted = [f"{ip} saddr {cidr} goto {ADMITTED}" for cidr in plan.source_ranges]
        chains[ranges_chain(plan)] = [*admitted, "drop"]
    return maps | {name: chain_text(plan.family, name, rules) for name, rules in chains.items()}


def chain_text(family: Family, name: str, rules: Iterable[str]) -> str:
    """Return the commands after which a chain of our table has *rules* only."""
    chain = f"{family.ip} {TABLE} {name}"
    added = "".join(f"add rule {chain} {rule}\n" for rule in rules)
    return f"add chain {chain}\nflush chain {chain}\n{added}"


def delete_objects(family: Family, owned: Iterable[str]) -> str:
    """Return the commands that delete *owned* objects, in an order that the kernel accepts."""
    table = f"{family.ip} {TABLE}"
    return "".join(
        f"delete {'map' if name.startswith(_AFFINITY) else 'chain'} {table} {name}\n"
        for name in sorted(owned, key=lambda name: name.startswith(_AFFINITY))
    )


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
    return f"{_AFFINITY}{group}/{port}/{plan.affinity_seconds}s"
