"""Random rules of nft and iptables, of the expressions that `kproxy_core.nft.interpret` knows."""

from collections.abc import Callable, Sequence
from random import Random

from kproxy_core.model.address import Family, Protocol, parse_address
from kproxy_core.nft.packet import Flow
from tests.core.nft.packet_judge import CLIENTS, OWN, PORTS, SERVERS, Probe

NETWORKS = {
    Family.IPV4: ("10.0.1.0/24", "10.0.0.0/15", "10.0.9.8/31", "172.16.0.0/12", "10.0.2.0/25", "0.0.0.0/1"),
    Family.IPV6: ("fd00:1::/64", "fd00::/13", "fd00:9::8/127", "fd05::/16", "fd00:2::/96", "8000::/1")}
RANGES = {
    Family.IPV4: ("10.0.1.2-10.0.2.1", "10.0.2.2-10.0.9.8", "172.16.0.1-172.16.5.9"),
    Family.IPV6: ("fd00:1::2-fd00:2::1", "fd00:2::2-fd00:9::8", "fd05::1-fd05::9")}
HOOKS = ("prerouting", "input", "forward", "output", "postrouting")
PRIORITIES = {
    "prerouting": (-300, -250, -150, -100, -90, 0, 10), "output": (-300, -250, -150, -100, -90, 0, 10),
    "input": (-150, 0, 10, 150), "forward": (-150, 0, 10), "postrouting": (-150, 0, 90, 100, 150)}


