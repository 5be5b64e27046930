"""The path of a packet through iptables rules as iptables-save prints them. Pure.

A rule is read once, into parts that `kproxy_core.nft.interpret` follows.
"""

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from operator import attrgetter
from typing import Any, Final, NamedTuple

from kproxy_core.contract import (
    Address,
    Cidr,
    Destination,
    Fate,
    KernelObject,
    Outcome,
    Protocol,
    Question,
    format_address,
    parse_network,
)
from kproxy_core.nft.expressions import CERTAIN, HOOKS, BaseChain, Branch, HeldSet, Part, Prepared, prepare
from kproxy_core.nft.interpret import Fate as EndFate
from kproxy_core.nft.interpret import Program, Way
from kproxy_core.nft.packet import (
    RTN_LOCAL,
    Answer,
    Depends,
    Interface,
    Node,
    Number,
    Place,
    Seen,
    Share,
    Translation,
)
from kproxy_core.nft.packet import Packet as Headers
from kproxy_core.nft.rules import (
    NF_ACCEPT,
    NF_DROP,
    NFT_CONTINUE,
    NFT_GOTO,
    NFT_JUMP,
    NFT_RETURN,
    HeldRule,
    Verdict,
)
from kproxy_core.nft.xt import (
    WITHOUT_EFFECT,
    Effect,
    Sight,
    Target,
    Test,
    Unreadable,
    address_type,
    changed_mark,
    negated,
    redirected,
    to_interface,
)
from kproxy_nft.packets import first_seen, routes
from kproxy_xtables.rules import BUILT_IN_CHAINS, ChainKey, RulesByChain

# Rules: the matches and targets that the backends use.


class ParsedRule(NamedTuple):
    """The meaning of one rule."""

    text: str
    parts: tuple[Part, ...]
    is_strange: bool
    """The rule has an unknown match or target."""

    @property
    def chain(self) -> str:
        """The chain to which the rule sends packets; "": none."""
        last = self.parts[-1] if self.parts else None
        return last.chain if isinstance(last, Verdict) else ""


network = lru_cache(maxsize=4096)(parse_network)
_PROTOCOLS = {text: int(each) for each in Protocol for text in (each.name.lower(), str(int(each)))}
_STATES = {
    "INVALID": 1, "ESTABLISHED": 2, "RELATED": 4, "NEW": 8, "SNAT": 64, "DNAT": 128, "UNTRACKED": 256}
"""XT_CONNTRACK_STATE_*."""
_TYPES = {"LOCAL": RTN_LOCAL}


def _value_and_mask(text: str) -> tuple[int, int]:
    value, _, mask = text.partition("/")
    return int(value, 0), int(mask, 0) if mask else 0xFFFFFFFF


def _name_and_sides(text: str) -> tuple[str, tuple[str, ...]]:
    name, _, sides = text.partition(" ")
    return name, tuple(sides.split(","))


_Read = Callable[[Sight], Any]
"""Returns what a match looks at. None, or a text that tells why: not known."""
_SENDER, _DESTINATION = attrgetter("seen.packet.flow.source"), attrgetter("seen.packet.flow.destination")
_PROTOCOL = attrgetter("seen.packet.protocol")


def _address_in(value: str) -> Callable[[Address], bool]:
    net = network(value)
    return net.network.__eq__ if net.prefix == len(net.network) * 8 else net.__contains__


def _interface_is(value: str) -> Callable[[Interface], bool]:
    prefix = value.removesuffix("+")
    return lambda interface: interface.name == value or (
        prefix != value and interface.name.startswith(prefix))


def _has_mark(value: str) -> Callable[[int], bool]:
    wanted, mask = _value_and_mask(value)
    return lambda mark: mark & mask == wanted


def _in_state(value: str) -> Callable[[int], bool]:
    states = sum(_STATES[state] for state in value.split(","))
    return lambda state: bool(state & states)


def _equals(value: object) -> Callable[[object], bool]:
    return value.__eq__


