"""Rules of other programs on a node, in the form in which they write them, about a random part of a site."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Final, NamedTuple

from kproxy_core.model.address import Family
from tests.core.nft.random_rules import Site, iptables_rules, nft_rules


class Rules(NamedTuple):
    """Input for ``nft -f`` and for ``iptables-restore --noflush``."""

    nft: str = ""
    iptables: str = ""


class Words(NamedTuple):
    """What rules are about."""

    ip: str
    key: str
    vip: str
    server: str
    other: str
    client: str
    network: str
    device: str
    pod_device: str
    port: str
    own: str


def _words(random: Random, family: Family, site: Site) -> Words:
    return Words(
        family.ip, "ipv4_addr" if family is Family.IPV4 else "ipv6_addr", random.choice(site.servers[2:]),
        *random.sample(site.servers[:2], 2), random.choice(site.clients), random.choice(site.networks),
        random.choice(site.devices), random.choice(("kcbr0", "kcveth2")), str(random.choice(site.ports)),
        random.choice(site.own))


_NFT: Final[Mapping[str, str]] = {
    "firewalld": """table inet firewalld {
        chain mangle_PREROUTING { type filter hook prerouting priority -140; jump zones; }
        chain nat_PREROUTING { type nat hook prerouting priority -90; jump zones; }
        chain filter_FORWARD { type filter hook forward priority 10; policy accept;
            ct state { established, related } accept; ct status dnat accept; iifname "lo" accept;
            ct state invalid drop; jump policies; reject with icmpx admin-prohibited; }
        chain filter_INPUT { type filter hook input priority 10; policy accept;
            ct state { established, related } accept; ct status dnat accept; iifname "lo" accept;
            tcp dport {port} accept; meta l4proto { icmp, ipv6-icmp } accept; udp dport 53 accept;
            reject with icmpx admin-prohibited; }
        chain zones { iifname "{device}" return; return; }
        chain policies { iifname "{pod_device}" accept; oifname "{device}" accept; }
    }""",
    "ufw by nft": """table inet ufw {
        chain forward { type filter hook forward priority 0; policy drop; ct state established accept;
            {ip} saddr {client} accept; {ip} daddr {server} {proto} dport {port} accept; }
        chain output { type filter hook output priority 0; ct state new accept; }
    }""",
    "fail2ban": """table inet f2b-table {
        set addr-set-sshd { type {key}; elements = { {client} }; }
        chain f2b-chain { type filter hook input priority -1; policy accept;
            tcp dport {port} {ip} saddr @addr-set-sshd reject; }
    }""",
    "fail2ban in forward": """table inet f2b-table {
        set banned { type {key}; flags interval; elements = { {network} }; }
        chain f2b-forward { type filter hook forward priority -1; {ip} saddr @banned drop; }
    }""",
    "raw drop": """table inet guard { chain early { type filter hook prerouting priority -300;
        {ip} daddr {vip} {proto} dport {port} drop; iifname "{device}" {ip} saddr {client} drop; }; }""",
    "local destinations": """table inet guard { chain c { type filter hook prerouting priority -150;
        fib daddr type local {proto} dport {port} drop; }; }""",
    "unicast sources": """table inet guard { chain c { type filter hook prerouting priority -300;
        fib saddr . iif oif missing drop; }; }""",
    "DNAT in front": """table inet theirs { chain c { type nat hook prerouting priority -110;
        meta nfproto {nfproto} {ip} daddr {vip} {proto} dport {port} dnat {ip} to {other}; };
        chain o { type nat hook output priority -110;
        meta nfproto {nfproto} {ip} daddr {vip} {proto} dport {port} dnat {ip} to {other}; }; }""",
    "hostPort by nft": """table inet hostports {
        chain hostports { fib daddr type local {proto} dport {port} dnat {ip} to {server}; }
        chain prerouting { type nat hook prerouting priority -100; jump hostports; }
        chain output { type nat hook output priority -100; jump hostports; }
    }""",
    "NodeLocal DNSCache": """table inet nodelocal {
        chain raw { type filter hook prerouting priority -300; {ip} daddr {vip} {proto} dport {port} notrack; }
        chain out { type filter hook output priority -300; {ip} daddr {vip} {proto} dport {port} notrack;
            {ip} saddr {vip} {proto} sport {port} notrack; }
        chain in { type filter hook input priority 0; {ip} daddr {vip} {proto} dport {port} accept; }
    }""",
    "limiter": """table inet limiter {
        set met { type {key}; flags dynamic; timeout 1m; size 1000; }
        chain c { type filter hook forward priority 0;
            ct state new add @met { {ip} saddr limit rate over 9000/second } drop; }
    }""",
    "forward port": """table inet fw { chain c { type filter hook forward priority 0;
        {proto} dport {endpoint_port} drop; }; }""",
    "forward address": """table inet fw { chain c { type filter hook forward priority 5; policy accept;
        {ip} daddr {server} reject; }; }""",
    "egress policy": """table inet fw { chain c { type filter hook postrouting priority 10;
        oifname "{device}" {ip} daddr {server} drop; }; }""",
    "output policy": """table inet fw { chain c { type filter hook output priority 0; policy accept;
        {ip} daddr {server} {proto} dport {endpoint_port} drop; {ip} daddr {vip} reject; }; }""",
    "marks": """table inet cali { chain p { type filter hook prerouting priority -150;
            iifname "{pod_device}" meta mark set meta mark or 0x10000; }
        chain f { type filter hook forward priority 0; meta mark & 0x10000 == 0x10000 jump pol; }
        chain pol { {ip} daddr {server} meta mark set meta mark or 0x20000;
            meta mark & 0x20000 == 0x20000 accept; drop; }
    }""",
    "vpn": """table inet vpn {
        chain p { type filter hook prerouting priority -160; {ip} saddr {network} ct mark set 0x51; }
        chain o { type route hook output priority -150; {ip} daddr {server} meta mark set 0x51; }
        chain s { type nat hook postrouting priority 90; oifname "{device}" masquerade; }
    }""",
    "mtu": """table inet mtu { chain c { type filter hook forward priority -150;
        tcp flags syn tcp option maxseg size set rt mtu; }; }""",
}  # fmt: skip

_IPTABLES: Final[Mapping[str, str]] = {
    "docker": """*filter
