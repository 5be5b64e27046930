"""The rules as nft text: base chains, maps, template chains.

The text may be applied at any time over an existing table of the same layout: it flushes and refills chains
in one transaction, and maps keep their elements.
"""

import re
from collections.abc import Collection, Container, Iterable
from typing import NamedTuple, Self

from kproxy_core.model.address import Family, Protocol
from kproxy_core.model.node import LocalSource, NodeView
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_nft import counting
from kproxy_nftables import names
from kproxy_nftables.names import TABLE, Template
from kproxy_nftables.owned_chains import Owned, chain_text
from kproxy_nftables.wanted import verdicts

BaseChains = dict[str, tuple[str, str, int]]
"""Type, hook and priority by name."""

BASE_CHAINS = {
    "nat-prerouting": ("nat", "prerouting", -100),
    "nat-output": ("nat", "output", -100),
    "nat-postrouting": ("nat", "postrouting", 100),
    "filter-forward": ("filter", "forward", 0),
    "filter-output": ("filter", "output", 0),
}
_RECORDING_BASE_CHAINS = {
    "filter-input": ("filter", "input", 0),
    "filter-postrouting": ("filter", "postrouting", 0),
}
"""The first hooks after DNAT: input for connections to this node, else postrouting. They exist once there is
a template with session affinity: each packet would pay for them, even without rules."""


class Extras(NamedTuple):
    """The rules that are written on request only."""

    counted: bool = False
    """Count new connections."""
    flowtable: tuple[str, ...] = ()
    """Devices between which established flows are forwarded without rules; none: no flowtable."""

    def limited_to(self, present: Container[str]) -> Self:
        """Return the extras without devices that do not exist: the kernel refuses those."""
        return self._replace(flowtable=tuple(device for device in self.flowtable if device in present))


NO_EXTRAS = Extras()


def skeleton(node: NodeView, extras: Extras = NO_EXTRAS) -> str:
    """Return the commands for all constant objects of one family's table except template chains."""
    family, chains = node.family, _chains(node)
    table = f"{family.ip} {TABLE}"
    lines = [f'add table {table} {{ comment "rules for kproxy"; }}', *_containers(family)]
    if extras.counted:
        lines.append(counting.set_of_connections(family, TABLE))
        lines.append(counting.counting_set(family, TABLE, names.REFUSED))
        chains = _counted(chains, family.ip)
    text = "".join(f"{line}\n" for line in lines) + _added(family, _base_chains(extras))
    text += "".join(chain_text(family, name, rules) for name, rules in chains.items())
    return text + (_flowtable(family, extras.flowtable) if extras.flowtable else "")


def templates(node: NodeView, wanted: Collection[Template]) -> str:
    """Return the commands for the *wanted* template chains and those they lead to.

    Clients are recorded once there is a template with session affinity.
    """
    chains: dict[str, list[str]] = {}
    for template in sorted(wanted):
        for needed in (*_leads_to(template), template):
            chains[needed.name] = _template_rules(node, needed)
    text = ""
    if _records(wanted):
        text = _added(node.family, _RECORDING_BASE_CHAINS)
        chains[_RECORD] = _record_rules(node.family.ip)
        for name in _RECORDING_BASE_CHAINS:
            chains[name] = [f"ct state new ct status dnat jump {_RECORD}"]
    return text + "".join(chain_text(node.family, name, rules) for name, rules in chains.items())


def _records(templates: Iterable[Template]) -> bool:
    """Return whether connections through *templates* are recorded, for session affinity."""
    return any(template.sticky for template in templates)


def _added(family: Family, base_chains: BaseChains) -> str:
    """Return the commands that add *base_chains*."""
    places = {
        name: f"type {kind} hook {hook} priority {priority}; policy accept;"
        for name, (kind, hook, priority) in base_chains.items()
    }
    return "".join(f"add chain {family.ip} {TABLE} {name} {{ {place} }}\n" for name, place in places.items())