class Rules:
    """Rules of one table."""

    def __init__(self, random: Random, family: Family, table_family: str) -> None:
        self.random = random
        self.family = family
        self.ip = family.ip
        self.table_family = table_family
        self.declared: list[str] = []
        self.helpers: list[str] = []
        """Chains without a hook."""
        self._names = 0

    # Values.

    def one(self, *given: str) -> str:
        return self.random.choice(given)

    def source(self) -> str:
        return self.one(*CLIENTS[self.family], *OWN[self.family])

    def destination(self) -> str:
        return self.one(*SERVERS[self.family], *OWN[self.family])

    def address(self, which: str) -> str:
        return self.source() if which == "saddr" else self.destination()

    def port(self) -> int:
        return self.random.choice(PORTS)

    def ports(self) -> str:
        return self.one(str(self.port()), "1-1024", "443-9000", "8081-65535")

    def some(self, make: Callable[[], str]) -> str:
        return "{ " + ", ".join(dict.fromkeys(make() for _ in range(self.random.randint(1, 4)))) + " }"

    def no(self) -> str:
        return self.one("", "", "!= ")

    def name(self) -> str:
        self._names += 1
        return f"n{self._names}"

    def declare(self, kind: str, type_: str, elements: str, flags: str = "") -> str:
        name = self.name()
        self.declared.append(
            f"{kind} {name} {{ type {type_}; {f'flags {flags};' if flags else ''} "
            f"{f'elements = {elements};' if elements else ''} }}")
        return name

    # Matches.

    def match(self, hook: str) -> str:
        ip, no = self.ip, self.no()
        which = self.one("saddr", "daddr")
        networks, ranges = NETWORKS[self.family], RANGES[self.family]
        type_ = "ipv4_addr" if self.family is Family.IPV4 else "ipv6_addr"
        host = lambda: self.address(which)  # noqa: E731
        in_or_out = self.one(*(
            ("iifname", "iif") if hook in ("prerouting", "input") else
            ("oifname", "oif") if hook == "output" else ("iifname", "oifname")))
        device = self.one('"c0"', '"s0"', '"lo"')
        mark = self.random.choice((0, 1, 2, 4, 5, 7))
        protocol = self.one("tcp", "udp")
        choices = [
            f"{ip} {which} {no}{host()}", f"{ip} {which} {no}{self.one(*networks)}",
            f"{ip} {which} {no}{self.one(*ranges)}", f"{ip} {which} {no}{self.some(host)}",
            f"{ip} {which} {no}{self.some(lambda: self.one(*networks[:5:2], *ranges[2:]))}",
            f"{protocol} dport {no}{self.port()}", f"{protocol} dport {no}{self.ports()}",
            f"{protocol} sport {no}{self.one('1-30000', '20000-65535', '1000')}",
            f"th dport {no}{self.some(lambda: str(self.port()))}",
            f"meta l4proto {self.no()}{protocol}", f"meta l4proto {self.some(lambda: self.one('tcp', 'udp'))}",
            f"meta l4proto {protocol} th dport {self.some(lambda: str(self.port()))}",
            f"{ip} {which} . th dport {no}{self.some(lambda: f'{host()} . {self.port()}')}",
            f"{ip} {which} . th dport {no}{{ {networks[0]} . {self.ports()}, {host()} . 7000-9000 }}",
            f"{ip} saddr . {ip} daddr {self.some(lambda: f'{self.source()} . {self.destination()}')}",
            f"tcp flags {self.one('syn', '& (fin | syn | rst | ack) == syn', '& (syn | ack) == ack', '!= syn')}",
            f"{in_or_out} {no if 'name' in in_or_out else ''}{device}", f'{in_or_out[:3]}name "{self.one("c*", "s*", "l*")}"',
            f"meta mark {no}{mark}", f"meta mark & {self.random.choice((1, 4, 6))} {self.one('==', '!=')} {self.random.choice((0, 4))}",
            f"meta mark {no}{self.one('1-4', '0-2')}", f"meta mark {self.some(lambda: str(self.random.choice((0, 1, 2, 4))))}",
            f"ct state {self.one('new', 'established,related', '! new', 'untracked', 'invalid')}",
            f"ct state {{ {self.one('new', 'untracked')}, {self.one('established', 'invalid')} }}",
            f"ct mark {no}{mark}", f"ct status {self.one('dnat', 'snat', '! dnat', 'confirmed', 'snat,dnat')}",
            f"ct direction {self.one('original', 'reply')}",
            f"ct original {ip} {which} {no}{host()}", f"ct reply {ip} saddr {no}{self.destination()}",
            f"ct reply {ip} daddr {no}{self.source()}",
            f"meta l4proto {protocol} ct original proto-dst {no}{self.port()}",
            f"meta l4proto {protocol} ct reply proto-src {no}{self.port()}", "ct zone 0", "ct l3proto ipv4",
            f"fib saddr type {no}{self.one('local', 'unicast')}", f"fib daddr type {no}{self.one('local', 'unicast')}",
            f"fib daddr type {{ {self.one('local', 'unicast')}, broadcast }}",
            "meta pkttype unicast", "meta skuid 0",  *([f"meta nfproto {self.one('ipv4', 'ipv6')}"] if self.table_family == "inet" else []),
            f"meta protocol {self.one('ip', 'ip6')}", f"@th,16,16 {no}{self.port()}",
            f"@nh,{128 if self.family is Family.IPV4 else 192},16 {no}0x0a00",
            f"{ip} {which} & {self.one('0.0.255.0', '255.255.0.1') if ip == 'ip' else self.one('0:ffff::', 'ffff::f')} "
            f"== {self.one('0.0.1.0', '10.0.0.1', '0.0.9.0') if ip == 'ip' else self.one('0:1::', 'fd00::1')}",
            "exthdr frag exists" if ip == "ip6" else "ip option rr exists",
            f"tcp option maxseg {self.one('exists', 'missing')}", "meta length 40-100",
            f"meta mark . th dport {self.some(lambda: f'{self.random.choice((0, 1, 4))} . {self.port()}')}",
        ]  # fmt: skip
        if self.random.random() < 0.15:
            return self.random.choice((
                lambda: f"{ip} {which} {no}@{self.declare('set', type_, self.some(host))}",
                lambda: f"{ip} {which} @" + self.declare(
                    "set", type_, self.some(lambda: self.one(*networks[:5:2])), "interval"),
                lambda: f"{ip} {which} . meta l4proto . th dport @" + self.declare(
                    "set", f"{type_} . inet_proto . inet_service",
                    self.some(lambda: f"{host()} . {self.one('tcp', 'udp')} . {self.port()}")),
                lambda: f"meta mark @" + self.declare("set", "mark", "{ 1-3, 5 }", "interval"),
            ))()
        if hook in ("prerouting", "input"):
            choices.append("socket transparent 1")
        if self.family is Family.IPV4:
            choices.append(f"ip protocol {no}{protocol}")
        if hook in ("prerouting", "input", "forward"):
            choices += [f"fib saddr . iif oif {self.one('exists', 'missing')}", f'fib saddr oifname {no}"c0"']
        return self.random.choice(choices)

    # Actions that do not end the packet.

    def change(self, hook: str) -> str:
        mark = self.random.choice((0, 1, 2, 4, 5))
        ports = ", ".join(f"{port} : {at}" for at, port in enumerate(PORTS[:3]))
        own = f"{self.one(*OWN[self.family])} : {mark}, {CLIENTS[self.family][0]} : 3"
        choices = [
            f"meta mark set {mark}", f"meta mark set meta mark or {mark}", f"meta mark set meta mark xor {mark}",
            f"meta mark set meta mark and {mark}", "meta mark set meta mark << 1", "meta mark set meta mark >> 1",
            "meta mark set ct mark", f"ct mark set {mark}", "ct mark set meta mark",
            f"ct mark set ct mark or {mark}", f"meta mark set th dport map {{ {ports} }}",
            'log prefix "x"', f"meta mark set jhash {self.ip} saddr mod 2", "meta mark set numgen random mod 3",
            f"{self.ip} {self.one('dscp set 1', 'dscp set 2')}",
        ]
        if self.random.random() < 0.15:
            return self.random.choice((
                lambda: f"meta mark set {self.ip} saddr map @" + self.declare(
                    "map", f"{'ipv4_addr' if self.ip == 'ip' else 'ipv6_addr'} : mark", f"{{ {own} }}"),
                lambda: f"update @{self.declare('set', 'inet_service', '', 'dynamic,timeout')} {{ th dport timeout 1m }}",
            ))()
        if hook in ("prerouting", "output"):
            choices += ["notrack"] * 3
        if self.random.random() < 0.2:
            choices += [f"th dport set {self.port()}", f"{self.ip} daddr set {self.destination()}"]
        return self.random.choice(choices)

    # Verdicts.

    def verdict(self, hook: str) -> str:
        choices = ["accept", "accept", "return", "drop", "continue"]
        if hook != "postrouting":
            choices.append("reject")
        if self.helpers:
            lead = self.one(*self.helpers)
            choices += [f"jump {lead}"] * 3 + [f"goto {lead}"] * 2
        return self.random.choice(choices)

    def translation(self, hook: str) -> str:
        colon = (lambda host, port: f"{host}:{port}") if self.ip == "ip" else (
            lambda host, port: f"[{host}]:{port}")
        own = self.ip if self.table_family == "inet" else ""
        if hook in ("prerouting", "output"):
            host, first, last = self.destination(), *(SERVERS[self.family][:2])
            four = f"meta l4proto {self.one('tcp', 'udp')}"
            return self.random.choice([
                f"{{}} dnat {own} to {host}", f"{four} {{}} dnat {own} to {colon(host, self.port())}",
                f"{four} {{}} dnat {own} to {colon(host, '8000-9000')}",
                f"{four} {{}} redirect to :{self.port()}", "{} redirect",
                f"{{}} dnat {own} to {first}-{last}",
                f"{{}} dnat {own} to {self.ip} daddr map {{{{ {SERVERS[self.family][2]} : {host} }}}}",
                f"{four} {{}} dnat {self.ip} addr . port to th dport map {{{{ 80 : {host} . 8080, 443 : {first} . 53 }}}}",
                f"{{}} dnat {own} to numgen random mod 2 map {{{{ 0 : {first}, 1 : {last} }}}}",
                f"{{}} dnat {self.ip} prefix to {self.ip} daddr map {{{{ "
                f"{'10.0.9.0/24 : 10.0.2.0/24' if self.ip == 'ip' else 'fd00:9::/64 : fd00:2::/64'} }}}}",
            ])
        own_address = self.one(*OWN[self.family])
        choices = [f"{{}} snat {own} to {own_address}",
                   f"meta l4proto tcp {{}} snat {own} to {colon(own_address, '2000-3000')}"]
        if hook == "postrouting":
            choices += ["{} masquerade", "{} masquerade random", "{} masquerade fully-random"]
        return self.random.choice(choices)

    def rule(self, hook: str, kind: str) -> str:
        matches = " ".join(self.match(hook) for _ in range(self.random.choice((0, 1, 1, 1, 2, 2, 3))))
        draw = self.random.random()
        if draw < 0.03:
            matches += self.one(
                " limit rate 1/second", " limit rate over 1/second", " quota 100 bytes", " numgen random mod 3 1",
                " ct count 1", f" meter m{self.random.randint(1, 10**6)} {{ {self.ip} saddr limit rate over 9/second }}",
                " numgen inc mod 2 0")
        if kind == "nat" and draw < 0.4:
            translation = self.translation(hook)
            return translation.format(matches if " map " in translation else f"{matches} counter")
        if draw < 0.55:
            return f"{matches} {self.change(hook)} counter"
        if draw < 0.62 and self.helpers:
            lead, other = self.one(*self.helpers), self.one("accept", "drop", "return", "continue")
            return self.random.choice((
                f"{matches} th dport vmap {{ 80 : jump {lead}, 443 : {other}, 8000-9000 : goto {lead} }}",
                f"{matches} {self.ip} saddr vmap {{ {self.source()} : {other}, * : jump {lead} }}",
                f"{matches} ct state vmap {{ new : jump {lead}, untracked : {other} }}",
                f"{matches} meta l4proto vmap {{ tcp : {other}, udp : jump {lead} }}"))
        return f"{matches} counter {self.verdict(hook)}"