:FORWARD DROP [0:0]
:DOCKER-USER - [0:0]
:DOCKER - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A FORWARD -o docker0 -j DOCKER
-A FORWARD -i docker0 ! -o docker0 -j ACCEPT
-A DOCKER-USER -i {pod_device} -j ACCEPT
-A DOCKER-USER -j RETURN
COMMIT
""",
    "portmap": """*nat
:CNI-HOSTPORT-DNAT - [0:0]
:CNI-DN-0123456789abcdef01234 - [0:0]
:CNI-HOSTPORT-SETMARK - [0:0]
:CNI-HOSTPORT-MASQ - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ
-A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000
-A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE
-A CNI-HOSTPORT-DNAT -p {proto} -m multiport --dports {port} -j CNI-DN-0123456789abcdef01234
-A CNI-DN-0123456789abcdef01234 -s {network} -p {proto} -m {proto} --dport {port} -j CNI-HOSTPORT-SETMARK
-A CNI-DN-0123456789abcdef01234 -p {proto} -m {proto} --dport {port} -j DNAT --to-destination {server_socket}8080
COMMIT
""",
    "portmap in front": """*nat
:CNI-HOSTPORT-DNAT - [0:0]
-I PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-I OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A CNI-HOSTPORT-DNAT -p {proto} -m {proto} --dport {port} -j DNAT --to-destination {server_socket}8080
COMMIT
""",
    "Calico": """*raw
