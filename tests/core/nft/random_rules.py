"""Random rules of nft and iptables, of the expressions that `kproxy_core.nft.expressions` knows.

Rules are made of templates, in which each word in braces stands for a random value.
"""

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Final, NamedTuple

from kproxy_core.model.address import Family, Protocol, parse_address
from kproxy_core.nft.packet import Flow
from tests.core.nft.packet_judge import CLIENTS, OWN, PORTS, SERVERS, Probe


class Site(NamedTuple):
    """The addresses, devices and ports of one IP family that rules and packets are about."""

    clients: Sequence[str]
    own: Sequence[str]
    """Of the node."""
    servers: Sequence[str]
    networks: Sequence[str]
    ranges: Sequence[str]
    masked: Sequence[str]
    """Address bits and what they are compared with, as nft writes it."""
    vips: str
    """A network, translated to one of the same size."""
    behind: str
    devices: Sequence[str]
    ports: Sequence[int]


JUDGE: Final = {
    Family.IPV4: Site(
        CLIENTS[Family.IPV4], OWN[Family.IPV4], SERVERS[Family.IPV4],
        ("10.0.1.0/24", "10.0.9.8/31", "10.0.2.0/25", "172.16.0.0/12", "10.0.0.0/15", "0.0.0.0/1"),
        ("10.0.1.2-10.0.2.1", "10.0.2.2-10.0.9.8", "172.16.0.1-172.16.5.9"),
        ("0.0.255.0 == 0.0.1.0", "255.255.0.1 == 10.0.0.1", "0.0.255.0 != 0.0.9.0"),
        "10.0.9.0/24", "10.0.2.0/24", ("c0", "s0", "lo"), PORTS),
    Family.IPV6: Site(
        CLIENTS[Family.IPV6], OWN[Family.IPV6], SERVERS[Family.IPV6],
        ("fd00:1::/64", "fd00:9::8/127", "fd00:2::/96", "fd05::/16", "fd00::/13", "8000::/1"),
        ("fd00:1::2-fd00:2::1", "fd00:2::2-fd00:9::8", "fd05::1-fd05::9"),
        ("0:ffff:: == 0:1::", "ffff::f == fd00::1", "0:ffff:: != 0:9::"),
        "fd00:9::/64", "fd00:2::/64", ("c0", "s0", "lo"), PORTS),
}  # fmt: skip
"""The node of the judge of packets."""


class _Words(Mapping[str, str]):
    """Random values by the words of templates."""

    def __init__(self, random: Random, family: Family, site: Site, **more: str) -> None:
        self.random = random
        self.family = family
        self.site = site
        self._more = more
        servers = site.servers
        self._lists: dict[str, Sequence[str]] = {
            "source": (*site.clients, *site.own), "destination": (*servers, *site.own),
            "own": site.own, "network": site.networks, "range": site.ranges,
            "masked": site.masked, "port": [str(port) for port in site.ports],
            "ports": ("80", "1-1024", "443-9000", "8081-65535"), "sports": ("1-30000", "20000-65535", "1000"),
            "no": ("", "", "!= "), "not": ("", "", "! "), "device": site.devices, "protocol": ("tcp",
            "udp"),
            "mark": ("0", "1", "2", "4", "5", "7"), "bits": ("1", "4", "6"), "which": ("saddr", "daddr"),
            "state": ("new", "established,related", "untracked", "invalid", "! new"),
            "status": ("dnat", "snat", "! dnat", "confirmed"), "type": ("local", "unicast"),
            "presence": ("exists", "missing"), "end": ("accept", "drop", "return", "continue"),
            # Of iptables.
            "xtstate": ("NEW", "NEW,RELATED", "ESTABLISHED,RELATED", "INVALID", "UNTRACKED"),
            "xtnat": ("DNAT", "SNAT", "NEW,DNAT"), "xtstatus": ("NONE", "CONFIRMED", "SEEN_REPLY"),
            "xtmark": ("0x0/0x1", "0x1/0x1", "0x4/0x4", "0x0", "0x2/0x6"),
            "xttype": ("LOCAL", "UNICAST", "LOCAL,UNICAST"), "xtports": ("80", "1:1024", "443:9000", "53:"),
            "set": ("0x4/0x4", "0x1/0xffffffff", "0x0/0x1", "0x5/0x0"), "policy": ("ACCEPT",) * 8 + ("DROP",),
        }  # fmt: skip
        self._fixed = {
            "ip": family.ip, "key": "ipv4_addr" if family is Family.IPV4 else "ipv6_addr",
            "at": "128" if family is Family.IPV4 else "192", "first": servers[0], "second": servers[1],
            "vip": servers[2], "client": site.clients[0], "other": site.clients[1],
            "vips": site.vips, "servers": site.behind,
            "option": "ip option rr" if family is Family.IPV4 else "exthdr frag"}

    def __getitem__(self, word: str) -> str:
        if word in self._more:
            return self._more[word]
        if word in self._fixed:
            return self._fixed[word]
        if word == "socket":
            host = self["destination"]
            return f"{host}:" if self.family is Family.IPV4 else f"[{host}]:"
        name, _, count = word.partition("*")
        found = self._lists["destination" if name == "host" else name]
        if count:
            return ", ".join(self.random.sample(sorted(set(found)), self.random.randint(1, int(count))))
        return self.random.choice(found)

    def __iter__(self) -> Iterator[str]:
        return iter((*self._more, *self._fixed, *self._lists))

    def __len__(self) -> int:
        return len(tuple(self))

    def fill(self, templates: Sequence[str]) -> str:
        return self.random.choice(templates).format_map(self)


