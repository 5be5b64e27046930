"""Leftovers of many versions of kube-proxy by mode, and objects of other programs."""

import re
from collections.abc import Callable, Collection

from kproxy_core.model.address import Family
from kproxy_xtables.variant import Variant
from tests.core.golden import golden
from tests.core.namespaces import Namespace

_GOLDEN = "loadbalancer-source-ranges"
_MATCH = re.compile(r"(--match-set )KUBE-(\S+)")
_SHARED = re.compile("-A (?:PREROUTING|INPUT|FORWARD|OUTPUT|POSTROUTING|KUBE-FIREWALL) ")
_COUNTED = re.compile(r" -m nfacct --nfacct-name +\S+")

_IPTABLES_1_23 = """*nat
:KUBE-MARK-DROP - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-PROXY-CANARY - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-FW-LOLE4ISW44XBNF3G - [0:0]
:KUBE-SVC-LOLE4ISW44XBNF3G - [0:0]
:KUBE-XLB-LOLE4ISW44XBNF3G - [0:0]
:KUBE-SEP-BXGIMPZQ6XCUK4PZ - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-MARK-DROP -j MARK --set-xmark 0x8000/0x8000
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE
-A KUBE-SERVICES -p tcp -m comment --comment "default/web loadbalancer IP" -m tcp --dport 80 -j KUBE-FW-LOLE4ISW44XBNF3G
-A KUBE-SERVICES -m comment --comment "kubernetes nodeports" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-NODEPORTS -p tcp -m comment --comment "default/web" -m tcp --dport 30080 -j KUBE-XLB-LOLE4ISW44XBNF3G
-A KUBE-FW-LOLE4ISW44XBNF3G -m comment --comment "default/web loadbalancer IP" -j KUBE-XLB-LOLE4ISW44XBNF3G
-A KUBE-FW-LOLE4ISW44XBNF3G -m comment --comment "default/web loadbalancer IP" -j KUBE-MARK-DROP
-A KUBE-XLB-LOLE4ISW44XBNF3G -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ
-A KUBE-XLB-LOLE4ISW44XBNF3G -m addrtype --src-type LOCAL -j KUBE-SVC-LOLE4ISW44XBNF3G
-A KUBE-XLB-LOLE4ISW44XBNF3G -m comment --comment "default/web has no local endpoints" -j KUBE-MARK-DROP
-A KUBE-SVC-LOLE4ISW44XBNF3G -m comment --comment "default/web" -j KUBE-SEP-BXGIMPZQ6XCUK4PZ
-A KUBE-SEP-BXGIMPZQ6XCUK4PZ -p tcp -m tcp -j REDIRECT --to-ports 8080
COMMIT
*filter
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-PROXY-CANARY - [0:0]
:KUBE-SERVICES - [0:0]
-A INPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-A INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS
-A FORWARD -m comment --comment "kubernetes forward rules" -j KUBE-FORWARD
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-SERVICES -p tcp -m comment --comment "default/api has no endpoints" -m tcp --dport 443 -j REJECT
COMMIT
*mangle
:KUBE-PROXY-CANARY - [0:0]
COMMIT
"""  # noqa: E501

_IPTABLES_1_1 = """*nat
-A POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -m mark --mark 0x4d415351 -j MASQUERADE
COMMIT
"""  # noqa: E501

