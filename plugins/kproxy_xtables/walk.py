"""The way of a packet through iptables rules, as iptables-save prints them. Pure.

Understands the matches and targets of the backends' rules. In built-in chains, only rules that lead to other
chains are followed: what other tools add there is theirs.
"""

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from kproxy_core.backend.api import KernelObject
from kproxy_core.model.address import Address, Cidr, format_address, parse_address, parse_cidr
from kproxy_core.model.endpoint import Destination
from kproxy_core.model.node import NodeView
from kproxy_core.plan.fate import Origin, Outcome, Packet
from kproxy_xtables.rules import BUILT_IN_CHAINS, ChainKey, RulesByChain


@dataclass(frozen=True, slots=True)
class Flight:
    """A packet on its way."""

    packet: Packet
    """The packet before any translation."""
    destination: Address
    port: int
    mark: int = 0
    translated: bool = False
    masqueraded: bool = False
    local: int = 0
    """The port of this node to which it was redirected; 0: it was not."""

    @classmethod
    def of(cls, packet: Packet) -> "Flight":
        return cls(packet, packet.destination, packet.port)

    @property
    def where(self) -> Destination:
        return Destination(self.destination, self.port)


class Ruleset:
    """The chains of one IP family: in the kernel, or as they would be written."""

    def __init__(self, chains: RulesByChain) -> None:
        self._chains = chains
        self._indexes: dict[ChainKey, dict[str, list[int]]] = {}

    def rules(self, table: str, chain: str) -> Sequence[str]:
        return self._chains.get((table, chain), ())

    def relevant(self, table: str, chain: str, flight: Flight) -> Sequence[str]:
        """Return the rules of a chain, of a long one without those for another address or port."""
        rules = self.rules(table, chain)
        if len(rules) <= _SHORT:
            return rules
        index = self._indexes.get((table, chain))
        if index is None:
            index = self._indexes[table, chain] = _index(rules)
        keys = ("", f"{format_address(flight.destination)}", f"port {flight.port}")
        return [rules[number] for number in sorted(number for key in keys for number in index.get(key, ()))]

    def in_set(self, name: str, sides: Sequence[str], packet: Flight) -> int | None:
        """Return the mark of the entry for *packet* in an ipset, 0 without marks; None: it has no entry."""
        return None

    def is_recent(self, name: str, source: Address) -> bool:
        """Return whether the list *name* of the match ``recent`` holds *source*."""
        return False


class End(NamedTuple):
    """One of the ways that a packet may take through a chain."""

    share: float
    outcome: Outcome | None
    """None: accepted."""
    flight: Flight


