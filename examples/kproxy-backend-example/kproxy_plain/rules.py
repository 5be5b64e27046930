"""The desired nftables rules for a node and its service plans. Pure: values in, text out.

Every line is written exactly as ``nft list table`` prints it, so that the kernel's rules can be compared with
the desired ones, chain by chain.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from ipaddress import collapse_addresses, ip_network

from kproxy_core.contract import (
    Address,
    Destination,
    Family,
    NodeView,
    Protocol,
    ServicePlan,
    ServicePortKey,
    format_address,
    format_socket,
)

TABLE = "kproxy-plain"
NFT_FAMILY = {Family.IPV4: "ip", Family.IPV6: "ip6"}
BASE_CHAINS = ("prerouting", "output", "postrouting")
MAPS = {
    "frontends": "type {address} . inet_proto . inet_service : verdict",
    "node-ports": "type inet_proto . inet_service : verdict",
}


@dataclass(frozen=True, slots=True)
class Rules:
    """Part of a table: the lines of chains by name, and the verdicts of map elements by map and key."""

    chains: dict[str, tuple[str, ...]] = field(default_factory=dict)
    elements: dict[tuple[str, str], str] = field(default_factory=dict)


def together(parts: Iterable[Rules]) -> Rules:
    """Return the union of *parts*, which have no chain or element in common."""
    whole = Rules()
    for part in parts:
        whole.chains.update(part.chains)
        whole.elements.update(part.elements)
    return whole


def base_rules(node: NodeView, bit: int) -> Rules:
    """Return the constant rules: dispatch of packets to service ports, and masquerading."""
    ip = NFT_FAMILY[node.family]
    dispatch = [f"{ip} daddr . meta l4proto . th dport vmap @frontends"]
    if node.node_ports_anywhere:
        loopback = "127.0.0.0/8" if node.family is Family.IPV4 else "::1"
        dispatch.append(
            f"{ip} daddr != {loopback} fib daddr type local meta l4proto . th dport vmap @node-ports"
        )
    elif node.node_port_addresses:
        addresses = _among(map(format_address, node.node_port_addresses))
        dispatch.append(f"{ip} daddr {addresses} meta l4proto . th dport vmap @node-ports")
    mark = _mark(bit)
    masquerade = f"meta mark & {mark} == {mark} meta mark set meta mark ^ {mark} masquerade fully-random"
    return Rules({
        "prerouting": ("type nat hook prerouting priority dstnat; policy accept;", *dispatch),
        "output": ("type nat hook output priority -100; policy accept;", *dispatch),
        "postrouting": ("type nat hook postrouting priority srcnat; policy accept;", masquerade),
    })  # fmt: skip


def service_rules(plan: ServicePlan, node: NodeView, bit: int) -> Rules:
    """Return the chains of one service port, and the map elements that point to them."""
    ip = NFT_FAMILY[plan.family]
    name, protocol = _chain_name(plan.key), plan.key.protocol
    rules = Rules()

    def lead(map_name: str, key: str, chain: str) -> None:
        rules.elements[map_name, key] = f"goto {chain}"

    if plan.cluster_ip is not None:
        rules.chains[f"cluster/{name}"] = tuple(_cluster_ip(plan, node, bit))
        lead("frontends", _frontend(plan.cluster_ip, protocol, plan.port), f"cluster/{name}")
    if plan.external_addresses or plan.node_port:
        rules.chains[f"external/{name}"] = tuple(_external(plan, node, bit))
    if plan.source_ranges:
        ranges = collapse_addresses(ip_network(str(cidr)) for cidr in plan.source_ranges)  # type: ignore[type-var]
        rules.chains[f"ranges/{name}"] = (
            f"{ip} saddr != {_among(str(r).removesuffix(f'/{plan.family.bits}') for r in ranges)} drop",
            f"goto external/{name}",
        )
    for address in plan.external_ips:
        lead("frontends", _frontend(address, protocol, plan.port), f"external/{name}")
    for address in plan.load_balancer_ips:
        first = "ranges" if plan.source_ranges else "external"
        lead("frontends", _frontend(address, protocol, plan.port), f"{first}/{name}")
    if plan.node_port:
        lead("node-ports", f"{protocol.name.lower()} . {plan.node_port}", f"external/{name}")
    return rules


def _cluster_ip(plan: ServicePlan, node: NodeView, bit: int) -> Iterator[str]:
    """Masquerade clients outside the pod network: their replies must return through this node."""
    if node.masquerade_all:
        yield _masquerade(bit)
    elif node.local_source is not None:
        yield f"{_source(node, '!= ')} {_masquerade(bit)}"
    yield from _hairpin(plan, bit)
    yield from _forward(plan, plan.local_slots if plan.internal_policy_local else plan.cluster_slots)


def _external(plan: ServicePlan, node: NodeView, bit: int) -> Iterator[str]:
    """Under Cluster masquerade every client. Local keeps its address; pods and the node use any endpoint."""
    if not plan.external_policy_local:
        yield _masquerade(bit)
        yield from _forward(plan, plan.cluster_slots)
        return
    if plan.cluster:
        if node.local_source is not None:
            yield from _hairpin(plan, bit)
            yield f"{_source(node)} {_dnat(plan, plan.cluster_slots)}"
        yield f"fib saddr type local {_masquerade(bit)}"
        yield f"fib saddr type local {_dnat(plan, plan.cluster_slots)}"
    yield from _forward(plan, plan.local_slots)


def _forward(plan: ServicePlan, slots: Sequence[Destination]) -> Iterator[str]:
    """Forward to the endpoint in one of *slots*. Without any, reject if no node has one, else drop."""
    if slots:
        yield _dnat(plan, slots)
    elif plan.has_endpoints:
        yield "drop"
    else:
        yield "reject with tcp reset" if plan.key.protocol is Protocol.TCP else "reject"


def _dnat(plan: ServicePlan, slots: Sequence[Destination]) -> str:
    ip, protocol = NFT_FAMILY[plan.family], plan.key.protocol.name.lower()
    if len(slots) == 1:
        return f"meta l4proto {protocol} dnat to {format_socket(*slots[0])}"
    targets = ", ".join(f"{n} : {format_address(to.address)} . {to.port}" for n, to in enumerate(slots))
    return f"meta l4proto {protocol} dnat {ip} to numgen random mod {len(slots)} map {{ {targets} }}"


def _hairpin(plan: ServicePlan, bit: int) -> Iterator[str]:
    """Masquerade an endpoint that dials its own Service: it must not see itself as the client."""
    if plan.hairpins:
        hairpins = _among(format_address(address) for address in sorted(plan.hairpins))
        yield f"{NFT_FAMILY[plan.family]} saddr {hairpins} {_masquerade(bit)}"


def _source(node: NodeView, negation: str = "") -> str:
    """Return a match for traffic from pods: of the cluster or of this node, as configured."""
    source = node.local_source
    assert source is not None
    if source.cidr is not None:
        return f"{NFT_FAMILY[node.family]} saddr {negation}{source.cidr}"
    name = source.interface or f"{source.interface_prefix}*"
    return f'iifname {negation}"{name}"'


def _masquerade(bit: int) -> str:
    return f"meta mark set meta mark | {_mark(bit)}"


def _mark(bit: int) -> str:
    return f"0x{1 << bit:08x}"


def _frontend(address: Address, protocol: Protocol, port: int) -> str:
    return f"{format_address(address)} . {protocol.name.lower()} . {port}"


def _among(values: Iterable[str]) -> str:
    listed = list(values)
    return listed[0] if len(listed) == 1 else f"{{ {', '.join(listed)} }}"


def _chain_name(key: ServicePortKey) -> str:
    """Return a readable name, or a hash if a part is not a valid Kubernetes name: nft might misread it."""
    parts = [key.namespace, key.name, key.port_name or "-"]
    if not all(re.fullmatch(r"[a-z0-9.-]{1,63}", part) for part in parts):
        parts = [sha256("/".join(parts).encode()).hexdigest()[:32]]
    return "/".join([*parts, key.protocol.name.lower()])


def table_text(family: Family, rules: Rules) -> str:
    """Return a whole table in the syntax of ``nft -f`` and ``nft list table``."""
    blocks = []
    for name, kind in MAPS.items():
        lines = [f"\t\t{kind.format(address='ipv4_addr' if family is Family.IPV4 else 'ipv6_addr')}\n"]
        elements = sorted(f"{key} : {to}" for (where, key), to in rules.elements.items() if where == name)
        if elements:
            lines.append("\t\telements = { " + ",\n\t\t\t     ".join(elements) + " }\n")
        blocks.append(f"\tmap {name} {{\n{''.join(lines)}\t}}\n")
    order = [*sorted(rules.chains.keys() - set(BASE_CHAINS)), *BASE_CHAINS]
    for name in order:
        if name in rules.chains:
            lines = [f"\t\t{line}\n" for line in rules.chains[name]]
            blocks.append(f"\tchain {name} {{\n{''.join(lines)}\t}}\n")
    return f"table {NFT_FAMILY[family]} {TABLE} {{\n" + "\n".join(blocks) + "}\n"


def parse_table(text: str) -> Rules:
    """Parse the output of ``nft -s list table``, including chains and elements that we did not make."""
    rules = Rules()
    kind = name = ""
    lines: list[str] = []
    for line in map(str.strip, text.splitlines()[1:]):
        if line.endswith("{") and not kind:
            kind, name = line.split()[:2]
            lines = []
        elif line == "}" and kind:
            if kind == "chain":
                rules.chains[name] = tuple(lines)
            elif kind == "map":
                found = " ".join(lines).partition("elements = { ")[2].removesuffix(" }")
                for element in filter(None, found.split(", ")):
                    key, _, to = element.partition(" : ")
                    rules.elements[name, key] = to
            kind = ""
        elif kind:
            # nft 1.1 has a name for this priority, older ones do not.
            lines.append(line.replace("hook output priority dstnat;", "hook output priority -100;"))
    return rules


def commands(family: Family, old: Rules, new: Rules) -> str:
    """Return the ``nft -f`` commands that turn *old* into *new* in one transaction."""
    table = f"{NFT_FAMILY[family]} {TABLE}"
    gone = [name for name in old.chains if name not in new.chains]
    text = [
        f"delete element {table} {where} {{ {key} }}"
        for (where, key), to in old.elements.items() if new.elements.get((where, key)) != to
    ]  # fmt: skip
    changed = {name: lines for name, lines in new.chains.items() if old.chains.get(name) != lines}
    # A chain must exist before another one jumps to it.
    text += [f"add chain {table} {name}" for name in changed if name not in BASE_CHAINS]
    text += [f"flush chain {table} {name}" for name in [*changed, *gone] if name in old.chains]
    if changed:
        text.append(table_text(family, Rules(changed)))
    text += [
        f"add element {table} {where} {{ {key} : {to} }}"
        for (where, key), to in new.elements.items() if old.elements.get((where, key)) != to
    ]  # fmt: skip
    text += [f"delete chain {table} {name}" for name in gone]
    return "".join(f"{line.rstrip()}\n" for line in text)


def count_changes(old: Rules, new: Rules) -> int:
    """Return the number of chains and elements of service ports that differ."""
    chains = (old.chains.keys() | new.chains.keys()) - set(BASE_CHAINS)
    different = sum(old.chains.get(name) != new.chains.get(name) for name in chains)
    elements = old.elements.keys() | new.elements.keys()
    return different + sum(old.elements.get(key) != new.elements.get(key) for key in elements)