_IPVS_SETS = (
    ("LOOP-BACK", "hash:ip,port,ip"),
    ("CLUSTER-IP", "hash:ip,port"),
    ("EXTERNAL-IP", "hash:ip,port"),
    ("EXTERNAL-IP-LOCAL", "hash:ip,port"),
    ("LOAD-BALANCER", "hash:ip,port"),
    ("LOAD-BALANCER-LOCAL", "hash:ip,port"),
    ("LOAD-BALANCER-FW", "hash:ip,port"),
    ("LOAD-BALANCER-SOURCE-CIDR", "hash:ip,port,net"),
    ("LOAD-BALANCER-SOURCE-IP", "hash:ip,port,ip"),
    ("NODE-PORT-TCP", "bitmap:port range 0-65535"),
    ("NODE-PORT-UDP", "bitmap:port range 0-65535"),
    ("NODE-PORT-LOCAL-TCP", "bitmap:port range 0-65535"),
    ("NODE-PORT-LOCAL-UDP", "bitmap:port range 0-65535"),
    ("NODE-PORT-SCTP-HASH", "hash:ip,port"),
    ("NODE-PORT-LOCAL-SCTP-HASH", "hash:ip,port"),
    ("HEALTH-CHECK-NODE-PORT", "bitmap:port range 0-65535"),
    ("IPVS-IPS", "hash:ip"),
)
_OLDER_IPVS_SETS = (
    ("LOAD-BALANCER-MASQ", "hash:ip,port"),
    ("NODE-PORT-SCTP", "bitmap:port range 0-65535"),
    ("NODE-PORT-LOCAL-SCTP", "bitmap:port range 0-65535"),
)

_IPVS = """*nat
:KUBE-LOAD-BALANCER - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SERVICES - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-LOAD-BALANCER -m set --match-set KUBE-LOAD-BALANCER-LOCAL dst,dst -j RETURN
-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-NODE-PORT -p tcp -m set --match-set KUBE-NODE-PORT-LOCAL-TCP dst -j RETURN
-A KUBE-NODE-PORT -p tcp -m set --match-set KUBE-NODE-PORT-TCP dst -j KUBE-MARK-MASQ
-A KUBE-POSTROUTING -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MASQUERADE
-A KUBE-SERVICES -m set --match-set KUBE-LOAD-BALANCER dst,dst -j KUBE-LOAD-BALANCER
-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j KUBE-MARK-MASQ
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT
COMMIT
*filter
:KUBE-FORWARD - [0:0]
:KUBE-IPVS-FILTER - [0:0]
:KUBE-IPVS-OUT-FILTER - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SOURCE-RANGES-FIREWALL - [0:0]
-A INPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-FILTER
-A INPUT -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
-A INPUT -m comment --comment "kubernetes health check rules" -j KUBE-NODE-PORT
-A FORWARD -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A OUTPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-OUT-FILTER
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-IPVS-FILTER -m set --match-set KUBE-CLUSTER-IP dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m conntrack --ctstate NEW -m set --match-set KUBE-IPVS-IPS dst -j REJECT
-A KUBE-NODE-PORT -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j ACCEPT
-A KUBE-PROXY-FIREWALL -m set --match-set KUBE-LOAD-BALANCER-FW dst,dst -j KUBE-SOURCE-RANGES-FIREWALL
-A KUBE-SOURCE-RANGES-FIREWALL -m set --match-set KUBE-LOAD-BALANCER-SOURCE-CIDR dst,dst,src -j RETURN
-A KUBE-SOURCE-RANGES-FIREWALL -j DROP
COMMIT
"""

_IPVS_1_14 = """*nat
:KUBE-FIRE-WALL - [0:0]
:KUBE-LOAD-BALANCER - [0:0]
:KUBE-MARK-DROP - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SERVICES - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-FIRE-WALL -j KUBE-MARK-DROP
-A KUBE-LOAD-BALANCER -m set --match-set KUBE-LOAD-BALANCER-FW dst,dst -j KUBE-FIRE-WALL
-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ
-A KUBE-MARK-DROP -j MARK --set-xmark 0x8000/0x8000
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-NODE-PORT -p sctp -m set --match-set KUBE-NODE-PORT-SCTP dst -j KUBE-MARK-MASQ
-A KUBE-SERVICES -m set --match-set KUBE-LOAD-BALANCER dst,dst -j KUBE-LOAD-BALANCER
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
COMMIT
*filter
:KUBE-FORWARD - [0:0]
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
COMMIT
"""

