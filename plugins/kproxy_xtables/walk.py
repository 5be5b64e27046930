"""The path of a packet through iptables rules as iptables-save prints them. Pure."""

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice
from operator import attrgetter
from typing import Literal, NamedTuple

from kproxy_core.contract import (
    Address,
    Destination,
    KernelObject,
    NodeView,
    Origin,
    Outcome,
    Packet,
    Protocol,
    format_address,
    is_own,
    parse_network,
)
from kproxy_xtables.rules import BUILT_IN_CHAINS, ChainKey, RulesByChain

# Rules: the matches and targets that the backends use.


class Skb(NamedTuple):
    """A packet with its current destination, mark and translation."""

    packet: Packet
    """The packet as it was sent."""
    destination: Address
    port: int
    mark: int = 0
    translated: bool = False
    masqueraded: bool = False
    local: int = 0
    """The port of this node to which it was redirected; 0: it was not."""

    @classmethod
    def of(cls, packet: Packet) -> "Skb":
        return cls(packet, packet.destination, packet.port)

    @property
    def where(self) -> Destination:
        return Destination(self.destination, self.port)


class Branch(NamedTuple):
    """One of the paths that a packet may take through a chain."""

    share: float
    done: Outcome | Literal[True] | None
    """True: accepted; None: no verdict, the calling chain continues."""
    skb: Skb

    @property
    def outcome(self) -> Outcome | None:
        """The verdict; None: the packet continues."""
        return self.done if isinstance(self.done, Outcome) else None


Test = Callable[["Walk", Skb], bool]
Act = Callable[["Walk", Skb], Branch]


class ParsedRule(NamedTuple):
    """The meaning of one rule."""

    tests: tuple[Test, ...] = ()
    chance: float = 1.0
    recent: str = ""
    """The list in which the rule looks up clients; "": none."""
    target: str = ""
    goto: bool = False
    act: Act | None = None
    """The target's effect; None: it is a chain."""
    endpoint: Destination | None = None
    """The new destination of a DNAT rule."""
    places: tuple[tuple[str, str], ...] = ()
    """Names and values of the matches on the destination's address and port."""
    looks_further: bool = False
    """The rule depends on more than a packet's headers, mark and origin, and the node's addresses."""
    strange: bool = False
    """The rule has an unknown match or target."""

    def matches(self, around: "Walk", skb: Skb) -> bool:
        for test in self.tests:  # noqa: SIM110 - all() of a generator takes twice as long
            if not test(around, skb):
                return False
        return True


network = lru_cache(maxsize=4096)(parse_network)


def _value_and_mask(text: str) -> tuple[int, int]:
    value, _, mask = text.partition("/")
    return int(value, 0), int(mask, 0) if mask else 0xFFFFFFFF


def _in_network(address_of: Callable[[Skb], Address], value: str) -> Test:
    net, (address, prefix) = network(value), network(value)
    if prefix == len(address) * 8:
        return lambda around, skb: address_of(skb) == address
    return lambda around, skb: address_of(skb) in net


def _protocol(value: str) -> Test:
    return lambda around, skb: skb.packet.protocol is _PROTOCOLS.get(value)


def _port(value: str) -> Test:
    port = int(value)
    return lambda around, skb: skb.port == port


def _state(value: str) -> Test:
    states = value.split(",")
    return lambda around, skb: "NEW" in states or (skb.translated and "DNAT" in states)


def _mark(value: str) -> Test:
    wanted, mask = _value_and_mask(value)
    return lambda around, skb: skb.mark & mask == wanted


_PROTOCOLS = {text: each for each in Protocol for text in (each.name.lower(), str(int(each)))}
_TESTS: Mapping[str, Callable[[str], Test]] = {
    "-d": partial(_in_network, attrgetter("destination")),
    "-s": partial(_in_network, attrgetter("packet.source")),
    "-p": _protocol,
    "-i": lambda value: lambda around, skb: skb.packet.origin is Origin.POD,
    "--dport": _port,
    "--dst-type": lambda value: lambda around, skb: (
        value == "LOCAL" and around.is_local(skb.destination)),
    "--src-type": lambda value: lambda around, skb: (
        value == "LOCAL" and skb.packet.origin is Origin.NODE),
    "--ctstate": _state,
    "--state": _state,
    "--mark": _mark,
    "--vaddr": partial(_in_network, attrgetter("packet.destination")),
    "--vproto": _protocol,
    "--vport": lambda value: lambda around, skb: skb.packet.port == int(value),
    "--match-set": lambda value: lambda around, skb: around.set_mark(value, skb) is not None,
    "--physdev-is-in": lambda value: lambda around, skb: around.is_bridged(skb.packet.source),
}  # fmt: skip
"""Known matches."""


