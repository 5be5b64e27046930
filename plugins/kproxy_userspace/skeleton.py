"""Constant rules: the jumps to our chains, the rule without effect, and the nftables table. Pure."""

from kproxy_core.model.address import Address, Family, format_socket
from kproxy_userspace import names
from kproxy_userspace.names import TABLE
from kproxy_xtables.rules import TO_THIS_NODE, Jump

_FIRST = "handle ClusterIPs; NOTE: this must be before the NodePort rules"
_LAST = "handle service NodePorts; NOTE: this must be the last rule in the chain"
_FILTER = "Ensure that non-local NodePort traffic can flow"
JUMPS = (
    Jump("nat", "PREROUTING", names.PORTALS_CONTAINER, _FIRST),
    Jump("nat", "OUTPUT", names.PORTALS_HOST, _FIRST),
    Jump("nat", "PREROUTING", names.NODE_PORT_CONTAINER, _LAST, TO_THIS_NODE, at_end=True),
    Jump("nat", "OUTPUT", names.NODE_PORT_HOST, _LAST, TO_THIS_NODE, at_end=True),
    Jump("filter", "INPUT", names.NON_LOCAL, _FILTER),
)

PIN = '-m comment --comment "kproxy: established connections stay translated" -m conntrack --ctstate NEW'
"""A rule without effect that needs connection tracking.

When the last such rule of a family is deleted, the kernel stops translating established connections.
"""

NFT_MAPS = VIPS, RANGED_VIPS, NODE_PORTS = "vips", "ranged-vips", "node-ports"


def nft_target(at: Address | None) -> str:
    """Return the statement that redirects to relays *at* an address, None: at every one, without the port."""
    return "redirect to :" if at is None else f"dnat to {format_socket(at, 0).removesuffix('0')}"


def nft_skeleton(family: Family, at: Address | None = None) -> str:
    """Return commands that replace the table by an empty one, for relays *at* an address or everywhere."""
    ip = family.ip
    protocol = "meta l4proto { tcp, udp }"
    to = nft_target(at)
    address = "ipv4_addr" if family is Family.IPV4 else "ipv6_addr"
    return f"""\
add table {ip} {TABLE}
delete table {ip} {TABLE}
table {ip} {TABLE} {{
    comment "VIPs and node ports lead to the relays of kproxy"
    map {VIPS} {{
        type {address} . inet_proto . inet_service : inet_service
    }}
    map {RANGED_VIPS} {{
        type {address} . {address} . inet_proto . inet_service : inet_service
        flags interval
    }}
    map {NODE_PORTS} {{
        type inet_proto . inet_service : inet_service
    }}
    chain portals {{
        {protocol} {to}{ip} daddr . meta l4proto . th dport map @{VIPS}
        {protocol} {to}{ip} saddr . {ip} daddr . meta l4proto . th dport map @{RANGED_VIPS}
        fib daddr type local {protocol} {to}meta l4proto . th dport map @{NODE_PORTS}
    }}
    chain nat-prerouting {{
        type nat hook prerouting priority dstnat
        jump portals
    }}
    chain nat-output {{
        type nat hook output priority -100
        jump portals
    }}
}}
"""