class Walk:
    """Follows packets through chains, and notes what they meet."""

    def __init__(
        self, ruleset: Ruleset, node: NodeView,
        local: Container[Address] = (), bridged: Container[Address] = (),
    ) -> None:  # fmt: skip
        """*local*: addresses that are this node's, besides those of *node*.

        *bridged*: senders whose packets are on a bridge's port when they meet the rules.
        """
        self._ruleset = ruleset
        self._node = node
        self._local = local
        self._bridged = bridged
        self.objects: dict[KernelObject, None] = {}
        self.remembered: Destination | None = None
        self.strange = ""
        """A rule that is not understood; "": none."""

    def through(self, table: str, chain: str, flight: Flight) -> list[End]:
        return [
            End(share, done if isinstance(done, Outcome) else None, end)
            for share, done, end in self._chain(table, chain, flight)
        ]

    def is_local(self, address: Address) -> bool:
        node = self._node
        own = (node.node_ip, node.family.loopback, *node.node_port_addresses)
        return address in own or address in self._local

    @property
    def reason(self) -> str:
        """The last object that the packet met."""
        last = next(reversed(self.objects), None)
        return f"{last.where}: {last.text}" if last else ""

    def note(self, where: str, text: str) -> None:
        self.objects[KernelObject(where, text)] = None

    def _chain(self, table: str, chain: str, flight: Flight, start: int = 0) -> Iterator["_Branch"]:
        """Yield each way through the rules from number *start* on."""
        left = 1.0
        rules = self._ruleset.relevant(table, chain, flight)
        for number in range(start, len(rules)):
            text = rules[number]
            rule = _parsed(text)
            if chain in BUILT_IN_CHAINS and (not rule.target or rule.target in _TARGETS):
                continue
            if rule.strange:
                self.strange = self.strange or text
                self.note(f"{table} {chain}", f"{text}  (not understood)")
                continue
            chance = self._chance(rule, table, flight)
            if not chance:
                continue
            self.note(f"{table} {chain}", text)
            for share, done, end in self._take(rule, table, flight):
                share *= left * chance
                if done is not None or rule.goto or rule.target == "RETURN":
                    yield _Branch(share, done, end)
                    continue
                for rest in self._chain(table, chain, end, number + 1):
                    yield rest._replace(share=share * rest.share)
            left *= 1 - chance
            if not left:
                return
        yield _Branch(left, None, flight)

    def _take(self, rule: "_Rule", table: str, flight: Flight) -> Iterator["_Branch"]:
        options = rule.options
        match rule.target:
            case "DROP":
                yield _Branch(1.0, Outcome.DROPPED, flight)
            case "REJECT":
                yield _Branch(1.0, Outcome.REFUSED, flight)
            case "ACCEPT":
                yield _Branch(1.0, True, flight)
            case "RETURN" | "":
                yield _Branch(1.0, None, flight)
            case "MARK":
                value, mask = _value_and_mask(options["--set-xmark"])
                yield _Branch(1.0, None, replace(flight, mark=(flight.mark & ~mask) ^ value))
            case "SET":
                name, sides = options["--map-set"].split()
                mark = self._ruleset.in_set(name, sides.split(","), flight)
                yield _Branch(1.0, None, replace(flight, mark=mark or flight.mark))
            case "MASQUERADE":
                yield _Branch(1.0, True, replace(flight, masqueraded=True))
            case "DNAT":
                where = Destination.parse(options["--to-destination"])
                yield _Branch(1.0, True, replace(
                    flight, destination=where.address, port=where.port, translated=True))
            case "REDIRECT":
                yield _Branch(1.0, True, replace(flight, translated=True, local=int(options["--to-ports"])))
            case chain:
                yield from self._chain(table, chain, flight)

    def _chance(self, rule: "_Rule", table: str, flight: Flight) -> float:
        chance = 1.0
        for name, value, negated in rule.matches:
            if name == "--probability":
                chance *= float(value)
            elif name == "--rcheck":
                self._remember(rule, table, flight)
                return 0.0
            elif self._matches(name, value, flight) is negated:
                return 0.0
        return chance

    def _remember(self, rule: "_Rule", table: str, flight: Flight) -> None:
        """Note the endpoint that affinity gives the client. The walk continues as for a new client."""
        name = rule.options["--name"]
        if self._ruleset.is_recent(name, flight.packet.source):
            self.note(f"list {name}", "holds the sender")
            for text in self._ruleset.rules(table, rule.target):
                other = _parsed(text)
                if other.target == "DNAT":
                    self.remembered = Destination.parse(other.options["--to-destination"])

    def _matches(self, name: str, value: str, flight: Flight) -> bool:
        packet = flight.packet
        match name:
            case "-d":
                return flight.destination in network(value)
            case "-s":
                return packet.source in network(value)
            case "-p":
                return value == packet.protocol.name.lower()
            case "-i":
                return packet.origin is Origin.POD
            case "--dport":
                return int(value) == flight.port
            case "--dst-type":
                return value == "LOCAL" and self.is_local(flight.destination)
            case "--src-type":
                return value == "LOCAL" and packet.origin is Origin.NODE
            case "--ctstate" | "--state":
                states = value.split(",")
                return "NEW" in states or (flight.translated and "DNAT" in states)
            case "--mark":
                wanted, mask = _value_and_mask(value)
                return flight.mark & mask == wanted
            case "--vaddr":
                return packet.destination in network(value)
            case "--vproto":
                return value in (str(int(packet.protocol)), packet.protocol.name.lower())
            case "--vport":
                return int(value) == packet.port
            case "--match-set":
                return self._in_set(value, flight)
            case "--physdev-is-in":
                return packet.source in self._bridged
        return False

    def _in_set(self, value: str, flight: Flight) -> bool:
        name, sides = value.split()
        found = self._ruleset.in_set(name, sides.split(","), flight)
        if found is not None:
            self.note(f"ipset {name}", f"holds the packet ({sides})")
        return found is not None