def _set_mark(value: str) -> Act:
    new, mask = _value_and_mask(value)
    return lambda around, skb: Branch(1.0, None, skb._replace(mark=(skb.mark & ~mask) ^ new))


def _translate(value: str) -> Act:
    address, port = Destination.parse(value)
    return lambda around, skb: Branch(  # _replace() takes three times as long.
        1.0, True, Skb(skb.packet, address, port, skb.mark, True, skb.masqueraded, skb.local))


def _redirect(value: str) -> Act:
    port = int(value)
    return lambda around, skb: Branch(1.0, True, skb._replace(translated=True, local=port))


_ACTS: Mapping[str, tuple[str, Callable[[str], Act]]] = {
    "": ("", lambda _: lambda around, skb: Branch(1.0, None, skb)),
    "RETURN": ("", lambda _: lambda around, skb: Branch(1.0, None, skb)),
    "ACCEPT": ("", lambda _: lambda around, skb: Branch(1.0, True, skb)),
    "DROP": ("", lambda _: lambda around, skb: Branch(1.0, Outcome.DROPPED, skb)),
    "REJECT": ("", lambda _: lambda around, skb: Branch(1.0, Outcome.REFUSED, skb)),
    "MASQUERADE": ("", lambda _: lambda around, skb: Branch(1.0, True, skb._replace(masqueraded=True))),
    "MARK": ("--set-xmark", _set_mark),
    "SET": ("--map-set", lambda value: lambda around, skb: Branch(
        1.0, None, skb._replace(mark=around.set_mark(value, skb) or skb.mark))),
    "DNAT": ("--to-destination", _translate),
    "REDIRECT": ("--to-ports", _redirect),
}
"""Known targets, with the option that each needs."""
TARGETS = frozenset(_ACTS)

_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"|(\S+)')
_TARGET = re.compile(r"((?:.* )?)-([jg]) (\S+)(.*)")
_FLAGS = (
    "--rsource", "--reap", "--random-fully", "--random", "--map-mark", "--set", "--rcheck", "--physdev-is-in")
_OPTIONS = (
    "-m", "--comment", "--mode", "--probability", "--name", "--mask", "--seconds", "--nfacct-name",
    "--reject-with", "--set-xmark", "--to-destination", "--to-ports",
)  # fmt: skip
_VALUES = {
    **dict.fromkeys([*_TESTS, *_OPTIONS], 1), **dict.fromkeys(_FLAGS, 0), "--match-set": 2, "--map-set": 2}
"""The number of words that follow each option."""
_FURTHER = frozenset({
    "--match-set", "--map-set", "--rcheck", "--physdev-is-in", "--vaddr", "--vport", "--vproto"})


@lru_cache(maxsize=4096)
def parsed(text: str) -> ParsedRule:
    """Return the meaning of a rule, without ``-A CHAIN``."""
    found = _TARGET.fullmatch(text)
    if found is None or found[1].count('"') % 2:  # within a comment
        return _without_target(text)
    head, jump, target, tail = found.groups()
    rule = _without_target(head)  # Many rules differ in their targets only.
    option, make = _ACTS.get(target, ("", None))
    try:
        options = dict(_options(tail)) if tail else {}
        act = make(options.get(option, "")) if make else None
        endpoint = Destination.parse(options[option]) if target == "DNAT" else None
    except (KeyError, ValueError):
        return rule._replace(target=target, looks_further=True, strange=True)
    return ParsedRule(
        rule.tests, rule.chance, rule.recent, target, jump == "g", act, endpoint, rule.places,
        rule.looks_further or target == "SET", rule.strange)


@lru_cache(maxsize=4096)
def _without_target(text: str) -> ParsedRule:
    tests: list[Test] = []
    places: list[tuple[str, str]] = []
    options: dict[str, str] = {}
    try:
        for name, value in _options(text):
            word = name.removeprefix("! ")
            if word not in _TESTS:
                options[word] = value
                continue
            test = _TESTS[word](value)
            tests.append(test if name == word else _not(test))
            if word in ("-d", "--dport"):
                places.append((word, value))
        return ParsedRule(
            tuple(tests), float(options.get("--probability", 1)),
            options["--name"] if "--rcheck" in options else "", act=_ACTS[""][1](""), places=tuple(places),
            looks_further=any(word in text for word in _FURTHER))
    except (KeyError, ValueError):
        return ParsedRule(looks_further=True, strange=True)


def _options(text: str) -> Iterator[tuple[str, str]]:
    """Yield names of options, with "! " if negated, and their values. Raises ValueError for another word."""
    words = iter([bare or quoted.replace('\\"', '"') for quoted, bare in _WORD.findall(text)])
    for word in words:
        name, no = (next(words, ""), "! ") if word == "!" else (word, "")
        if name not in _VALUES:
            raise ValueError(name)
        yield no + name, " ".join(islice(words, _VALUES[name]))