_MATCHES: Final[Mapping[str, tuple[_Read, Callable[[str], Callable[[Any], bool]]]]] = {
    "-d": (_DESTINATION, _address_in),
    "-s": (_SENDER, _address_in),
    "-p": (_PROTOCOL, lambda value: _equals(_PROTOCOLS[value])),
    "-i": (attrgetter("arrived_by"), _interface_is),
    "--dport": (attrgetter("seen.packet.flow.port"), lambda value: _equals(int(value))),
    "--dst-type": (
        lambda sight: address_type(sight, _DESTINATION(sight)), lambda value: _equals(_TYPES[value])),
    "--src-type": (
        lambda sight: address_type(sight, _SENDER(sight)), lambda value: _equals(_TYPES[value])),
    "--ctstate": (attrgetter("conntrack_state"), _in_state),
    "--state": (attrgetter("conntrack_state"), _in_state),
    "--mark": (attrgetter("seen.mark"), _has_mark),
    "--vaddr": (attrgetter("dialled.destination"), _address_in),
    "--vproto": (_PROTOCOL, lambda value: _equals(_PROTOCOLS[value])),
    "--vport": (attrgetter("dialled.port"), lambda value: _equals(int(value))),
}  # fmt: skip
"""Matches of one value: what they look at, and what it has to be."""


def _test(name: str, value: str) -> Test:
    """Return a match. Raises KeyError or ValueError if it is not known."""
    if name in _OTHER_MATCHES:
        return _OTHER_MATCHES[name](value)
    read, make = _MATCHES[name]
    holds = make(value)

    def test(sight: Sight) -> Answer:
        found = read(sight)
        return Depends(f"match {name}") if found is None or isinstance(found, str) else holds(found)

    return test


def _chance(value: str) -> Test:
    yes = float(value)
    answer = Share(yes, "match statistic") if 0 < yes < 1 else yes >= 1
    return lambda sight: answer


def _in_set(value: str) -> Test:
    def test(sight: Sight) -> Answer:
        found = sight.node.in_ipset(name, sides, sight.seen.packet)
        return found if isinstance(found, Depends) else found is not None

    name, sides = _name_and_sides(value)
    return test


_OTHER_MATCHES: Final[Mapping[str, Callable[[str], Test]]] = {
    "--probability": _chance,
    "--match-set": _in_set,
    "--physdev-is-in": lambda value: lambda sight: sight.node.is_bridged(_SENDER(sight)),
}


def _dnat(value: str) -> Part:
    address, port = Destination.parse(value)
    translation = Translation(False, address, address, (port, port))
    return Target(lambda sight: Effect(sight.seen, NF_ACCEPT, translation))


def _redirect(value: str) -> Part:
    translation = Translation(is_source=False, ports=(int(value), int(value)))
    return Target(lambda sight: Effect(sight.seen, NF_ACCEPT, redirected(sight, translation)))


def _masquerade(value: str) -> Part:
    return Target(lambda sight: Effect(
        sight.seen, NF_ACCEPT, to_interface(sight, sight.seen.output, Translation(is_source=True))))


def _set_mark(value: str) -> Part:
    mark, mask = _value_and_mask(value)
    return Target(lambda sight: Effect(
        sight.seen._replace(mark=changed_mark(sight.seen.mark, mask, mark))))


def _map_set(value: str) -> Part:
    def act(sight: Sight) -> Effect:
        found = sight.node.in_ipset(name, sides, sight.seen.packet)
        mark: Number = found.why if isinstance(found, Depends) else found or sight.seen.mark
        return Effect(sight.seen._replace(mark=mark))

    name, sides = _name_and_sides(value)
    return Target(act)


_TARGETS: Final[Mapping[str, tuple[str, Callable[[str], Part]]]] = {
    "RETURN": ("", lambda value: Verdict(NFT_RETURN)),
    "ACCEPT": ("", lambda value: Verdict(NF_ACCEPT)),
    "DROP": ("", lambda value: Verdict(NF_DROP)),
    "REJECT": ("", lambda value: Target(lambda sight: Effect(sight.seen, NF_DROP, rejects=True))),
    "MASQUERADE": ("", _masquerade),
    "MARK": ("--set-xmark", _set_mark),
    "SET": ("--map-set", _map_set),
    "DNAT": ("--to-destination", _dnat),
    "REDIRECT": ("--to-ports", _redirect),
}
"""Known targets, with the option that each needs."""

_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"|(\S+)')
_TARGET = re.compile(r"((?:.* )?)-([jg]) (\S+)(.*)")
_FLAGS = (
    "--rsource", "--reap", "--random-fully", "--random", "--map-mark", "--set", "--rcheck", "--physdev-is-in")
_OPTIONS = (
    "-m", "--comment", "--mode", "--name", "--mask", "--seconds", "--nfacct-name", "--reject-with",
    "--probability", "--set-xmark", "--to-destination", "--to-ports",
)  # fmt: skip
_VALUES = {
    **dict.fromkeys([*_MATCHES, *_OPTIONS], 1), **dict.fromkeys(_FLAGS, 0), "--match-set": 2, "--map-set": 2}
