"""The chains and rules that a service plan wants in the kernel. Pure.

Rules are spelled as iptables-save prints them, so that wanted rules and those in the kernel can be compared
as text (kube-proxy 1.36, pkg/proxy/iptables/proxier.go).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from kproxy_core.model.address import Family, Protocol, format_address, format_socket
from kproxy_core.model.endpoint import Destination
from kproxy_core.model.node import LocalSource, NodeView
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_iptables import names
from kproxy_iptables.names import FILTER, NAT, ServiceChains, endpoint_chain, service_chains
from kproxy_iptables.skeleton import Facts
from kproxy_xtables.rules import REJECT, from_pods

LARGE_CLUSTER = 1000
"""With more endpoints than this, rules of single endpoints have no comments."""


class Rule(NamedTuple):
    """One rule in one of the fixed chains."""

    table: str
    chain: str
    spec: str


class Wanted(NamedTuple):
    """The chains and rules of one service port."""

    chains: dict[str, str]
    """Chains of its own in nat: name -> rules, as complete ``-A`` lines. Each chain stands before those that
    jump to it."""
    rules: list[Rule]


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """Parameters that all service ports of one family share."""

    family: Family
    local_source: LocalSource | None
    masquerade_all: bool
    localhost_node_ports_counted: bool
    """Node ports are served on 127.0.0.0/8 too, and the kernel has the object that counts these packets."""
    comments: bool
    """Rules of single endpoints have comments."""


_PROTOCOLS = {protocol: protocol.name.lower() for protocol in Protocol}
_MASK = {Family.IPV4: "255.255.255.255", Family.IPV6: ":".join(["ffff"] * 8)}


def make_style(node: NodeView, facts: Facts, endpoints: int) -> Style:
    return Style(
        family=node.family,
        local_source=node.local_source,
        masquerade_all=node.masquerade_all,
        localhost_node_ports_counted=facts.localhost_node_ports and names.LOCALHOST_COUNTER in facts.counters,
        comments=endpoints <= LARGE_CLUSTER,
    )


def wanted(plan: ServicePlan, style: Style) -> Wanted:
    chains = service_chains(plan.key)
    own = _own_chains(plan, style, chains) if plan.has_endpoints else {}
    return Wanted(own, list(_rules(plan, style, chains)))


def _own_chains(plan: ServicePlan, style: Style, chains: ServiceChains) -> dict[str, str]:
    own: dict[str, str] = {}
    internal = chains.local if plan.internal_policy_local else chains.cluster
    endpoints = _endpoint_chains(plan, style, chains, own)
    for chain, destinations in ((chains.cluster, plan.cluster), (chains.local, plan.local)):
        if destinations:
            first = _from_outside(plan, style, chain) if chain == internal else ""
            own[chain] = first + _balance(plan, style, chain, destinations, endpoints)
    if plan.node_port or plan.external_addresses:
        own[chains.external] = _external(plan, style, chains)
    if plan.source_ranges and plan.load_balancer_ips:
        own[chains.firewall] = _firewall(plan, chains)
    return own


def _endpoint_chains(
    plan: ServicePlan, style: Style, chains: ServiceChains, own: dict[str, str]
) -> dict[Destination, tuple[str, str]]:
    """Add a chain for each endpoint. Return the comment of rules that jump to it, and its name."""
    found: dict[Destination, tuple[str, str]] = {}
    seed = chains.endpoint_seed
    protocol = _PROTOCOLS[plan.key.protocol]
    comment = f' -m comment --comment "{plan.key}"' if style.comments else ""
    host = f"/{style.family.bits}"
    for where in plan.reachable:
        text = format_socket(where.address, where.port)
        chain = endpoint_chain(seed, text)
        found[where] = (f' -m comment --comment "{plan.key} -> {text}"' if style.comments else "", chain)
        recent = (
            f" -m recent --set --name {chain} --mask {_MASK[style.family]} --rsource"
            if plan.affinity_seconds
            else ""
        )
        own[chain] = (
            f"-A {chain} -s {format_address(where.address)}{host}{comment} -j KUBE-MARK-MASQ\n"
            f"-A {chain} -p {protocol}{comment}{recent} -m {protocol} -j DNAT --to-destination {text}\n"
        )
    return found


def _from_outside(plan: ServicePlan, style: Style, chain: str) -> str:
    """Return the rule that masquerades traffic except from this node's pods; "" if none."""
    if plan.cluster_ip is None:
        return ""
    before, after = "", ""
    if not style.masquerade_all:
        if style.local_source is None:
            return ""
        before, after = _source_match(style.local_source, negate=True)
    match = _match(plan, style, format_address(plan.cluster_ip), f"{plan.key} cluster IP", after)
    return f"-A {chain} {before}{match} -j KUBE-MARK-MASQ\n"