# nft.

_MATCHES: Final = (
    "{ip} saddr {no}{source}", "{ip} daddr {no}{destination}", "{ip} {which} {no}{network}",
    "{ip} {which} {no}{range}", "{ip} saddr {no}{{ {source*4} }}", "{ip} daddr {no}{{ {destination*4} }}",
    "{ip} {which} {no}{{ {vips}, {range} }}", "{protocol} dport {no}{port}", "{protocol} dport {no}{ports}",
    "{protocol} sport {no}{sports}", "th dport {no}{{ {port*3} }}", "meta l4proto {no}{protocol}",
    "meta l4proto {{ {protocol*2} }}", "meta l4proto {protocol} th dport {{ {port*3} }}",
    "{ip} daddr . th dport {no}{{ {first} . {port}, {vip} . {port}, {second} . {port} }}",
    "{ip} daddr . th dport {no}{{ {network} . {ports} }}",
    "{ip} saddr . {ip} daddr {no}{{ {client} . {vip}, {other} . {destination} }}",
    "tcp flags syn", "tcp flags & (fin | syn | rst | ack) == syn", "tcp flags & (syn | ack) == ack",
    "meta mark {no}{mark}", "meta mark & {bits} == {mark}", "meta mark & {bits} != {mark}",
    "meta mark {no}1-4",
    "meta mark {{ {mark*3} }}", "meta mark . th dport {{ 0 . {port}, 1 . {port}, 4 . {port} }}",
    "ct state {state}", "ct state {{ new, established }}", "ct state {{ untracked, invalid }}",
    "ct mark {no}{mark}", "ct status {status}", "ct direction original", "ct direction reply", "ct zone 0",
    "ct original {ip} saddr {no}{source}", "ct original {ip} daddr {no}{destination}",
    "ct reply {ip} saddr {no}{destination}", "ct reply {ip} daddr {no}{source}", "ct l3proto ipv4",
    "meta l4proto {protocol} ct original proto-dst {no}{port}",
    "meta l4proto {protocol} ct reply proto-src {no}{port}",
    "fib saddr type {no}{type}", "fib daddr type {no}{type}", "fib daddr type {{ {type}, broadcast }}",
    "meta pkttype unicast", "meta protocol ip", "meta protocol ip6", "@th,16,16 {no}{port}",
    "@nh,{at},16 {no}0x0a00", "{ip} {which} & {masked}", "{option} exists",
)  # fmt: skip
_MATCHES_AT: Final = {
    "prerouting": ('iifname {no}"{device}"', 'iif "{device}"', "fib saddr . iif oif {presence}"),
    "input": ('iifname {no}"{device}"', 'iifname "c*"', 'fib saddr oifname {no}"c0"'),
    "forward": ('iifname {no}"{device}"', 'oifname {no}"{device}"', 'oif "{device}"',
    "fib saddr . iif oif exists"),
    "output": ('oifname {no}"{device}"', 'oif "{device}"', 'oifname "s*"'),
    "postrouting": ('iifname {no}"{device}"', 'oifname {no}"{device}"', 'oifname "l*"'),
    "": ("meta l4proto {protocol}",),
}  # fmt: skip
_WITH_SETS: Final = (
    ("{ip} {which} {no}@{{}}", "set", "{key}", "{destination*4}, {client}", ""),
    ("{ip} {which} @{{}}", "set", "{key}", "{vips}, {servers}", "interval"),
    ("{ip} daddr . meta l4proto . th dport @{{}}", "set", "{key} . inet_proto . inet_service",
     "{first} . tcp . {port}, {vip} . udp . {port}, {second} . {protocol} . {port}", ""),
    ("meta mark {no}@{{}}", "set", "mark", "1-3, 5", "interval"),
    ("{ip} saddr @{{}} meta mark set {ip} saddr map @{{}}", "map", "{key} : mark",
    "{client} : 3, {other} : 1", ""),
)  # fmt: skip
_UNCERTAIN: Final = (
    "limit rate 1/second", "limit rate over 1/second", "quota 100 bytes", "numgen random mod 3 1",
    "ct count 1",
    "meter m {{ {ip} saddr limit rate over 9/second }}", "numgen inc mod 2 0", "meta length 40-100",
    "tcp option maxseg {presence}", "meta skuid 0", "jhash {ip} saddr mod 2 0", "{ip} dscp 0",
)  # fmt: skip
_CHANGES: Final = (
    "meta mark set {mark}", "meta mark set meta mark or {mark}", "meta mark set meta mark xor {mark}",
    "meta mark set meta mark and {mark}", "meta mark set meta mark << 1", "meta mark set meta mark >> 1",
    "meta mark set ct mark", "ct mark set {mark}", "ct mark set meta mark", "ct mark set ct mark or {mark}",
    "meta mark set th dport map {{ 53 : {mark}, 80 : {mark}, 443 : {mark} }}", 'log prefix "x"',
    "{ip} dscp set 1",
)  # fmt: skip
_REWRITES: Final = ("tcp dport set {port}", "udp dport set {port}", "{ip} daddr set {destination}",
"th dport set 80")
_ENDS: Final = ("accept", "accept", "return", "drop", "continue")
_LEADS: Final = (
    "jump {lead}", "jump {lead}", "goto {lead}",
    "th dport vmap {{ 80 : jump {lead}, 443 : {end}, 8000-9000 : goto {lead} }}",
    "{ip} saddr vmap {{ {client} : {end}, * : jump {lead} }}",
    "ct state vmap {{ new : jump {lead}, untracked : {end} }}",
    "meta l4proto vmap {{ tcp : {end}, udp : jump {lead} }}",
)  # fmt: skip
_DESTINATIONS: Final = (
    "dnat {of} to {destination}", "meta l4proto {protocol} dnat {of} to {socket}{port}", "redirect",
    "meta l4proto {protocol} dnat {of} to {socket}8000-9000", "meta l4proto {protocol} redirect to :{port}",
    "dnat {of} to {ip} daddr map {{ {vip} : {destination} }}",
    "meta l4proto tcp dnat {ip} addr . port to th dport map {{ 80 : {first} . {port}, 443 : {vip} . 53 }}",
    "dnat {ip} prefix to {ip} daddr map {{ {vips} : {servers} }}",
)  # fmt: skip
_SOURCES: Final = ("snat {of} to {own}", "meta l4proto tcp snat {of} to {own_socket}2000-3000")
_PRIORITIES: Final = {
    "prerouting": (-300, -250, -150, -90, 0, 10), "output": (-300, -250, -150, -90, 0, 10),
    "input": (-150, 0, 10, 150), "forward": (-150, 0, 10), "postrouting": (-150, 0, 90, 150)}