_USERSPACE = """*nat
:KUBE-NODEPORT-CONTAINER - [0:0]
:KUBE-NODEPORT-HOST - [0:0]
:KUBE-PORTALS-CONTAINER - [0:0]
:KUBE-PORTALS-HOST - [0:0]
-I PREROUTING -m comment --comment "handle ClusterIPs; NOTE: this must be before the NodePort rules" -j KUBE-PORTALS-CONTAINER
-I OUTPUT -m comment --comment "handle ClusterIPs; NOTE: this must be before the NodePort rules" -j KUBE-PORTALS-HOST
-A PREROUTING -m addrtype --dst-type LOCAL -m comment --comment "handle service NodePorts; NOTE: this must be the last rule in the chain" -j KUBE-NODEPORT-CONTAINER
-A OUTPUT -m addrtype --dst-type LOCAL -m comment --comment "handle service NodePorts; NOTE: this must be the last rule in the chain" -j KUBE-NODEPORT-HOST
-A KUBE-PORTALS-CONTAINER -p tcp -m comment --comment "default/web" -m tcp --dport 80 -j REDIRECT --to-ports 40000
-A KUBE-PORTALS-HOST -p tcp -m comment --comment "default/web" -m tcp --dport 80 -j DNAT --to-destination {node}:40000
-A KUBE-NODEPORT-CONTAINER -p tcp -m comment --comment "default/web" -m tcp --dport 30080 -j REDIRECT --to-ports 40000
COMMIT
*filter
:KUBE-NODEPORT-NON-LOCAL - [0:0]
-I INPUT -m comment --comment "Ensure that non-local NodePort traffic can flow" -j KUBE-NODEPORT-NON-LOCAL
-A KUBE-NODEPORT-NON-LOCAL -p tcp -m comment --comment "default/web" -m tcp --dport 40000 -j ACCEPT
COMMIT
"""  # noqa: E501

_NFTABLES = """table {ip} kube-proxy {{
    comment "rules for kube-proxy"
    map service-ips {{ type {address} . inet_proto . inet_service : verdict; }}
    chain services {{ {ip} daddr . meta l4proto . th dport vmap @service-ips; }}
    chain nat-prerouting {{ type nat hook prerouting priority dstnat; jump services; }}
}}
"""

_FOREIGN = """*nat
:CNI-HOSTPORT-DNAT - [0:0]
:KUBE-ROUTER-NAT - [0:0]
:KUBE-SVC-THEIRS - [0:0]
:KUBE-SVC-lowercaseletters - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SVC-THEIRS
-A POSTROUTING -o egress0 -m comment --comment "kubernetes egress" -j MASQUERADE
-A POSTROUTING -m comment --comment "not a jump -j KUBE-POSTROUTING" -j RETURN
-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 8080
-A KUBE-ROUTER-NAT -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE
-A KUBE-SVC-THEIRS -j KUBE-SVC-lowercaseletters
COMMIT
*filter
:KUBE-FIREWALL - [0:0]
:KUBE-NWPLCY-DEFAULT - [0:0]
:KUBE-ROUTER-FORWARD - [0:0]
-A INPUT -j KUBE-FIREWALL
-A OUTPUT -j KUBE-FIREWALL
-A FORWARD -m comment --comment "kube-router netpol" -j KUBE-ROUTER-FORWARD
{localnet}-A KUBE-FIREWALL -m comment --comment "block" -m mark --mark 0x8000/0x8000 -j DROP
-A KUBE-ROUTER-FORWARD -m set --match-set KUBE-DST-THEIRS dst -j KUBE-NWPLCY-DEFAULT
COMMIT
*mangle
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
-A FORWARD -p tcp -j ACCEPT
COMMIT
"""

_LOCALNET = (
    "-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8"
    ' -m comment --comment "block incoming localnet connections"'
    " -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP\n"
)

_NODE = {Family.IPV4: "192.0.2.1", Family.IPV6: "[2001:db8::1]"}