:cali-PREROUTING - [0:0]
:cali-from-host-endpoint - [0:0]
-A PREROUTING -m comment --comment "cali:6gwbT8clXdHdC1b1" -j cali-PREROUTING
-A cali-PREROUTING -j MARK --set-xmark 0x0/0xf0000
-A cali-PREROUTING -i {pod_device} -j MARK --set-xmark 0x40000/0x40000
-A cali-PREROUTING -m mark --mark 0x40000/0x40000 -m rpfilter --validmark --invert -j DROP
-A cali-PREROUTING -m mark --mark 0x0/0x40000 -j cali-from-host-endpoint
COMMIT
*filter
:cali-FORWARD - [0:0]
:cali-from-wl-dispatch - [0:0]
:cali-fw-1 - [0:0]
:cali-to-wl-dispatch - [0:0]
:cali-tw-1 - [0:0]
-I FORWARD -m comment --comment "cali:wUHhoiAYhphO9Mso" -j cali-FORWARD
-A FORWARD -m comment --comment "cali:S93hcgKJrXEqnTfs" -m comment --comment "Policy explicitly accepted packet." -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-FORWARD -j MARK --set-xmark 0x0/0xe0000
-A cali-FORWARD -i {pod_device} -j cali-from-wl-dispatch
-A cali-FORWARD -o {pod_device} -j cali-to-wl-dispatch
-A cali-FORWARD -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-from-wl-dispatch -g cali-fw-1
-A cali-fw-1 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A cali-fw-1 -m conntrack --ctstate INVALID -j DROP
-A cali-fw-1 -j MARK --set-xmark 0x0/0x30000
-A cali-fw-1 -d {server} -j MARK --set-xmark 0x10000/0x10000
-A cali-fw-1 -m mark --mark 0x10000/0x10000 -j RETURN
-A cali-fw-1 -m comment --comment "Drop if no policies passed packet" -m mark --mark 0x0/0x20000 -j DROP
-A cali-to-wl-dispatch -g cali-tw-1
-A cali-tw-1 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A cali-tw-1 -p {proto} -m {proto} --dport {endpoint_port} -j MARK --set-xmark 0x10000/0x10000
-A cali-tw-1 -m mark --mark 0x10000/0x10000 -j RETURN
-A cali-tw-1 -j DROP
COMMIT
""",
    "kube-router": """*filter
:KUBE-ROUTER-FORWARD - [0:0]
:KUBE-POD-FW-ABCDEFGHIJKLMNOP - [0:0]
:KUBE-NWPLCY-ABCDEFGHIJKLMNOP - [0:0]
-I FORWARD 1 -m comment --comment "kube-router netpol - 4IA2OSFRMVNDXBVV" -j KUBE-ROUTER-FORWARD
-A FORWARD -m mark --mark 0x20000/0x20000 -j ACCEPT
-A KUBE-ROUTER-FORWARD -d {server} -j KUBE-POD-FW-ABCDEFGHIJKLMNOP
-A KUBE-POD-FW-ABCDEFGHIJKLMNOP -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A KUBE-POD-FW-ABCDEFGHIJKLMNOP -m addrtype --src-type LOCAL -d {server} -j ACCEPT
-A KUBE-POD-FW-ABCDEFGHIJKLMNOP -j KUBE-NWPLCY-ABCDEFGHIJKLMNOP
-A KUBE-POD-FW-ABCDEFGHIJKLMNOP -m limit --limit 10/min --limit-burst 10 -m mark ! --mark 0x10000/0x10000 -j NFLOG --nflog-group 100
-A KUBE-POD-FW-ABCDEFGHIJKLMNOP -m mark ! --mark 0x10000/0x10000 -j REJECT
-A KUBE-POD-FW-ABCDEFGHIJKLMNOP -j MARK --set-xmark 0x0/0x10000
-A KUBE-POD-FW-ABCDEFGHIJKLMNOP -j MARK --set-xmark 0x20000/0x20000
-A KUBE-NWPLCY-ABCDEFGHIJKLMNOP -s {network} -p {proto} -m {proto} --dport {endpoint_port} -j MARK --set-xmark 0x10000/0x10000
-A KUBE-NWPLCY-ABCDEFGHIJKLMNOP -m mark --mark 0x10000/0x10000 -j RETURN
COMMIT
""",
    "state as of old": """*filter