def table(random: Random, family: Family, number: int) -> str:
    table_family = random.choice((family.ip, "inet"))
    rules = Rules(random, family, table_family)
    chains: list[str] = []
    hook = random.choice(HOOKS)
    count = random.choice((1, 1, 2, 3))
    hooks = [hook] + [random.choice(HOOKS) for _ in range(count - 1)]
    for at in range(random.randint(0, 3)):
        # Without a hook; only to be reached from hooks that may have all of its expressions.
        body = "; ".join(_safe(rules) for _ in range(random.randint(1, 3)))
        chains.append(f"chain h{at} {{ {body}; }}")
        rules.helpers.append(f"h{at}")
    for at, one in enumerate(hooks):
        kind = "filter"
        if one != "forward" and random.random() < 0.35:
            kind = "nat"
        elif one == "output" and random.random() < 0.3:
            kind = "route"
        choices = PRIORITIES[one] if kind != "nat" else [each for each in PRIORITIES[one] if each > -200]
        policy = random.choice(("accept",) * 6 + ("drop",))
        body = "; ".join(rules.rule(one, kind) for _ in range(random.randint(1, 5)))
        chains.append(
            f"chain c{at} {{ type {kind} hook {one} priority {random.choice(choices)}; policy {policy}; {body}; }}")
    body = "\n".join((*rules.declared, *chains))
    return f"table {table_family} t{number} {{\n{body}\n}}"


