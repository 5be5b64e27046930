"""What the kernel holds: tables with their objects, read over netlink (linux/netfilter/nf_tables.h)."""

import errno
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, Self, TypeVar

from kproxy_core.model.address import Family
from kproxy_core.netlink.messages import (
    NETLINK_NETFILTER,
    NFGENMSG,
    Span,
    attribute_spans,
    attributes,
    decoding,
    payload,
    text,
    text_attribute,
)
from kproxy_core.netlink.sockets import NetlinkSocket
from kproxy_core.nft.elements import (
    CATCH_ALL,
    Element,
    Found,
    by_key,
    element_list,
    elements_by_place,
    encode_element,
    names_of,
    parse_packets,
    parse_plain,
)
from kproxy_core.nft.messages import (
    ABSENT,
    FAMILIES,
    GETCHAIN,
    GETFLOWTABLE,
    GETOBJ,
    GETRULE,
    GETSET,
    GETSETELEM,
    GETTABLE,
    TABLE_NAME,
    TABLE_OWNER,
    unless_absent,
)
from kproxy_core.nft.objects import ANONYMOUS, Flowtable, StatefulObject
from kproxy_core.nft.rules import Attributes, HeldRule, parse_rule

T = TypeVar("T")
K = TypeVar("K")

_CHAIN_NAME = 3
_TABLE_ATTRIBUTES, _CHAIN_ATTRIBUTES = (2, 6), (4, 5, 7)
_CONTAINER_ATTRIBUTES = (3, 4, 5, 6, 7, 9, 11, 13)
_SET_FLAGS, _CHAIN_FLAGS = 3, 10
_BINDING = 4
"""NFT_CHAIN_BINDING: the chain is deleted with the rule that refers to it."""
_OBJECT_TYPE = 3
_FLAGS, _USE = 2, 3
"""Attributes of a table."""
_MATCH: Final = re.compile(
    re.escape(struct.pack("=HH8s", 10, 1, b"match"))  # NFTA_EXPR_NAME
    + b".." + struct.pack("=H", 2) + b".." + struct.pack("=H", 1)  # NFTA_EXPR_DATA, NFTA_MATCH_NAME
    + rb"([\w-]+)\0", re.DOTALL)  # fmt: skip
"""An expression of nft_compat in a rule."""
_COUNT = 20
"""NFTA_SET_COUNT: the number of elements."""


class HeldTable(NamedTuple):
    """The objects of a table that the kernel lists, without the elements of sets that are not constant.

    Anonymous chains and sets are left out: each belongs to the rule that refers to it.
    """

    attributes: Attributes
    chains: dict[str, Attributes]
    rules: dict[str, list[HeldRule]]
    containers: dict[str, Attributes]
    elements: dict[str, frozenset[Element]]
    """Those of the containers that were asked for."""
    flowtables: dict[str, Flowtable]
    owner: int = 0
    """The netlink port that alone may change the table; 0: any."""
    stateful: Sequence[StatefulObject] = ()
    catch_alls: Collection[str] = ()
    """The containers with a catch-all element, among those whose elements were not asked for."""


def parse_flowtable(span: Span) -> Flowtable:
    """Return a listed flowtable. Raises Malformed."""
    with decoding("a flowtable"):
        found = attributes(*span)
        hook = attributes(found.get(3, b""))
        devices = hook.get(3, b"")
        names = tuple(text(devices[start:end]) for _, start, end in attribute_spans(devices, 0, len(devices)))
        return Flowtable(text(found[2]), names)


class TableName(NamedTuple):
    family: str
    """nft's name: ``ip``, ``ip6``, ``inet``, ..."""
    name: str

    def __str__(self) -> str:
        return f"{self.family} {self.name}"


class TableState(NamedTuple):
    """A table as a listing of all tables has it."""

    flags: int
    """`objects.DORMANT`, `objects.OWNER` and `objects.PERSIST`."""
    chains: int
    """Chains and other objects in it."""
    owner: int
    """The netlink port that alone may change it; 0: any may."""


