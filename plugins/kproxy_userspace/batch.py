"""Portals as text: for iptables-restore, in kube-proxy's chains; or for nft, as elements of a few maps."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kproxy_core.model.address import Address, Cidr, Family, Protocol, format_address, format_socket
from kproxy_userspace import names
from kproxy_userspace.names import TABLE
from kproxy_userspace.wanted import Portal
from kproxy_xtables.rules import TO_THIS_NODE, Jump


class Redirect(NamedTuple):
    """A portal, and where it leads to."""

    portal: Portal
    port: int
    """Of the relay."""
    at: Address | None = None
    """Where that listens; None: at every address."""


PORTAL_CHAINS = (
    names.PORTALS_CONTAINER, names.PORTALS_HOST, names.NODE_PORT_CONTAINER, names.NODE_PORT_HOST,
)  # fmt: skip

_LONGEST_COMMENT = 255


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


def iptables_rules(redirect: Redirect) -> dict[str, list[str]]:
    """The rules of one portal, by table, each with its chain in front.

    kube-proxy sent the node's own traffic to the node's address; REDIRECT does without one.
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
    """What takes rules out and puts others in, for ``iptables-restore --noflush``."""
    lines: dict[str, list[str]] = {"nat": [], "filter": []}
    for action, redirects in (("-D", deletes), ("-A", adds)):
        for redirect in redirects:
            for table, rules in iptables_rules(redirect).items():
                lines[table] += [f"{action} {rule}" for rule in rules]
    return _tables(lines)


def iptables_rewrite(redirects: Iterable[Redirect], missing: Sequence[Jump]) -> str:
    """What makes the chains hold exactly the rules for *redirects*, and adds *missing* jumps."""
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


_PIN = "-m comment --comment \"kproxy: established connections stay translated\" -m conntrack --ctstate NEW"
"""A rule that does nothing."""


def iptables_pin() -> str:
    """What makes the chain of the filter table hold nothing but a rule that needs connection tracking."""
    return _tables({"filter": [f":{names.NON_LOCAL} - [0:0]", f"-A {names.NON_LOCAL} {_PIN}"]})


def is_pin(rule: str) -> bool:
    """Whether *rule* is that one, without its chain."""
    return rule == _PIN


def _tables(lines: dict[str, list[str]]) -> str:
    return "".join(
        "\n".join([f"*{table}", *found, "COMMIT", ""]) for table, found in lines.items() if found
    )


NFT_FAMILY = {Family.IPV4: "ip", Family.IPV6: "ip6"}

_VIPS, _RANGED, _NODE_PORTS = "vips", "ranged-vips", "node-ports"


def nft_target(at: Address | None) -> str:
    """How nft writes where a portal leads to, without the port."""
    return "redirect to :" if at is None else f"dnat to {format_socket(at, 0).removesuffix('0')}"


def nft_skeleton(family: Family, at: Address | None = None) -> str:
    """The empty table, whatever was in it, for relays that listen *at*; None: at every address."""
    ip = NFT_FAMILY[family]
    protocol = "meta l4proto { tcp, udp }"
    to = nft_target(at)
    address = "ipv4_addr" if family is Family.IPV4 else "ipv6_addr"
    return f"""\
add table {ip} {TABLE}
delete table {ip} {TABLE}
table {ip} {TABLE} {{
    comment "VIPs and node ports lead to the relays of kproxy"
    map {_VIPS} {{
        type {address} . inet_proto . inet_service : inet_service
    }}
    map {_RANGED} {{
        type {address} . {address} . inet_proto . inet_service : inet_service
        flags interval
    }}
    map {_NODE_PORTS} {{
        type inet_proto . inet_service : inet_service
    }}
    chain portals {{
        {protocol} {to}{ip} daddr . meta l4proto . th dport map @{_VIPS}
        {protocol} {to}{ip} saddr . {ip} daddr . meta l4proto . th dport map @{_RANGED}
        fib daddr type local {protocol} {to}meta l4proto . th dport map @{_NODE_PORTS}
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


def nft_change(family: Family, deletes: Iterable[Redirect], adds: Iterable[Redirect]) -> str:
    """Commands that take elements out and put others in."""
    ip = NFT_FAMILY[family]
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
    """Commands that take all elements out."""
    maps = (_VIPS, _RANGED, _NODE_PORTS)
    return "".join(f"flush map {NFT_FAMILY[family]} {TABLE} {name}\n" for name in maps)


def nft_rewrite(family: Family, redirects: Iterable[Redirect], at: Address | None) -> str:
    """Commands that make the table anew with just these."""
    return nft_skeleton(family, at) + nft_change(family, (), redirects)


def nft_key(portal: Portal) -> tuple[str, str]:
    """The map that an element is in, and its key as nft writes it."""
    last = f"{Protocol(portal.protocol).name.lower()} . {portal.port}"
    if portal.address is None:
        return _NODE_PORTS, last
    last = f"{format_address(portal.address)} . {last}"
    return (_VIPS, last) if portal.source is None else (_RANGED, f"{_source(portal.source)} . {last}")


def _source(cidr: Cidr) -> str:
    """Without the length if that says nothing."""
    return str(cidr).removesuffix(f"/{8 * len(cidr.network)}")
