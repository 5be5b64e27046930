"""Rules that count new connections in a set, by the dialled address and by the endpoint. Pure.

The first packet of a connection alone traverses nat chains, so each connection is counted once. The rules
stand after DNAT, where both addresses are known. No rule and no element belongs to one Service, and counts
outlive rules and processes.
"""

import struct
from collections.abc import Iterable
from typing import Literal

from kproxy_core.backend.api import Connections
from kproxy_core.model.address import Address, Family, Protocol, format_address
from kproxy_core.model.endpoint import Destination
from kproxy_core.plan.service_plan import Frontend

CONNECTIONS = "connections"
"""The set of pairs of frontend and endpoint."""
REJECTED = "rejected"
"""The set of frontends that were dialled without an endpoint."""

_UNSERVED, _UNSERVED_NODE_PORTS = "unserved", "unserved-node-ports"
"""The sets of frontends without endpoints."""

_DIALLED = "dialled"
ADDRESS_TYPE = {Family.IPV4: "ipv4_addr", Family.IPV6: "ipv6_addr"}
_MOST = 1 << 18
"""Most elements of a set; beyond it, further ones are not counted."""
_KEPT = "90m"
"""Time after its last connection for which a count is kept.

Not an hour: the count of a client that connects hourly would end, and begin again at the number that was read
last, which does not show the new connection.
"""
_FRONTEND = struct.Struct(">B3xH2x")
_PORT = struct.Struct(">H2x")


def set_of_connections(family: Family, table: str) -> str:
    return counting_set(family, table, CONNECTIONS, f" . {ADDRESS_TYPE[family]} . inet_service")


def counting_set(family: Family, table: str, name: str, rest: str = "") -> str:
    """Return the command that adds a set of frontends, followed by the key types in *rest*."""
    key = f"{ADDRESS_TYPE[family]} . inet_proto . inet_service{rest}"
    return (f"add set {family.ip} {table} {name} "
            f"{{ type {key}; flags dynamic,timeout; timeout {_KEPT}; size {_MOST}; }}")


def count_rules(ip: str) -> list[str]:
    """Return the rules that count a translated connection. *ip* is nft's name of the family."""
    frontend = f"ct original {ip} daddr . meta l4proto . ct original proto-dst"
    return [
        f"meta l4proto {protocol.name.lower()} update @{CONNECTIONS} "
        f"{{ {frontend} . {ip} daddr . th dport counter }}"
        for protocol in Protocol
    ]


def counting_table(family: Family, table: str, *, ipvs: bool) -> str:
    """Return the commands for a table that counts whatever any rules of this machine translate.

    Its chains precede those that masquerade, which are the last that nat chains see of a connection. Those
    that count rejections precede DNAT and IPVS, for `change_unserved` says which frontends are rejected.

    *ipvs*: count what IPVS translates, too. Its connections have no status of their own (ip_vs_nfct.c), but
    are dialled at a local address, which chains before IPVS note in a set. Connections to the node itself are
    counted with them: their endpoint is the dialled socket.
    """
    ip = family.ip
    port = "meta l4proto . th dport"
    frontend = f"{ip} daddr . {port}"
    reject = f"update @{REJECTED} {{ {frontend} counter }}"
    lines = [
        f"add table {ip} {table}", set_of_connections(family, table), counting_set(family, table, REJECTED),
        f"add set {ip} {table} {_UNSERVED} {{ type {ADDRESS_TYPE[family]} . inet_proto . inet_service; }}",
        f"add set {ip} {table} {_UNSERVED_NODE_PORTS} {{ type inet_proto . inet_service; }}",
    ]
    dialled = [
        f"{frontend} @{_UNSERVED} {reject}",
        f"fib daddr type local {port} @{_UNSERVED_NODE_PORTS} {reject}",
    ]
    translated = ["ct status dnat goto count"]
    if ipvs:
        lines.append(f"add set {ip} {table} {_DIALLED} "
                     f"{{ type {ADDRESS_TYPE[family]}; flags dynamic,timeout; timeout 10s; size {_MOST}; }}")
        dialled.append(f"fib daddr type local update @{_DIALLED} {{ {ip} daddr }}")
        translated.append(f"ct original {ip} daddr @{_DIALLED} goto count")
    chains = {"count": ("", count_rules(ip))}
    chains |= {hook: (f"type nat hook {hook} priority -101", dialled) for hook in ("prerouting", "output")}
    chains |= {hook: (f"type nat hook {hook} priority 99", translated) for hook in ("postrouting", "input")}
    for chain, (place, rules) in chains.items():
        lines += [f"add chain {ip} {table} {chain}" + (f" {{ {place}; policy accept; }}" if place else ""),
                  f"flush chain {ip} {table} {chain}"]
        lines += [f"add rule {ip} {table} {chain} {rule}" for rule in rules]
    return "".join(f"{line}\n" for line in lines)


def change_unserved(action: Literal["add", "delete"], table: str, frontends: Iterable[Frontend]) -> str:
    """Return the commands that change the frontends without endpoints. *table* includes the family."""
    elements: dict[str, list[str]] = {_UNSERVED: [], _UNSERVED_NODE_PORTS: []}
    for address, protocol, port in frontends:
        last = f"{protocol.name.lower()} . {port}"
        if address is None:
            elements[_UNSERVED_NODE_PORTS].append(last)
        else:
            elements[_UNSERVED].append(f"{format_address(address)} . {last}")
    return "".join(
        f"{action} element {table} {name} {{ {', '.join(found)} }}\n"
        for name, found in elements.items() if found
    )  # fmt: skip


def replace_unserved(table: str, frontends: Iterable[Frontend]) -> str:
    """Return the commands after which *frontends* are those without endpoints. *table*: as above."""
    flushes = "".join(f"flush set {table} {name}\n" for name in (_UNSERVED, _UNSERVED_NODE_PORTS))
    return flushes + change_unserved("add", table, frontends)


def connections(family: Family, counted: Iterable[tuple[bytes, int]]) -> list[Connections]:
    """Return the counts of elements, which are frontends or pairs of frontend and endpoint."""
    size = family.size
    rest = size + _FRONTEND.size
    frontends: dict[bytes, Frontend] = {}
    found: list[Connections] = []
    for key, number in counted:
        dialled = key[:rest]
        frontend = frontends.get(dialled)
        if frontend is None:
            protocol, port = _FRONTEND.unpack_from(key, size)
            frontend = frontends[dialled] = Frontend(Address(key[:size]), Protocol(protocol), port)
        endpoint = None
        if len(key) > rest:
            endpoint = Destination(Address(key[rest:rest + size]), _PORT.unpack_from(key, rest + size)[0])
        found.append(Connections(frontend, endpoint, number))
    return found