def rules_text(
    node: NodeView, wanted: Collection[Template], owned: Owned, extras: Extras = NO_EXTRAS
) -> str:
    """Return the commands for everything but elements, including the objects that service ports own."""
    return skeleton(node, extras) + templates(node, wanted) + service_cidrs(node) + "".join(owned.values())


def templates_of(plans: Iterable[ServicePlan]) -> set[Template]:
    """Return all templates that *plans* need."""
    return templates_behind(verdict for plan in plans for verdict in verdicts(plan))


def templates_behind(verdicts: Iterable[str]) -> set[Template]:
    """Return the templates to which *verdicts* lead, at once or from one to the next."""
    found = (names.parse_template(verdict.partition(" ")[2]) for verdict in set(verdicts))
    return {t for template in found if template is not None for t in (template, *_leads_to(template))}


def service_cidrs(node: NodeView) -> str:
    name = f"{node.family.ip} {TABLE} {names.SERVICE_CIDRS}"
    text = f"flush set {name}\n"
    if node.service_cidrs:
        text += f"add element {name} {{ {', '.join(map(str, node.service_cidrs))} }}\n"
    return text


def rules_differ(one: NodeView, other: NodeView) -> bool:
    return (one.local_source, one.masquerade_all, one.masquerade_bit, one.node_ports_anywhere) != (
        other.local_source, other.masquerade_all, other.masquerade_bit, other.node_ports_anywhere
    )  # fmt: skip


def delete_foreign(
    family: Family, chains: Iterable[str], containers: Iterable[str], flowtables: Iterable[str]
) -> str:
    """Return the commands that delete chains and what they refer to; maps and sets may refer to chains."""
    table = f"{family.ip} {TABLE}"
    chains = sorted(filter(_QUOTABLE, chains))
    return "".join(
        [f"flush chain {table} {name}\n" for name in chains]
        + [f"delete set {table} {name}\n" for name in sorted(filter(_QUOTABLE, containers))]
        + [f"delete flowtable {table} {name}\n" for name in sorted(filter(_QUOTABLE, flowtables))]
        + [f"delete chain {table} {name}\n" for name in chains]
    )


def delete_table(family: Family) -> str:
    """Return the commands that delete the table of *family*, which need not exist."""
    table = f"table {family.ip} {TABLE}"
    return f"add {table}\ndelete {table}\n"


def object_names(templates: Collection[Template], owned: Iterable[str], extras: Extras) -> set[str]:
    """Return the names of all chains, maps, sets and flowtables that belong into the table."""
    wanted = {*_base_chains(extras), *_REGULAR_CHAINS, *names.ELEMENT_CONTAINERS, names.SERVICE_CIDRS}
    wanted.update(template.name for template in templates)
    if _records(templates):
        wanted |= {*_RECORDING_BASE_CHAINS}
    wanted.update(owned)
    if extras.counted:
        wanted |= {*_COUNTING_CHAINS, counting.CONNECTIONS, names.REFUSED}
    if extras.flowtable:
        wanted.add(names.FLOWTABLE)
    return wanted


_QUOTABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*").fullmatch
"""Matches the names that nft text can hold. All of ours can; others are left alone."""

_RECORD = "record"
_REGULAR_CHAINS = {"services", "masquerading", "cluster-ips-check", _RECORD, names.REJECT, names.ADMITTED}


