"""Objects of the table: base chains, maps and template chains, and the objects of one service port. Pure."""

from collections.abc import Collection, Iterable, Mapping

from kproxy_core.contract import (
    HASH_SEED,
    Destination,
    Family,
    LocalSource,
    NodeView,
    Protocol,
    ServicePlan,
    outermost,
)
from kproxy_core.nft import objects
from kproxy_core.nft.objects import Chain, Container, Flowtable, Hook, Layout, Object
from kproxy_core.nft.rules import (
    ADDRESS,
    DESTINATION_PORT,
    DESTINATION_PORT_OF,
    DROP,
    INPUT_INTERFACE,
    L4_PROTOCOL,
    MASQUERADE,
    ORIGINAL_PORT,
    PORT,
    PROTOCOL,
    RESET,
    SOURCE_PORT_OF,
    VERDICT,
    DataType,
    Field,
    Key,
    Rule,
    Statement,
    Verdict,
    among,
    count,
    ct_state,
    ct_status,
    destination_address,
    differs,
    dnat_to_address,
    dnat_to_endpoint,
    equals,
    flip_mark,
    goto,
    has_mark,
    hashed,
    is_local,
    jump,
    offload,
    original_destination,
    original_source,
    random_number,
    reject,
    set_mark,
    source_address,
    update,
    vmap,
)
from kproxy_nft import counting
from kproxy_nftables import names
from kproxy_nftables.names import ADMITTED, TABLE, Template
from kproxy_nftables.settings import DEFAULTS, Settings
from kproxy_nftables.wanted import affinity_groups, ranges_chain, record_chain, verdicts

# Constant objects. They may be written at any time over a table of the same layout: chains are flushed and
# refilled in one transaction, and maps keep their elements.

_BASE_CHAINS = {
    "nat-prerouting": Hook("nat", "prerouting", -100),
    "nat-output": Hook("nat", "output", -100),
    "nat-postrouting": Hook("nat", "postrouting", 100),
    "filter-forward": Hook("filter", "forward", 0),
    "filter-output": Hook("filter", "output", 0),
}
_RECORDING_BASE_CHAINS = {
    "filter-input": Hook("filter", "input", 0),
    "filter-postrouting": Hook("filter", "postrouting", 0),
}
"""The first hooks after DNAT: input for connections to this node, else postrouting. They exist only with a
template with session affinity: each packet would pay for them, even without rules."""
_COUNTING_HOOK = Hook("nat", "input", 100)
_FLOWTABLE_HOOK = Hook("filter", "forward", 300)
"""After the filters of other tables, which see, and may drop, each packet that would add a flow."""

_RECORD = "record"

_YEAR = 365 * 24 * 3600
"""Seconds: a set that rules fill needs a timeout, and a count that ends falls."""


def table(family: Family, *, owned: bool = False) -> objects.Table:
    """Return our table. If *owned*, no other process can change it, and it outlives this one."""
    flags = objects.OWNER | objects.PERSIST if owned else 0
    return objects.Table(family, TABLE, "rules for kproxy", flags)


def layout(
    node: NodeView, wanted: Collection[Template], owned: Mapping[str, Object], settings: Settings = DEFAULTS
) -> Layout:
    """Return all objects of one family's table, including those that service ports own."""
    parts = [*skeleton(node, settings), *templates(node, wanted, settings), *owned.values()]
    return {item.name: item for item in parts}


def skeleton(node: NodeView, settings: Settings = DEFAULTS) -> list[Object]:
    """Return all constant objects of one family's table except template chains."""
    family = node.family
    found: list[Object] = _containers(node)
    if settings.counted:
        found += [counting.set_of_connections(family), counting.counting_set(family, names.REFUSED)]
    if node.relays_node_ports:
        found.append(Container(
            names.NOT_RELAYED, (ADDRESS[family], PROTOCOL, PORT), dynamic=True, timeout=_YEAR, size=1 << 16))
    found += _chains(node, counted=settings.counted)
    return [*found, *offloading(settings)]


def offloading(settings: Settings) -> list[Object]:
    """Return the flowtable and the chain that adds flows to it; [] without one."""
    if not settings.flowtable:
        return []
    established = (ct_state("established"), offload(names.FLOWTABLE))
    return [Flowtable(names.FLOWTABLE, settings.flowtable), Chain(names.OFFLOADING, tuple(
        (equals(L4_PROTOCOL, protocol), *established) for protocol in (Protocol.TCP, Protocol.UDP)
    ), _FLOWTABLE_HOOK)]  # fmt: skip


