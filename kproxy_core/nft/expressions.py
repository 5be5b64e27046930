"""The expressions of a rule, as the kernel runs them for a packet. Pure.

An expression matches, does not match, or depends on what cannot be known before: a limit, a quota, a random
number, a set that other packets fill, a field that is not known, an expression of a newer kernel. Then the
packet is followed both ways. Attributes are those of linux/netfilter/nf_tables.h; the effects are those of
Linux 6.18.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Final, NamedTuple, Protocol, Self

from kproxy_core.model import address as net
from kproxy_core.model.address import Address, Family
from kproxy_core.netlink.messages import Malformed, attribute_spans, attributes, text
from kproxy_core.nft import xt
from kproxy_core.nft.elements import CATCH_ALL, Element
from kproxy_core.nft.packet import (
    LOOPBACK,
    NO_INTERFACE,
    RTN_LOCAL,
    RTN_UNICAST,
    Answer,
    Bytes,
    Depends,
    Interface,
    Node,
    Number,
    Place,
    Seen,
    Share,
    Tracking,
    Translation,
    known_bytes,
    translated,
)
from kproxy_core.nft.rules import (
    NF_ACCEPT,
    NF_DROP,
    NF_QUEUE,
    NFT_BREAK,
    NFT_CONTINUE,
    Attributes,
    DataType,
    Expression,
    HeldRule,
    Verdict,
    parse_verdict,
    types_of_number,
)
from kproxy_core.nft.xt import STOLEN, UNKNOWN, Sight


class BaseChain(NamedTuple):
    """A chain at a hook."""

    family: str
    """nft's name: ``ip``, ``ip6``, ``inet``, ..."""
    table: str
    name: str
    type: str
    """``filter``, ``nat`` or ``route``."""
    hook: str
    priority: int
    drops_by_policy: bool
    packets: int | None
    """Packets that met the policy; None: not counted."""


class Elements:
    """The elements of a set, read when they are first asked for: all, or one by its key."""

    def __init__(
        self, read: Callable[[], Sequence[Element]], one: Callable[[bytes], Element | None] | None = None,
    ) -> None:
        """*read* returns all elements, *one* that at a key, or None; without it all are read."""
        self._read = read
        self._one = one
        self._all: Sequence[Element] | None = None
        self._known: dict[bytes, Element | None] = {}
        self._are_all_known = False

    def __iter__(self) -> Iterator[Element]:
        """Yield all elements. Raises OSError."""
        if self._all is None:
            self._all = self._read()
        return iter(self._all)

    def at(self, key: bytes) -> Element | None:
        """Return the element whose key is *key*, or the catch-all at b"". Raises OSError."""
        if key not in self._known and not self._are_all_known:
            if self._one is not None and self._all is None:
                self._known[key] = self._one(key)
            else:  # The first one of a key counts.
                self._known = {each.key: each for each in reversed(list(self))}
                self._are_all_known = True
        return self._known.get(key)