def _balance(
    plan: ServicePlan, style: Style, chain: str, destinations: Sequence[Destination],
    endpoints: dict[Destination, tuple[str, str]],
) -> str:
    """Return the rules that choose a client's last destination, or else one of *destinations* at random."""
    found = [endpoints[where] for where in destinations]
    lines: list[str] = []
    if plan.affinity_seconds:
        mask = _MASK[style.family]
        lines += [
            f"-A {chain}{comment} -m recent --rcheck --seconds {plan.affinity_seconds} --reap"
            f" --name {endpoint} --mask {mask} --rsource -j {endpoint}\n"
            for comment, endpoint in found
        ]
    left = len(found)
    for comment, endpoint in found:
        lines.append(f"-A {chain}{comment}{_chance(left)} -j {endpoint}\n")
        left -= 1
    return "".join(lines)


@cache
def _chance(among: int) -> str:
    """Return the match that is true once in *among* times.

    kube-proxy writes ten decimals, the kernel keeps 31 bits, iptables-save prints eleven decimals.
    """
    if among == 1:
        return ""
    kept = round(float(f"{1 / among:.10f}") * 2**31)
    return f" -m statistic --mode random --probability {kept / 2**31:.11f}"


def _external(plan: ServicePlan, style: Style, chains: ServiceChains) -> str:
    """Return the rules of the entry for external addresses and node ports.

    With external policy Local, the node itself and its pods still use endpoints on all nodes.
    """
    head = f"-A {chains.external}"
    text = f"{plan.key} external destinations"
    lines: list[str] = []
    if not plan.external_policy_local:
        lines.append(f'{head} -m comment --comment "masquerade traffic for {text}" -j KUBE-MARK-MASQ\n')
    else:
        if style.local_source is not None:
            before, after = _source_match(style.local_source)
            lines.append(
                f'{head} {before}{after}-m comment --comment "pod traffic for {text}" -j {chains.cluster}\n'
            )
        local = "-m addrtype --src-type LOCAL"
        lines.append(
            f'{head} -m comment --comment "masquerade LOCAL traffic for {text}" {local} -j KUBE-MARK-MASQ\n'
        )
        lines.append(
            f'{head} -m comment --comment "route LOCAL traffic for {text}" {local} -j {chains.cluster}\n'
        )
    if plan.has_external_endpoints:
        lines.append(f"{head} -j {chains.local if plan.external_policy_local else chains.cluster}\n")
    return "".join(lines)


def _firewall(plan: ServicePlan, chains: ServiceChains) -> str:
    """Return the rules that admit the source ranges. KUBE-PROXY-FIREWALL drops all other packets."""
    head = f"-A {chains.firewall}"
    lines = [
        f'{head} -s {cidr} -m comment --comment "{plan.key} loadbalancer IP" -j {chains.external}\n'
        for cidr in plan.source_ranges
    ]
    dropped = f"other traffic to {plan.key} will be dropped by KUBE-PROXY-FIREWALL"
    lines.append(f'{head} -m comment --comment "{dropped}"\n')
    return "".join(lines)