def templates(
    node: NodeView, wanted: Collection[Template], settings: Settings = DEFAULTS
) -> list[Object]:  # fmt: skip
    """Return the *wanted* template chains and those that they jump to.

    Clients are recorded if there is a template with session affinity.
    """
    chains: dict[str, Object] = {}
    for template in sorted(wanted):
        for needed in (*_leads_to(template), template):
            chains[needed.name] = Chain(needed.name, _template_rules(node, needed, settings))
    if any(template.sticky for template in wanted):
        chains[_RECORD] = Chain(_RECORD, _record_rules(node.family))
        for name, place in _RECORDING_BASE_CHAINS.items():
            chains[name] = Chain(name, ((ct_state("new"), ct_status("dnat"), jump(_RECORD)),), place)
    return list(chains.values())


def templates_of(plans: Iterable[ServicePlan]) -> set[Template]:
    """Return all templates that *plans* need."""
    return templates_behind(verdict for plan in plans for verdict in verdicts(plan))


def templates_behind(verdicts: Iterable[Verdict]) -> set[Template]:
    """Return the templates that are reachable from *verdicts*."""
    found = (names.parse_template(verdict.chain) for verdict in set(verdicts))
    return {t for template in found if template is not None for t in (template, *_leads_to(template))}


def service_cidrs(node: NodeView) -> objects.Container:
    """Return the set of the networks from which ClusterIPs are allocated."""
    key = (destination_address(node.family),)
    return objects.Container(
        names.SERVICE_CIDRS, key, interval=True, constant=outermost(node.service_cidrs))


def rules_differ(one: NodeView, other: NodeView) -> bool:
    def of(node: NodeView) -> tuple[object, ...]:
        return (node.local_source, node.masquerade_all, node.masquerade_bit, node.node_ports_anywhere,
                node.relays_node_ports)

    return of(one) != of(other)


def _containers(node: NodeView) -> list[Object]:
    """Return all maps and sets whose elements lead to services."""
    family = node.family
    address, index = destination_address(family), random_number(1)
    maps: dict[str, tuple[DataType | Field, ...]] = {}
    for name in (names.VIPS, names.ADMITTED_VIPS, names.STICKY_VIPS, names.STICKY_LOCAL_VIPS):
        maps[name] = (address, L4_PROTOCOL, DESTINATION_PORT)
    for name in (names.NODE_PORTS, names.STICKY_NODE_PORTS, names.STICKY_LOCAL_NODE_PORTS):
        maps[name] = (L4_PROTOCOL, DESTINATION_PORT)
    # By types: outside of a rule nft does not know the type of a conntrack port.
    maps[names.RECORDED_VIPS] = (ADDRESS[family], PROTOCOL, PORT)
    maps[names.RECORDED_NODE_PORTS] = (PROTOCOL, PORT)
    found: list[Object] = [objects.Container(name, key, (VERDICT,)) for name, key in maps.items()]
    for protocol, port in DESTINATION_PORT_OF.items():
        vips = (names.VIP_ENDPOINTS[protocol], names.VIP_LOCAL_ENDPOINTS[protocol])
        node_ports = (names.NODE_PORT_ENDPOINTS[protocol], names.NODE_PORT_LOCAL_ENDPOINTS[protocol])
        found += [objects.Container(name, (address, port, index), (address, port)) for name in vips]
        found += [objects.Container(name, (port, index), (address, port)) for name in node_ports]
    found += [objects.Container(name, (address,)) for name in (names.CLUSTER_IPS, names.NODE_IPS)]
    hairpins = objects.Container(names.HAIRPINS, (source_address(family), address))
    return [*found, hairpins, service_cidrs(node)]


