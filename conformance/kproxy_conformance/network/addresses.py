"""Symbols of the topology, and the addresses and networks that they stand for in each IP family."""

import functools
import ipaddress
from collections.abc import Iterable

NODE = "kc-node"
"""Name of the node under test."""
OTHER_NODE = "kc-node2"

FAMILIES = ("ipv4", "ipv6")

ADDRESSES = {
    "gateway": ("172.18.0.1", "fd00:172:18::1"),
    "node": ("172.18.0.2", "fd00:172:18::2"),
    "node_alt": ("172.18.0.22", "fd00:172:18::22"),
    "node_net2": ("172.19.0.2", "fd00:172:19::2"),
    "node_pods": ("10.244.1.1", "fd00:10:244:1::1"),
    "node2": ("172.18.0.3", "fd00:172:18::3"),
    "node_overlay": ("10.244.1.0", "fd00:10:244:1::"),
    "node2_pods": ("10.244.2.1", "fd00:10:244:2::1"),
    "node2_overlay": ("10.244.2.0", "fd00:10:244:2::"),
    "client": ("172.18.0.100", "fd00:172:18::100"),
    "client_alt": ("172.18.0.101", "fd00:172:18::101"),
    "client_net2": ("172.19.0.100", "fd00:172:19::100"),
    "pod1": ("10.244.1.11", "fd00:10:244:1::11"),
    "pod2": ("10.244.1.12", "fd00:10:244:1::12"),
    "pod3": ("10.244.2.13", "fd00:10:244:2::13"),
    "pod4": ("10.244.2.14", "fd00:10:244:2::14"),
    "ghost": ("10.244.2.99", "fd00:10:244:2::99"),
    "loopback": ("127.0.0.1", "::1"),
}
NUMBERED = {
    "vip": ("10.96.10.0", "fd00:96::a00"),
    "lb": ("203.0.113.0", "fd00:203:113::"),
    "ext": ("198.51.100.0", "fd00:198:51::"),
    "many": ("10.244.3.0", "fd00:10:244:3::"),
    "crowd": ("198.19.0.0", "fd00:198:19::"),
}
"""Symbols with a number behind: vip1, vip2, ..."""
NETWORKS = {
    "lan_net": ("172.18.0.0/24", "fd00:172:18::/64"),
    "second_net": ("172.19.0.0/24", "fd00:172:19::/64"),
    "cluster_net": ("10.244.0.0/16", "fd00:10:244::/48"),
    "local_pod_net": ("10.244.1.0/24", "fd00:10:244:1::/64"),
    "remote_pod_net": ("10.244.2.0/24", "fd00:10:244:2::/64"),
    "many_net": ("10.244.3.0/24", "fd00:10:244:3::/64"),
    "crowd_net": ("198.19.0.0/24", "fd00:198:19::/64"),
    "service_net": ("10.96.0.0/16", "fd00:96::/112"),
    "lb_net": ("203.0.113.0/24", "fd00:203:113::/64"),
    "ext_net": ("198.51.100.0/24", "fd00:198:51::/64"),
    "any_net": ("0.0.0.0/0", "::/0"),
    "loopback_net": ("127.0.0.0/8", "::1/128"),
}
NODE_ADDRESSES = ("node", "node_alt", "node_net2", "node_pods", "node_overlay")
SERVERS = ("node", "node2", "pod1", "pod2", "pod3", "pod4")
"""Hosts with echo servers."""
LOCAL = ("node", "pod1", "pod2")
"""Hosts that are the node under test, or its pods."""


def resolve(symbol: str, family: str) -> str:
    """Return the address or network that *symbol* stands for; *symbol* itself if it is none."""
    index = FAMILIES.index(family)
    for table in (ADDRESSES, NETWORKS):
        if symbol in table:
            return table[symbol][index]
    stem = symbol.rstrip("0123456789")
    if stem in NUMBERED and stem != symbol:
        return str(ipaddress.ip_address(NUMBERED[stem][index]) + int(symbol[len(stem) :]))
    return symbol


def expand(symbols: Iterable[str]) -> list[str]:
    """Replace ``many:3`` by many1, many2 and many3, and ``many:5-7`` likewise."""
    found = []
    for symbol in symbols:
        stem, colon, span = symbol.partition(":")
        if not colon or stem not in NUMBERED:
            found.append(symbol)
            continue
        first, _, last = span.rpartition("-")
        found += [f"{stem}{number}" for number in range(int(first or 1), int(last) + 1)]
    return found


@functools.cache
def symbol_of(address: str) -> str:
    """Return the symbol of an endpoint's *address*; the address itself if it is none."""
    ip = ipaddress.ip_address(address)
    index = 0 if ip.version == 4 else 1
    for symbol in SERVERS:
        if ip == ipaddress.ip_address(ADDRESSES[symbol][index]):
            return symbol
    if ip in ipaddress.ip_network(NETWORKS["many_net"][index]):
        return f"many{int(ip) - int(ipaddress.ip_address(NUMBERED['many'][index]))}"
    return str(ip)


def node_name_of(symbol: str) -> str:
    return NODE if symbol in LOCAL else OTHER_NODE


def is_node_address(address: str, host_pods: Iterable[str] = ()) -> bool:
    """Return whether the node has *address*. *host_pods*: pods that share its namespace."""
    return any(address in ADDRESSES[symbol] for symbol in (*NODE_ADDRESSES, *host_pods))