class _Branch(NamedTuple):
    share: float
    done: Outcome | Literal[True] | None
    """True: accepted; None: no verdict, the calling chain continues."""
    flight: Flight


class _Rule(NamedTuple):
    matches: tuple[tuple[str, str, bool], ...]
    """Name, value, and whether it is negated."""
    target: str
    goto: bool
    options: Mapping[str, str]
    strange: bool


_TARGETS = frozenset({"DROP", "REJECT", "ACCEPT", "RETURN", "MARK", "SET", "MASQUERADE", "DNAT", "REDIRECT"})
_MATCHES = frozenset({
    "-d", "-s", "-p", "-i", "--dport", "--dst-type", "--src-type", "--ctstate", "--state", "--mark",
    "--probability", "--vaddr", "--vproto", "--vport",
})  # fmt: skip
_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"|(\S+)')
_SHORT = 32
"""Rules in a chain that needs no index."""
_ONE_ADDRESS = re.compile(r"(?<!! )-d (\S+)/(?:32|128) ")
_ONE_PORT = re.compile(r"(?<!! )--dport (\d+)(?: |$)")
_BARE_MATCHES = frozenset({"--rcheck", "--physdev-is-in"})
_FLAGS = frozenset({"--rsource", "--reap", "--random-fully", "--random", "--map-mark", "--set"})
_VALUES = frozenset({
    "--comment", "--mode", "--name", "--mask", "--seconds", "--nfacct-name", "--reject-with",
    "--set-xmark", "--to-destination", "--to-ports",
})  # fmt: skip


def _index(rules: Sequence[str]) -> dict[str, list[int]]:
    """Return the numbers of rules by the only address or port that they match; "": any."""
    found: dict[str, list[int]] = {}
    for number, rule in enumerate(rules):
        address, port = _ONE_ADDRESS.search(rule), _ONE_PORT.search(rule)
        key = address[1] if address else f"port {port[1]}" if port else ""
        found.setdefault(key, []).append(number)
    return found


@lru_cache(maxsize=4096)
def _parsed(text: str) -> _Rule:
    """Return a rule in parts. Without an unknown part it is understood."""
    matches: list[tuple[str, str, bool]] = []
    options: dict[str, str] = {}
    target, goto, negated, strange = "", False, False, False
    words = _words(text)
    for word in words:
        if word == "!":
            negated = True
            continue
        if word in ("-j", "-g"):
            target, goto = next(words), word == "-g"
        elif word in _BARE_MATCHES:
            matches.append((word, "", negated))
        elif word == "--match-set" or word == "--map-set":
            value = f"{next(words)} {next(words)}"
            if word == "--map-set":
                options[word] = value
            else:
                matches.append((word, value, negated))
        elif word in _MATCHES:
            matches.append((word, next(words), negated))
        elif word in _VALUES:
            options[word] = next(words)
        elif word == "-m":
            next(words)
        elif word not in _FLAGS:
            strange = True
        negated = False
    return _Rule(tuple(matches), target, goto, options, strange)


def _words(text: str) -> Iterator[str]:
    """Yield the words of a rule; a fifth of the time that `shlex` takes."""
    for quoted, bare in _WORD.findall(text):
        yield bare or quoted.replace('\\"', '"')


@lru_cache(maxsize=4096)
def network(text: str) -> Cidr:
    """Return a network as iptables and ipset write it: a single address has no prefix length."""
    return parse_cidr(text if "/" in text else f"{text}/{len(parse_address(text)) * 8}")


def _value_and_mask(text: str) -> tuple[int, int]:
    value, _, mask = text.partition("/")
    return int(value, 0), int(mask, 0) if mask else 0xFFFFFFFF