class _Table:
    def __init__(
        self, random: Random, family: Family, site: Site, number: int, *, is_certain: bool
    ) -> None:
        self.random = random
        self.name = f"t{number}"
        self.of = random.choice((family.ip, "inet"))
        self.is_certain = is_certain
        own = random.choice(site.own)
        self._more = {
            "of": family.ip if self.of == "inet" else "",
            "own_socket": f"{own}:" if family is Family.IPV4 else f"[{own}]:"}
        self.words = _Words(random, family, site, **self._more)
        self._declared: list[str] = []
        self._chains: list[str] = []

    def _match(self, hook: str) -> str:
        draw = self.random.random()
        if draw < 0.08:
            template, kind, type_, elements, flags = self.random.choice(_WITH_SETS)
            name = f"s{len(self._declared)}"
            type_, elements = (each.format_map(self.words) for each in (type_, elements))
            if kind == "set" and not flags and ". " not in type_:
                elements = ", ".join(dict.fromkeys(elements.split(", ")))
            self._declared.append(f"{kind} {name} {{ type {type_}; {f'flags {flags};' if flags else ''} "
                                  f"elements = {{ {elements} }}; }}")
            return template.format_map(self.words).format(name, name)
        if draw < 0.12 and not self.is_certain:
            return self.words.fill(_UNCERTAIN)
        if self.of == "inet" and draw < 0.14:
            return self.random.choice(("meta nfproto ipv4", "meta nfproto ipv6"))
        return self.words.fill(_MATCHES_AT[hook] if draw < 0.22 else _MATCHES)

    def _rule(self, hook: str, kind: str, leads: Sequence[str]) -> str:
        matches = " ".join(self._match(hook) for _ in range(self.random.choice((0, 1, 1, 1, 2, 2, 3))))
        draw = self.random.random()
        if kind == "nat" and draw < 0.4:
            if hook in ("prerouting", "output"):
                translation = self.words.fill(_DESTINATIONS)
            else:
                translation = self.words.fill((*_SOURCES, *(["masquerade"] if hook == "postrouting" else [])))
            return f"{matches} {translation}"
        if draw < 0.5:
            more = ["notrack"] * 3 if hook in ("prerouting", "output") else []
            rewrites = _REWRITES if not self.is_certain and self.random.random() < 0.2 else ()
            return f"{matches} {self.words.fill((*_CHANGES, *more, *rewrites))} counter"
        if draw < 0.7 and leads:
            end = _Words(
                self.random, self.words.family, self.words.site, lead=self.random.choice(leads)).fill(_LEADS)
            return f"{matches} {end}" if "vmap" in end else f"{matches} counter {end}"
        ends = (*_ENDS, *(["reject"] if hook and hook != "postrouting" else []))
        return f"{matches} counter {self.random.choice(ends)}"

    def text(self) -> str:
        leads: list[str] = []
        for at in range(self.random.randint(0, 3)):
            rules = [self._rule("", "filter", leads) for _ in range(self.random.randint(1, 3))]
            self._chain(f"h{at}", "", rules)
            leads.append(f"h{at}")
        for at in range(self.random.choice((1, 1, 2, 3))):
            hook, draw = self.random.choice([*_PRIORITIES]), self.random.random()
            kind = "nat" if hook != "forward" and draw < 0.35 else (
                "route" if hook == "output" and draw < 0.5 else "filter")
            priority = self.random.choice([
                each for each in _PRIORITIES[hook] if kind != "nat" or each > -200])
            policy = self.random.choice(("accept",) * 6 + ("drop",))
            rules = [self._rule(hook, kind, leads) for _ in range(self.random.randint(1, 5))]
            self._chain(
                f"c{at}", f"type {kind} hook {hook} priority {priority}; policy {policy}; ", rules)
        return f"table {self.of} {self.name} {{\n" + "\n".join((*self._declared, *self._chains)) + "\n}\n"

    def _chain(self, name: str, head: str, rules: Sequence[str]) -> None:
        self._chains.append(f"chain {name} {{ {head}{'; '.join(rules)}; }}")


