"""Elements of sets and maps: their keys, data and intervals, as text and as messages. Pure.

Attributes are those of linux/netfilter/nf_tables.h.
"""

import errno
import sys
from collections.abc import Iterator
from typing import Final, NamedTuple

from kproxy_core.model.address import Address, Cidr, Protocol, format_address
from kproxy_core.netlink.messages import Span, attribute, attribute_spans, attributes, nested, u32_attribute
from kproxy_core.nft.rules import ADDRESS, PROTOCOL, DataType, Parts, type_of


class Element(NamedTuple):
    """An element of a set or a map, packed as in the kernel."""

    key: bytes
    """b"": all keys without an element of their own (a catch-all, Linux 5.13), which only another process
    adds."""
    value: bytes = b""
    """In a map, unless it is a verdict."""
    last: bytes = b""
    """In a set of intervals whose keys have several parts: the last value of each part."""
    is_end: bool = False
    """In a set of intervals whose keys have one part: the first key behind an interval."""
    is_stateful: bool = False
    """Another process has added it with expressions, such as a limit, that decide whether it matches."""


CATCH_ALL: Final = Element(b"")

_END, _CATCH_ALL = 1, 2
"""NFT_SET_ELEM_INTERVAL_END: the element is the first key behind an interval. NFT_SET_ELEM_CATCHALL."""
_STATEFUL = frozenset((7, 9, 11))
"""NFTA_SET_ELEM_EXPR, _OBJREF and _EXPRESSIONS."""


def elements_of(item: Address | Cidr) -> list[Element]:
    """Return one constant as the kernel holds it: a network has a first key, and the first key behind it."""
    if not isinstance(item, Cidr):
        return [Element(item)]
    size = len(item.network)
    behind = int.from_bytes(item.network, "big") + (1 << (size * 8 - item.prefix))
    if behind == 1 << size * 8:
        return [Element(item.network)]
    return [Element(item.network), Element(behind.to_bytes(size, "big"), is_end=True)]


def encode_element(element: Element) -> bytes:
    if not element.key:
        return nested(1, u32_attribute(3, _CATCH_ALL))
    parts = [nested(1, attribute(1, element.key))]
    if element.value:
        parts.append(nested(2, attribute(1, element.value)))
    if element.is_end:
        parts.append(u32_attribute(3, _END))
    if element.last:
        parts.append(nested(10, attribute(1, element.last)))
    return nested(1, *parts)


CATCH_ALL_LIST: Final = nested(3, encode_element(CATCH_ALL))
"""The attribute of a request for the catch-all element of a container."""


def element_text(key: Parts, value: Parts, element: Element) -> str:
    """Return *element* as nft writes it: ``192.0.2.0/24 . tcp . 80 : 8080``."""
    if not element.key:
        return "*"
    firsts = _split(key, element.key)
    lasts = _split(key, element.last) if element.last else firsts
    shown = " . ".join(map(_range_text, map(type_of, key), firsts, lasts))
    if not element.value:
        return shown
    values = _split(value, element.value)
    return f"{shown} : {' . '.join(map(_value_text, map(type_of, value), values))}"


def _split(parts: Parts, packed: bytes) -> list[bytes]:
    """Return the values of the parts of a key, each of which begins with a word of four bytes."""
    found, at = [], 0
    for size in (type_of(part).size for part in parts):
        found.append(packed[at : at + size])
        at += -(-size // 4) * 4
    return found


def _range_text(type_: DataType, first: bytes, last: bytes) -> str:
    if first == last:
        return _value_text(type_, first)
    differing = int.from_bytes(first, "big") ^ int.from_bytes(last, "big")
    free = differing.bit_length()
    if type_ in ADDRESS.values() and differing + 1 == 1 << free:
        return f"{_value_text(type_, first)}/{type_.size * 8 - free}"
    return f"{_value_text(type_, first)}-{_value_text(type_, last)}"


def _value_text(type_: DataType, packed: bytes) -> str:
    if type_ in ADDRESS.values():
        return format_address(Address(packed))
    number = int.from_bytes(packed, "big" if type_.byte_order == 2 else sys.byteorder)
    return _PROTOCOL_NAMES.get(number, str(number)) if type_ == PROTOCOL else str(number)


_PROTOCOL_NAMES = {protocol.value: protocol.name.lower() for protocol in Protocol}


def parse_elements(span: Span) -> Iterator[Element]:
    """Yield the elements in a message about them. Raises Malformed."""
    data, start, end = span
    for kind, list_start, list_end in attribute_spans(data, start, end):
        if kind == 3:
            for _, first, last in attribute_spans(data, list_start, list_end):
                found = attributes(data, first, last)
                flags = int.from_bytes(found.get(3, b""), "big")
                key, value, end_key = (attributes(found.get(part, b"")).get(1, b"") for part in (1, 2, 10))
                yield Element(
                    key, value, end_key, bool(flags & _END), is_stateful=not _STATEFUL.isdisjoint(found))


def check_complete(sent: int, found: int) -> None:
    """Raise InterruptedError if a dump *sent* more elements than were *found* in it, without repetitions.

    For each part of a dump the kernel walks the hash table from its start, and skips as many elements as it
    has sent (nft_rhash_walk). Soon after many additions or deletions it resizes the table, which changes the
    order. It does not set NLM_F_DUMP_INTR then, but sends another element twice for each one that is missing.
    """
    if sent != found:
        raise InterruptedError(errno.EINTR, "a hash table was resized while it was read")
