"""Rulesets for the interpreter: what the kernel lists, of all programs, and a table that may be written."""

import errno
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Final, TypeVar

from kproxy_core.netlink.messages import NFGENMSG, Span, attributes, decoding, text, text_attribute
from kproxy_core.netlink.sockets import NetlinkSocket
from kproxy_core.nft.elements import (
    Element,
    Found,
    PlainElement,
    by_key,
    element_list,
    encode_element,
    names_of,
    parse_elements,
    parse_plain,
)
from kproxy_core.nft.expressions import (
    BaseChain,
    Elements,
    HeldSet,
    Ruleset,
    parse_base_chain,
    parse_held_set,
)
from kproxy_core.nft.messages import (
    ABSENT,
    FAMILIES,
    GETCHAIN,
    GETRULE,
    GETSET,
    GETSETELEM,
    GETTABLE,
    unless_absent,
)
from kproxy_core.nft.objects import (
    ANONYMOUS,
    DORMANT,
    Chain,
    Container,
    Layout,
    Table,
    constant_elements,
    packed_size,
)
from kproxy_core.nft.rules import HeldRule, parse_rule, rule_expressions, type_of

T = TypeVar("T")

_FAMILY_NUMBERS: Final = {name: number for number, name in FAMILIES.items()}


class ListedRuleset:
    """The chains, rules and sets of this thread's network namespace, each read when it is first asked for.

    Of a set without intervals, single elements are read: it may have hundreds of thousands. With *for_many*
    packets, all are read at once.

    All methods raise OSError.
    """

    def __init__(self, sock: NetlinkSocket, *, for_many: bool = False) -> None:
        self._socket = sock
        self._for_many = for_many
        self._base_chains: Sequence[BaseChain] | None = None
        self._rules: dict[tuple[str, str, str], Sequence[HeldRule]] = {}
        self._sets: dict[tuple[str, str, str], HeldSet | None] = {}

    def base_chains(self) -> Sequence[BaseChain]:
        """Return the chains at hooks in their order, but for those of dormant tables."""
        if self._base_chains is None:
            dormant = set(self._dumped(GETTABLE, 0, b"", _dormant_table))
            found = self._dumped(GETCHAIN, 0, b"", _base_chain)
            self._base_chains = [each for each in found if (each.family, each.table) not in dormant]
        return self._base_chains

    def chain_names(self, family: str, table: str) -> frozenset[str]:
        def name(of: str, span: Span) -> Iterator[str]:
            found = attributes(*span)
            if (of, text(found[1])) == (family, table):
                yield text(found[3])

        return frozenset(self._dumped(GETCHAIN, 0, b"", name))

    def rules(self, family: str, table: str, chain: str) -> Sequence[HeldRule]:
        key = family, table, chain
        if key not in self._rules:
            of = text_attribute(1, table) + text_attribute(2, chain)
            self._rules[key] = self._dumped(
                GETRULE, _FAMILY_NUMBERS[family], of, lambda _, span: [parse_rule(span)[1]])
        return self._rules[key]

    def held_set(self, family: str, table: str, name: str) -> HeldSet | None:
        key = family, table, name
        if key not in self._sets:
            self._sets[key] = self._held_set(_FAMILY_NUMBERS[family], names_of(table, name))
        return self._sets[key]

    def _held_set(self, family: int, of: bytes) -> HeldSet | None:
        found = unless_absent(
            lambda: self._socket.request_one(GETSET, NFGENMSG.pack(family, 0, 0) + of))
        if found is None:
            return None
        data, start, end = found
        with decoding("a set"):
            listed = attributes(data, start + NFGENMSG.size, end)
            is_small = int.from_bytes(listed.get(3, b""), "big") & ANONYMOUS
            one = self._among_all(family, of) if is_small or self._for_many else partial(
                self._element, family, of)
            return parse_held_set(listed, Elements(
                lambda: self._dumped(GETSETELEM, family, of, lambda _, span: parse_elements(span)), one))

    def _among_all(self, family: int, of: bytes) -> Callable[[bytes], Element | None]:
        """Return what finds an element by its key. It reads all when it is first called."""

        @cache
        def elements() -> dict[bytes, Found]:
            request = NFGENMSG.pack(family, 0, 0) + of
            return unless_absent(
                lambda: self._socket.dump(GETSETELEM, request, partial(by_key, parse_plain))) or {}

        return partial(_element_at, elements)

    def _element(self, family: int, of: bytes, key: bytes) -> Element | None:
        """Return the element at a key of a set without intervals, or the catch-all at b"" (Linux 5.13)."""
        request = NFGENMSG.pack(family, 0, 0) + of + element_list(encode_element(Element(key)))
        try:
            data, start, end = self._socket.request_one(GETSETELEM, request)
        except OSError as error:
            if error.errno == errno.ENOENT or (not key and error.errno in (*ABSENT, errno.EOPNOTSUPP)):
                return None
            raise
        return next(parse_elements((data, start + NFGENMSG.size, end)), None)

    def _dumped(
        self, kind: int, family: int, of: bytes, parse: Callable[[str, Span], Iterable[T]]
    ) -> list[T]:
        """Return what *parse* makes of family and attributes of each answer; none without a subject."""

        def collect(answers: Iterator[Span]) -> list[T]:
            with decoding("a filter"):
                return [
                    item for data, start, end in answers
                    for item in parse(
                        FAMILIES.get(data[start], "?"), (data, start + NFGENMSG.size, end))
                ]  # fmt: skip

        return unless_absent(
            lambda: self._socket.dump(kind, NFGENMSG.pack(family, 0, 0) + of, collect)) or []


