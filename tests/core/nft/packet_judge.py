"""A node whose rules real packets meet, so that the kernel judges what is predicted.

Packets are written to the wire, or sent by the node, and logged behind the last rule of hooks ``input`` and
``postrouting``, where they end. Nothing answers them.
"""

import contextlib
import socket
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kproxy_conformance.network.namespaces import Namespace
from kproxy_core.model.address import Address, Family, Protocol, format_address, parse_address, parse_cidr
from kproxy_core.netlink.messages import (
    NETLINK_NETFILTER,
    NFGENMSG,
    NLM_F_ACK,
    attribute,
    attributes,
    messages,
    text,
)
from kproxy_core.netlink.sockets import NetlinkSocket
from kproxy_core.nft.expressions import BaseChain
from kproxy_core.nft.interpret import End, Fate, Program, Result
from kproxy_core.nft.messages import FAMILIES, GETRULE
from kproxy_core.nft.packet import (
    LOOPBACK,
    NO_INTERFACE,
    RTN_LOCAL,
    RTN_UNICAST,
    Flow,
    Interface,
    Node,
    Number,
    Packet,
    Place,
    Route,
    Seen,
)
from kproxy_core.nft.rules import parse_rule
from kproxy_core.nft.ruleset import ListedRuleset

OWN: Final = {
    Family.IPV4: ("10.0.1.1", "10.0.2.1", "10.0.3.3"), Family.IPV6: ("fd00:1::1", "fd00:2::1", "fd00:3::3")}
CLIENTS: Final = {
    Family.IPV4: ("10.0.1.2", "10.0.1.3", "172.16.5.9"), Family.IPV6: ("fd00:1::2", "fd00:1::3", "fd05::9")}
SERVERS: Final = {
    Family.IPV4: ("10.0.2.2", "10.0.2.3", "10.0.9.9", "10.0.9.8", "10.0.1.9"),
    Family.IPV6: ("fd00:2::2", "fd00:2::3", "fd00:9::9", "fd00:9::8", "fd00:1::9")}
_CLIENT_NETWORK = {Family.IPV4: "10.0.1.0/24", Family.IPV6: "fd00:1::/64"}
PORTS: Final = (53, 80, 443, 8080, 30080)
_TTL, _GROUP, _LAST_PORT = 77, 5, 65000
_JUDGE = f"""
table inet judge {{
    chain first {{ type filter hook prerouting priority -2000000000;
        ip ttl != {_TTL} drop; ip6 hoplimit != {_TTL} drop
        udp dport {_LAST_PORT} log prefix "S" group {_GROUP} drop; }}
    chain sent {{ type filter hook output priority -2000000000;
        ip ttl != {_TTL} log prefix "R" group {_GROUP} drop
        icmpv6 type != destination-unreachable drop
        ip6 hoplimit != {_TTL} log prefix "R" group {_GROUP} drop
        udp dport {_LAST_PORT} log prefix "S" group {_GROUP} drop; }}
    chain received {{ type filter hook input priority 2000000000;
        ct state new
        log prefix "I" group {_GROUP}; drop; }}
    chain leaving {{ type filter hook postrouting priority 2000000000;
        oifname "lo" accept; log prefix "P" group {_GROUP}; drop; }}
}}
"""