def _safe(rules: Rules) -> str:
    draw = rules.random.random()
    match = rules.match("all") if draw < 0.8 else ""
    lower = [each for each in rules.helpers]
    choices = ["accept", "return", "drop", "continue", "meta mark set 6", "ct mark set 2"]
    choices += [f"jump {each}" for each in lower] + [f"goto {each}" for each in lower]
    return f"{match} counter {rules.random.choice(choices)}"


def ruleset(random: Random, family: Family) -> str:
    return "\n".join(table(random, family, number) for number in range(random.randint(1, 3)))


def probes(random: Random, family: Family, count: int, first: int = 1) -> list[Probe]:
    found = []
    for number in range(first, first + count):
        is_from_node = random.random() < 0.35
        source = random.choice(OWN[family] if is_from_node else CLIENTS[family])
        destination = random.choice((*SERVERS[family], *SERVERS[family], *OWN[family]))
        flow = Flow(
            parse_address(source), parse_address(destination), random.randint(1024, 60000),
            random.choice(PORTS))
        found.append(Probe(family, random.choice((Protocol.TCP, Protocol.UDP)), flow, is_from_node, number))
    return found


# iptables.

_TABLES = {
    "raw": ("PREROUTING", "OUTPUT"), "mangle": ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"),
    "filter": ("INPUT", "FORWARD", "OUTPUT"), "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING")}