def _element_at(elements: Callable[[], Mapping[bytes, Found]], key: bytes) -> Element | None:
    try:
        found = elements()[key]
    except KeyError:
        return None
    return found if isinstance(found, Element) else Element(key, found)


class WrittenRuleset:
    """A table as it would be written, with elements."""

    def __init__(self, table: Table, layout: Layout, elements: Iterable[PlainElement]) -> None:
        self._table = table
        self._layout = layout
        self._elements: dict[str, list[Element]] = defaultdict(list)
        for name, key, data in elements:
            self._elements[name].append(Element(key, data))

    def base_chains(self) -> list[BaseChain]:
        return [
            BaseChain(self._table.family.ip, self._table.name, item.name, *item.hook[:3],
                      drops_by_policy=False, packets=None)
            for item in self._layout.values() if isinstance(item, Chain) and item.hook is not None]

    def rules(self, family: str, table: str, chain: str) -> list[HeldRule]:
        found = self._layout.get(chain)
        return [HeldRule(0, tuple(rule_expressions(rule)), b"") for rule in found.rules] if isinstance(
            found, Chain) else []

    def held_set(self, family: str, table: str, name: str) -> HeldSet | None:
        found = self._layout.get(name)
        if not isinstance(found, Container):
            return None
        elements = self._elements[name] if found.constant is None else constant_elements(found)
        types = tuple(map(type_of, found.key))
        return HeldSet(
            packed_size(found.key), found.interval, (), Elements(lambda: elements),
            is_filled_by_packets=found.dynamic, types=types)


class TableRuleset:
    """One table of a ruleset, as packets meet it about whose senders no set that packets fill knows anything.

    With *remembers*, such sets know what they hold.
    """

    def __init__(self, table: str, ruleset: Ruleset, *, remembers: bool = False) -> None:
        self._table = table
        self._ruleset = ruleset
        self._remembers = remembers

    def base_chains(self) -> list[BaseChain]:
        return [each for each in self._ruleset.base_chains() if each.table == self._table]

    def rules(self, family: str, table: str, chain: str) -> Sequence[HeldRule]:
        return self._ruleset.rules(family, table, chain)

    def held_set(self, family: str, table: str, name: str) -> HeldSet | None:
        held = self._ruleset.held_set(family, table, name)
        if held is None or not held.is_filled_by_packets:
            return held
        known = held.elements if self._remembers else Elements(list)
        return held._replace(is_filled_by_packets=False, elements=known)


def _dormant_table(family: str, span: Span) -> Iterator[tuple[str, str]]:
    found = attributes(*span)
    if int.from_bytes(found.get(2, b""), "big") & DORMANT:
        yield family, text(found[1])


def _base_chain(family: str, span: Span) -> Iterator[BaseChain]:
    """Yield a listed chain if it is at a hook. Most are not, and only searched for the names of types."""
    data, start, end = span
    if any(data.find(kind, start, end) >= 0 for kind in (b"filter\0", b"nat\0", b"route\0")):
        found = parse_base_chain(family, attributes(*span))
        if found is not None:
            yield found