class Probe(NamedTuple):
    family: Family
    protocol: Protocol
    flow: Flow
    is_from_node: bool
    number: int

    def __str__(self) -> str:
        flow = self.flow
        assert flow.source is not None
        assert flow.destination is not None
        sender = "node" if self.is_from_node else "wire"
        return (
            f"{self.protocol.name} from {sender} {format_address(flow.source)} port {flow.source_port} to "
            f"{format_address(flow.destination)} port {flow.port}")

    def data(self) -> bytes:
        """Return the packet with an IP header. Its number is TCP's sequence number, or UDP's data."""
        flow = self.flow
        assert flow.source_port is not None
        assert flow.port is not None
        assert flow.source is not None
        assert flow.destination is not None
        if self.protocol is Protocol.TCP:
            body = struct.pack(
                "!HHIIBBHHH", flow.source_port, flow.port, self.number, 0, 5 << 4, 2, 1024, 0, 0)
        else:
            body = struct.pack("!HHHHI", flow.source_port, flow.port, 12, 0, self.number)
        pseudo = flow.source + flow.destination + struct.pack("!II", len(body), self.protocol)
        at = 16 if self.protocol is Protocol.TCP else 6
        body = body[:at] + struct.pack("!H", _checksum(pseudo + body) or 0xFFFF) + body[at + 2 :]
        if self.family is Family.IPV4:
            header = struct.pack(
                "!BBHHHBBH4s4s", 0x45, 0, 20 + len(body), 7, 0x4000, _TTL, self.protocol, 0, flow.source,
                flow.destination)
            return header[:10] + struct.pack("!H", _checksum(header)) + header[12:] + body
        return struct.pack(
            "!IHBB16s16s", 6 << 28, len(body), self.protocol, _TTL, flow.source, flow.destination) + body


def _checksum(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{(len(data) + 1) // 2}H", data + bytes(len(data) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


class Passed(NamedTuple):
    """A packet that has passed all rules."""

    where: str
    """``I``: at the end of input, ``P``: of postrouting."""
    flow: Flow
    mark: int
    output: int


class Outcome(NamedTuple):
    """What became of packets."""

    passed: dict[int, Passed]
    """By number."""
    refusals: int


class _WithoutJudge(ListedRuleset):
    """The rules but those of the judge."""

    def base_chains(self) -> Sequence[BaseChain]:
        return [chain for chain in super().base_chains() if chain.table != "judge"]


class Judge:
    """A node between two hosts."""

    def __init__(self, node: Namespace, client: Namespace) -> None:
        self.node = node
        with client.entered():
            self._wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
            self._wire.bind(("eth0", 0))
        with node.entered():
            self.interfaces = {name: Interface(name, socket.if_nametoindex(name)) for name in ("c0", "s0")}
            self.interfaces["lo"] = LOOPBACK
            self._raw = {
                Family.IPV4: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW),
                Family.IPV6: socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_RAW)}
            self._log = NetlinkSocket.open(NETLINK_NETFILTER)
            with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as named:
                named.bind(("c0", 0))
                self._mac = named.getsockname()[4]
        for kind, value in ((1, b"\1"), (2, struct.pack("!IBx", 128, 2)), (5, struct.pack("!I", 1))):
            self._log.request(
                4 << 8 | 1, NLM_F_ACK, NFGENMSG.pack(0, 0, socket.htons(_GROUP)) + attribute(kind, value))

    def close(self) -> None:
        for sock in (self._wire, *self._raw.values()):
            sock.close()
        self._log.close()

    def load(self, family: Family, nft: str, iptables: str = "") -> bool:
        """Replace the rules by those of nft and of iptables-restore; False if they are refused."""
        self.node.forget_connections()
        steps = [(["nft", "-f", "-"], f"flush ruleset\n{_JUDGE}{nft}")]
        if iptables:
            steps.append(([f"{'ip' if family is Family.IPV4 else 'ip6'}tables-nft-restore"], iptables))
        with self.node.entered():
            return all(
                subprocess.run(
                    argv, input=text, text=True, capture_output=True, check=False).returncode == 0
                for argv, text in steps)

    def predict(self, probes: Sequence[Probe]) -> list[Result]:
        with self.node.entered(), NetlinkSocket.open(NETLINK_NETFILTER) as sock:
            ruleset = _WithoutJudge(sock)
            node = Node(self._route, self._addresses)
            program = Program(ruleset)
            return [program.interpret(self._seen(probe), node) for probe in probes]

    def _seen(self, probe: Probe) -> Seen:
        return Seen(
            Packet.of(probe.family, probe.protocol, probe.flow),
            NO_INTERFACE if probe.is_from_node else self.interfaces["c0"], NO_INTERFACE, probe.is_from_node)

    def _route(self, address: Address, mark: Number) -> Route | None:
        family = Family.IPV4 if len(address) == 4 else Family.IPV6
        if format_address(address) in OWN[family] or address in family.loopback_cidr:
            return Route(RTN_LOCAL, LOOPBACK)
        name = "c0" if address in parse_cidr(_CLIENT_NETWORK[family]) else "s0"
        return Route(RTN_UNICAST, self.interfaces[name])

    def _addresses(self, interface: Interface, family: Family) -> Sequence[Address]:
        at = {"c0": 0, "s0": 1}.get(interface.name)
        return () if at is None else (parse_address(OWN[family][at]),)

    def send(self, probes: Sequence[Probe]) -> Outcome:
        """Send *probes* and return what became of them when the last one has been met."""
        for probe in (*probes, *_LAST):
            if not probe.is_from_node:
                ethertype = b"\x08\x00" if probe.family is Family.IPV4 else b"\x86\xdd"
                self._wire.send(self._mac + bytes(6) + ethertype + probe.data())
                continue
            assert probe.flow.destination is not None
            with contextlib.suppress(OSError):  # The sender is told that rules drop it.
                self._raw[probe.family].sendto(probe.data(), (format_address(probe.flow.destination), 0))
        passed: dict[int, Passed] = {}
        refusals, ends = 0, 0
        while ends < len(_LAST):
            received = self._log.receive()
            for kind, _, _, start, end in messages(received):
                if kind != 4 << 8:
                    continue
                found = attributes(received, start + NFGENMSG.size, end)
                where = text(found.get(10, b""))
                if where == "R":
                    refusals += 1
                elif where == "S":
                    ends += 1
                else:
                    number, flow = _parse(found[9])
                    passed[number] = Passed(
                        where, flow, int.from_bytes(found.get(2, b""), "big"),
                        int.from_bytes(found.get(5, b""), "big"))
        return Outcome(passed, refusals)

    def counts(self) -> dict[tuple[str, str, str, int], int]:
        """Return the packets that each rule with a counter has matched."""
        found: dict[tuple[str, str, str, int], int] = {}
        with self.node.entered(), NetlinkSocket.open(NETLINK_NETFILTER) as sock:
            def collect(answers: Iterator[tuple[bytes, int, int]]) -> None:
                for data, start, end in answers:
                    table = text(attributes(data, start + NFGENMSG.size, end)[1])
                    chain, rule = parse_rule((data, start + NFGENMSG.size, end))
                    for each in rule.expressions:
                        if each.name == "counter":
                            found[FAMILIES[data[start]], table, chain, rule.handle] = int.from_bytes(
                                each.attributes[2], "big")

            sock.dump(GETRULE, NFGENMSG.pack(0, 0, 0), collect)
        return found


