"""Packets that rules treat alike, but for the addresses and ports of their destinations. Pure.

Most of the packets to thousands of services differ in nothing else. Rules that look such names up in sets and
compare them with few constants do the same with two packets if each lookup of the one finds what the other
finds: nothing, an equal verdict, or an address and port that stand for those of the other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from kproxy_core.model.address import Family
from kproxy_core.netlink.messages import attributes
from kproxy_core.nft.elements import Element
from kproxy_core.nft.expressions import HeldSet, Looked, register_words
from kproxy_core.nft.rules import ADDRESS, PORT, Attributes, Expression

Names = Mapping[bytes, bytes]
"""Packed addresses and ports by those that they stand for, one for one."""


class NoLike(Exception):
    """Rules may treat any two packets differently."""


class _Step(NamedTuple):
    looked: Looked
    held: HeldSet
    parts: tuple[tuple[bool, bytes], ...]
    """Those of the key; True: an address or a port."""


class Example:
    """A packet of which the result is known."""

    def __init__(
        self, names: Sequence[bytes], looked: Iterable[Looked], held_set: Callable[[str], HeldSet | None],
        constants: Iterable[bytes],
    ) -> None:
        """*names* are its packed addresses, then its ports; *constants* what rules compare them with.

        Raises NoLike.
        """
        self._names = names
        self._steps = [_step(one, held_set(one.container)) for one in looked]
        self._constants = tuple(constants)

    def compare(
        self, names: Sequence[bytes], is_local: Callable[[bytes], bool]
    ) -> tuple[Names, Mapping[Looked, Looked]] | None:
        """Return the names and lookups of another packet by those of the example; None if it is not alike.

        *is_local* says whether the node has a packed address. Raises OSError.
        """
        forth: dict[bytes, bytes] = {}
        back: dict[bytes, bytes] = {}

        def pair(one: bytes, other: bytes) -> bool:
            if one in forth or other in back:
                return forth.get(one) == other and back.get(other) == one
            forth[one], back[other] = other, one
            return all(one.startswith(each) is other.startswith(each) for each in self._constants) and (
                len(one) == PORT.size or is_local(one) is is_local(other))

        if not all(map(pair, self._names, names)):
            return None
        lookups: dict[Looked, Looked] = {}
        for looked, held, parts in self._steps:
            try:
                key = b"".join([forth[part] if is_name else part for is_name, part in parts])
            except KeyError:
                return None
            found = held.find(key)
            if not _are_alike(looked.element, found, len(names[0]), pair):
                return None
            lookups[looked] = Looked(looked.container, key, found)
        return forth, lookups


def _step(looked: Looked, held: HeldSet | None) -> _Step:
    if held is None or not held.types or held.is_filled_by_packets or not looked.key:
        raise NoLike(f"set {looked.container}")
    parts, at = [], 0
    for type_ in held.types:
        end, behind = at + type_.size, at + -(-type_.size // 4) * 4
        parts += [(type_ == PORT or type_ in ADDRESS.values(), looked.key[at:end]),
                  (False, looked.key[end:behind])]
        at = behind
    return _Step(looked, held, tuple(part for part in parts if part[1]))


def _are_alike(
    one: Element | None, other: Element | None, size: int, pair: Callable[[bytes, bytes], bool]
) -> bool:
    """Return whether two lookups find the same, or addresses of *size* bytes that stand for each other."""
    if one is None or other is None:
        return one is other
    mine, yours = one.data, other.data
    if one.expressions or other.expressions or not (isinstance(mine, bytes) and isinstance(yours, bytes)):
        return mine == yours and one.expressions == other.expressions
    return len(mine) == len(yours) and len(mine) in (size, size + 4) and pair(mine[:size], yours[:size]) and (
        len(mine) == size or pair(mine[size : size + PORT.size], yours[size : size + PORT.size]))


# Rules.

_HARMLESS: Final = frozenset({
    "counter", "reject", "dynset", "masq", "immediate", "log", "last", "numgen", "hash"})
_CT_ADDRESSES: Final = frozenset({8, 9, 19, 20, 21, 22})
_CT_PORTS: Final = frozenset({11, 12})
"""NFT_CT_*"""
_FIB_TYPE: Final = 3
_HEADERS: Final = {Family.IPV4: (16, 20), Family.IPV6: (24, 40)}
"""Positions of the destination and of the next header."""


def compared_with(expressions: Iterable[Expression], family: Family) -> set[bytes]:
    """Return the first bytes of destinations for which a rule looks.

    Raises NoLike if it uses destinations otherwise than for lookups and translations.
    """
    rule = _Rule(family)
    for name, found in expressions:
        handle = _USES.get(name)
        if handle is not None:
            handle(rule, found)
        elif name not in _HARMLESS:
            raise NoLike(name)
    return rule.constants


class _Rule:
    def __init__(self, family: Family) -> None:
        self._family = family
        self._names: dict[int, bool] = {}
        """Words of the registers that hold destinations; True: the first bytes of one."""
        self.constants: set[bytes] = set()

    def _load(self, register: bytes, size: int, *, is_name: bool, is_first: bool = True) -> None:
        words = register_words(register, size)
        for word in words:
            self._names.pop(word, None)
            if is_name:
                self._names[word] = is_first and word == words[0]

    def _need_no_name(self, register: bytes, size: int) -> None:
        if any(word in self._names for word in register_words(register, size)):
            raise NoLike("a destination that is computed with")

    def payload(self, found: Attributes) -> None:
        base, at, size = (_number(found, kind) for kind in (2, 3, 4))
        start, end = _HEADERS[self._family] if base == 1 else (2, 4)
        if 5 in found or (base == 1 and at + size > end):
            raise NoLike("payload")
        is_name = base in (1, 2) and at < end and at + size > start
        self._load(found[1], size, is_name=is_name, is_first=at == start)

    def meta(self, found: Attributes) -> None:
        if 3 in found:
            self._need_no_name(found[3], 16)
        else:
            self._load(found[1], 4, is_name=False)

    def ct(self, found: Attributes) -> None:
        key = _number(found, 2)
        if 4 in found:
            self._need_no_name(found[4], 16)
        elif key in _CT_ADDRESSES:
            self._load(found[1], self._family.size, is_name=True)
        else:
            self._load(found[1], 4, is_name=key in _CT_PORTS)

    def fib(self, found: Attributes) -> None:
        if _number(found, 2) != _FIB_TYPE:
            raise NoLike("fib")
        self._load(found[1], 4, is_name=False)

    def lookup(self, found: Attributes) -> None:
        if _number(found, 5):
            raise NoLike("an inverted lookup")
        if 3 in found and _number(found, 3):
            self._load(found[3], self._family.size + 4, is_name=True, is_first=False)

    def cmp(self, found: Attributes) -> None:
        wanted = attributes(found[3]).get(1, b"")
        first, *_ = register_words(found[1], len(wanted))
        if self._names.get(first) and _number(found, 2) in _EQUALITY:
            self.constants.add(wanted)
        else:
            self._need_no_name(found[1], len(wanted))

    def compute(self, found: Attributes) -> None:
        self._need_no_name(found[1], 16)

    def nat(self, found: Attributes) -> None:
        if found.get(4, found.get(3)) != found.get(3) or found.get(6, found.get(5)) != found.get(5):
            raise NoLike("a range of addresses")


_EQUALITY: Final = (0, 1)
"""NFT_CMP_EQ and NFT_CMP_NEQ."""
_USES: Final[Mapping[str, Callable[[_Rule, Attributes], None]]] = {
    "payload": _Rule.payload, "meta": _Rule.meta, "ct": _Rule.ct, "fib": _Rule.fib, "lookup": _Rule.lookup,
    "cmp": _Rule.cmp, "range": _Rule.compute, "bitwise": _Rule.compute, "byteorder": _Rule.compute,
    "nat": _Rule.nat,
}  # fmt: skip


def _number(found: Attributes, kind: int) -> int:
    return int.from_bytes(found.get(kind, b""), "big")
