"""The chains and rules for a service plan (kube-proxy 1.36, pkg/proxy/iptables/proxier.go). Pure.

Rules are spelled as iptables-save prints them, so that wanted rules and those in the kernel can be compared
as text.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

from kproxy_core.contract import (
    Address,
    Destination,
    Family,
    NodeView,
    Protocol,
    ServicePlan,
    format_address,
    format_socket,
    shares,
)
from kproxy_iptables import names
from kproxy_iptables.names import FILTER, NAT, ServiceChains, endpoint_chain, group_chain, service_chains
from kproxy_iptables.skeleton import Facts
from kproxy_xtables.rules import REJECT, append_commands, from_pods

LARGE_CLUSTER = 1000
"""Number of endpoints above which rules of single endpoints have no comments."""

MOST_IN_CHAIN = 256
"""Limit for the endpoints that one chain chooses from; more are chosen from in groups.

A chain is replaced as a whole, in a time that is quadratic in the chains to which it jumps
(iptables-nft-restore 1.8.9): 0.02 s for 256, 4 s for 5,000.
"""


class DispatchRule(NamedTuple):
    """A rule in a fixed chain that sends a frontend to a chain of its service port, or refuses it."""

    table: str
    chain: str
    spec: str


class Wanted(NamedTuple):
    """The chains and rules of one service port."""

    chains: dict[str, str]
    """Its own chains in nat: name -> rules, as complete ``-A`` lines. Each chain precedes those that jump to
    it."""
    rules: list[DispatchRule]


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """Parameters that all service ports of one family share."""

    node: NodeView
    localhost_node_ports_counted: bool
    """Node ports are served on 127.0.0.0/8 too, and the kernel has the object that counts these packets."""
    comments: bool
    """Rules of single endpoints have comments."""


_PROTOCOLS = {protocol: protocol.name.lower() for protocol in Protocol}
_MASK = {Family.IPV4: "255.255.255.255", Family.IPV6: ":".join(["ffff"] * 8)}


def make_style(node: NodeView, facts: Facts, endpoints: int) -> Style:
    counted = facts.localhost_node_ports and names.LOCALHOST_COUNTER in facts.counters
    return Style(node=node, localhost_node_ports_counted=counted, comments=endpoints <= LARGE_CLUSTER)


def wanted(plan: ServicePlan, style: Style) -> Wanted:
    chains = service_chains(plan.key)
    own = _own_chains(plan, style, chains) if plan.has_endpoints else {}
    return Wanted(own, list(_rules(plan, style, chains)))


def _own_chains(plan: ServicePlan, style: Style, chains: ServiceChains) -> dict[str, str]:
    own: dict[str, str] = {}
    internal = chains.local if plan.internal_policy_local else chains.cluster
    endpoints = _endpoint_chains(plan, style, chains, own)
    for chain, destinations, weights in (
        (chains.cluster, plan.cluster, plan.cluster_weights), (chains.local, plan.local, plan.local_weights),
    ):  # fmt: skip
        if destinations:
            first = _from_outside(plan, style, chain) if chain == internal else ""
            choice = _balance(plan, style, chain, shares(destinations, weights), endpoints, own)
            own[chain] = first + choice
    if plan.node_port or plan.external_addresses:
        own[chains.external] = _external(plan, style, chains)
    if plan.source_ranges and plan.load_balancer_ips:
        own[chains.firewall] = _firewall(plan, chains)
    return own


def _endpoint_chains(
    plan: ServicePlan, style: Style, chains: ServiceChains, own: dict[str, str]
) -> dict[Destination, tuple[str, str]]:
    """Add a chain for each endpoint. Return the comment of rules that jump to it, and its name.

    Endpoints are in kube-proxy's order, that of their texts.
    """
    found: dict[Destination, tuple[str, str]] = {}
    seed = chains.endpoint_seed
    protocol = _PROTOCOLS[plan.key.protocol]
    comment = f' -m comment --comment "{plan.key}"' if style.comments else ""
    host = f"/{style.node.family.bits}"
    for text, where in sorted([(format_socket(*where), where) for where in plan.reachable]):
        chain = endpoint_chain(seed, text)
        found[where] = (f' -m comment --comment "{plan.key} -> {text}"' if style.comments else "", chain)
        recent = (
            f" -m recent --set --name {chain} --mask {_MASK[style.node.family]} --rsource"
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
    if not style.node.masquerade_all:
        source = style.node.local_source
        if source is None:
            return ""
        pods = from_pods(source, negate=True)
        before, after = (pods, "") if source.cidr is not None else ("", pods)
    match = _match(plan, style, plan.cluster_ip, f"{plan.key} cluster IP", after)
    return f"-A {chain} {before}{match} -j KUBE-MARK-MASQ\n"


class _Choice(NamedTuple):
    """A chain that one of the rules that choose jumps to."""

    comment: str
    chain: str
    share: int


def _balance(
    plan: ServicePlan, style: Style, chain: str, chosen: Mapping[Destination, int],
    endpoints: dict[Destination, tuple[str, str]], own: dict[str, str],
) -> str:
    """Return the rules that choose a client's last destination, or else one of *chosen* by its share.

    Beyond `MOST_IN_CHAIN` add the chains of groups to *own*. An endpoint is in the same one whatever others
    there are, so that a change of one writes one group.
    """
    found = [_Choice(*named, chosen[where]) for where, named in endpoints.items() if where in chosen]
    if len(found) <= MOST_IN_CHAIN:
        return _last(plan, style, chain, found) + _by_share(chain, found)
    number = 1 << ((len(found) - 1) // MOST_IN_CHAIN).bit_length()
    groups: dict[int, list[_Choice]] = {}
    for choice in found:
        groups.setdefault(crc32(choice.chain.encode()) % number, []).append(choice)
    comment = f' -m comment --comment "{plan.key}"' if style.comments else ""
    last: list[str] = []
    of_groups: list[_Choice] = []
    for at, group in sorted(groups.items()):
        # With their number: all groups of another number are written before a chain jumps to them.
        name = group_chain(chain, f"{at} of {number}")
        own[name] = _by_share(name, group)
        of_groups.append(_Choice(comment, name, sum(choice.share for choice in group)))
        if plan.affinity_seconds:
            name = group_chain(chain, f"last {at} of {number}")
            own[name] = _last(plan, style, name, group)
            last.append(f"-A {chain}{comment} -j {name}\n")
    return "".join(last) + _by_share(chain, of_groups)


def _last(plan: ServicePlan, style: Style, chain: str, found: Sequence[_Choice]) -> str:
    """Return the rules that choose a client's last destination; "" without session affinity."""
    if not plan.affinity_seconds:
        return ""
    mask = _MASK[style.node.family]
    return "".join([
        f"-A {chain}{comment} -m recent --rcheck --seconds {plan.affinity_seconds} --reap"
        f" --name {endpoint} --mask {mask} --rsource -j {endpoint}\n"
        for comment, endpoint, _ in found
    ])