_LAST: Final = tuple(
    Probe(Family.IPV4, Protocol.UDP, Flow(parse_address(source), parse_address("10.0.1.1"), 9, _LAST_PORT),
          is_from_node, 0)
    for source, is_from_node in (("10.0.1.2", False), ("10.0.1.1", True)))
"""Packets behind which all others have been met."""


def _parse(data: bytes) -> tuple[int, Flow]:
    is_ipv4 = data[0] >> 4 == 4
    at, size = (12, 4) if is_ipv4 else (8, 16)
    source, destination, body = (
        data[at : at + size], data[at + size : at + 2 * size], data[at + 2 * size :])
    ports = struct.unpack_from("!HH", body)
    (number,) = struct.unpack_from("!I", body, 4 if data[9 if is_ipv4 else 6] == Protocol.TCP else 8)
    return number, Flow(Address(source), Address(destination), *ports)


class Comparison(NamedTuple):
    """What the kernel did beside what was predicted."""

    problems: list[str]
    compared: int
    unclear: int


def compare(judge: Judge, probes: Sequence[Probe]) -> Comparison:
    """Send *probes*, and return where the kernel did not do what was predicted."""
    predicted = judge.predict(probes)
    before = judge.counts()
    outcome = judge.send(probes)
    after = judge.counts()
    problems: list[str] = []
    unclear, refused, may_be_refused = 0, 0, 0
    least: Counter[tuple[str, str, str, int]] = Counter()
    most: Counter[tuple[str, str, str, int]] = Counter()
    for probe, result in zip(probes, predicted, strict=True):
        ends = result.ends
        real = outcome.passed.get(probe.number)
        if len(ends) > 1 or not all(end.is_certain for end in ends):
            unclear += 1
        if not any(_agrees(end.fate, end.seen, real) for end in ends):
            did = real and (real.where, _shown(real.flow), real.mark, real.output)
            problems.append(f"{probe}: {did}, predicted {[*map(_told, ends)]}")
        refused += all(end.fate is Fate.REJECTED for end in ends)
        may_be_refused += any(end.fate is Fate.REJECTED for end in ends)
        counted = [
            (Counter(_rule(met.place) for met in end.branch.met if met.is_certain and not met.misses),
             Counter(_rule(met.place) for met in end.branch.met if not met.misses)) for end in ends]
        if counted:
            smallest, largest = counted[0]
            for low, high in counted[1:]:
                smallest, largest = smallest & low, largest | high
            least += smallest
            most += largest
    if not refused <= outcome.refusals <= may_be_refused:
        problems.append(f"{outcome.refusals} refusals, predicted {refused} to {may_be_refused}")
    for rule, packets in after.items():
        met = packets - before.get(rule, 0)
        if rule[1] != "judge" and not least[rule] <= met <= most[rule]:
            listed = judge.node.run("nft", "-a", "list", "table", *rule[:2]).splitlines()
            shown = next((line.strip() for line in listed if line.endswith(f" # handle {rule[3]}")), "")
            problems.append(f"{met} packets met {rule[:3]} {shown}, predicted {least[rule]} to {most[rule]}")
    return Comparison(problems, len(probes), unclear)


