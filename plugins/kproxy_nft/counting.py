"""Rules that count new connections in a set, by the dialled address and by the endpoint. Pure.

Only the first packet of a connection traverses nat chains, so each connection is counted once. The rules
follow DNAT, where both addresses are known. No rule and no element belongs to one Service, and counts outlive
rules and processes.
"""

import struct
from collections.abc import Iterable, Mapping

from kproxy_core.contract import Address, Connections, Destination, Family, Frontend, Protocol
from kproxy_core.nft.elements import Element
from kproxy_core.nft.messages import Command
from kproxy_core.nft.objects import Chain, Container, Hook, Layout, Object, Table
from kproxy_core.nft.rules import (
    ADDRESS,
    DESTINATION_PORT,
    L4_PROTOCOL,
    ORIGINAL_PORT,
    PORT,
    PROTOCOL,
    DataType,
    Rule,
    among,
    count,
    ct_status,
    destination_address,
    equals,
    goto,
    is_local,
    original_destination,
    update,
)

CONNECTIONS = "connections"
"""Set of pairs of frontend and endpoint."""
REJECTED = "rejected"
"""Set of frontends dialled without an endpoint."""

UNSERVED_SETS = _UNSERVED, _UNSERVED_NODE_PORTS = "unserved", "unserved-node-ports"
"""Sets of frontends without endpoints."""

_TABLES = {False: "kproxy-counts", True: "kproxy-ipvs-counts"}

Elements = Mapping[str, frozenset[Element]]
"""Elements by set."""

_DIALLED = "dialled"
_MOST = 1 << 18
"""Limit for the elements of a set; further pairs are not counted."""
_KEPT = 90 * 60
"""Seconds after its last connection for which a count is kept.

Not an hour: the count of a client that connects hourly would expire and restart at the number that was read
last, which hides the new connection.
"""
_FRONTEND = struct.Struct(">B3xH2x")
_PORT = struct.Struct(">H2x")
_PROTOCOLS = frozenset(protocol.value for protocol in Protocol)


def set_of_connections(family: Family) -> Container:
    return counting_set(family, CONNECTIONS, ADDRESS[family], PORT)


def counting_set(family: Family, name: str, *more: DataType) -> Container:
    """Return a set of frontends, whose keys may continue with *more*."""
    return Container(
        name, (ADDRESS[family], PROTOCOL, PORT, *more), dynamic=True, timeout=_KEPT, size=_MOST)


def count_rules(family: Family) -> tuple[Rule, ...]:
    """Return the rules that count a translated connection."""
    dialled = (original_destination(family), L4_PROTOCOL, ORIGINAL_PORT)
    endpoint = (destination_address(family), DESTINATION_PORT)
    return tuple(
        (equals(L4_PROTOCOL, protocol), count(CONNECTIONS, (*dialled, *endpoint))) for protocol in Protocol)


def counting_table(family: Family, *, ipvs: bool) -> Table:
    """Return the table that counts; *ipvs*: with IPVS."""
    return Table(family, _TABLES[ipvs])


def counting_layout(family: Family, *, ipvs: bool) -> Layout:
    """Return the objects of a table that counts the connections translated by any rules of this machine.

    Its chains precede those that masquerade, after which nat chains do not see a connection again. The chains
    that count rejections precede DNAT and IPVS, because `unserved_elements` tells the rejected frontends.

    *ipvs*: count connections through IPVS, too. They have no status of their own (ip_vs_nfct.c), but their
    dialled address is local, and chains before IPVS record it in a set. Connections to the node itself are
    counted with them: their endpoint is the dialled socket.
    """
    daddr = destination_address(family)
    port = (L4_PROTOCOL, DESTINATION_PORT)
    frontend = (daddr, *port)
    reject = count(REJECTED, frontend)
    sets: list[Container] = [
        set_of_connections(family), counting_set(family, REJECTED),
        *_unserved_sets(family),
    ]
    dialled: list[Rule] = [
        (among(frontend, _UNSERVED), reject),
        (is_local("daddr"), among(port, _UNSERVED_NODE_PORTS), reject),
    ]
    translated: list[Rule] = [(ct_status("dnat"), goto("count"))]
    if ipvs:
        sets.append(Container(_DIALLED, (ADDRESS[family],), dynamic=True, timeout=10, size=_MOST))
        dialled.append((is_local("daddr"), update(_DIALLED, (daddr,))))
        translated.append((among((original_destination(family),), _DIALLED), goto("count")))
    objects: list[Object] = [
        *sets, Chain("count", count_rules(family)),
        *(Chain(hook, tuple(dialled), Hook("nat", hook, -101)) for hook in ("prerouting", "output")),
        *(Chain(hook, tuple(translated), Hook("nat", hook, 99)) for hook in ("postrouting", "input")),
    ]
    return {item.name: item for item in objects}


def _unserved_sets(family: Family) -> tuple[Container, Container]:
    return (
        Container(_UNSERVED, (ADDRESS[family], PROTOCOL, PORT)),
        Container(_UNSERVED_NODE_PORTS, (PROTOCOL, PORT)),
    )


def unserved_elements(frontends: Iterable[Frontend]) -> dict[str, frozenset[Element]]:
    """Return the elements for *frontends* without endpoints, by set."""
    elements: dict[str, list[Element]] = {name: [] for name in UNSERVED_SETS}
    for address, protocol, port in frontends:
        last = _FRONTEND.pack(protocol, port)
        if address is None:
            elements[_UNSERVED_NODE_PORTS].append(Element(last))
        else:
            elements[_UNSERVED].append(Element(address + last))
    return {name: frozenset(found) for name, found in elements.items()}


def change_unserved(table: Table, held: Elements, wanted: Elements) -> list[Command]:
    """Return the commands that turn the *held* elements of the sets of *table* into the *wanted* ones."""
    return [
        command for container in _unserved_sets(table.family)
        for command in table.change_elements(container, held[container.name], wanted[container.name])
    ]


def connections(family: Family, counted: Iterable[tuple[bytes, int]]) -> list[Connections]:
    """Return the counts of elements, which are frontends or pairs of frontend and endpoint.

    Without those of protocols that no Service has, which another process has added.
    """
    size = family.size
    rest = size + _FRONTEND.size
    frontends: dict[bytes, Frontend] = {}
    found: list[Connections] = []
    for key, number in counted:
        dialled = key[:rest]
        frontend = frontends.get(dialled)
        if frontend is None:
            protocol, port = _FRONTEND.unpack_from(key, size)
            if protocol not in _PROTOCOLS:
                continue
            frontend = frontends[dialled] = Frontend(Address(key[:size]), Protocol(protocol), port)
        endpoint = None
        if len(key) > rest:
            endpoint = Destination(Address(key[rest:rest + size]), _PORT.unpack_from(key, rest + size)[0])
        found.append(Connections(frontend, endpoint, number))
    return found
