"""The meaning of rules as iptables-save prints them: the matches and targets that the backends use. Pure."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, NamedTuple

from kproxy_core.model import address as addresses
from kproxy_core.model.address import Address, parse_network
from kproxy_core.model.endpoint import Destination
from kproxy_core.plan.fate import Origin, Outcome, Packet

if TYPE_CHECKING:
    from kproxy_xtables.walk import Walk


class Flight(NamedTuple):
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


class Branch(NamedTuple):
    """One of the ways that a packet may take through a chain."""

    share: float
    done: Outcome | Literal[True] | None
    """True: accepted; None: no verdict, the calling chain continues."""
    flight: Flight

    @property
    def outcome(self) -> Outcome | None:
        """None: the packet continues on its way."""
        return self.done if isinstance(self.done, Outcome) else None


Test = Callable[["Walk", Flight], bool]
Act = Callable[["Walk", Flight], Branch]


class Rule(NamedTuple):
    tests: tuple[Test, ...] = ()
    chance: float = 1.0
    recent: str = ""
    """The list in which the rule looks up clients; "": none."""
    target: str = ""
    goto: bool = False
    act: Act | None = None
    """The target's effect; None: it is a chain."""
    endpoint: Destination | None = None
    """The new destination, of a DNAT rule."""
    places: tuple[tuple[str, str], ...] = ()
    """The matches on the destination's address and port: their names and values."""
    looks_further: bool = False
    """The rule depends on more than a packet's headers, mark and origin, and the node's addresses."""
    strange: bool = False
    """The rule is not understood."""

    def matches(self, around: "Walk", flight: Flight) -> bool:
        for test in self.tests:  # noqa: SIM110 - all() of a generator takes twice as long
            if not test(around, flight):
                return False
        return True


network = lru_cache(maxsize=4096)(parse_network)


def _value_and_mask(text: str) -> tuple[int, int]:
    value, _, mask = text.partition("/")
    return int(value, 0), int(mask, 0) if mask else 0xFFFFFFFF


def _in_network(address_of: Callable[[Flight], Address], value: str) -> Test:
    net, (address, prefix) = network(value), network(value)
    if prefix == len(address) * 8:
        return lambda around, flight: address_of(flight) == address
    return lambda around, flight: address_of(flight) in net


def _protocol(value: str) -> Test:
    return lambda around, flight: flight.packet.protocol is _PROTOCOLS.get(value)


def _port(value: str) -> Test:
    port = int(value)
    return lambda around, flight: flight.port == port


def _state(value: str) -> Test:
    states = value.split(",")
    return lambda around, flight: "NEW" in states or (flight.translated and "DNAT" in states)


def _mark(value: str) -> Test:
    wanted, mask = _value_and_mask(value)
    return lambda around, flight: flight.mark & mask == wanted


_PROTOCOLS = {text: each for each in addresses.Protocol for text in (each.name.lower(), str(int(each)))}
_TESTS: Mapping[str, Callable[[str], Test]] = {
    "-d": partial(_in_network, attrgetter("destination")),
    "-s": partial(_in_network, attrgetter("packet.source")),
    "-p": _protocol,
    "-i": lambda value: lambda around, flight: flight.packet.origin is Origin.POD,
    "--dport": _port,
    "--dst-type": lambda value: lambda around, flight: (
        value == "LOCAL" and around.is_local(flight.destination)),
    "--src-type": lambda value: lambda around, flight: (
        value == "LOCAL" and flight.packet.origin is Origin.NODE),
    "--ctstate": _state,
    "--state": _state,
    "--mark": _mark,
    "--vaddr": partial(_in_network, attrgetter("packet.destination")),
    "--vproto": _protocol,
    "--vport": lambda value: lambda around, flight: flight.packet.port == int(value),
    "--match-set": lambda value: lambda around, flight: around.set_mark(value, flight) is not None,
    "--physdev-is-in": lambda value: lambda around, flight: around.is_bridged(flight.packet.source),
}  # fmt: skip
"""The matches that are understood."""


def _set_mark(value: str) -> Act:
    new, mask = _value_and_mask(value)
    return lambda around, flight: Branch(1.0, None, flight._replace(mark=(flight.mark & ~mask) ^ new))


def _translate(value: str) -> Act:
    address, port = Destination.parse(value)
    return lambda around, flight: Branch(  # _replace() takes three times as long.
        1.0, True, Flight(flight.packet, address, port, flight.mark, True, flight.masqueraded, flight.local))


def _redirect(value: str) -> Act:
    port = int(value)
    return lambda around, flight: Branch(1.0, True, flight._replace(translated=True, local=port))


_ACTS: Mapping[str, tuple[str, Callable[[str], Act]]] = {
    "": ("", lambda _: lambda around, flight: Branch(1.0, None, flight)),
    "RETURN": ("", lambda _: lambda around, flight: Branch(1.0, None, flight)),
    "ACCEPT": ("", lambda _: lambda around, flight: Branch(1.0, True, flight)),
    "DROP": ("", lambda _: lambda around, flight: Branch(1.0, Outcome.DROPPED, flight)),
    "REJECT": ("", lambda _: lambda around, flight: Branch(1.0, Outcome.REFUSED, flight)),
    "MASQUERADE": ("", lambda _: lambda around, flight: Branch(1.0, True, flight._replace(masqueraded=True))),
    "MARK": ("--set-xmark", _set_mark),
    "SET": ("--map-set", lambda value: lambda around, flight: Branch(
        1.0, None, flight._replace(mark=around.set_mark(value, flight) or flight.mark))),
    "DNAT": ("--to-destination", _translate),
    "REDIRECT": ("--to-ports", _redirect),
}
"""The targets that are understood, with the option that each needs."""
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
def parsed(text: str) -> Rule:
    """Return the meaning of a rule, without ``-A CHAIN``."""
    found = _TARGET.fullmatch(text)
    if found is None or found[1].count('"') % 2:  # The words are those of a comment.
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
    return Rule(
        rule.tests, rule.chance, rule.recent, target, jump == "g", act, endpoint, rule.places,
        rule.looks_further or target == "SET", rule.strange)


@lru_cache(maxsize=4096)
def _without_target(text: str) -> Rule:
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
        return Rule(
            tuple(tests), float(options.get("--probability", 1)),
            options["--name"] if "--rcheck" in options else "", act=_ACTS[""][1](""), places=tuple(places),
            looks_further=any(word in text for word in _FURTHER))
    except (KeyError, ValueError):
        return Rule(looks_further=True, strange=True)


def _options(text: str) -> Iterator[tuple[str, str]]:
    """Yield names of options, with "! " if negated, and their values. Raises ValueError for another word."""
    words = iter([bare or quoted.replace('\\"', '"') for quoted, bare in _WORD.findall(text)])
    for word in words:
        name, no = (next(words, ""), "! ") if word == "!" else (word, "")
        if name not in _VALUES:
            raise ValueError(name)
        yield no + name, " ".join(islice(words, _VALUES[name]))


def _not(test: Test) -> Test:
    return lambda around, flight: not test(around, flight)