class Reader:
    """A netlink socket by which tables are read. Not thread-safe."""

    def __init__(self, sock: NetlinkSocket) -> None:
        self.socket = sock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def read(self, family: Family, table: str, elements_of: Collection[str] = ()) -> HeldTable | None:
        """Return the objects of *table*, and *elements_of* these containers; None without the table.

        Raises InterruptedError if the rules changed during each attempt, Malformed, other OSError.
        """
        named = text_attribute(TABLE_NAME, table)
        found = unless_absent(lambda: self.socket.request_one(GETTABLE, payload(family, named)))
        if found is None:
            return None
        data, start, end = found
        rules: dict[str, list[HeldRule]] = {}
        for chain, rule in self._listed(GETRULE, family, named, parse_rule):
            rules.setdefault(chain, []).append(rule)
        found_table = attributes(data, start + NFGENMSG.size, end)
        containers = _by_name(
            2, self._listed(GETSET, family, named, _attributes), _CONTAINER_ATTRIBUTES,
            _SET_FLAGS, ANONYMOUS)
        return HeldTable(
            attributes={kind: value for kind, value in found_table.items() if kind in _TABLE_ATTRIBUTES},
            chains=_by_name(
                3, map(_attributes, self._of_table(GETCHAIN, family, table)), _CHAIN_ATTRIBUTES,
                _CHAIN_FLAGS, _BINDING),
            rules=rules,
            containers=containers,
            elements={
                name: self.elements(family, table, name) for name in elements_of if name in containers},
            flowtables={
                flowtable.name: flowtable
                for span in self._of_table(GETFLOWTABLE, family, table)
                for flowtable in [parse_flowtable(span)]
            },
            owner=int.from_bytes(found_table.get(TABLE_OWNER, b""), "big"),
            stateful=self._listed(GETOBJ, family, named, parse_stateful_object),
            catch_alls=[
                name for name in containers
                if name not in elements_of and self._has_catch_all(family, table, name)],
        )  # fmt: skip

    def tables(self, family: Family) -> dict[str, TableState]:
        """Return the tables of *family* by name; none in a kernel without nf_tables. Raises OSError."""
        with decoding("a table"):
            return {
                text(found[TABLE_NAME]): TableState(*(
                    int.from_bytes(found.get(kind, b""), "big") for kind in (_FLAGS, _USE, TABLE_OWNER)))
                for found in self._listed(GETTABLE, family, b"", _attributes)
            }

    def matches(self, family: Family, table: str) -> set[str]:
        """Return the names of the matches of iptables in the rules of *table*; none without the table.

        Scans the listing as bytes: a table of kube-proxy's may have 100,000 rules. Raises OSError.
        """

        def collect(answers: Iterator[Span]) -> set[str]:
            found: set[str] = set()
            scanned = b""
            for data, _, _ in answers:  # Several rules are in one piece of data.
                if data is not scanned:
                    scanned = data
                    found.update(name.decode("ascii", "replace") for name in _MATCH.findall(data))
            return found

        return self._dumped(GETRULE, family, text_attribute(TABLE_NAME, table), collect) or set()

    def _has_catch_all(self, family: Family, table: str, name: str) -> bool:
        try:
            return self._element(family, table, name, CATCH_ALL) is not None
        except OSError as error:
            if error.errno in (*ABSENT, errno.EOPNOTSUPP):
                return False
            raise

    def element(self, family: Family, table: str, name: str, key: bytes) -> Found:
        """Return what is found at a key of a map, or of a set without intervals.

        Raises KeyError if it does not exist, OSError.
        """
        try:
            found = self._element(family, table, name, Element(key))
        except FileNotFoundError as error:
            raise KeyError(key) from error
        if found is None:
            raise KeyError(key)
        return found[1]

    def _element(
        self, family: Family, table: str, name: str, element: Element
    ) -> tuple[bytes, Found] | None:
        of = names_of(table, name) + element_list(encode_element(element))
        for data, start, end in self.socket.request(GETSETELEM, 0, payload(family, of)):
            for found in parse_plain((data, start + NFGENMSG.size, end)):
                return found
        return None

    def elements(self, family: Family, table: str, name: str) -> frozenset[Element]:
        """Return the elements of a set or a map; none if it does not exist.

        Raises InterruptedError if they changed during each attempt, other OSError.
        """
        return frozenset(self._by_key(elements_by_place, family, table, name).values())

    def plain_elements(self, family: Family, table: str, name: str) -> dict[bytes, Found]:
        """Return what is found at each key of a map, or of a set without intervals.

        Without catch-alls, which `HeldTable` names. Nothing if it does not exist. Raises as `elements`.
        """
        found = self._by_key(parse_plain, family, table, name)
        found.pop(CATCH_ALL.key, None)
        return found

    def packets(self, family: Family, table: str, name: str) -> dict[bytes, int]:
        """Return the packets that each element of a set has counted, as `plain_elements` does."""
        found = self._by_key(parse_packets, family, table, name)
        found.pop(CATCH_ALL.key, None)
        return found

    def _by_key(
        self, parse: Callable[[Span], Iterable[tuple[K, T]]], family: Family, table: str, name: str
    ) -> dict[K, T]:
        return self._dumped(GETSETELEM, family, names_of(table, name), partial(by_key, parse)) or {}

    def counts(self, family: Family, table: str) -> dict[str, int]:
        """Return the number of elements of each set and map of *table*; none if the kernel does not tell it.

        Raises as `elements`.
        """
        named = text_attribute(TABLE_NAME, table)
        with decoding("a set"):
            return {
                text(found[2]): int.from_bytes(found[_COUNT], "big")
                for found in self._listed(GETSET, family, named, _attributes)
                if _COUNT in found
            }

    def _of_table(self, kind: int, family: Family, table: str) -> list[Span]:
        """Return the objects of *table*: the kernel lists those of all tables, and the table's name first."""
        named = text_attribute(TABLE_NAME, table)

        def collect(answers: Iterator[Span]) -> list[Span]:
            return [
                (data, start + NFGENMSG.size, end) for data, start, end in answers
                if data.startswith(named, start + NFGENMSG.size)
            ]  # fmt: skip

        return self._dumped(kind, family, b"", collect) or []

    def _listed(self, kind: int, family: Family, of: bytes, parse: Callable[[Span], T]) -> list[T]:
        """Return what *parse* makes of each answer to a dump; none without its subject."""

        def collect(answers: Iterator[Span]) -> list[T]:
            return [parse((data, start + NFGENMSG.size, end)) for data, start, end in answers]

        return self._dumped(kind, family, of, collect) or []

    def _dumped(
        self, kind: int, family: Family, of: bytes, collect: Callable[[Iterator[Span]], T]
    ) -> T | None:
        """Return what *collect* makes of the answers to a dump; None without its subject."""
        return unless_absent(lambda: self.socket.dump(kind, payload(family, of), collect))


