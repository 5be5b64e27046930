"""Portals encoded as text: iptables-restore input with kube-proxy's chains, or nft commands. Pure."""

from collections.abc import Iterable, Sequence

from kproxy_core.model.address import Address, Cidr, Family, Protocol, format_address, format_socket
from kproxy_userspace import names
from kproxy_userspace.names import PORTAL_CHAINS, TABLE
from kproxy_userspace.skeleton import NFT_MAPS, NODE_PORTS, PIN, RANGED_VIPS, VIPS, nft_skeleton
from kproxy_userspace.wanted import Portal, Redirect
from kproxy_xtables.rules import Jump

_LONGEST_COMMENT = 255


def iptables_rules(redirect: Redirect) -> dict[str, list[str]]:
    """Return the rules of one portal by table, each after the name of its chain.

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
        accept = f"{head} --dport {proxy_port} -m conntrack --ctstate NEW -j ACCEPT"
        return {
            "nat": [f"{chain} {where} {target}" for chain in PORTAL_CHAINS[2:]],
            "filter": [f"{names.NON_LOCAL} {accept}"],
        }
    where += f" -d {format_address(portal.address)}"
    if portal.source is not None:
        where += f" -s {portal.source}"
    if not portal.external:
        return {"nat": [f"{chain} {where} {target}" for chain in PORTAL_CHAINS[:2]]}
    local = "-m addrtype --dst-type LOCAL"
    return {"nat": [
        f"{names.PORTALS_CONTAINER} {where} -m physdev ! --physdev-is-in {target}",
        f"{names.PORTALS_CONTAINER} {where} {local} {target}",
        f"{names.PORTALS_HOST} {where} {local} {target}",
    ]}  # fmt: skip


def iptables_change(deletes: Iterable[Redirect], adds: Iterable[Redirect]) -> str:
    """Return input for ``iptables-restore --noflush`` that deletes rules and adds others."""
    lines: dict[str, list[str]] = {"nat": [], "filter": []}
    for action, redirects in (("-D", deletes), ("-A", adds)):
        for redirect in redirects:
            for table, rules in iptables_rules(redirect).items():
                lines[table] += [f"{action} {rule}" for rule in rules]
    return _tables(lines)


def iptables_rewrite(redirects: Iterable[Redirect], missing: Sequence[Jump]) -> str:
    """Return input that makes our chains hold exactly the rules of *redirects*, and adds *missing* jumps."""
    lines = {
        "nat": [f":{chain} - [0:0]" for chain in PORTAL_CHAINS],
        "filter": [f":{names.NON_LOCAL} - [0:0]"],
    }
    for jump in missing:
        lines[jump.table].append(jump.command)
    for redirect in redirects:
        for table, rules in iptables_rules(redirect).items():
            lines[table] += [f"-A {rule}" for rule in rules]
    return _tables(lines)


def iptables_pin() -> str:
    """Return input that leaves only the rule without effect in our chain of the filter table."""
    return _tables({"filter": [f":{names.NON_LOCAL} - [0:0]", f"-A {names.NON_LOCAL} {PIN}"]})


def _tables(lines: dict[str, list[str]]) -> str:
    return "".join("\n".join([f"*{table}", *found, "COMMIT", ""]) for table, found in lines.items() if found)


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
    return (VIPS, last) if portal.source is None else (RANGED_VIPS, f"{_source(portal.source)} . {last}")


def _source(cidr: Cidr) -> str:
    """Return *cidr* as nft prints it: without the length if it is one address."""
    return str(cidr).removesuffix(f"/{8 * len(cidr.network)}")