def _containers(family: Family) -> list[str]:
    """Return the commands that add all maps and sets."""
    address, index = f"{family.ip} daddr", "numgen random mod 1"
    maps: dict[str, str] = {}
    for name in (names.VIPS, names.ADMITTED_VIPS, names.STICKY_VIPS, names.STICKY_LOCAL_VIPS):
        maps[name] = f"typeof {address} . meta l4proto . th dport : verdict"
    for name in (names.NODE_PORTS, names.STICKY_NODE_PORTS, names.STICKY_LOCAL_NODE_PORTS):
        maps[name] = "typeof meta l4proto . th dport : verdict"
    # Not typeof: outside of a rule nft does not know the type of a conntrack port.
    maps[names.RECORDED_VIPS] = f"type {counting.ADDRESS_TYPE[family]} . inet_proto . inet_service : verdict"
    maps[names.RECORDED_NODE_PORTS] = "type inet_proto . inet_service : verdict"
    for protocol in Protocol:
        port = f"{protocol.name.lower()} dport"
        for name in (names.VIP_ENDPOINTS[protocol], names.VIP_LOCAL_ENDPOINTS[protocol]):
            maps[name] = f"typeof {address} . {port} . {index} : {address} . {port}"
        for name in (names.NODE_PORT_ENDPOINTS[protocol], names.NODE_PORT_LOCAL_ENDPOINTS[protocol]):
            maps[name] = f"typeof {port} . {index} : {address} . {port}"
    sets = {
        names.CLUSTER_IPS: f"typeof {address}", names.NODE_IPS: f"typeof {address}",
        names.HAIRPINS: f"typeof {family.ip} saddr . {address}",
        names.SERVICE_CIDRS: f"typeof {address}; flags interval",
    }  # fmt: skip
    table = f"{family.ip} {TABLE}"
    return [
        *(f"add map {table} {name} {{ {of}; }}" for name, of in maps.items()),
        *(f"add set {table} {name} {{ {of}; }}" for name, of in sets.items()),
    ]


def _chains(node: NodeView) -> dict[str, list[str]]:
    """Return every chain with its rules. A chain precedes those that lead to it."""
    ip = node.family.ip
    bit = 1 << node.masquerade_bit
    to_node = (
        f"fib daddr type local {ip} daddr != {str(node.family.loopback_cidr).removesuffix('/128')}"
        if node.node_ports_anywhere
        else f"{ip} daddr @{names.NODE_IPS}"
    )
    # Service ports have translated the destination of their connections, and no endpoint is a ClusterIP.
    check = "ct state new ct status ! dnat jump cluster-ips-check"
    return {
        # The kernel rate-limits ICMP errors, but not resets.
        names.REJECT: ["meta l4proto tcp reject with tcp reset", "reject"],
        names.ADMITTED: [f"{ip} daddr . meta l4proto . th dport vmap @{names.ADMITTED_VIPS}"],
        "services": [
            f"{ip} daddr . meta l4proto . th dport vmap @{names.VIPS}",
            f"{to_node} meta l4proto . th dport vmap @{names.NODE_PORTS}",
        ],
        "masquerading": [
            f"meta mark and {bit:#010x} != 0 meta mark set meta mark xor {bit:#010x} masquerade fully-random",
            f"ct status dnat {ip} saddr . {ip} daddr @{names.HAIRPINS} masquerade fully-random",
        ],
        "cluster-ips-check": [
            f"{ip} daddr @{names.CLUSTER_IPS} goto {names.REJECT}",
            f"{ip} daddr @{names.SERVICE_CIDRS} drop",
        ],
        _RECORD: [],  # `templates` fills it, and adds the chains that lead to it.
        "nat-prerouting": ["jump services"],
        "nat-output": ["jump services"],
        "nat-postrouting": ["jump masquerading"],
        "filter-forward": [check],
        "filter-output": [check],
    }


_COUNTING_BASE_CHAINS = {"nat-input": ("nat", "input", 100)}
_COUNTING_CHAINS = ("count", "refuse-unserved")
_FLOWTABLE_BASE_CHAINS = {"flow-offload": ("filter", "forward", 300)}
"""After the filters of other tables: they see, and may drop, each packet that would add a flow."""


def _base_chains(extras: Extras) -> BaseChains:
    return (
        BASE_CHAINS
        | (_COUNTING_BASE_CHAINS if extras.counted else {})
        | (_FLOWTABLE_BASE_CHAINS if extras.flowtable else {})
    )


