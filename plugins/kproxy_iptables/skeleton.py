"""The constant rules: the fixed chains of both tables, and the jumps to them from built-in chains. Pure."""

from dataclasses import dataclass

from kproxy_core.contract import Family, NodeView, format_address
from kproxy_iptables import names
from kproxy_iptables.names import FILTER, NAT
from kproxy_xtables.rules import NEW_CONNECTIONS, TO_THIS_NODE, ChainKey, Jump, mark_rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Kernel settings and configuration that the rules depend on."""

    liberal: bool = False
    """Conntrack accepts TCP packets outside of the window (``nf_conntrack_tcp_be_liberal``), so that INVALID
    packets must not be dropped."""
    counters: frozenset[str] = frozenset()
    """The existing accounting objects of `names.COUNTERS`."""
    localhost_node_ports: bool = False
    """Node ports are served on 127.0.0.0/8 too."""


_EXTERNAL = "kubernetes externally-visible service portals"
_PORTALS = "kubernetes service portals"
_FIREWALL = "kubernetes load balancer firewall"

JUMPS = (
    Jump(FILTER, "INPUT", names.EXTERNAL_SERVICES, _EXTERNAL, NEW_CONNECTIONS),
    Jump(FILTER, "FORWARD", names.EXTERNAL_SERVICES, _EXTERNAL, NEW_CONNECTIONS),
    Jump(FILTER, "INPUT", names.NODE_PORTS, "kubernetes health check service ports"),
    Jump(FILTER, "FORWARD", names.SERVICES, _PORTALS, NEW_CONNECTIONS),
    Jump(FILTER, "OUTPUT", names.SERVICES, _PORTALS, NEW_CONNECTIONS),
    Jump(FILTER, "FORWARD", names.FORWARD, "kubernetes forwarding rules"),
    Jump(FILTER, "INPUT", names.PROXY_FIREWALL, _FIREWALL, NEW_CONNECTIONS),
    Jump(FILTER, "OUTPUT", names.PROXY_FIREWALL, _FIREWALL, NEW_CONNECTIONS),
    Jump(FILTER, "FORWARD", names.PROXY_FIREWALL, _FIREWALL, NEW_CONNECTIONS),
    Jump(NAT, "OUTPUT", names.SERVICES, _PORTALS),
    Jump(NAT, "PREROUTING", names.SERVICES, _PORTALS),
    Jump(NAT, "POSTROUTING", names.POSTROUTING, "kubernetes postrouting rules"),
)
"""Inserted at the top of their chains in this order, so that the last one stands first."""

ALL_JUMPS = (
    *JUMPS,
    Jump(FILTER, "INPUT", names.KUBELET_FIREWALL),
    Jump(FILTER, "OUTPUT", names.KUBELET_FIREWALL),
)
"""The last two are never deleted, because kubelet needs them too."""

BLOCK_LOCALNET = (
    '! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "block incoming localnet connections"'
    " -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"
)
"""Keeps hosts on the link from loopback services, which ``route_localnet`` would let them reach."""

_DISPATCH = (
    '-m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain"'
)


def skeleton(node: NodeView, facts: Facts) -> dict[ChainKey, list[str]]:
    """Return the constant rules of each fixed chain. Rules of service ports precede them."""
    mark, accept, masquerade = mark_rules(node)
    invalid: list[str] = []
    if not facts.liberal:
        counted = (
            f" -m nfacct --nfacct-name {names.INVALID_COUNTER}"
            if names.INVALID_COUNTER in facts.counters
            else ""
        )
        # Otherwise a reply that conntrack does not recognize would leave with the endpoint's address, and the
        # client would reset the connection.
        invalid.append(f"-m conntrack --ctstate INVALID{counted} -j DROP")
    return {
        (FILTER, names.SERVICES): [],
        (FILTER, names.EXTERNAL_SERVICES): [],
        (FILTER, names.FORWARD): [*invalid, *accept],
        (FILTER, names.NODE_PORTS): [],
        (FILTER, names.PROXY_FIREWALL): [],
        (NAT, names.SERVICES): _node_port_dispatch(node, facts),
        (NAT, names.NODE_PORTS): [],
        (NAT, names.POSTROUTING): masquerade,
        (NAT, names.MARK_MASQ): mark,
    }


def rules_differ(one: NodeView, other: NodeView) -> bool:
    return _relevant(one) != _relevant(other)


def _relevant(node: NodeView) -> object:
    return (
        node.local_source,
        node.node_ports_anywhere or node.node_port_addresses,
        node.node_ports_on_loopback,
        node.masquerade_all,
        node.masquerade_bit,
    )


def serves_loopback(node: NodeView, *, enabled: bool) -> bool:
    """Return whether node ports are served on loopback: only for IPv4, and only if *enabled*."""
    return enabled and node.family is Family.IPV4 and node.node_ports_on_loopback


def _node_port_dispatch(node: NodeView, facts: Facts) -> list[str]:
    if node.node_ports_anywhere:
        if node.family is Family.IPV6 or not facts.localhost_node_ports:
            return [f"! -d {node.family.loopback_cidr} {_DISPATCH} {TO_THIS_NODE} -j {names.NODE_PORTS}"]
        return [f"{_DISPATCH} {TO_THIS_NODE} -j {names.NODE_PORTS}"]
    addresses = [format_address(address) for address in node.node_port_addresses]
    if facts.localhost_node_ports:
        addresses.append("127.0.0.1")
    return [f"-d {address}/{node.family.bits} {_DISPATCH} -j {names.NODE_PORTS}" for address in addresses]