def iptables_ruleset(random: Random, family: Family) -> str:
    """Return input for ``iptables-restore``."""
    tables = random.sample(sorted(_TABLES), random.randint(1, 3))
    return "".join(_iptables_table(random, family, name) for name in tables)


def _iptables_table(random: Random, family: Family, table_name: str) -> str:
    chains = _TABLES[table_name]
    lines = [f"*{table_name}"]
    for chain in chains:
        policy = "DROP" if table_name == "filter" and random.random() < 0.1 else "ACCEPT"
        lines.append(f":{chain} {policy} [0:0]")
    others = [f"O{at}" for at in range(random.randint(0, 3))]
    lines += [f":{chain} - [0:0]" for chain in others]
    for at, chain in enumerate(others):
        for _ in range(random.randint(1, 3)):
            leads = [f"-j {other}" for other in others[:at]] + [f"-g {other}" for other in others[:at]]
            end = random.choice(("-j ACCEPT", "-j RETURN", "-j MARK --set-xmark 0x6/0x6", "", *(
                ["-j DROP"] if table_name != "nat" else []), *leads))
            if table_name == "nat":
                end = end.replace("-j MARK --set-xmark 0x6/0x6", "-j LOG")
            lines.append(f"-A {chain} {_iptables_matches(random, family, 'any', table_name)} {end}")
    for chain in random.sample(chains, random.randint(1, len(chains))):
        for _ in range(random.randint(1, 4)):
            matches = _iptables_matches(random, family, chain, table_name)
            target = _iptables_target(random, family, chain, table_name, others)
            if target.startswith("-p") and "-p " in matches:
                continue
            lines.append(f"-A {chain} {matches} {target}")
    return "\n".join((*lines, "COMMIT", ""))


def _iptables_matches(random: Random, family: Family, chain: str, table_name: str) -> str:
    found, protocol = [], ""
    for _ in range(random.choice((0, 1, 1, 2, 2, 3))):
        no = random.choice(("", "", "! "))
        ports = ",".join(dict.fromkeys(str(random.choice(PORTS)) for _ in range(3)))
        source = random.choice((*CLIENTS[family], *OWN[family]))
        destination = random.choice((*SERVERS[family], *OWN[family]))
        mark = random.choice(("0x0/0x1", "0x1/0x1", "0x4/0x4", "0x0", "0x2/0x6"))
        low, high = RANGES[family][0].split("-")
        state = random.choice(("NEW", "NEW,RELATED", "ESTABLISHED,RELATED", "INVALID", "UNTRACKED"))
        choices = [
            f"{no}-s {source}", f"{no}-d {destination}", f"{no}-s {random.choice(NETWORKS[family])}",
            f"{no}-d {random.choice(NETWORKS[family])}", f"-m conntrack {no}--ctstate {state}",
            f"-m state {no}--state {state}", f"-m conntrack {no}--ctstate {random.choice(('DNAT', 'SNAT', 'NEW,DNAT'))}",
            f"-m conntrack {no}--ctorigdst {destination}", f"-m conntrack {no}--ctorigsrc {source}",
            f"-m conntrack {no}--ctreplsrc {destination}", f"-m conntrack {no}--ctrepldst {source}",
            f"-m conntrack {no}--ctorigdstport {random.choice(('80', '1:1024', '443:9000'))}",
            f"-m conntrack {no}--ctreplsrcport {random.choice(('80', '53:443'))}",
            "-m conntrack --ctdir ORIGINAL", f"-m conntrack {no}--ctstatus {random.choice(('NONE', 'CONFIRMED', 'SEEN_REPLY'))}",
            f"-m mark {no}--mark {mark}", f"-m connmark {no}--mark {mark}",
            f"-m addrtype {no}--src-type {random.choice(('LOCAL', 'UNICAST', 'MULTICAST'))}",
            f"-m addrtype {no}--dst-type {random.choice(('LOCAL', 'UNICAST', 'LOCAL,UNICAST'))}",
            f"-m iprange {no}--src-range {low}-{high}", f"-m iprange {no}--dst-range {low}-{high}",
            "-m comment --comment x", "-m statistic --mode random --probability 0.5" if random.random() < 0.1 else "",
            "-m limit --limit 1/second" if random.random() < 0.1 else "", f"-m pkttype --pkt-type unicast",
        ]  # fmt: skip
        if not protocol:
            protocol = random.choice(("tcp", "udp"))
            of_ports = [
                f"-p {protocol} -m {protocol} {no}--dport {random.choice(('80', '1:1024', '443:9000', '53:'))}",
                f"-p {protocol} -m {protocol} {no}--sport {random.choice(('1024:30000', '20000:'))}",
                f"-p {protocol} -m multiport {no}--dports {ports}",
                f"-p {protocol} -m multiport {no}--dports 80,443:9000", f"-p {protocol} -m multiport {no}--ports {ports}",
                f"{no}-p {protocol}",
            ]
            if protocol == "tcp":
                of_ports += ["-p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN", "-p tcp -m tcp ! --syn"]
            choice = random.choice([*choices, *of_ports, *of_ports])
            if choice not in of_ports:
                protocol = ""
            elif choice.startswith("! -p") or "-p" in choice:
                protocol = "given"
            found.append(choice)
        else:
            found.append(random.choice(choices))
    if chain in ("PREROUTING", "INPUT", "FORWARD") and random.random() < 0.15:
        found.append(f"{random.choice(('', '! '))}-i {random.choice(('c0', 's+', 'lo'))}")
    if chain in ("OUTPUT", "POSTROUTING", "FORWARD") and random.random() < 0.15:
        found.append(f"{random.choice(('', '! '))}-o {random.choice(('c0', 's+', 'lo'))}")
    if chain == "PREROUTING" and table_name in ("raw", "mangle") and random.random() < 0.1:
        found.append("-m rpfilter" + random.choice(("", " --invert", " --loose", " --accept-local")))
    if chain in ("OUTPUT", "POSTROUTING") and random.random() < 0.05:
        found.append("-m owner --uid-owner 0")
    once: dict[str, str] = {}
    for each in filter(None, found):
        words = [word for word in each.split() if word.startswith("-")]
        key = words[0] if words[0] != "-m" else each.split()[1]
        once.setdefault(key, each)
    return " ".join(once.values())