"""The number of words that follow each option."""


@lru_cache(maxsize=4096)
def parsed(text: str) -> ParsedRule:
    """Return the meaning of a rule, without ``-A CHAIN``."""
    found = _TARGET.fullmatch(text)
    if found is None or found[1].count('"') % 2:  # within a comment
        return ParsedRule(text, *_matches(text))
    head, jump, target, tail = found.groups()
    tests, is_strange = _matches(head)  # Many rules differ in their targets only.
    try:
        step = _target(jump, target, tail)
    except (KeyError, ValueError):
        step, is_strange = _unknown_target(target), True
    return ParsedRule(text, (*tests, step), is_strange)


@lru_cache(maxsize=4096)
def _matches(text: str) -> tuple[tuple[Test, ...], bool]:
    """Return the matches in *text*, and whether one is unknown."""
    tests: list[Test] = []
    by_chance: list[Test] = []
    options: dict[str, str] = {}
    try:
        for name, value, is_negated in _options(text):
            if name in _MATCHES or name in _OTHER_MATCHES:
                test = _test(name, value)
                (by_chance if name == "--probability" else tests).append(
                    negated(test) if is_negated else test)
            elif is_negated:
                raise ValueError(name)
            options[name] = value
        if "--rcheck" in options:
            listed = options["--name"]
            tests.append(lambda sight: sight.node.is_recent(listed, _SENDER(sight)))
    except (KeyError, ValueError):
        return (lambda sight: Depends("a match that is not known"),), True
    return (*([_all_of(tests)] if tests else ()), *by_chance), False


def _all_of(tests: Sequence[Test]) -> Test:
    """Return one match for all of *tests*: if several are not known, it names the first."""

    def test(sight: Sight) -> Answer:
        unknown: Answer = True
        for each in tests:
            answer = each(sight)
            if answer is False:
                return False
            if unknown is True:
                unknown = answer
        return unknown

    return test


def _target(jump: str, target: str, tail: str) -> Part:
    option, make = _TARGETS.get(target, ("", None))
    if make is not None:
        options = {name: value for name, value, _ in _options(tail)}
        return make(options[option] if option else "")
    if target in WITHOUT_EFFECT:
        return Verdict(NFT_CONTINUE)
    if tail:
        raise ValueError(target)
    return Verdict(NFT_GOTO if jump == "g" else NFT_JUMP, target)


def _unknown_target(name: str) -> Part:
    def act(sight: Sight) -> Effect:
        raise Unreadable(f"target {name}")

    return Target(act)


def _options(text: str) -> Iterator[tuple[str, str, bool]]:
    """Yield names of options with their values, and whether they are negated.

    Raises ValueError for another word.
    """
    words = iter([bare or quoted.replace('\\"', '"') for quoted, bare in _WORD.findall(text)])
    for word in words:
        name = next(words, "") if word == "!" else word
        if name not in _VALUES:
            raise ValueError(name)
        yield name, " ".join(islice(words, _VALUES[name])), word == "!"


_OF_A_PROXY = re.compile(r"KUBE-(?!ROUTER-)")
"""Filter chains of service proxies and of the kubelet, and not of kube-router's network policies."""


def _is_followed(table: str, chain: str, rule: ParsedRule) -> bool:
    if chain not in BUILT_IN_CHAINS:
        return True
    return bool(rule.chain) and (table != "filter" or _OF_A_PROXY.match(rule.chain) is not None)


# The chains.

_FIRST_HOOKS = ("prerouting", "output")
_PRIORITIES = {"mangle": -150, "nat": -100, "filter": 0}
_HOOKS = {
    "mangle": HOOKS, "nat": ("prerouting", "input", "output", "postrouting"),
    "filter": ("input", "forward", "output"),
}  # fmt: skip
_KINDS = {**{("mangle", hook): "filter" for hook in HOOKS}, ("mangle", "output"): "route"}


class _Distinguished(NamedTuple):
    """What rules compare a packet with."""

    addresses: frozenset[Address]
    wider: tuple[Cidr, ...]
    ports: frozenset[int]
    further: bool
    """They depend on more than a packet's headers, mark and origin, and the node's addresses."""


_FURTHER = re.compile(r"--(?:match-set|map-set|rcheck|physdev-is-in|vaddr|vport|vproto) ")