def _rules(plan: ServicePlan, style: Style, chains: ServiceChains) -> Iterator[Rule]:
    """Yield the rules that send frontends to chains, or refuse them without a usable endpoint."""
    key = plan.key
    if plan.cluster_ip is not None:
        address = format_address(plan.cluster_ip)
        if plan.has_internal_endpoints:
            chain = chains.local if plan.internal_policy_local else chains.cluster
            match = _match(plan, style, address, f"{key} cluster IP")
            yield Rule(NAT, names.SERVICES, f"{match} -j {chain}")
        else:
            reason, target = _refusal(plan, style)
            match = _match(plan, style, address, reason)
            yield Rule(FILTER, names.SERVICES, f"{match} -j {target}")
    for packed in plan.external_ips:
        address = format_address(packed)
        if plan.has_endpoints:
            match = _match(plan, style, address, f"{key} external IP")
            yield Rule(NAT, names.SERVICES, f"{match} -j {chains.external}")
        yield from _refuse_external(plan, style, address)
    firewall = bool(plan.source_ranges) and plan.has_endpoints
    for packed in plan.load_balancer_ips:
        address = format_address(packed)
        if plan.has_endpoints:
            match = _match(plan, style, address, f"{key} loadbalancer IP")
            target = chains.firewall if firewall else chains.external
            yield Rule(NAT, names.SERVICES, f"{match} -j {target}")
        if firewall:
            text = f"{key} traffic not accepted by {chains.firewall}"
            match = _match(plan, style, address, text)
            yield Rule(FILTER, names.PROXY_FIREWALL, f"{match} -j DROP")
        yield from _refuse_external(plan, style, address)
    if plan.node_port:
        yield from _node_port_rules(plan, style, chains)
    if plan.health_check_node_port:
        text = f"{key} health check node port"
        yield Rule(
            FILTER, names.NODE_PORTS,
            f'-p tcp -m comment --comment "{text}" -m tcp --dport {plan.health_check_node_port} -j ACCEPT',
        )  # fmt: skip


def _node_port_rules(plan: ServicePlan, style: Style, chains: ServiceChains) -> Iterator[Rule]:
    protocol = _PROTOCOLS[plan.key.protocol]
    if plan.has_endpoints:
        match = f'-p {protocol} -m comment --comment "{plan.key}" -m {protocol} --dport {plan.node_port}'
        if style.localhost_node_ports_counted:
            counted = f"-m nfacct --nfacct-name {names.LOCALHOST_COUNTER}"
            loopback = style.family.loopback_cidr
            yield Rule(NAT, names.NODE_PORTS, f"-d {loopback} {match} {counted} -j {chains.external}")
        yield Rule(NAT, names.NODE_PORTS, f"{match} -j {chains.external}")
    if not plan.has_external_endpoints:
        reason, target = _refusal(plan, style)
        yield Rule(
            FILTER, names.EXTERNAL_SERVICES,
            f'-p {protocol} -m comment --comment "{reason}" -m addrtype --dst-type LOCAL'
            f" -m {protocol} --dport {plan.node_port} -j {target}",
        )  # fmt: skip


def _refuse_external(plan: ServicePlan, style: Style, address: str) -> Iterator[Rule]:
    if not plan.has_external_endpoints:
        reason, target = _refusal(plan, style)
        match = _match(plan, style, address, reason)
        yield Rule(FILTER, names.EXTERNAL_SERVICES, f"{match} -j {target}")


def _refusal(plan: ServicePlan, style: Style) -> tuple[str, str]:
    """Return the reason and the target: DROP if endpoints exist on other nodes only, else REJECT."""
    if plan.has_endpoints:
        return f"{plan.key} has no local endpoints", "DROP"
    return f"{plan.key} has no endpoints", REJECT[style.family]


def _match(plan: ServicePlan, style: Style, address: str, comment: str, interface: str = "") -> str:
    protocol = _PROTOCOLS[plan.key.protocol]
    return (
        f'-d {address}/{style.family.bits} {interface}-p {protocol} -m comment --comment "{comment}"'
        f" -m {protocol} --dport {plan.port}"
    )


def _source_match(source: LocalSource, *, negate: bool = False) -> tuple[str, str]:
    """Return the match for traffic from this node's pods, as the parts before and after a destination."""
    match = from_pods(source, negate=negate)
    return (match, "") if source.cidr is not None else ("", match)