class HeldSet(NamedTuple):
    """A set or map that the kernel lists."""

    key_size: int
    """Bytes."""
    is_interval: bool
    parts: tuple[int, ...]
    """Bytes of each part of a concatenation of intervals; () else."""
    elements: Elements
    is_filled_by_packets: bool = False
    """Rules add elements."""
    object_type: int = 0
    """In a map of objects: NFT_OBJECT_*."""
    types: tuple[DataType, ...] = ()
    """Those of a key's parts; (): not known."""

    def find(self, value: bytes) -> Element | None:
        """Return the element whose key is *value*, or whose interval holds it. Raises OSError."""
        if not self.is_interval:
            found = self.elements.at(value)
            return self.elements.at(CATCH_ALL.key) if found is None else found
        keyed = [each for each in self.elements if each.key]
        for_all = next((each for each in self.elements if not each.key), None)
        if self.parts:
            return next((each for each in keyed if self._may_hold(each, tuple(value))), for_all)
        # At the same key, one interval may end and the next one start.
        nearest = max(
            (each for each in keyed if each.key <= value), key=lambda each: (each.key, not each.is_end),
            default=None)
        return nearest if nearest is not None and not nearest.is_end else for_all

    def candidates(self, value: Bytes) -> tuple[list[Element], bool]:
        """Return the elements that a *value* with unknown bytes may find, and whether it may find none.

        Raises OSError.
        """
        keyed = [each for each in self.elements if each.key and not each.is_end]
        for_all = [each for each in self.elements if not each.key]
        if self.is_interval and not self.parts:
            return [*keyed, *for_all], not for_all
        found = [each for each in keyed if self._may_hold(each, value)]
        return [*found, *for_all], not for_all

    def _may_hold(self, element: Element, value: Bytes) -> bool:
        at, last = 0, element.last or element.key
        for size in self.parts or (self.key_size,):
            part = value[at : at + size]
            known = known_bytes(part)
            if known is None:
                is_one = element.key[at : at + size] == last[at : at + size]
                if is_one and not all(
                        isinstance(mine, str) or mine == theirs
                        for mine, theirs in zip(part, element.key[at : at + size], strict=False)):
                    return False
            elif not element.key[at : at + size] <= known <= last[at : at + size]:
                return False
            at += -(-size // 4) * 4
        return True


class Ruleset(Protocol):
    """The chains, rules and sets that the kernel lists. All raise OSError."""

    def base_chains(self) -> Sequence[BaseChain]:
        """Return the chains at hooks that are in effect, in the order in which the kernel lists them."""

    def rules(self, family: str, table: str, chain: str) -> Sequence[HeldRule]: ...

    def held_set(self, family: str, table: str, name: str) -> HeldSet | None: ...


# Ways of a packet.


class Looked(NamedTuple):
    """A set or map in which a rule has looked up a key."""

    container: str
    key: bytes
    """b"" if it is not known."""
    element: Element | None
    """None: it holds none for the key."""


class Met(NamedTuple):
    """A rule whose matches all apply to the packet, or that has drawn a number without an element."""

    place: Place
    is_certain: bool
    looked: tuple[Looked, ...] = ()

    @property
    def misses(self) -> bool:
        """Whether no element was found for the number, so that the rule does not apply."""
        return bool(self.looked) and self.looked[-1].element is None


class Doubt(NamedTuple):
    """A statement which may match or not."""

    text: str
    """``limit in rule 3 of chain input``."""
    occurrence: int
    """The statement may be met several times."""
    matched: bool
    place: Place | None = None
    """None: no rule."""


_Cube = frozenset[Doubt]
_ALWAYS: Final[_Cube] = frozenset()


class Chance(NamedTuple):
    """When a packet takes a way: in one of several cases, each of which is a set of doubts, decided so.

    Cases exclude each other. Each has the share of packets that take it, if its doubts are decided so.
    """

    cases: Mapping[_Cube, float]
    random: frozenset[Doubt] = frozenset()
    """The statements that choose packets at random."""

    @property
    def share(self) -> float:
        """The share of packets, at most."""
        return min(sum(self.cases.values()), 1.0)

    @property
    def is_certain(self) -> bool:
        return self.cases.keys() == {_ALWAYS} and self.share > _ALL

    @property
    def doubts(self) -> tuple[str, ...]:
        """The statements on which it depends whether a packet takes this way."""
        found = {each.text for case in self.cases for each in case}
        return (*sorted(found), *(
            sorted({each.text for each in self.random}) if self.share <= _ALL else ()))

    def given(self, doubt: str, place: Place | None = None, *, matched: bool) -> "Chance":
        """Return the chance if a statement is decided so. *place* is that of its rule."""
        text = doubt if place is None else f"{doubt} {place.text}"
        cases = {}
        for case, share in self.cases.items():
            times = sum(each.text == text for each in case)
            cases[case | {Doubt(text, times, matched, place)}] = share
        return Chance(cases, self.random)

    def times(self, share: float, why: str, *, matched: bool = True) -> "Chance":
        cases = {case: one * share for case, one in self.cases.items()}
        return Chance(cases, self.random | {Doubt(why, 0, matched)})

    def or_else(self, other: "Chance") -> "Chance":
        """Return the chance of either way. They exclude each other."""
        cases = dict(self.cases)
        for case, share in other.cases.items():
            cases[case] = cases.get(case, 0.0) + share
        return Chance(_simplified(cases), self.random | other.random)


_ALL: Final = 1 - 1e-6
_MOST_CASES = 32


def _simplified(cases: dict[_Cube, float]) -> Mapping[_Cube, float]:
    """Join cases that differ in how one doubt is decided, and in nothing else."""
    if len(cases) > _MOST_CASES:
        return {frozenset(each for case in cases for each in case): min(sum(cases.values()), 1.0)}
    found = True
    while found and len(cases) > 1:
        found = False
        for case in list(cases):
            for doubt in case:
                other = case - {doubt} | {doubt._replace(matched=not doubt.matched)}
                if case in cases and other in cases and abs(cases[case] - cases[other]) < 1e-9:
                    share = cases.pop(case)
                    del cases[other]
                    joined = case - {doubt}
                    cases[joined] = cases.get(joined, 0.0) + share
                    found = True
                    break
    return cases


CERTAIN: Final = Chance({_ALWAYS: 1.0})


class Branch(NamedTuple):
    """A packet on one of its ways."""

    seen: Seen
    chance: Chance
    met: tuple[Met, ...] = ()
    """In their order."""

    def of(self, seen: Seen) -> "Branch":
        """Return the way with another packet."""
        return Branch(seen, self.chance, self.met)


# One rule.

_Words = dict[int, Bytes]
"""Registers in words of four bytes."""


class _NotKnown(Exception):
    """It depends on what cannot be known whether an expression matches."""


_STRANGE: Final = (KeyError, ValueError, IndexError, Malformed)
"""Errors in attributes: they are those of a newer kernel."""
_NOT_EXECUTED: Final = (_NotKnown, xt.Unreadable, *_STRANGE)
_CONTINUE: Final = Verdict(NFT_CONTINUE)
_BREAK: Final = Verdict(NFT_BREAK)


class Around(NamedTuple):
    """What the rules of a chain have around them."""

    held_set: Callable[[str, str, str], HeldSet | None]
    """`Ruleset.held_set`"""
    node: Node
    base: BaseChain
    most_numbers: int
    """Numbers at random that are followed in one rule, each by itself."""


class Prepared(NamedTuple):
    """A rule whose expressions have been read."""

    place: Place
    steps: tuple["_Step", ...]


def prepare(place: Place, expressions: Iterable[Expression]) -> Prepared:
    return Prepared(place, tuple(map(_prepared, expressions)))


def run(around: Around, rule: Prepared, branch: Branch) -> list["Run"]:
    """Return how a rule ends for a packet: in one way, or in several that depend on what is not known.

    Its way after a rule that does not match is *branch* itself.
    """
    place, steps = rule
    seen, chance, known = branch
    run = Run(around, place, seen, chance)
    open_: list[tuple[int, Run]] = []
    found, at, count = [], 0, len(steps)
    while True:
        while at < count and (run.verdict is _CONTINUE or run.verdict.code == NFT_CONTINUE):
            name, step = steps[at]
            at += 1
            try:
                others = step(run)
            except _NOT_EXECUTED as problem:
                others = run.doubt(name, problem)
            if others:
                open_ += [(at, other) for other in reversed(others)]
        if run.verdict.code != NFT_BREAK or run.misses:
            run.branch = Branch(run.noted(seen), run.chance, (*known, Met(place, True, run.looked)))
        elif run.seen is seen and run.chance is chance:
            run.branch = branch
        else:
            run.branch = Branch(run.noted(seen), run.chance, known)
        found.append(run)
        if not open_:
            return found
        at, run = open_.pop()


class Run:
    """The run of one rule's expressions for one packet."""

    branch: Branch
    """The packet behind the rule."""
    verdict = _CONTINUE
    rejects = False
    packets: int | None = None
    looked: tuple[Looked, ...] = ()
    _drawn = 0
    """The numbers of which it has one at random, over all its statements; 0: none."""

    def __init__(self, around: Around, place: Place, seen: Seen, chance: Chance) -> None:
        self._around = around
        self._place = place
        self.seen = seen
        self.chance = chance
        self._words: _Words = {}

    @property
    def misses(self) -> bool:
        """Whether a random number had no element."""
        return bool(self._drawn and self.looked) and self.looked[-1].element is None

    @property
    def _where(self) -> str:
        return self._place.text

    def noted(self, before: Seen) -> Seen:
        """Return the packet. It has the rule that has exempted it from connection tracking."""
        seen = self.seen
        if seen is before or seen.tracking is not Tracking.UNTRACKED or seen.untracked_by is not None:
            return seen
        return seen._replace(untracked_by=self._place)

    def _copy(self) -> Self:
        other = type(self)(self._around, self._place, self.seen, self.chance)
        other.verdict, other.rejects, other.packets = self.verdict, self.rejects, self.packets
        other.looked, other._drawn = self.looked, self._drawn
        other._words = dict(self._words)
        return other

    def doubt(self, name: str, problem: Exception) -> Sequence["Run"]:
        """Continue behind an expression that was not executed. Return the other runs that are possible."""
        if isinstance(problem, _NotKnown):
            self._words.clear()
            return self._decide(Depends(str(problem)))
        if isinstance(problem, xt.Unreadable):
            return self._strange(str(problem)) if str(problem).startswith("target") else self._decide(
                Depends(str(problem)))
        return self._strange(name)

    def _strange(self, name: str) -> Sequence["Run"]:
        """Continue behind an expression that is not known: it may match, not match, or end the packet."""
        others = self._decide(Depends(name))
        self._words.clear()
        end = self._copy()
        end.verdict = Verdict(UNKNOWN)
        end.chance = end.chance.given(name, self._place, matched=True)
        return [*others, end]

    @staticmethod
    def _depend(name: str, run: "Run", found: Attributes) -> Sequence["Run"]:
        return run._decide(Depends(name))

    def _decide(self, answer: Answer) -> Sequence["Run"]:
        """End the rule if it does not match."""
        if answer is True:
            return ()
        if answer is False:
            self.verdict = _BREAK
            return ()
        other = self._copy()
        other.verdict = _BREAK
        if isinstance(answer, Share):
            if not 0 < answer.yes < 1:
                return self._decide(answer.yes >= 1)
            why = f"{answer.why} {self._where}"
            self.chance = self.chance.times(answer.yes, why)
            other.chance = other.chance.times(1 - answer.yes, why, matched=False)
        else:
            self.chance = self.chance.given(answer.why, self._place, matched=True)
            other.chance = other.chance.given(answer.why, self._place, matched=False)
        return [other]

    @property
    def _sight(self) -> Sight:
        return Sight(self.seen, self._around.base.hook, self._around.node)

    def _held_set(self, name: str) -> HeldSet | None:
        held_set, _, base, _ = self._around
        return held_set(base.family, base.table, name)

    # Registers.

    def _store(self, register: bytes, value: Bytes | bytes) -> None:
        self._put(_word(register, len(value)), tuple(value))

    def _put(self, word: int, value: Bytes) -> None:
        size = len(value)
        if size == 4:  # Most values.
            self._words[word] = value
            return
        for at in range(0, size, 4):
            part = value[at : at + 4]
            self._words[word + at // 4] = part if len(part) == 4 else part + (0,) * (4 - len(part))

    def _store_unknown(self, register: bytes, why: str, size: int = 16) -> None:
        self._store(register, (why,) * size)

    def _load(self, register: bytes, size: int) -> Bytes:
        return self._take(_word(register, size), size)

    def _take(self, word: int, size: int) -> Bytes:
        value = self._words.get(word, _UNWRITTEN)
        if size == 4:
            return value
        for at in range(word + 1, word - (-size // 4)):
            value += self._words.get(at, _UNWRITTEN)
        return value[:size]

    def _number(self, register: bytes) -> Number:
        value = self._load(register, 4)
        return _why(value) if (known := known_bytes(value)) is None else int.from_bytes(known, sys.byteorder)

    # Expressions that load a value.

    def _write_payload(self, found: Attributes) -> None:
        base, offset, size = (_u32(found[kind]) for kind in (2, 3, 4))
        packet = self.seen.packet
        # Transport checksums cover the transport's header and the addresses.
        is_covered = base == 2 or (base == 1 and offset + size > packet.addresses_at)
        is_sound = packet.is_sound and (bool(_u32(found.get(8, b""))) if base == 1 else bool(
            _u32(found.get(6, b"")))) if is_covered else packet.is_sound
        changed = packet.store(base, offset, self._load(found[5], size))
        self.seen = self.seen._replace(packet=changed._replace(is_sound=is_sound))

    def _meta(self, found: Attributes) -> Sequence["Run"]:
        key, seen, sight = _u32(found[2]), self.seen, self._sight
        if key in (10, 11) and not (seen.is_from_node and sight.hook in ("output", "postrouting")):
            return self._decide(False)  # No socket has sent it.
        register, packet = found[1], seen.packet
        name, size = _META_NAMES.get(key, (f"meta key {key}", 16))
        value: Bytes | bytes | None = None
        if key == 1:
            value = b"\x08\x00" if packet.family is Family.IPV4 else b"\x86\xdd"
        elif key in (4, 6):
            value = sight.arrived_by and _interface(sight.arrived_by, size)
        elif key in (5, 7):
            value = sight.leaves_by and _interface(sight.leaves_by, size)
        elif key == 15:
            value = bytes([packet.family.af])
        elif key == 19 and (kind := xt.packet_type(sight)) is not None:
            value = bytes([kind])
        self._store(register, (name,) * size if value is None else value)
        return ()

    def _ct(self, found: Attributes) -> Sequence["Run"]:
        key, connection, register = _u32(found[2]), self.seen.connection, found[1]
        if self.seen.tracking is Tracking.TEMPLATE:
            raise _NotKnown("ct template")
        if connection is None:
            return self._decide(False)
        packet, size = self.seen.packet, self.seen.packet.family.size
        flow = connection.reply if found.get(3) == b"\1" else connection.original
        is_ipv4 = packet.family is Family.IPV4
        if key in (19, 20, 21, 22) and is_ipv4 is (key > 20):
            return self._decide(False)
        if key == 6 and connection.helper == 0:
            return self._decide(False)
        value: Bytes | bytes
        if key == 1:
            value = b"\0"
        elif key == 2:
            value = _host(int(connection.status))
        elif key == 3:
            value = _host(connection.mark)
        elif key == 7:
            value = bytes([packet.family.af])
        elif key == 10:
            value = bytes([packet.protocol])
        elif key in (8, 19, 21):
            value = flow.source or ("ct address",) * size
        elif key in (9, 20, 22):
            value = flow.destination or ("ct address",) * size
        elif key in (11, 12):
            port = flow.source_port if key == 11 else flow.port
            value = ("ct port",) * 2 if port is None else port.to_bytes(2, "big")
        elif key == 13:
            value = (connection.labels,) * 16
        elif key == 17:
            zone = connection.zone
            value = (zone,) * 2 if isinstance(zone, str) else zone.to_bytes(2, sys.byteorder)
        else:
            value = (_CT_NAMES.get(key, f"ct key {key}"),) * 16
        self._store(register, value)
        return ()

    def _set_ct(self, key: int, register: bytes) -> None:
        connection = self.seen.connection
        if key == 17:
            self.seen = xt.with_template(self.seen)
        if connection is None:
            return
        if key == 3:
            connection = connection._replace(mark=self._number(register))
        elif key == 13:
            connection = connection._replace(labels="ct label")
        self.seen = self.seen._replace(connection=connection)

    def _fib(self, found: Attributes) -> None:
        result, flags, register = _u32(found[2]), _u32(found[3]), found[1]
        sight, size = self._sight, 16 if result == 2 else 4
        flow = self.seen.packet.flow
        address = flow.source if flags & _FIB_SOURCE else flow.destination
        if result == 3:
            kind = xt.address_type(sight, address)
            if kind is None or (kind == RTN_LOCAL and flags & (_FIB_IIF | _FIB_OIF)):
                self._store_unknown(register, "fib type", 4)
            else:
                self._store(register, _host(kind))
            return
        arrived = sight.arrived_by
        route = sight.route(address)
        output: Interface | None
        if arrived == LOOPBACK and sight.hook == "prerouting":
            output = LOOPBACK
        elif route is None or arrived is None or route.type == RTN_LOCAL or flags & _FIB_OIF or (
                flags & _FIB_MARK and isinstance(self.seen.mark, str)):
            output = None
        elif route.type != RTN_UNICAST:
            output = NO_INTERFACE
        elif flags & _FIB_IIF and route.output is not None:
            output = arrived if route.output == arrived else NO_INTERFACE
        else:
            output = route.output
        if output is None:
            self._store_unknown(register, "fib", size)
        elif flags & _FIB_PRESENT:
            self._store(register, _host(int(output != NO_INTERFACE)))
        else:
            self._store(register, _interface(output, size))

    def _numbers(self, found: Attributes, count: int, offset: int, why: str) -> Sequence["Run"]:
        """Store a number of *count*, from *offset* on, each for a share of packets."""
        register = found[1] if why == "numgen" else found[2]
        self._drawn = max(self._drawn, 1) * max(count, 1)
        if count == 0 or self._drawn > self._around.most_numbers:
            self._store_unknown(register, why, 4)
            return ()
        chance = self.chance if count == 1 else self.chance.times(1 / count, f"{why} {self._where}")
        runs = [self] + [self._copy() for _ in range(count - 1)]
        for number, run in enumerate(runs):
            run.chance = chance
            run._store(register, _host(number + offset & 0xFFFFFFFF))
        return runs[1:]

    def _numgen(self, found: Attributes) -> Sequence["Run"]:
        return self._numbers(found, _u32(found[2]), _u32(found.get(4, b"")), "numgen")

    def _hash(self, found: Attributes) -> Sequence["Run"]:
        return self._numbers(found, _u32(found[4]), _u32(found.get(6, b"")), "hash")

    def _exthdr(self, found: Attributes) -> Sequence["Run"]:
        kind, is_presence = _u32(found.get(6, b"")), bool(_u32(found.get(5, b"")) & 1)
        protocol = _OPTIONS_OF.get(kind)
        if 7 in found or kind > max(_OPTIONS_OF):
            raise _NotKnown("exthdr")
        if protocol == self.seen.packet.protocol:
            if not is_presence:
                raise _NotKnown("exthdr")
            self._store_unknown(found[1], "exthdr", 1)
        elif not is_presence:
            return self._decide(False)
        else:
            self._store(found[1], b"\0")
        return ()

    def _route(self, found: Attributes) -> Sequence["Run"]:
        if self._around.base.hook == "prerouting" and self.seen.input != LOOPBACK:
            return self._decide(False)
        self._store_unknown(found[1], "rt")
        return ()

    # Expressions that compute with a value, and that match it.

    def _bitwise(self, found: Attributes) -> None:
        size, kind = _u32(found[3]), _u32(found.get(6, b""))
        value = self._load(found[1], size)
        result: Bytes
        if kind in (1, 2):
            result = _shifted(value, int.from_bytes(_data(found[7]), sys.byteorder), is_left=kind == 1)
        elif kind in (3, 4, 5):
            other: Bytes = self._load(found[8], size) if 8 in found else tuple(_data(found[7]))
            result = tuple(_BITWISE[kind](a, b) for a, b in zip(value, other, strict=True))
        else:
            raise _NotKnown("bitwise")
        self._store(found[2], result)

    def _byteorder(self, found: Attributes) -> None:
        length, size = _u32(found[4]), _u32(found[5])
        value = self._load(found[1], length)
        if sys.byteorder == "little" and size:
            value = tuple(byte for at in range(0, length, size) for byte in value[at : at + size][::-1])
        self._store(found[2], value)

    def _range(self, found: Attributes) -> Sequence["Run"]:
        first, last = _data(found[3]), _data(found[4])
        value = self._load(found[1], len(first))
        at_least, at_most = _compared(_GTE, value, first), _compared(_LTE, value, last)
        inside: Answer = False if False in (at_least, at_most) else (
            at_least if at_least is not True else at_most)
        if not isinstance(inside, bool):
            return self._decide(inside)
        return self._decide(inside is not bool(_u32(found[2])))

    def _look_up(
        self, name: str, register: bytes, result: bytes | None, *, inverted: bool = False,
    ) -> Sequence["Run"]:
        held = self._held_set(name)
        if held is None:
            raise _NotKnown(f"set {name}")
        value = self._load(register, held.key_size)
        known = known_bytes(value)
        candidates: list[Element]
        if known is not None:
            one = held.find(known)
            if not held.is_filled_by_packets and (one is None or not one.expressions):  # Most lookups.
                if not inverted:
                    self.looked = (*self.looked, Looked(name, known, one))
                if one is not None:
                    self._found(one, result, inverted=inverted)
                elif not inverted:
                    self.verdict = _BREAK
                return ()
            candidates, may_miss = ([], True) if one is None else ([one], False)
            why = f"set {name}, which packets fill" if held.is_filled_by_packets else ""
        else:
            self.looked = (*self.looked, Looked(name, b"", None))
            candidates, may_miss = held.candidates(value)
            why = f"{_why(value)}, looked up in set {name}"
        if why:
            may_miss = True
        outcomes: list[Run] = []
        for element in _distinct(candidates):
            limits = _limits(element)
            run = self._copy()
            problem = why or (f"{limits[0]} in set {name}" if limits else "")
            may_miss = may_miss or bool(limits)
            if problem:
                run.chance = run.chance.given(problem, self._place, matched=not inverted)
            if not inverted:
                run.looked = (*run.looked, Looked(name, element.key if known is None else known, element))
            run._found(element, result, inverted=inverted)
            outcomes.append(run)
        if why and not outcomes and held.is_filled_by_packets:
            run = self._copy()
            run.chance = run.chance.given(why, self._place, matched=not inverted)
            if result is not None:
                run._store_unknown(result, why)
            run._found(None, None, inverted=inverted)
            outcomes.append(run)
        if may_miss:
            run = self._copy()
            if outcomes:
                problem = why or next(
                    f"{limit} in set {name}" for each in candidates for limit in _limits(each))
                run.chance = run.chance.given(problem, self._place, matched=inverted)
            if not inverted:
                run.verdict = _BREAK
            outcomes.append(run)
        first, *others = outcomes
        self._become(first)
        return others

    def _become(self, other: "Run") -> None:
        self.seen, self.chance, self.verdict, self.looked, self._words = (
            other.seen, other.chance, other.verdict, other.looked, other._words)

    def _found(self, element: Element | None, result: bytes | None, *, inverted: bool) -> None:
        if inverted:
            self.verdict = _BREAK
        elif element is not None and result is not None:
            if isinstance(element.data, Verdict):
                self.verdict = element.data
            else:
                self._store(result, element.data or b"")

    def _add_to_set(self, found: Attributes) -> Sequence["Run"]:
        inner = [found[7]] if 7 in found else [
            found[10][start:end] for _, start, end in attribute_spans(found.get(10, b""), 0, len(
                found.get(10, b"")))]
        names = [text(attributes(each).get(1, b"")) for each in inner]
        limits = [name for name in names if name not in ("counter", "last")]
        if limits:
            raise _NotKnown(f"dynset with {limits[0]}")
        if _u32(found.get(9, b"")) & 1:
            raise _NotKnown("dynset")
        return ()

    # Expressions that act.

    def _reject(self, found: Attributes) -> None:
        self.rejects, self.verdict = True, Verdict(NF_DROP)

    def _queue(self, found: Attributes) -> None:
        self.verdict = Verdict(NF_QUEUE)

    def _synproxy(self, found: Attributes) -> Sequence["Run"]:
        packet = self.seen.packet
        if packet.protocol != net.Protocol.TCP:
            return self._decide(False)
        if packet.flags != 2:
            raise _NotKnown("synproxy")
        self.verdict = Verdict(STOLEN)
        return ()

    def _object(self, found: Attributes) -> Sequence["Run"]:
        if 4 not in found:
            return self._refer(_u32(found[1]))
        held = self._held_set(text(found[4]))
        others = self._look_up(text(found[4]), found[3], None)
        more: list[Run] = [*others]
        for run in (self, *others):
            if run.verdict.code == NFT_CONTINUE and held is not None:
                more += run._refer(held.object_type)
        return more

    def _refer(self, kind: int) -> Sequence["Run"]:
        """Run a named object (NFT_OBJECT_*)."""
        if kind == _HELPER and self.seen.connection is not None:
            self.seen = self.seen._replace(connection=self.seen.connection._replace(helper="ct helper"))
        if kind == _SYNPROXY:
            return self._synproxy({})
        if kind in _LIMITING_OBJECTS:
            return self._decide(Depends(_LIMITING_OBJECTS[kind]))
        return () if kind in _OBJECTS_WITHOUT_EFFECT else self._strange(f"object of type {kind}")

    def _notrack(self, found: Attributes) -> None:
        self.seen = xt.untracked(self.seen)

    # Translations.

    def _masquerade(self, found: Attributes) -> Sequence["Run"]:
        ports, _ = self._port_range(found.get(2), found.get(3))
        translation = Translation(True, None, None, ports, _u32(found.get(1, b"")))
        return self._translate(xt.to_interface(self._sight, self.seen.output, translation))

    def _redirect(self, found: Attributes) -> Sequence["Run"]:
        ports, are_known = self._port_range(found.get(1), found.get(2))
        translation = Translation(False, None, None, ports, _u32(found.get(3, b"")))
        redirected = xt.redirected(self._sight, translation)
        return self._translate(redirected._replace(is_known=redirected.is_known and are_known))

    def _port_range(self, first: bytes | None, last: bytes | None) -> tuple[tuple[int, int] | None, bool]:
        if first is None:
            return None, True
        low = known_bytes(self._load(first, 2))
        high = low if last in (None, first) else known_bytes(self._load(last, 2))
        if low is None or high is None:
            return None, False
        return (int.from_bytes(low, "big"), int.from_bytes(high, "big")), True

    def _translate(self, translation: Translation) -> Sequence["Run"]:
        """Translate and accept, unless the connection is not tracked or has been translated before."""
        self.verdict = Verdict(NF_ACCEPT)
        (seen, share), *others = translated(self.seen, translation, self._place)
        runs = []
        why = f"the choice of an address {self._where}"
        for other, part in others:
            run = self._copy()
            run.seen, run.chance = other, run.chance.times(part, why)
            runs.append(run)
        self.seen = seen
        if others:
            self.chance = self.chance.times(share, why)
        return runs

    # Matches and targets of iptables.

    def _match(self, found: Attributes) -> Sequence["Run"]:
        name = text(found[1])
        return self._decide(xt.match(name, _u32(found.get(2, b"")), found.get(3, b""), self._sight))

    def _target(self, found: Attributes) -> Sequence["Run"]:
        effect = xt.target(text(found[1]), _u32(found.get(2, b"")), found.get(3, b""), self._sight)
        self.seen, self.rejects = effect.seen, effect.rejects
        if effect.translation is not None:
            return self._translate(effect.translation)
        self.verdict = Verdict(effect.verdict)
        return ()


_UNWRITTEN: Final[Bytes] = ("an unwritten register",) * 4
_META_MARK, _META_PROTOCOL, _CT_STATE = 3, 16, 0
_META_NAMES: Final = {
    0: ("meta length", 4), 1: ("meta protocol", 2), 2: ("meta priority", 4), 3: ("meta mark", 4),
    4: ("meta iif", 4), 5: ("meta oif", 4), 6: ("meta iifname", 16), 7: ("meta oifname", 16),
    8: ("meta iiftype", 2), 9: ("meta oiftype", 2), 10: ("meta skuid", 4), 11: ("meta skgid", 4),
    13: ("meta rtclassid", 4), 14: ("meta secmark", 4), 15: ("meta nfproto", 1), 16: ("meta l4proto", 1),
    17: ("meta ibrname", 16), 18: ("meta obrname", 16), 19: ("meta pkttype", 1), 20: ("meta cpu", 4),
    21: ("meta iifgroup", 4), 22: ("meta oifgroup", 4), 23: ("meta cgroup", 4), 24: ("meta random", 4),
    25: ("meta ipsec", 1), 26: ("meta iifkind", 16), 27: ("meta oifkind", 16), 30: ("meta time", 8),
    31: ("meta day", 1), 32: ("meta hour", 4), 33: ("meta sdif", 4), 34: ("meta sdifname", 16),
}  # fmt: skip
"""Names and sizes by NFT_META_*."""
_CT_NAMES: Final = {
    4: "ct secmark", 5: "ct expiration", 6: "ct helper", 14: "ct packets", 15: "ct bytes", 16: "ct avgpkt",
    18: "ct event", 23: "ct id",
}  # fmt: skip
_FIB_SOURCE, _FIB_MARK, _FIB_IIF, _FIB_OIF, _FIB_PRESENT = 1, 4, 8, 16, 32
_OPTIONS_OF: Final = {0: None, 1: net.Protocol.TCP, 2: None, 3: net.Protocol.SCTP, 4: 33}
"""The protocol with options, by NFT_EXTHDR_OP_*; None: the packets of which this tells have none."""
_LIMITS: Final = ("limit", "quota", "connlimit")
_HELPER, _SYNPROXY = 3, 10
_LIMITING_OBJECTS: Final = {2: "quota", 4: "limit", 5: "connlimit"}
_OBJECTS_WITHOUT_EFFECT: Final = (1, 3, 6, 7, 8, 9)
_GTE, _LTE = 5, 3

_WITHOUT_EFFECT: Final = frozenset({"log", "last", "dup"})
"""Expressions that neither match nor end the packet."""

_STEPS: Final[dict[str, Callable[[Run, Attributes], Sequence[Run] | None]]] = {
    "fib": Run._fib, "numgen": Run._numgen, "hash": Run._hash,
    "exthdr": Run._exthdr, "rt": Run._route, "byteorder": Run._byteorder, "range": Run._range,
    "dynset": Run._add_to_set, "reject": Run._reject, "queue": Run._queue, "synproxy": Run._synproxy,
    "objref": Run._object, "notrack": Run._notrack, "masq": Run._masquerade,
    "redir": Run._redirect, "match": Run._match, "target": Run._target,
    "flow_offload": lambda run, found: run._decide(False),  # Only for connections that are established.
    **{name: partial(Run._depend, name) for name in (*_LIMITS, "socket", "osf", "tproxy")},
}  # fmt: skip

# The expressions of most rules are read once, for all packets.

_Execute = Callable[[Run], Sequence[Run] | None]
_Step = tuple[str, _Execute]
"""The name of an expression, and what executes it."""


def _prepared(expression: Expression) -> _Step:
    name, found = expression
    try:
        if name in _READERS:
            return name, _READERS[name](found)
    except _STRANGE:
        return name, lambda run: run._strange(name)
    if name in _STEPS:
        step = _STEPS[name]
        return name, lambda run: step(run, found)
    if name in _WITHOUT_EFFECT:
        return name, lambda run: None
    return name, lambda run: run._strange(name)


def _payload(found: Attributes) -> _Execute:
    if 5 in found:
        return lambda run: run._write_payload(found)
    base, offset, size = (_u32(found[kind]) for kind in (2, 3, 4))
    word = _word(found[1], size)

    def load(run: Run) -> None:
        if base == 0 and run.seen.is_from_node and run._around.base.hook == "output":
            run.verdict = _BREAK
        else:
            run._put(word, run.seen.packet.load(base, offset, size))

    return load if base != 1 or offset + size > _SHORTEST else lambda run: run._put(
        word, run.seen.packet.network[offset : offset + size])


def _bitwise(found: Attributes) -> _Execute:
    size, kind = _u32(found[3]), _u32(found.get(6, b""))
    if kind != 0:
        return lambda run: run._bitwise(found)
    source, target, mask, xor = _word(found[1], size), _word(found[2], size), _data(found[4]), _data(found[5])
    if not len(mask) == len(xor) == size:
        raise ValueError(f"a mask of {len(mask)} bytes for {size}")
    bits = list(zip(mask, xor, strict=True))

    def compute(run: Run) -> None:
        value = run._take(source, size)
        run._put(target, tuple([
            one & a ^ b if type(one) is int else (one if a else b)
            for one, (a, b) in zip(value, bits, strict=True)]))

    return compute


def _cmp(found: Attributes) -> _Execute:
    wanted, how = _data(found[3]), _u32(found[2])
    size = len(wanted)
    word, same = _word(found[1], size), tuple(wanted)

    def compare(run: Run) -> Sequence[Run] | None:
        value = run._take(word, size)
        if value == same and how in _EQUALITY:  # Most comparisons.
            if how:
                run.verdict = _BREAK
            return None
        answer = _compared(how, value, wanted)
        if answer is True:
            return None
        if answer is False:
            run.verdict = _BREAK
            return None
        return run._decide(answer)

    return compare


def _immediate(found: Attributes) -> _Execute:
    verdict = parse_verdict(found[2])
    data = b"" if verdict is not None else _data(found[2])
    word, value = _word(found[1], len(data)) if verdict is None else 0, tuple(data)

    def store(run: Run) -> None:
        if verdict is not None:
            run.verdict = verdict
        else:
            run._put(word, value)

    return store


def _lookup(found: Attributes) -> _Execute:
    name, register, result = text(found[1]), found[2], found.get(3)
    inverted = bool(_u32(found.get(5, b"")) & 1)
    return lambda run: run._look_up(name, register, result, inverted=inverted)


def _meta(found: Attributes) -> _Execute:
    key = _u32(found[2])
    if 3 in found:
        register = found[3]

        def write(run: Run) -> None:
            if key == _META_MARK:
                run.seen = run.seen._replace(mark=run._number(register))

        return write
    word = _word(found[1], 4)
    if key == _META_MARK:
        return lambda run: run._put(word, _host(run.seen.mark))
    if key == _META_PROTOCOL:
        return lambda run: run._put(word, (run.seen.packet.protocol,))
    return lambda run: run._meta(found)


def _ct(found: Attributes) -> _Execute:
    key = _u32(found[2])
    if 4 in found:
        written = found[4]
        return lambda run: run._set_ct(key, written)
    if key != _CT_STATE:
        return lambda run: run._ct(found)
    word = _word(found[1], 4)
    return lambda run: run._put(word, _TRACKED[run.seen.tracking])


def _nat(found: Attributes) -> _Execute:
    is_source, flags = _u32(found[1]) == 0, _u32(found.get(7, b""))
    first, last = found.get(3), found.get(4, found.get(3))

    def translate(run: Run) -> Sequence[Run]:
        size = run.seen.packet.family.size
        low = None if first is None else known_bytes(run._load(first, size))
        high = low if last == first else (None if last is None else known_bytes(run._load(last, size)))
        ports, are_known = run._port_range(found.get(5), found.get(6))
        return run._translate(Translation(
            is_source, None if low is None else Address(low), None if high is None else Address(high), ports,
            flags, are_known and (first is None or low is not None)))

    return translate


def _counter(found: Attributes) -> _Execute:
    packets = _u32(found.get(2, b""))

    def count(run: Run) -> None:
        run.packets = packets

    return count


_READERS: Final[dict[str, Callable[[Attributes], _Execute]]] = {
    "payload": _payload, "bitwise": _bitwise, "cmp": _cmp, "immediate": _immediate, "lookup": _lookup,
    "counter": _counter, "meta": _meta, "ct": _ct, "nat": _nat,
}  # fmt: skip
_SHORTEST: Final = 20
"""Bytes of a network's header at least."""
_EQUALITY: Final = (0, 1)
"""NFT_CMP_EQ and NFT_CMP_NEQ."""


def _u32(value: bytes) -> int:
    return int.from_bytes(value, "big")


@lru_cache(maxsize=4096)
def _host(value: Number) -> Bytes:
    return (value,) * 4 if isinstance(value, str) else tuple(value.to_bytes(4, sys.byteorder))


_TRACKED: Final[dict[Tracking, Bytes]] = {
    each: _host(xt.StateBits(1, 8, 64).of(each)) for each in Tracking}
"""The bit of a connection's state (NF_CT_STATE_*)."""


def _interface(interface: Interface, size: int) -> Bytes:
    if size == 4:
        return _host(interface.number)
    return tuple(interface.name.encode().ljust(16, b"\0")[:16])


def _why(value: Bytes) -> str:
    """Return why *value* is not known."""
    return next((each for each in value if isinstance(each, str)), "an unknown value")


@lru_cache(maxsize=4096)
def _data(value: bytes) -> bytes:
    return attributes(value).get(1, b"")


def _compared(how: int, value: Bytes, wanted: bytes) -> Answer:
    """Compare as NFT_CMP_* *how* says: equal, not equal, less, at most, more, at least."""
    if how < 2:
        known = known_bytes(value)
        if known is not None:
            return (known == wanted) is (how == 0)
        if any(isinstance(one, int) and one != other for one, other in zip(value, wanted, strict=True)):
            return how == 1
        return Depends(_why(value))
    order = 0
    for one, other in zip(value, wanted, strict=True):
        if isinstance(one, str):
            return Depends(one)
        if one != other:
            order = 1 if one > other else -1
            break
    return (order < 0, order <= 0, order > 0, order >= 0)[how - 2]


def _shifted(value: Bytes, by: int, *, is_left: bool) -> Bytes:
    """Shift words of the host's byte order (nft_bitwise_eval_lshift, _rshift)."""
    known = known_bytes(value)
    if known is None or not by < 32:
        return (_why(value),) * len(value)
    padded = known + bytes(-len(known) % 4)
    words = [int.from_bytes(padded[at : at + 4], sys.byteorder) for at in range(0, len(padded), 4)]
    carry, found = 0, []
    for word in reversed(words) if is_left else words:
        if is_left:
            found.append((word << by | carry) & 0xFFFFFFFF)
            carry = word >> (32 - by) if by else 0
        else:
            found.append(word >> by | carry)
            carry = word << (32 - by) & 0xFFFFFFFF if by else 0
    ordered = reversed(found) if is_left else found
    return tuple(b"".join(word.to_bytes(4, sys.byteorder) for word in ordered)[: len(value)])


def _and(one: int | str, other: int | str) -> int | str:
    if 0 in (one, other):
        return 0
    return one if isinstance(one, str) else (other if isinstance(other, str) else one & other)


def _or(one: int | str, other: int | str) -> int | str:
    if 0xFF in (one, other):
        return 0xFF
    return one if isinstance(one, str) else (other if isinstance(other, str) else one | other)


def _xor(one: int | str, other: int | str) -> int | str:
    return one if isinstance(one, str) else (other if isinstance(other, str) else one ^ other)


_BITWISE: Final = {3: _and, 4: _or, 5: _xor}


def _limits(element: Element) -> list[str]:
    """Return the names of an element's expressions which decide whether it matches."""
    names = (text(attributes(each).get(1, b"")) for each in element.expressions)
    return [name for name in names if name in _LIMITS]


def _distinct(elements: Iterable[Element]) -> list[Element]:
    """Return elements with different results."""
    return list({(each.data, each.expressions): each for each in elements}.values())


_REGISTERS = 80
"""Bytes of all registers (NFT_REG_MAX)."""


@lru_cache(maxsize=1024)
def _word(register: bytes, size: int) -> int:
    """Return the word where a register of *size* begins: 1 to 4 have 16 bytes, those from 8 on four."""
    number = _u32(register)
    if size > _REGISTERS:
        raise ValueError(f"no register has {size} bytes")
    return number - 8 if number >= 8 else (number - 1) * 4


def register_words(register: bytes, size: int) -> range:
    """Return the words that *size* bytes from a register on take."""
    first = _word(register, size)
    return range(first, first + -(-size // 4))


# Parsing.


_INTERVAL, _EVAL = 4, 32


def parse_held_set(found: Attributes, elements: Elements) -> HeldSet:
    """Return a set with its listed attributes."""
    fields = attributes(found.get(9, b"")).get(2, b"")
    spans = attribute_spans(fields, 0, len(fields))
    sizes = (_u32(attributes(fields, start, end)[1]) for _, start, end in spans)
    flags = _u32(found.get(3, b""))
    is_interval = bool(flags & _INTERVAL)
    return HeldSet(
        _u32(found.get(5, b"")), is_interval, tuple(sizes) if is_interval else (), elements,
        bool(flags & _EVAL), _u32(found.get(15, b"")), types_of_number(_u32(found.get(4, b""))))


HOOKS: Final = ("prerouting", "input", "forward", "output", "postrouting")
_FAMILY_HOOKS: Final = {"netdev": ("ingress", "egress")}


def parse_base_chain(family: str, found: Attributes) -> BaseChain | None:
    """Return a listed chain; None if it is not at a hook."""
    hook = attributes(found.get(4, b""))
    names = _FAMILY_HOOKS.get(family, (*HOOKS, "ingress"))
    if 1 not in hook or _u32(hook[1]) >= len(names):
        return None
    counted = attributes(found[8]).get(2) if 8 in found else None
    return BaseChain(
        family, text(found[1]), text(found[3]), text(found.get(7, b"")), names[_u32(hook[1])],
        int.from_bytes(hook.get(2, b""), "big", signed=True), _u32(found.get(5, bytes([1]))) == NF_DROP,
        None if counted is None else _u32(counted))