def nft_rules(random: Random, family: Family, *, is_certain: bool, site: Site | None = None) -> str:
    """Return tables t0, t1, ... of nft. *is_certain*: without matches that depend on what is not known.

    *site*: that of the judge by default.
    """
    return "".join(
        _Table(random, family, site or JUDGE[family], number, is_certain=is_certain).text()
        for number in range(random.randint(1, 3)))


# iptables.

_TABLES: Final = {
    "raw": ("PREROUTING", "OUTPUT"), "mangle": ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"),
    "filter": ("INPUT", "FORWARD", "OUTPUT"), "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING")}
_XT_MATCHES: Final = (
    "{not}-s {source}", "{not}-d {destination}", "{not}-s {network}", "{not}-d {network}",
    "-m conntrack {not}--ctstate {xtstate}", "-m state {not}--state {xtstate}",
    "-m conntrack {not}--ctstate {xtnat}",
    "-m conntrack {not}--ctorigdst {destination}", "-m conntrack {not}--ctorigsrc {source}",
    "-m conntrack {not}--ctreplsrc {destination}", "-m conntrack {not}--ctrepldst {source}",
    "-m conntrack {not}--ctorigdstport {xtports}", "-m conntrack {not}--ctreplsrcport {xtports}",
    "-m conntrack --ctdir ORIGINAL", "-m conntrack {not}--ctstatus {xtstatus}",
    "-m mark {not}--mark {xtmark}",
    "-m connmark {not}--mark {xtmark}", "-m addrtype {not}--src-type {xttype}",
    "-m addrtype {not}--dst-type {xttype}", "-m iprange {not}--src-range {range}",
    "-m iprange {not}--dst-range {range}", "-m comment --comment x", "-m pkttype --pkt-type unicast",
)  # fmt: skip
_XT_PROTOCOLS: Final = (
    "-p tcp -m tcp {not}--dport {xtports}", "-p udp -m udp {not}--dport {xtports}", "{not}-p {protocol}",
    "-p tcp -m tcp {not}--sport 1024:30000", "-p udp -m udp {not}--sport 20000:",
    "-p tcp -m multiport {not}--dports {port},443:9000", "-p udp -m multiport {not}--ports {port},{port}",
    "-p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN", "-p tcp -m tcp ! --syn",
)  # fmt: skip
_XT_UNCERTAIN: Final = (
    "-m statistic --mode random --probability 0.5", "-m limit --limit 1/second", "-m length --length 40:100",
    "-m statistic --mode nth --every 2 --packet 0",
)  # fmt: skip
_XT_IN: Final = ("{not}-i {device}", "-i c+")
_XT_OUT: Final = ("{not}-o {device}", "-o s+")
_XT_RPFILTER: Final = tuple(f"-m rpfilter {each}" for each in ("", "--invert", "--loose", "--accept-local"))
_XT_TARGETS: Final = {
    "": ("-j ACCEPT", "-j RETURN", "-j LOG", ""),
    "raw": ("-j CT --notrack", "-j NOTRACK", "-j DROP"),
    "mangle": (
        "-j MARK --set-xmark {set}", "-j CONNMARK --save-mark", "-j CONNMARK --restore-mark", "-j DROP",
        "-j CONNMARK --set-xmark 0x2/0x2", "-j CONNMARK --save-mark --nfmask 0x4 --ctmask 0x4",
        "-j MARK --or-mark 0x2", "-j MARK --and-mark 0x5"),
    "filter": ("-j DROP", "-j REJECT"), "nat": (),
    "PREROUTING": (
        "-j DNAT --to-destination {destination}", "-p tcp -j DNAT --to-destination {socket}{port}",
        "-p udp -j REDIRECT --to-ports 53", "-j REDIRECT",
        "-p udp -j DNAT --to-destination {socket}8000-9000"),
    "INPUT": ("-j SNAT --to-source {own}",),
    "POSTROUTING": ("-j SNAT --to-source {own}", "-j MASQUERADE", "-j MASQUERADE --random-fully"),
}  # fmt: skip