def _chains(node: NodeView, *, counted: bool) -> list[Chain]:
    """Return the chains that every packet may meet. A chain precedes those that lead to it.

    With *counted*, refusals are counted by frontend only: other ports of a ClusterIP are refused by a chain
    that does not count.
    """
    family = node.family
    daddr = destination_address(family)
    frontend = (daddr, L4_PROTOCOL, DESTINATION_PORT)
    bit = 1 << node.masquerade_bit
    loopback = family.loopback_cidr if family is Family.IPV4 else family.loopback
    to_node = (
        (is_local("daddr"), differs(daddr, loopback))
        if node.node_ports_anywhere
        else (among((daddr,), names.NODE_IPS),)
    )
    # Service ports have translated the destination of their connections, and no endpoint is a ClusterIP.
    check: Rule = (ct_state("new"), ct_status("dnat", negate=True), jump("cluster-ips-check"))
    # The kernel rate-limits ICMP errors, but not resets.
    refuse: tuple[Rule, ...] = ((equals(L4_PROTOCOL, Protocol.TCP), RESET), (reject(family),))
    count_refusal: tuple[Rule, ...] = ((count(names.REFUSED, frontend),),) if counted else ()
    to_count: tuple[Rule, ...] = ((ct_status("dnat"), jump("count")),) if counted else ()
    unserved = "refuse-unserved" if counted else names.REJECT
    # Relays serve no SCTP. The kernel refuses what no socket takes.
    not_relayed = (equals(daddr, loopback), equals(L4_PROTOCOL, Protocol.SCTP),
                   count(names.NOT_RELAYED, frontend))
    rules: dict[str, tuple[Rule, ...]] = {}
    if counted:
        rules["count"] = counting.count_rules(family)
        rules["refuse-unserved"] = refuse
    rules |= {
        names.REJECT: (*count_refusal, *refuse),
        names.ADMITTED: ((vmap(frontend, names.ADMITTED_VIPS),),),
        "services": (
            (vmap(frontend, names.VIPS),),
            (*to_node, vmap((L4_PROTOCOL, DESTINATION_PORT), names.NODE_PORTS)),
        ),
        "masquerading": (
            (has_mark(bit), flip_mark(bit), MASQUERADE),
            (ct_status("dnat"), among((source_address(family), daddr), names.HAIRPINS), MASQUERADE),
        ),
        "cluster-ips-check": (
            (among((daddr,), names.CLUSTER_IPS), goto(unserved)),
            (among((daddr,), names.SERVICE_CIDRS), DROP),
        ),
        "nat-prerouting": ((jump("services"),),),
        "nat-output": ((jump("services"),),),
        "nat-postrouting": (*to_count, (jump("masquerading"),)),
        "filter-forward": (check,),
        "filter-output": (check, not_relayed) if node.relays_node_ports else (check,),
    }
    places = _BASE_CHAINS
    if counted:
        rules["nat-input"] = to_count
        places = places | {"nat-input": _COUNTING_HOOK}
    return [Chain(name, chain, places.get(name)) for name, chain in rules.items()]


def _record_rules(family: Family) -> tuple[Rule, ...]:
    """Return the rules that lead a connection to the chain which records its client.

    nft knows the type of a conntrack port only after a match on one protocol.
    """
    dialled = original_destination(family)
    port = (L4_PROTOCOL, ORIGINAL_PORT)
    return tuple(
        rule
        for protocol in Protocol
        for match in [equals(L4_PROTOCOL, protocol)]
        for rule in (
            (match, vmap((dialled, *port), names.RECORDED_VIPS)),
            (match, among((dialled,), names.NODE_IPS), vmap(port, names.RECORDED_NODE_PORTS)),
        )
    )


def _leads_to(template: Template) -> list[Template]:
    if template.policy != "external-local":
        return []
    short = template._replace(policy="short-circuit", local=0)
    return [short, short._replace(policy="external")]


def _template_rules(node: NodeView, template: Template, settings: Settings) -> tuple[Rule, ...]:
    family = node.family
    mark = set_mark(1 << node.masquerade_bit)
    rules: list[Rule] = []
    if template.policy in ("cluster", "local"):
        if node.masquerade_all:
            rules.append((mark,))
        elif node.local_source is not None:
            rules.append((_from_pods(node.local_source, family, negate=True), mark))
    elif template.policy == "external":
        rules.append((mark,))
    elif template.policy == "external-local":
        short_circuit, external = _leads_to(template)
        if node.local_source is not None:
            rules.append((_from_pods(node.local_source, family), goto(short_circuit.name)))
        rules.append((is_local("saddr"), goto(external.name)))
        if not template.local:
            return (*rules, (DROP,))
    address: Key = () if template.node_port else (destination_address(family),)
    maps = names.NODE_PORT_MAPS if template.node_port else names.VIP_MAPS
    if template.sticky:
        sticky = maps.sticky_local if template.policy == "external-local" else maps.sticky
        rules.append((vmap((*address, L4_PROTOCOL, DESTINATION_PORT), sticky),))
    number = _number(template, family, settings)
    endpoints = (maps.local_endpoints if template.local else maps.endpoints)[template.protocol]
    key = (*address, DESTINATION_PORT_OF[template.protocol], number)
    return (*rules, (dnat_to_endpoint(family, key, endpoints),))


def _number(template: Template, family: Family, settings: Settings) -> Field:
    """Return the field that selects one of a template's slots."""
    slots = template.local or template.cluster
    if not template.hash_by or slots == 1 or settings.without_hash:
        return random_number(slots)
    port = (SOURCE_PORT_OF[template.protocol],) if template.hash_by == "flow" else ()
    return hashed((source_address(family), *port), slots, HASH_SEED)


def _from_pods(source: LocalSource, family: Family, *, negate: bool = False) -> Statement:
    compare = differs if negate else equals
    if source.cidr is not None:
        return compare(source_address(family), source.cidr)
    return compare(INPUT_INTERFACE, source.interface or f"{source.interface_prefix}*")


# Objects of one service port, for session affinity and source ranges. They are written in the same
# transaction as the elements that refer to them, and deleted in another one after those elements.

AFFINITY_SIZE = 65536
"""Limit for the clients recorded per affinity group; further clients are not pinned."""

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