def _rule(place: Place) -> tuple[str, str, str, int]:
    return place.family, place.table, place.chain, place.handle


def _told(end: End) -> str:
    place = end.place and f"{end.place.table} {end.place.chain} {end.place.rule}"
    return f"{end.fate.name} {place} {_shown(end.seen.packet.flow)} mark {end.seen.mark} {end.doubts}"


def _shown(flow: Flow) -> str:
    hosts = ["?" if each is None else format_address(each) for each in (flow.source, flow.destination)]
    return f"{hosts[0]} {flow.source_port} > {hosts[1]} {flow.port}"


def _agrees(fate: Fate, seen: Seen, real: Passed | None) -> bool:
    if fate is Fate.UNKNOWN:
        return True
    if fate not in (Fate.DELIVERED, Fate.SENT):
        return real is None
    if real is None or real.where != ("I" if fate is Fate.DELIVERED else "P"):
        return False
    same = all(mine is None or mine == other for mine, other in zip(seen.packet.flow, real.flow, strict=True))
    is_mark = isinstance(seen.mark, str) or seen.mark == real.mark
    is_output = fate is Fate.DELIVERED or seen.output is None or seen.output.number == real.output
    return same and is_mark and is_output


@contextlib.contextmanager
def judging() -> Iterator[Judge]:
    with contextlib.ExitStack() as stack:
        node, client, server = (
            stack.enter_context(contextlib.closing(Namespace(name))) for name in ("node", "client", "server"))
        node.add_veth("c0", client, "eth0")
        node.add_veth("s0", server, "eth0")
        for family, (first, second, third) in OWN.items():
            prefix = "24" if family is Family.IPV4 else "64"
            node.add_address(f"{first}/{prefix}", "c0")
            node.add_address(f"{second}/{prefix}", "s0")
            node.add_address(f"{third}/{family.bits}", "lo")
        node.add_route("default", via="10.0.2.2")
        node.add_route("::/0", via="fd00:2::2")
        node.forward()
        judge = Judge(node, client)
        stack.enter_context(contextlib.closing(judge))
        yield judge