def iptables_rules(random: Random, family: Family, *, is_certain: bool, site: Site | None = None) -> str:
    """Return input for ``iptables-restore``, as `nft_rules` does for nft."""
    tables = random.sample(sorted(_TABLES), random.randint(1, 3))
    words = _Words(random, family, site or JUDGE[family])
    return "".join(_xt_table(words, name, is_certain=is_certain) for name in tables)


def _xt_table(words: _Words, name: str, *, is_certain: bool) -> str:
    random = words.random
    chains = _TABLES[name]
    others = [f"O{at}" for at in range(random.randint(0, 3))]
    lines = [f"*{name}",
    *(f":{chain} {words['policy'] if name == 'filter' else 'ACCEPT'} [0:0]" for chain in chains),
             *(f":{chain} - [0:0]" for chain in others)]  # fmt: skip
    for at, chain in enumerate(others):
        leads = [f"-{how} {other}" for other in others[:at] for how in "jg"]
        ends = ("-j ACCEPT", "-j RETURN", "", *leads, *(["-j DROP"] if name != "nat" else []))
        lines += [f"-A {chain} {_xt_matches(words, '', name, is_certain=is_certain)} {random.choice(ends)}"
                  for _ in range(random.randint(1, 3))]  # fmt: skip
    for chain in random.sample(chains, random.randint(1, len(chains))):
        nat = "PREROUTING" if chain == "OUTPUT" else chain
        targets = (*_XT_TARGETS[""], *_XT_TARGETS[name] * 2, *(_XT_TARGETS[nat] * 2 if name == "nat" else ()),
                   *(f"-{how} {other}" for other in others for how in "jg"))  # fmt: skip
        for _ in range(random.randint(1, 4)):
            target = words.fill(targets)
            matches = _xt_matches(words, chain, name, is_certain=is_certain, has_protocol="-p" in target)
            lines.append(f"-A {chain} {matches} {target}")
    return "\n".join((*lines, "COMMIT", ""))


