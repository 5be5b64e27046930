"""Portals encoded: input for iptables-restore with kube-proxy's chains, or commands of nf_tables. Pure."""

import struct
from collections.abc import Iterable, Iterator

from kproxy_core.contract import Address, Cidr, Family, Protocol, format_address, format_socket
from kproxy_core.nft.elements import Element, element_texts
from kproxy_core.nft.messages import Command
from kproxy_core.nft.transaction import completion
from kproxy_userspace.names import NON_LOCAL, OUR_CHAINS, PORTAL_CHAINS, PORTALS_CONTAINER
from kproxy_userspace.skeleton import NODE_PORTS, PIN, RANGED_VIPS, VIPS, nft_layout, nft_maps, nft_table
from kproxy_userspace.wanted import Portal, Redirect
from kproxy_xtables.rules import TO_THIS_NODE, Jump

_LONGEST_COMMENT = 255
_PROTOCOL_AND_PORT = struct.Struct(">B3xH2x")
_PORT = struct.Struct(">H")
_PROTOCOLS = frozenset(protocol.value for protocol in Protocol)
_ADDRESSES = {VIPS: 1, RANGED_VIPS: 2, NODE_PORTS: 0}
"""Addresses in the keys of each map."""


def iptables_rules(redirect: Redirect) -> Iterator[tuple[str, str]]:
    """Yield the rules of one portal: the table, and the rule behind the name of its chain.

    kube-proxy used DNAT to the node's address for the node's own traffic. REDIRECT needs no address.
    """
    portal, proxy_port, at = redirect
    protocol = portal.protocol.name.lower()
    head = f'-m comment --comment "{portal.owner[:_LONGEST_COMMENT]}" -p {protocol} -m {protocol}'
    where = f"{head} --dport {portal.port}"
    target = f"-j REDIRECT --to-ports {proxy_port}"
    if at is not None:
        target = f"-j DNAT --to-destination {format_socket(at, proxy_port)}"
    if portal.address is None:
        for chain in PORTAL_CHAINS[2:]:
            yield "nat", f"{chain} {where} {target}"
        yield "filter", f"{NON_LOCAL} {head} --dport {proxy_port} -m conntrack --ctstate NEW -j ACCEPT"
        return
    where += f" -d {format_address(portal.address)}"
    if portal.source is not None:
        where += f" -s {portal.source}"
    if not portal.external:
        for chain in PORTAL_CHAINS[:2]:
            yield "nat", f"{chain} {where} {target}"
        return
    yield "nat", f"{PORTALS_CONTAINER} {where} -m physdev ! --physdev-is-in {target}"
    for chain in PORTAL_CHAINS[:2]:
        yield "nat", f"{chain} {where} {TO_THIS_NODE} {target}"


def iptables_change(deletes: Iterable[Redirect], adds: Iterable[Redirect]) -> str:
    """Return input for ``iptables-restore --noflush`` that deletes rules and adds others."""
    return _text([*_rules("-D", deletes), *_rules("-A", adds)])


def iptables_rewrite(redirects: Iterable[Redirect], missing: Iterable[Jump]) -> str:
    """Return input that makes our chains hold exactly the rules of *redirects*, and adds *missing* jumps."""
    declared = [(table, f":{chain} - [0:0]") for table, chain in OUR_CHAINS]
    return _text([*declared, *((jump.table, jump.command) for jump in missing), *_rules("-A", redirects)])


def iptables_pin() -> str:
    """Return input that leaves only the rule without effect in our chain of the filter table."""
    return _text([("filter", f":{NON_LOCAL} - [0:0]"), ("filter", f"-A {NON_LOCAL} {PIN}")])


def _rules(command: str, redirects: Iterable[Redirect]) -> Iterator[tuple[str, str]]:
    for redirect in redirects:
        for table, rule in iptables_rules(redirect):
            yield table, f"{command} {rule}"


def _text(lines: Iterable[tuple[str, str]]) -> str:
    """Return the input that consists of these lines, each behind its table."""
    of_table: dict[str, list[str]] = {"nat": [], "filter": []}
    for table, line in lines:
        of_table[table].append(f"{line}\n")
    return "".join(f"*{table}\n{''.join(found)}COMMIT\n" for table, found in of_table.items() if found)


Elements = dict[str, frozenset[Element]]
"""Elements by map."""


def nft_elements(redirects: Iterable[Redirect]) -> Elements:
    """Return the elements of the maps for *redirects*."""
    found: dict[str, list[Element]] = {name: [] for name in (VIPS, RANGED_VIPS, NODE_PORTS)}
    for redirect in redirects:
        name, element = nft_element(redirect)
        found[name].append(element)
    return {name: frozenset(elements) for name, elements in found.items()}


def nft_element(redirect: Redirect) -> tuple[str, Element]:
    """Return the map and the element of one portal."""
    portal, port, _ = redirect
    value = _PORT.pack(port)
    last = _PROTOCOL_AND_PORT.pack(portal.protocol, portal.port)
    if portal.address is None:
        return NODE_PORTS, Element(last, value)
    last = portal.address + last
    if portal.source is None:
        return VIPS, Element(last, value)
    network, prefix = portal.source
    size = len(network) * 8
    highest = int.from_bytes(network, "big") | (1 << size - prefix) - 1
    return RANGED_VIPS, Element(network + last, value, highest.to_bytes(len(network), "big") + last)


def parse_nft_element(name: str, family: Family, element: Element) -> Redirect | None:
    """Return the portal of an element of the map *name*, whose owner is not known.

    None for an element that only another process may have added.
    """
    key, data, last = element.key, element.data, element.last or element.key
    addresses, rest = key[:-_PROTOCOL_AND_PORT.size], key[-_PROTOCOL_AND_PORT.size:]
    size = family.size
    if not isinstance(data, bytes) or len(data) != _PORT.size or len(rest) != _PROTOCOL_AND_PORT.size or (
            len(addresses) != _ADDRESSES[name] * size):
        return None
    protocol, port = _PROTOCOL_AND_PORT.unpack(rest)
    if protocol not in _PROTOCOLS:
        return None
    address, source = addresses, None
    if name == RANGED_VIPS:
        if last[size:] != key[size:]:  # A range of addresses or ports.
            return None
        network, address = addresses[:size], addresses[size:]
        differing = int.from_bytes(network, "big") ^ int.from_bytes(last[:size], "big")
        source = Cidr(Address(network), size * 8 - differing.bit_length())
    portal = Portal(Protocol(protocol), Address(address) if address else None, port, "", source=source)
    return Redirect(portal, *_PORT.unpack(data))


def nft_element_text(redirect: Redirect, family: Family) -> str:
    name, element = nft_element(redirect)
    (container,) = (each for each in nft_maps(family) if each.name == name)
    (shown,) = element_texts(container.key, container.value, [element])
    return shown


def nft_change(family: Family, deletes: Iterable[Redirect], adds: Iterable[Redirect]) -> list[Command]:
    """Return the commands that delete portals and add others."""
    old, new = nft_elements(deletes), nft_elements(adds)
    table = nft_table(family)
    return [
        command for container in nft_maps(family)
        for command in table.change_elements(container, old[container.name], new[container.name])
    ]


def nft_empty(family: Family) -> list[Command]:
    """Return the commands that delete all portals."""
    return [nft_table(family).empty(container) for container in nft_maps(family)]


def nft_creation(family: Family, redirects: Iterable[Redirect], at: Address | None) -> list[Command]:
    """Return the commands that create the table with *redirects*."""
    return completion(nft_table(family), nft_layout(family, at), nft_elements(redirects), None)