:RH-Firewall-1-INPUT - [0:0]
-A INPUT -j RH-Firewall-1-INPUT
-A FORWARD -j RH-Firewall-1-INPUT
-A RH-Firewall-1-INPUT -i lo -j ACCEPT
-A RH-Firewall-1-INPUT -m state --state ESTABLISHED,RELATED -j ACCEPT
-A RH-Firewall-1-INPUT -m state --state NEW -m {proto} -p {proto} --dport {port} -j ACCEPT
-A RH-Firewall-1-INPUT -m state --state NEW -p tcp -m tcp --dport 8080 -j ACCEPT
-A RH-Firewall-1-INPUT -j REJECT
COMMIT
""",
    "Cilium": """*raw
:CILIUM_PRE_raw - [0:0]
-A PREROUTING -m comment --comment "cilium-feeder: CILIUM_PRE_raw" -j CILIUM_PRE_raw
-A CILIUM_PRE_raw -m comment --comment "cilium: NOTRACK for proxy traffic" -m mark --mark 0x200/0xf00 -j CT --notrack
COMMIT
*nat
:CILIUM_POST_nat - [0:0]
-A POSTROUTING -m comment --comment "cilium-feeder: CILIUM_POST_nat" -j CILIUM_POST_nat
-A CILIUM_POST_nat -s {network} ! -d {network} ! -o cilium_+ -m comment --comment "cilium masquerade non-cluster" -j MASQUERADE
COMMIT
""",
    "NodeLocal DNSCache by iptables": """*raw
-A PREROUTING -d {vip} -p {proto} -m {proto} --dport {port} -m comment --comment "NodeLocal DNS Cache: skip conntrack" -j NOTRACK
-A OUTPUT -s {vip} -p {proto} -m {proto} --sport {port} -j NOTRACK
-A OUTPUT -d {vip} -p {proto} -m {proto} --dport {port} -j NOTRACK
COMMIT
*filter
-A INPUT -d {vip} -p {proto} -m {proto} --dport {port} -j ACCEPT
-A OUTPUT -s {vip} -p {proto} -m {proto} --sport {port} -j ACCEPT
COMMIT
""",
    "podman": """*nat
:NETAVARK-HOSTPORT-DNAT - [0:0]
:NETAVARK-DN-1D8721804F16F - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j NETAVARK-HOSTPORT-DNAT
-A OUTPUT -m addrtype --dst-type LOCAL -j NETAVARK-HOSTPORT-DNAT
-A NETAVARK-HOSTPORT-DNAT -p {proto} -m {proto} --dport {port} -j NETAVARK-DN-1D8721804F16F
-A NETAVARK-DN-1D8721804F16F -p {proto} -m {proto} --dport {port} -j DNAT --to-destination {server_socket}8081
COMMIT
""",
}  # fmt: skip


def _form(text: str, random: Random, family: Family, site: Site) -> str:
    values = dict(_words(random, family, site)._asdict())
    values["proto"] = random.choice(("tcp", "udp"))
    values["endpoint_port"] = random.choice(("8080", "8081", "8082"))
    values["nfproto"] = "ipv4" if family is Family.IPV4 else "ipv6"
    values["server_socket"] = f"{values['server']}:" if family is Family.IPV4 else f"[{values['server']}]:"
    for word, value in values.items():
        text = text.replace(f"{{{word}}}", value)
    return text


def _random_nft(random: Random, family: Family, site: Site) -> Rules:
    return Rules(nft=nft_rules(random, family, is_certain=random.random() < 0.8, site=site))


def _random_iptables(random: Random, family: Family, site: Site) -> Rules:
    return Rules(iptables=iptables_rules(random, family, is_certain=random.random() < 0.8, site=site))


Make = Callable[[Random, Family, Site], Rules]


def _of_nft(text: str) -> Make:
    return lambda random, family, site: Rules(nft=_form(text, random, family, site))


def _of_iptables(text: str) -> Make:
    return lambda random, family, site: Rules(iptables=_form(text, random, family, site))


NEIGHBOURS: Final[Mapping[str, Make]] = {
    **{name: _of_nft(text) for name, text in _NFT.items()},
    **{name: _of_iptables(text) for name, text in _IPTABLES.items()},
    "random rules of nft": _random_nft, "random rules of iptables": _random_iptables,
}
