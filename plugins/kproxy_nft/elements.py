"""Elements of maps and sets, as nf_tables lists them (linux/netfilter/nf_tables.h). Pure."""

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from kproxy_core.netlink.messages import NFGENMSG, Span, attribute_spans, decoding
from kproxy_core.nft.elements import check_complete

T = TypeVar("T")

_LIST_ELEMENTS = 3
_ELEM_KEY, _ELEM_EXPRESSION = 1, 7
_EXPRESSION_DATA = 2
_COUNTED_PACKETS = 2
_ATTRIBUTE = struct.Struct("=HH")


def attributes_of(answer: Span) -> Span:
    """Return the part of *answer* that follows the header of nfnetlink."""
    data, start, end = answer
    return data, start + NFGENMSG.size, end


def complete(
    parse: Callable[[bytes, int, int], Iterable[tuple[bytes, T]]], answers: Iterator[Span]
) -> dict[bytes, T]:
    """Collect the elements in *answers*, parsed by *parse*. Raises InterruptedError if some are missing."""
    found: dict[bytes, T] = {}
    sent = 0
    for answer in answers:
        elements = list(parse(*attributes_of(answer)))
        sent += len(elements)
        found.update(elements)
    check_complete(sent, len(found))
    return found


def parse_counters(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int]]:
    """Yield the (key, packets) of each counted element in the attributes of an element message.

    Without catch-all elements, which no rule of ours adds. Raises Malformed.
    """
    with decoding("a counted element"):
        for kind, list_start, list_end in attribute_spans(data, start, end):
            if kind != _LIST_ELEMENTS or list_start == list_end:
                continue
            # The kernel writes all elements of a set with the same layout, and there may be 100,000.
            if alike := _counted_alike(data, list_start, list_end):
                yield from alike
                continue
            for _, element_start, element_end in attribute_spans(data, list_start, list_end):
                key, packets = b"", 0
                for part, part_start, part_end in attribute_spans(data, element_start, element_end):
                    if part == _ELEM_KEY:
                        key = data[part_start + 4 : part_end]
                    elif part == _ELEM_EXPRESSION:
                        at = _packets_at(data, part_start, part_end)
                        packets = int.from_bytes(data[at : at + 8], "big")
                if key:
                    yield key, packets


def _counted_alike(data: bytes, start: int, end: int) -> list[tuple[bytes, int]]:
    """Return the keys and packets of a list of elements; empty if their layouts differ."""
    size = _ATTRIBUTE.unpack_from(data, start)[0]
    if size % 4 or (end - start) % size:
        return []
    parts = {kind: (first, last) for kind, first, last in attribute_spans(data, start + 4, start + size)}
    if not parts.keys() >= {_ELEM_KEY, _ELEM_EXPRESSION}:
        return []
    key, key_end = parts[_ELEM_KEY]
    packets = _packets_at(data, *parts[_ELEM_EXPRESSION])
    layout = struct.Struct(
        f"={key + 4 - start}s{key_end - key - 4}s{packets - key_end}s8s{start + size - packets - 8}x")
    first = data[start:key + 4], data[key_end:packets]
    # The bytes counted stand between the headers.
    value = slice(packets - key_end - 12, packets - key_end - 4)
    heads = first[0], first[1][:value.start] + first[1][value.stop:]
    found: list[tuple[bytes, int]] = []
    for head, name, between, number in layout.iter_unpack(data[start:end]):
        if (head, between[:value.start] + between[value.stop:]) != heads:
            return []
        found.append((name, int.from_bytes(number, "big")))
    return found


def _packets_at(data: bytes, start: int, end: int) -> int:
    """Return the offset of a counter's number of packets."""
    for wanted in (_EXPRESSION_DATA, _COUNTED_PACKETS):
        spans = {kind: (first, last) for kind, first, last in attribute_spans(data, start, end)}
        start, end = spans[wanted]
    return start