_OF_A_PROXY = re.compile(r"KUBE-(?!ROUTER-)")
"""Filter chains of service proxies and of the kubelet, and not of kube-router's network policies."""


def _is_followed(table: str, chain: str, rule: ParsedRule) -> bool:
    if chain not in BUILT_IN_CHAINS:
        return True
    return rule.target not in TARGETS and (
        table != "filter" or _OF_A_PROXY.match(rule.target) is not None)


def _not(test: Test) -> Test:
    return lambda around, skb: not test(around, skb)


# The path.

Objects = dict[KernelObject, None]
"""In the order in which a packet met them."""


class Ruleset:
    """The chains of one IP family: in the kernel, or as they would be written."""

    def __init__(self, chains: RulesByChain, *, for_many: bool = False) -> None:
        """*for_many*: many packets will be followed."""
        self._chains = chains
        self._indexes: dict[ChainKey, dict[str, list[int]]] = {}
        self._likenesses: dict[Sequence[ChainKey], Callable[[Skb], object] | None] = {}
        self.known: dict[object, tuple[Outcome | None, bool, Objects]] | None = {} if for_many else None
        """Cached results of `Walk.onward` and the objects met, by `likeness`."""

    def rules(self, table: str, chain: str) -> Sequence[str]:
        return self._chains.get((table, chain), ())

    def relevant(self, table: str, chain: str, skb: Skb) -> Sequence[str]:
        """Return the rules of a chain, of a long one without those for another address or port."""
        rules = self.rules(table, chain)
        if len(rules) <= _SHORT:
            return rules
        index = self._indexes.get((table, chain))
        if index is None:
            index = self._indexes[table, chain] = _index(rules)
        keys = ("", format_address(skb.destination), f"port {skb.port}")
        return [rules[number] for number in sorted(number for key in keys for number in index.get(key, ()))]

    def likeness(self, chains: Sequence[ChainKey], skb: Skb) -> object | None:
        """Return a cache key for packets that no rule reachable from *chains* distinguishes.

        The rules may tell whether the destination is this node. None: any two packets may differ.
        """
        if chains not in self._likenesses:
            self._likenesses[chains] = self._likeness(chains)
        likeness = self._likenesses[chains]
        return likeness(skb) if likeness is not None else None

    def _likeness(self, chains: Sequence[ChainKey]) -> Callable[[Skb], object] | None:
        reached = list(chains)
        values = set[tuple[str, str]]()
        for table, chain in reached:
            for text in self.rules(table, chain):
                rule = parsed(text)
                if not _is_followed(table, chain, rule):
                    continue
                if rule.looks_further:
                    return None
                values.update(rule.places)
                if rule.target not in TARGETS and (table, rule.target) not in reached:
                    reached.append((table, rule.target))
        networks = {network(value) for name, value in values if name == "-d"}
        single = {net for net in networks if net.prefix == len(net.network) * 8}
        addresses, wider = {net.network for net in single}, tuple(networks - single)
        ports = {int(value) for name, value in values if name == "--dport"}

        def likeness(skb: Skb) -> object:
            (origin, source, _, protocol, _), to, port, *state = skb
            return (
                chains, origin, source, protocol, *state,
                to if to in addresses else None, port if port in ports else None,
                *[to in net for net in wider],
            )  # fmt: skip

        return likeness

    def in_set(self, name: str, sides: Sequence[str], packet: Skb) -> int | None:
        """Return the mark of the entry for *packet* in an ipset, 0 without marks; None without an entry."""
        return None

    def is_recent(self, name: str, source: Address) -> bool:
        """Return whether the list *name* of the match ``recent`` holds *source*."""
        return False


