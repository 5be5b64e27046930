"""Portals encoded as text: iptables-restore input with kube-proxy's chains, or nft commands. Pure."""

from collections.abc import Iterable, Iterator

from kproxy_core.model.address import Address, Family, Protocol, format_address, format_socket
from kproxy_userspace.names import NON_LOCAL, OUR_CHAINS, PORTAL_CHAINS, PORTALS_CONTAINER, TABLE
from kproxy_userspace.skeleton import NFT_MAPS, NODE_PORTS, PIN, RANGED_VIPS, VIPS, nft_skeleton
from kproxy_userspace.wanted import Portal, Redirect
from kproxy_xtables.rules import TO_THIS_NODE, Jump

_LONGEST_COMMENT = 255


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


def nft_change(family: Family, deletes: Iterable[Redirect], adds: Iterable[Redirect]) -> str:
    ip = family.ip
    text = ""
    for action, redirects in (("delete", deletes), ("add", adds)):
        elements: dict[str, dict[str, str]] = {}
        for portal, port, _ in redirects:
            container, key = nft_key(portal)
            elements.setdefault(container, {})[key] = f"{key} : {port}"
        for container, found in elements.items():
            text += f"{action} element {ip} {TABLE} {container} {{ {', '.join(found.values())} }}\n"
    return text


def nft_empty(family: Family) -> str:
    return "".join(f"flush map {family.ip} {TABLE} {name}\n" for name in NFT_MAPS)


def nft_rewrite(family: Family, redirects: Iterable[Redirect], at: Address | None) -> str:
    """Return commands that replace the table by one with exactly *redirects*."""
    return nft_skeleton(family, at) + nft_change(family, (), redirects)


def nft_key(portal: Portal) -> tuple[str, str]:
    """Return the map of a portal's element, and its key as nft prints it."""
    last = f"{Protocol(portal.protocol).name.lower()} . {portal.port}"
    if portal.address is None:
        return NODE_PORTS, last
    last = f"{format_address(portal.address)} . {last}"
    return (VIPS, last) if portal.source is None else (RANGED_VIPS, f"{portal.source.listed} . {last}")