def _flowtable(family: Family, devices: Iterable[str]) -> str:
    """Replace the flowtable: `add` alone removes no device. The next packets of its flows add them again."""
    (chain,) = _FLOWTABLE_BASE_CHAINS
    table = f"{family.ip} {TABLE}"
    flowtable = f"flowtable {table} {names.FLOWTABLE}"
    hook = "hook ingress priority 0;"
    listed = ", ".join(f'"{device}"' for device in devices)
    rule = f"meta l4proto {{ tcp, udp }} ct state established flow add @{names.FLOWTABLE}"
    return (
        f"flush chain {table} {chain}\n"
        f"add {flowtable} {{ {hook} }}\n"
        f"delete {flowtable}\n"
        f"add {flowtable} {{ {hook} devices = {{ {listed} }}; counter; }}\n"
    ) + chain_text(family, chain, [rule])


def _counted(chains: dict[str, list[str]], ip: str) -> dict[str, list[str]]:
    """Return *chains* with those that count.

    Refusals are counted by frontend only: other ports of a ClusterIP are refused by a chain that does not
    count.
    """
    dialled = f"{ip} daddr . meta l4proto . th dport"
    refuse = chains[names.REJECT]
    to_count = "ct status dnat jump count"
    changed = {
        names.REJECT: [f"update @{names.REFUSED} {{ {dialled} counter }}", *refuse],
        "cluster-ips-check": [
            rule.replace(f"goto {names.REJECT}", "goto refuse-unserved")
            for rule in chains["cluster-ips-check"]],
        "nat-postrouting": [to_count, *chains["nat-postrouting"]],
    }
    return {
        "count": counting.count_rules(ip), "refuse-unserved": refuse, **chains, **changed,
        "nat-input": [to_count],
    }  # fmt: skip


def _record_rules(ip: str) -> list[str]:
    """Return the rules that lead a connection to the chain which records its client.

    nft knows the type of a conntrack port only after a match on one protocol.
    """
    rules: list[str] = []
    for protocol in Protocol:
        match = f"meta l4proto {protocol.name.lower()}"
        recorded = "meta l4proto . ct original proto-dst vmap"
        rules.append(f"{match} ct original {ip} daddr . {recorded} @{names.RECORDED_VIPS}")
        rules.append(
            f"{match} ct original {ip} daddr @{names.NODE_IPS} {recorded} @{names.RECORDED_NODE_PORTS}"
        )
    return rules


def _leads_to(template: Template) -> list[Template]:
    if template.policy != "external-local":
        return []
    short = template._replace(policy="short-circuit", local=0)
    return [short, short._replace(policy="external")]


def _template_rules(node: NodeView, template: Template) -> list[str]:
    ip = node.family.ip
    mark = f"meta mark set meta mark or {1 << node.masquerade_bit:#010x}"
    rules: list[str] = []
    if template.policy in ("cluster", "local"):
        if node.masquerade_all:
            rules.append(mark)
        elif node.local_source is not None:
            rules.append(f"{_from_pods(node.local_source, ip, negate=True)} {mark}")
    elif template.policy == "external":
        rules.append(mark)
    elif template.policy == "external-local":
        short_circuit, external = _leads_to(template)
        if node.local_source is not None:
            rules.append(f"{_from_pods(node.local_source, ip)} goto {short_circuit.name}")
        rules.append(f"fib saddr type local goto {external.name}")
        if not template.local:
            return [*rules, "drop"]
    address = "" if template.node_port else f"{ip} daddr . "
    maps = names.NODE_PORT_MAPS if template.node_port else names.VIP_MAPS
    if template.sticky:
        sticky = maps.sticky_local if template.policy == "external-local" else maps.sticky
        rules.append(f"{address}meta l4proto . th dport vmap @{sticky}")
    port = f"{template.protocol.name.lower()} dport"
    count = template.local or template.cluster
    endpoints = (maps.local_endpoints if template.local else maps.endpoints)[template.protocol]
    rules.append(f"dnat {ip} to {address}{port} . numgen random mod {count} map @{endpoints}")
    return rules


def _from_pods(source: LocalSource, ip: str, *, negate: bool = False) -> str:
    equals = "!= " if negate else ""
    if source.cidr is not None:
        return f"{ip} saddr {equals}{source.cidr}"
    return f'iifname {equals}"{source.interface or f"{source.interface_prefix}*"}"'