class Walk:
    """Follows packets through chains, and records the objects that they meet.

    In built-in chains, only rules that jump to other chains are followed: other tools own the rest. In table
    filter, only those to chains of service proxies: `kproxy_core.nft.interpret` follows firewalls.
    """

    def __init__(
        self, ruleset: Ruleset, node: NodeView,
        addresses: frozenset[Address] = frozenset(), *, bridged: Container[Address] = (),
        bound: Container[Address] = (),
    ) -> None:  # fmt: skip
        """*addresses*: of the node's interfaces. *bound*: those of an interface that the mode made.

        *bridged*: senders whose packets are on a bridge's port when they meet the rules.
        """
        self._ruleset = ruleset
        self._node = node
        self._addresses = addresses
        self._bound = bound
        self._bridged = bridged
        self.objects: Objects = {}
        self.remembered: Destination | None = None
        self.strange = ""
        """A rule with an unknown match or target; "": none."""

    def through(self, table: str, chain: str, skb: Skb) -> list[Branch]:
        return self._rules(table, chain, self._ruleset.relevant(table, chain, skb), skb)

    def onward(self, chains: Sequence[ChainKey], skb: Skb) -> tuple[Outcome | None, bool]:
        """Follow a packet through built-in *chains*. Return the verdict, and whether it was masqueraded.

        Where rules choose at random, the first verdict counts.
        """
        known = self._ruleset.known
        if known is None or (likeness := self._ruleset.likeness(chains, skb)) is None:
            return self._onward(chains, skb)
        key = likeness, self.is_local(skb.destination)
        if key not in known:
            met, self.objects = self.objects, {}
            known[key] = *self._onward(chains, skb), self.objects
            self.objects = met
        outcome, masqueraded, objects = known[key]
        self.objects.update(objects)
        return outcome, masqueraded

    def _onward(self, chains: Sequence[ChainKey], skb: Skb) -> tuple[Outcome | None, bool]:
        for table, chain in chains:
            for end in self.through(table, chain, skb):
                if end.outcome is not None:
                    return end.outcome, False
                last = end.skb
            skb = last
        return None, skb.masqueraded

    def is_local(self, address: Address) -> bool:
        return address in self._bound or is_own(address, self._node, self._addresses)

    @property
    def reason(self) -> str:
        """The last object that the packet met."""
        last = next(reversed(self.objects), None)
        return f"{last.where}: {last.text}" if last else ""

    def note(self, where: str, text: str) -> None:
        self.objects[_object(where, text)] = None

    def is_bridged(self, source: Address) -> bool:
        return source in self._bridged

    def set_mark(self, value: str, skb: Skb) -> int | None:
        """Call `Ruleset.in_set`. *value*: the set's name, and the compared sides of the packet."""
        name, sides = value.split()
        found = self._ruleset.in_set(name, sides.split(","), skb)
        if found is not None:
            self.note(f"ipset {name}", f"holds the packet ({sides})")
        return found

    def _rules(self, table: str, chain: str, rules: Sequence[str], skb: Skb) -> list[Branch]:
        found: list[Branch] = []
        left = 1.0
        where = f"{table} {chain}"
        for number, text in enumerate(rules):
            rule = parsed(text)
            if not _is_followed(table, chain, rule):
                continue
            if rule.strange:
                self.strange = self.strange or text
                self.note(where, f"{text}  (not understood)")
                continue
            if not rule.matches(self, skb):
                continue
            if rule.recent:
                self._remember(rule, table, skb)
                continue
            self.note(where, text)
            branches = [rule.act(self, skb)] if rule.act else self.through(table, rule.target, skb)
            leaves = rule.goto or rule.target == "RETURN"
            if rule.chance == 1 and len(branches) == 1 and branches[0].done is None and not leaves:
                skb = branches[0].skb
                continue
            factor = left * rule.chance
            for branch in branches:
                share = branch.share * factor
                if branch.done is not None or leaves:
                    found.append(branch if factor == 1 else Branch(share, branch.done, branch.skb))
                else:
                    found += [
                        rest._replace(share=share * rest.share)
                        for rest in self._rules(table, chain, rules[number + 1:], branch.skb)
                    ]
            left *= 1 - rule.chance
            if not left:
                return found
        found.append(Branch(left, None, skb))
        return found

    def _remember(self, rule: ParsedRule, table: str, skb: Skb) -> None:
        """Record the endpoint of the client's affinity. The walk continues as for a new client."""
        if self._ruleset.is_recent(rule.recent, skb.packet.source):
            self.note(f"list {rule.recent}", "holds the sender")
            for text in self._ruleset.rules(table, rule.target):
                self.remembered = parsed(text).endpoint or self.remembered


_object = lru_cache(maxsize=4096)(KernelObject)
"""Shared, because packets to one frontend meet the same rules: fewer objects for the garbage collector."""
_SHORT = 32
"""Limit for the rules in a chain without an index."""
_ONE_ADDRESS = re.compile(r"(?<!! )-d (\S+)/(?:32|128) ")
_ONE_PORT = re.compile(r"(?<!! )--dport (\d+)(?: |$)")


def _index(rules: Sequence[str]) -> dict[str, list[int]]:
    """Return the numbers of rules by the only address or port that they match; "": any."""
    found: dict[str, list[int]] = {}
    for number, rule in enumerate(rules):
        if match := _ONE_ADDRESS.search(rule):
            key = match[1]
        elif match := _ONE_PORT.search(rule):
            key = f"port {match[1]}"
        else:
            key = ""
        found.setdefault(key, []).append(number)
    return found