def _by_share(chain: str, found: Sequence[_Choice]) -> str:
    lines: list[str] = []
    rest = sum(choice.share for choice in found)
    for comment, target, share in found:
        lines.append(f"-A {chain}{comment}{_chance(share, rest)} -j {target}\n")
        rest -= share
    return "".join(lines)


@lru_cache(maxsize=4096)
def _chance(number: int, among: int) -> str:
    """Return the match for *number* of *among* packets.

    kube-proxy writes ten decimals, the kernel keeps 31 bits, iptables-save prints eleven decimals.
    """
    if number == among:
        return ""
    kept = round(float(f"{number / among:.10f}") * 2**31)
    return f" -m statistic --mode random --probability {kept / 2**31:.11f}"


def _external(plan: ServicePlan, style: Style, chains: ServiceChains) -> str:
    """Return the rules of the entry for external addresses and node ports.

    With external policy Local, the node itself and its pods still use endpoints on all nodes.
    """
    text = f"{plan.key} external destinations"
    rules: list[str] = []
    if plan.external_policy_local:
        if style.node.local_source is not None:
            pods = from_pods(style.node.local_source)
            rules.append(f'{pods}-m comment --comment "pod traffic for {text}" -j {chains.cluster}')
        local = "-m addrtype --src-type LOCAL"
        rules += [
            f'-m comment --comment "masquerade LOCAL traffic for {text}" {local} -j KUBE-MARK-MASQ',
            f'-m comment --comment "route LOCAL traffic for {text}" {local} -j {chains.cluster}',
        ]
    else:
        rules.append(f'-m comment --comment "masquerade traffic for {text}" -j KUBE-MARK-MASQ')
    if plan.has_external_endpoints:
        rules.append(f"-j {chains.local if plan.external_policy_local else chains.cluster}")
    return append_commands(chains.external, rules)