class Ruleset(Program):
    """The chains of one IP family: in the kernel, or as they would be written."""

    def __init__(
        self, chains: RulesByChain, tables: Collection[str] = ("nat", "filter"), *, for_many: bool = False,
    ) -> None:
        """*tables*: those that packets meet. *for_many*: many packets will be followed."""
        super().__init__(self)
        self._by_chain = chains
        self._base_chains = [
            BaseChain("inet", table, hook.upper(), _KINDS.get((table, hook), table), hook,
                      _PRIORITIES[table], drops_by_policy=False, packets=None)
            for table in tables for hook in _HOOKS[table]]
        self._prepared: dict[ChainKey, dict[int, Prepared | None]] = {}
        """The rules of a chain by their numbers; None: not followed."""
        self._indexes: dict[ChainKey, dict[str, list[int]]] = {}
        self._distinguished: _Distinguished | None = None
        self._for_many = for_many
        self.followed: dict[object, Walk] = {}
        """Packets behind their first hook, by `likeness`."""

    def texts(self, table: str, chain: str) -> Sequence[str]:
        return self._by_chain.get((table, chain), ())

    def text(self, place: Place) -> str:
        assert place.rule is not None
        return self.texts(place.table, place.chain)[place.rule - 1]

    def base_chains(self) -> Sequence[BaseChain]:
        return self._base_chains

    def rules(self, family: str, table: str, chain: str) -> Sequence[HeldRule]:
        return ()

    def held_set(self, family: str, table: str, name: str) -> HeldSet | None:
        return None

    def prepared(
        self, family: str, table: str, chain: str, branches: Sequence[Branch]
    ) -> Iterable[Prepared]:
        """Return the rules of a chain, of a long one without those for other addresses or ports."""
        texts = self.texts(table, chain)
        numbers = range(len(texts)) if len(texts) <= _SHORT else self._relevant(table, chain, branches)
        known = self._prepared.setdefault((table, chain), {})
        found = []
        for number in numbers:
            if number not in known:
                rule = parsed(texts[number])
                known[number] = prepare(Place("inet", table, chain, number + 1, 0), rule.parts) if (
                    _is_followed(table, chain, rule)) else None
            if (prepared := known[number]) is not None:
                found.append(prepared)
        return found

    def _relevant(self, table: str, chain: str, branches: Sequence[Branch]) -> Sequence[int]:
        """Return the numbers of the rules for the addresses and ports of *branches*, or for all."""
        index = self._indexes.get((table, chain))
        if index is None:
            index = self._indexes[table, chain] = _index(self.texts(table, chain))
        keys = {""}
        for branch in branches:
            flow = branch.seen.packet.flow
            if flow.destination is None or flow.port is None:
                return range(len(self.texts(table, chain)))
            keys |= {format_address(flow.destination), f"port {flow.port}"}
        return sorted(number for key in keys for number in index.get(key, ()))

    def likeness(self, seen: Seen, is_local: Callable[[Address], bool]) -> object | None:
        """Return a key for packets that no rule behind the first hook distinguishes.

        None: any two packets may differ, or few are followed.
        """
        flow, connection = seen.packet.flow, seen.connection
        if not self._for_many or flow.destination is None or connection is None:
            return None
        if self._distinguished is None:
            self._distinguished = self._find_distinguished()
        addresses, wider, ports, further = self._distinguished
        return None if further else (
            seen.input, seen.is_from_node, flow.source, seen.packet.protocol, seen.mark, connection.status,
            is_local(flow.destination), flow.destination if flow.destination in addresses else None,
            flow.port if flow.port in ports else None, *[flow.destination in net for net in wider])

    def _find_distinguished(self) -> _Distinguished:
        reached = [(base.table, base.name) for base in self._base_chains if base.hook not in _FIRST_HOOKS]
        found: list[str] = []
        for table, chain in reached:
            for rule in map(parsed, self.texts(table, chain)):
                if not _is_followed(table, chain, rule):
                    continue
                found.append(rule.text)
                if rule.chain and (table, rule.chain) not in reached:
                    reached.append((table, rule.chain))
        text = "\n".join(found)
        networks = {network(value) for value in re.findall(r"-d (\S+)", text)}
        single = {net for net in networks if net.prefix == len(net.network) * 8}
        return _Distinguished(
            frozenset(net.network for net in single), tuple(networks - single),
            frozenset(map(int, re.findall(r"--dport (\d+)", text))), _FURTHER.search(text) is not None)

    def in_ipset(self, name: str, sides: Sequence[str], packet: Headers) -> int | None:
        """Return the mark of the entry for *packet* in an ipset, 0 without marks; None without an entry."""
        return None

    def is_recent(self, name: str, source: Address) -> bool:
        """Return whether the list *name* of the match ``recent`` holds *source*."""
        return False