def load_foreign(node: Namespace, variants: Collection[Variant]) -> None:
    """Load objects of kubelet, kube-router and a CNI plugin, with names close to kube-proxy's."""
    node.run("ipset", "restore", stdin="create KUBE-DST-THEIRS hash:ip\ncreate KUBE-6-THEIRS hash:ip\n"
             "create KUBE-DST-THEIRS6 hash:ip family inet6\n")  # fmt: skip
    for family in Family:
        theirs = _FOREIGN.format(localnet=_LOCALNET)
        if family is Family.IPV6:
            theirs = _FOREIGN.format(localnet="").replace("DST-THEIRS", "DST-THEIRS6")
        for variant in variants:
            _restore(node, variant, family, theirs)
    if any(variant.nft for variant in variants):
        _load_foreign_tables(node)


def _load_foreign_tables(node: Namespace) -> None:
    node.nft("table ip kube-proxy-metrics { chain c { type filter hook input priority 7; }; }\n"
             "table inet kube-router { set s { type ipv4_addr; }; }\n")  # fmt: skip


def load(node: Namespace, what: str, variant: Variant) -> None:
    """Add the objects of kube-proxy in a mode, written by one variant of iptables."""
    _LOAD[what](node, variant)


def _iptables(node: Namespace, variant: Variant) -> None:
    for family in Family:
        rules = golden(f"iptables/{_GOLDEN}-{family.label.lower()}/rules").read_text()
        _restore(node, variant, family, _COUNTED.sub("", rules))


def _older_iptables(node: Namespace, variant: Variant) -> None:
    for family in Family:
        _restore(node, variant, family, _IPTABLES_1_23)
        _restore(node, variant, family, _IPTABLES_1_1)


def _ipvs(node: Namespace, variant: Variant) -> None:
    for family in Family:
        _create_sets(node, family, _IPVS_SETS)
        _restore(node, variant, family, _of_family(_IPVS, family))


def _older_ipvs(node: Namespace, variant: Variant) -> None:
    for family in Family:
        _create_sets(node, family, _IPVS_SETS + _OLDER_IPVS_SETS)
        _restore(node, variant, family, _of_family(_IPVS_1_14, family))


def _userspace(node: Namespace, variant: Variant) -> None:
    for family in Family:
        _restore(node, variant, family, _USERSPACE.format(node=_NODE[family]))


def _nftables(node: Namespace, variant: Variant) -> None:
    for ip, address in (("ip", "ipv4_addr"), ("ip6", "ipv6_addr")):
        node.nft(f"add table {ip} kube-proxy\ndelete table {ip} kube-proxy\n"
                 + _NFTABLES.format(ip=ip, address=address))  # fmt: skip


_LOAD: dict[str, Callable[[Namespace, Variant], None]] = {
    "nftables": _nftables,
    "iptables": _iptables,
    "iptables 1.23": _older_iptables,
    "ipvs": _ipvs,
    "ipvs 1.14": _older_ipvs,
    "userspace": _userspace,
}
KUBE_PROXYS = tuple(_LOAD)


def _create_sets(node: Namespace, family: Family, sets: tuple[tuple[str, str], ...]) -> None:
    inet = "inet" if family is Family.IPV4 else "inet6"
    lines = [
        f"create -exist {_set_name(name, family)} {kind}{'' if 'bitmap' in kind else f' family {inet}'}\n"
        for name, kind in sets
    ]
    node.run("ipset", "restore", stdin="".join(lines))


def _of_family(rules: str, family: Family) -> str:
    return _MATCH.sub(lambda found: f"{found[1]}{_set_name(found[2], family)}", rules)


def _set_name(name: str, family: Family) -> str:
    return f"KUBE-{'' if family is Family.IPV4 else '6-'}{name}"[:31]


def _restore(node: Namespace, variant: Variant, family: Family, rules: str) -> None:
    """Add *rules*. Existing jumps and kubelet's chain are not added again, as by kube-proxy."""
    there = set(node.run(variant.program(family, "save")).splitlines())
    lines = [
        line for line in rules.splitlines()
        if not (_SHARED.match(line) and line in there)
        and not (line.startswith(":KUBE-FIREWALL") and "-A INPUT -j KUBE-FIREWALL" in there)
    ]  # fmt: skip
    node.run(variant.program(family, "restore"), "-w", "5", "--noflush", stdin="\n".join(lines) + "\n")