def _xt_matches(
    words: _Words, chain: str, table: str, *, is_certain: bool, has_protocol: bool = False,
) -> str:
    """Return matches of different kinds: iptables refuses most of them twice."""
    random = words.random
    found = [words.fill(_XT_MATCHES) for _ in range(random.choice((0, 1, 1, 2)))]
    draws = iter(random.random() for _ in range(6))
    if not has_protocol and next(draws) < 0.4:
        found.append(words.fill(_XT_PROTOCOLS))
    if not is_certain and next(draws) < 0.05:
        found.append(words.fill(_XT_UNCERTAIN))
    if chain in ("PREROUTING", "INPUT", "FORWARD") and next(draws) < 0.15:
        found.append(words.fill(_XT_IN))
    if chain in ("OUTPUT", "POSTROUTING", "FORWARD") and next(draws) < 0.15:
        found.append(words.fill(_XT_OUT))
    if chain == "PREROUTING" and table in ("raw", "mangle") and next(draws) < 0.1:
        found.append(words.fill(_XT_RPFILTER))
    once: dict[str, str] = {}
    for each in found:
        option = next(word for word in each.split() if word.startswith("-"))
        once.setdefault(each.split()[1] if option == "-m" else option, each)
    return " ".join(once.values())


# Packets.


def probes(random: Random, family: Family, count: int) -> list[Probe]:
    """Return first packets of connections, from the wire and from the node."""
    found = []
    for number in range(1, count + 1):
        is_from_node = random.random() < 0.35
        source = random.choice(OWN[family] if is_from_node else CLIENTS[family])
        destination = random.choice((*SERVERS[family], *SERVERS[family], *OWN[family]))
        flow = Flow(
            parse_address(source), parse_address(destination), random.randint(1024, 60000),
            random.choice(PORTS))
        found.append(
            Probe(family, random.choice((Protocol.TCP, Protocol.UDP)), flow, is_from_node, number))
    return found