_SHORT = 8
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


# The path.

Objects = dict[KernelObject, None]
"""In the order in which a packet met them."""

_OUTCOMES = {EndFate.DROPPED: Outcome.DROPPED, EndFate.REJECTED: Outcome.REFUSED}
_SET = re.compile(r"(?<!! )--(?:match|map)-set (\S+) (\S+)")


class Walk(Way):
    """Follows a packet through chains, and records the objects that it meets.

    In built-in chains, only rules that jump to other chains are followed: other tools own the rest. In table
    filter, only those to chains of service proxies: `kproxy_core.app.drops` follows firewalls.
    """

    def __init__(
        self, ruleset: Ruleset, question: Question, *, bridged: Container[Address | None] = (),
        bound: Container[Address] = (), is_pinned: bool = False,
    ) -> None:
        """*bound*: addresses of an interface that the mode made.

        *bridged*: senders whose packets are on a bridge's port when they meet the rules. *is_pinned*: lists
        of match ``recent`` that hold the sender decide; else it is followed as a new client.
        """
        lists: dict[str, None] = {}

        # Without a cycle of references, which would keep each walk until the next run of the collector.
        def is_recent(name: str, source: Address | None) -> bool:
            if source is None or not ruleset.is_recent(name, source):
                return False
            lists[name] = None
            return is_pinned

        super().__init__(ruleset, Node(
            routes(question, bound), in_ipset=ruleset.in_ipset, is_recent=is_recent,
            is_bridged=lambda source: source in bridged))
        self._texts = ruleset
        self._question = question
        self._bridged, self._bound = bridged, bound
        self.lists = lists
        """The lists that hold the sender."""
        self.objects: Objects = {}
        self.is_certain = True
        """Whether all rules that decide are known."""
        self._noted: set[Place] = set()

    def start(self) -> Branch:
        """Return the packet before it meets rules."""
        return Branch(first_seen(self._question), CERTAIN)

    def hook(
        self, hook: str, branches: Sequence[Branch], translate: Callable[[Seen], Seen] = lambda seen: seen,
    ) -> list[Branch]:
        before = len(self.ends)
        passed = super().hook(hook, branches, translate)
        for branch in (*(end.branch for end in self.ends[before:]), *passed):
            self.is_certain = self.is_certain and not any(branch.chance.cases)
            for met in branch.met:
                if met.place not in self._noted:
                    self._noted.add(met.place)
                    self.objects.update(_objects(
                        f"{met.place.table} {met.place.chain}", self._texts.text(met.place)))
        for name in self.lists:
            self.note(f"list {name}", "holds the sender")
        return passed

    def rest(self, branch: Branch) -> "Walk":
        """Follow a packet that has passed the first hook. Return its way from there on."""
        likeness = self._texts.likeness(branch.seen, self.is_local)
        walk = self._texts.followed.get(likeness)
        if walk is None:
            walk = Walk(self._texts, self._question, bridged=self._bridged, bound=self._bound)
            walk.follow([Branch(branch.seen, CERTAIN)])
            if likeness is not None:
                self._texts.followed[likeness] = walk
        self.objects.update(walk.objects)
        self.is_certain = self.is_certain and walk.is_certain
        return walk

    @property
    def ended(self) -> Fate | None:
        """The fate of packets that do not pass all rules; None: no rule ends one."""
        return next((
            Fate(_OUTCOMES[end.fate], self.reason) for end in self.ends if end.fate in _OUTCOMES), None)

    @property
    def reason(self) -> str:
        """The last object that the packet met."""
        last = next(reversed(self.objects), None)
        return f"{last.where}: {last.text}" if last else ""

    def is_local(self, address: Address) -> bool:
        route = self.node.route(address, 0)
        return route is not None and route.type == RTN_LOCAL

    def note(self, where: str, text: str) -> None:
        self.objects[KernelObject(where, text)] = None


@lru_cache(maxsize=4096)
def _objects(where: str, rule: str) -> Objects:
    """Return the objects that a packet meets which a *rule* matches.

    Packets to one frontend meet the same rules, and share them.
    """
    unknown = "  (not understood)" * parsed(rule).is_strange
    return dict.fromkeys([
        *(KernelObject(f"ipset {name}", f"holds the packet ({sides})") for name, sides in _SET.findall(rule)),
        KernelObject(where, rule + unknown)])