def _attributes(span: Span) -> Attributes:
    return attributes(*span)


def _by_name(
    name: int, listed: Iterable[Attributes], kept: Collection[int], flags: int, anonymous: int
) -> dict[str, Attributes]:
    """Return the *kept* attributes of *listed* objects by name, without those with the flag *anonymous*."""
    with decoding("an object"):
        return {
            text(found[name]): {kind: found[kind] for kind in kept if kind in found}
            for found in listed
            if not int.from_bytes(found.get(flags, b""), "big") & anonymous
        }


def parse_stateful_object(span: Span) -> StatefulObject:
    """Return a listed stateful object. Raises Malformed."""
    with decoding("a stateful object"):
        found = attributes(*span)
        return StatefulObject(text(found[2]), int.from_bytes(found[_OBJECT_TYPE], "big"))


def _named(table: Span) -> TableName:
    data, start, end = table
    with decoding("a table"):
        name = attributes(data, start + NFGENMSG.size, end)[TABLE_NAME]
        return TableName(FAMILIES.get(data[start], "?"), text(name))


def tables() -> list[TableName]:
    """Return the tables of all families; none in a kernel without nf_tables. Raises OSError."""
    def ask() -> list[TableName]:
        with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
            return sock.dump(GETTABLE, NFGENMSG.pack(0, 0, 0), lambda found: [*map(_named, found)])

    return unless_absent(ask) or []


def has_table(family: Family, table: str) -> bool:
    """Return whether *table* exists, which it does not in a kernel without nf_tables. Raises OSError."""
    return _has(GETTABLE, family, table)


def has_chain(family: Family, table: str, chain: str) -> bool:
    """Return whether *chain* exists, as `has_table` does. Raises OSError."""
    return _has(GETCHAIN, family, table, text_attribute(_CHAIN_NAME, chain))


def _has(kind: int, family: Family, table: str, *named: bytes) -> bool:
    request = payload(family, text_attribute(TABLE_NAME, table), *named)

    def ask() -> list[Span]:
        with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
            return sock.request(kind, 0, request)

    return bool(unless_absent(ask))