def _firewall(plan: ServicePlan, chains: ServiceChains) -> str:
    """Return the rules that admit the source ranges. KUBE-PROXY-FIREWALL drops all other packets."""
    comment = f'-m comment --comment "{plan.key} loadbalancer IP"'
    admitted = [f"-s {cidr} {comment} -j {chains.external}" for cidr in plan.source_ranges]
    dropped = f"other traffic to {plan.key} will be dropped by KUBE-PROXY-FIREWALL"
    return append_commands(chains.firewall, [*admitted, f'-m comment --comment "{dropped}"'])


def _rules(plan: ServicePlan, style: Style, chains: ServiceChains) -> Iterator[DispatchRule]:
    """Yield the rules that send frontends to chains, or refuse them without a usable endpoint."""
    key = plan.key

    def rule(table: str, chain: str, address: Address, comment: str, target: str) -> DispatchRule:
        return DispatchRule(table, chain, f"{_match(plan, style, address, comment)} -j {target}")

    if plan.cluster_ip is not None:
        if plan.has_internal_endpoints:
            target = chains.local if plan.internal_policy_local else chains.cluster
            yield rule(NAT, names.SERVICES, plan.cluster_ip, f"{key} cluster IP", target)
        else:
            yield rule(FILTER, names.SERVICES, plan.cluster_ip, *_refusal(plan, style))
    if plan.has_endpoints:
        for address in plan.external_ips:
            yield rule(NAT, names.SERVICES, address, f"{key} external IP", chains.external)
        target = chains.firewall if plan.source_ranges else chains.external
        for address in plan.load_balancer_ips:
            yield rule(NAT, names.SERVICES, address, f"{key} loadbalancer IP", target)
            if plan.source_ranges:
                text = f"{key} traffic not accepted by {chains.firewall}"
                yield rule(FILTER, names.PROXY_FIREWALL, address, text, "DROP")
    if not plan.has_external_endpoints:
        for address in plan.external_addresses:
            yield rule(FILTER, names.EXTERNAL_SERVICES, address, *_refusal(plan, style))
    if plan.node_port:
        yield from _node_port_rules(plan, style, chains)
    if plan.health_check_node_port:
        text = f"{key} health check node port"
        yield DispatchRule(
            FILTER, names.NODE_PORTS,
            f'-p tcp -m comment --comment "{text}" -m tcp --dport {plan.health_check_node_port} -j ACCEPT',
        )  # fmt: skip


def _node_port_rules(plan: ServicePlan, style: Style, chains: ServiceChains) -> Iterator[DispatchRule]:
    protocol = _PROTOCOLS[plan.key.protocol]
    if plan.has_endpoints:
        match = f'-p {protocol} -m comment --comment "{plan.key}" -m {protocol} --dport {plan.node_port}'
        if style.localhost_node_ports_counted:
            counted = f"-m nfacct --nfacct-name {names.LOCALHOST_COUNTER}"
            loopback = style.node.family.loopback_cidr
            yield DispatchRule(NAT, names.NODE_PORTS, f"-d {loopback} {match} {counted} -j {chains.external}")
        yield DispatchRule(NAT, names.NODE_PORTS, f"{match} -j {chains.external}")
    if not plan.has_external_endpoints:
        reason, target = _refusal(plan, style)
        yield DispatchRule(
            FILTER, names.EXTERNAL_SERVICES,
            f'-p {protocol} -m comment --comment "{reason}" -m addrtype --dst-type LOCAL'
            f" -m {protocol} --dport {plan.node_port} -j {target}",
        )  # fmt: skip


def _refusal(plan: ServicePlan, style: Style) -> tuple[str, str]:
    """Return the reason and the target: DROP if endpoints exist on other nodes only, else REJECT."""
    if plan.has_endpoints:
        return f"{plan.key} has no local endpoints", "DROP"
    return f"{plan.key} has no endpoints", REJECT[style.node.family]


def _match(plan: ServicePlan, style: Style, address: Address, comment: str, interface: str = "") -> str:
    protocol = _PROTOCOLS[plan.key.protocol]
    return (
        f"-d {format_address(address)}/{style.node.family.bits} {interface}-p {protocol}"
        f' -m comment --comment "{comment}" -m {protocol} --dport {plan.port}'
    )