def _iptables_target(random: Random, family: Family, chain: str, table_name: str, others: list[str]) -> str:
    destination = random.choice((*SERVERS[family], *OWN[family]))
    shown = destination if family is Family.IPV4 else f"[{destination}]"
    leads = [f"-j {other}" for other in others] * 2 + [f"-g {other}" for other in others]
    choices = ["-j ACCEPT", "-j RETURN", "-j LOG", "", *leads]
    if table_name != "nat":
        choices.append("-j DROP")
    if table_name == "raw":
        choices += ["-j CT --notrack", "-j NOTRACK"]
    if table_name == "mangle":
        choices += [
            f"-j MARK --set-xmark {random.choice(('0x4/0x4', '0x1/0xffffffff', '0x0/0x1', '0x5/0x0'))}",
            "-j CONNMARK --save-mark", "-j CONNMARK --restore-mark", "-j CONNMARK --set-xmark 0x2/0x2",
            "-j CONNMARK --save-mark --nfmask 0x4 --ctmask 0x4", "-j MARK --or-mark 0x2", "-j MARK --and-mark 0x5"] * 2
    if table_name == "filter":
        choices.append("-j REJECT")
    if table_name == "nat" and chain in ("PREROUTING", "OUTPUT"):
        choices += [f"-j DNAT --to-destination {destination}", f"-p tcp -j DNAT --to-destination {shown}:8080",
                    "-p udp -j REDIRECT --to-ports 53", "-j REDIRECT",
                    f"-p udp -j DNAT --to-destination {shown}:8000-9000"] * 2
    if table_name == "nat" and chain in ("POSTROUTING", "INPUT"):
        choices += [f"-j SNAT --to-source {random.choice(OWN[family])}"] * 2
    if table_name == "nat" and chain == "POSTROUTING":
        choices += ["-j MASQUERADE", "-j MASQUERADE --random-fully"]
    return random.choice(choices)
