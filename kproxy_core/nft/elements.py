"""The one codec of elements of sets and maps: values, nft's text and netlink messages. Pure.

A large cluster has 250,000 elements with a key and data and nothing else. With an `Element` for each, a read
takes six times as long, and a write ten times. Therefore functions for many elements take and yield these
*plain* ones as a key and data, and others alone as `Element`.

Attributes are those of linux/netfilter/nf_tables.h. The kernel checks the sizes of keys and data.
"""

import errno
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, repeat, starmap
from typing import Final, NamedTuple, TypeVar

from kproxy_core.model.address import Address, Cidr, Family, Protocol, format_address
from kproxy_core.netlink.messages import (
    NFGENMSG,
    NLM_F_CREATE,
    NetlinkRequest,
    Span,
    attribute,
    attribute_spans,
    attributes,
    decoding,
    fitting,
    fitting_alike,
    nested,
    payload,
    text,
    text_attribute,
    u32_attribute,
)
from kproxy_core.nft.messages import NEWSETELEM
from kproxy_core.nft.rules import ADDRESS, PROTOCOL, DataType, Parts, Verdict, parse_verdict, type_of

T = TypeVar("T")
Key = TypeVar("Key")

Data = bytes | Verdict | None
"""What a key leads to: a value or a verdict in a map, None in a set. Packed as in the kernel."""


class Element(NamedTuple):
    """An element of a set or a map, packed as in the kernel."""

    key: bytes
    """b"": all keys without an element of their own (a catch-all, Linux 5.13), which only another process
    adds."""
    data: Data = None
    last: bytes = b""
    """In a container of intervals whose keys have several parts: the last value of each part."""
    is_end: bool = False
    """In a container of intervals whose keys have one part: the first key behind an interval."""
    timeout: int = 0
    """Timeout in milliseconds, where it is not that of the container."""
    expressions: tuple[bytes, ...] = ()
    """Those that run when the key is looked up, encoded as the kernel lists them: a counter, or a limit,
    which decides whether the element matches."""
    object: str = ""
    """In a map of stateful objects: the name of one."""

    @property
    def packets(self) -> int:
        """Packets that its counter has counted; 0 without a counter."""
        for expression in self.expressions:
            found = attributes(expression)
            if found.get(_EXPRESSION_NAME) == b"counter\0":
                counted = attributes(found.get(_EXPRESSION_DATA, b""))
                return int.from_bytes(counted.get(_PACKETS, b""), "big")
        return 0


CATCH_ALL: Final = Element(b"")

PlainElement = tuple[str, bytes, Data]
"""The name of a container, and the key and data of an element that has nothing else."""

Found = Data | Element
"""Of a key that the kernel lists: the data, or the whole element if it is not a plain one."""

_ELEMENTS = 3
_KEY, _DATA, _FLAGS, _TIMEOUT, _EXPIRATION, _NOTES, _EXPRESSION, _PADDING, _OBJECT, _LAST, _EXPRESSIONS = (
    range(1, 12))
_VALUE = 1
_END, _CATCH_ALL = 1, 2
_EXPRESSION_NAME, _EXPRESSION_DATA = 1, 2
_BYTES, _PACKETS, _COUNTER_PADDING = 1, 2, 3
_ATTRIBUTE = struct.Struct("=HH")


def elements_of(item: Address | Cidr) -> list[Element]:
    """Return one constant as the kernel holds it: a network has a first key, and the first key behind it."""
    if not isinstance(item, Cidr):
        return [Element(item)]
    size = len(item.network)
    behind = int.from_bytes(item.network, "big") + (1 << (size * 8 - item.prefix))
    if behind == 1 << size * 8:
        return [Element(item.network)]
    return [Element(item.network), Element(behind.to_bytes(size, "big"), is_end=True)]


# Encoding.


def encode_element(element: Element) -> bytes:
    """Encode one element of a list. Raises TooLong."""
    parts = [nested(_KEY, attribute(_VALUE, element.key))] if element.key else []
    if element.data is not None:
        parts.append(_encode_data(element.data))
    if flags := _END * element.is_end | _CATCH_ALL * (not element.key):
        parts.append(u32_attribute(_FLAGS, flags))
    if element.timeout:
        parts.append(attribute(_TIMEOUT, struct.pack(">Q", element.timeout)))
    if len(element.expressions) == 1:
        parts.append(nested(_EXPRESSION, *element.expressions))
    elif element.expressions:
        parts.append(nested(_EXPRESSIONS, *(nested(1, each) for each in element.expressions)))
    if element.object:
        parts.append(text_attribute(_OBJECT, element.object))
    if element.last:
        parts.append(nested(_LAST, attribute(_VALUE, element.last)))
    return nested(1, *parts)


def element_list(*encoded: bytes) -> bytes:
    """Encode the attribute of a request that holds *encoded* elements. Raises TooLong; see `fitting`."""
    return nested(_ELEMENTS, *encoded)


def plain_lists(keys: Sequence[bytes], data: Sequence[Data]) -> Iterator[bytes]:
    """Encode plain elements of one container, in as few lists as hold them; at least one key.

    *data* are None in a set, and where the kernel needs the keys only. Raises TooLong.
    """
    key_sizes = set(map(len, keys))
    if len(key_sizes) > 1 or 0 in key_sizes:
        encoded = [encode_element(Element(key, value)) for key, value in zip(keys, data, strict=True)]
    elif set(map(type, data)) == {bytes} and len(sizes := set(map(len, data))) == 1:  # type: ignore[arg-type]
        yield from _lists_of_values(keys, data, *key_sizes, *sizes)  # type: ignore[arg-type]
        return
    else:  # These share few data.
        (key_size,) = key_sizes
        ends = {value: _ends(key_size, value) for value in set(data)}
        around = map(ends.__getitem__, data)
        encoded = [head + key + tail for key, (head, tail) in zip(keys, around, strict=True)]
    yield from (element_list(*encoded[part]) for part in fitting(encoded))


def _lists_of_values(
    keys: Sequence[bytes], values: Sequence[bytes], key_size: int, size: int
) -> Iterator[bytes]:
    """Encode elements whose keys and values have one size each, as in most maps."""
    head, rest = _ends(key_size, bytes(size))
    tail = bytes(-size % 4)
    middle = rest[: len(rest) - len(tail) - size]
    for part in fitting_alike(len(keys), len(head) + key_size + len(rest)):
        columns = zip(repeat(head), keys[part], repeat(middle), values[part], repeat(tail))
        yield element_list(b"".join(chain.from_iterable(columns)))


@lru_cache(maxsize=4096)  # bounded, because Services may own chains
def _ends(key_size: int, data: Data) -> tuple[bytes, bytes]:
    """Return what stands before and behind the key of an element."""
    encoded = encode_element(Element(bytes(key_size), data))
    return encoded[:_HEADS], encoded[_HEADS + key_size :]


_HEADS: Final = 12
"""Bytes before a key: the headers of the element, the key and the value."""


def _encode_data(data: bytes | Verdict) -> bytes:
    return nested(_DATA, data.encode() if isinstance(data, Verdict) else attribute(_VALUE, data))


def element_request(family: Family, table: str, container: str, kind: int, elements: bytes) -> NetlinkRequest:
    """Return a request about a list of *elements*; see `element_list` and `plain_lists`."""
    flags = NLM_F_CREATE if kind == NEWSETELEM else 0
    return NetlinkRequest(kind, flags, payload(family, names_of(table, container), elements))


@lru_cache
def names_of(table: str, container: str) -> bytes:
    """Encode the attributes that name a container in messages about its elements."""
    return text_attribute(1, table) + text_attribute(2, container)


# Text.


def element_texts(key: Parts, value: Parts, elements: Iterable[Element]) -> Iterator[str]:
    """Yield *elements* as nft writes them: ``192.0.2.0/24 . tcp . 80 : 8080``. Without their expressions."""
    keys, values = _fields(key), _fields(value)
    for packed, data, last, _, timeout, _, _ in elements:
        if not packed:
            shown = "*"
        elif last:
            shown = " . ".join([_range_text(packed[at], last[at], text_of) for at, text_of in keys])
        else:
            shown = " . ".join([text_of(packed[at]) for at, text_of in keys])
        if timeout:
            shown += f" timeout {timeout}ms"
        if isinstance(data, Verdict):
            shown += f" : {data.text}"
        elif data is not None:
            shown += f" : {' . '.join([text_of(data[at]) for at, text_of in values])}"
        yield shown


def _fields(parts: Parts) -> list[tuple[slice, Callable[[bytes], str]]]:
    """Return where each part is in a packed key or value, and what writes it as text.

    Each begins with a word of four bytes.
    """
    found, at = [], 0
    for type_ in map(type_of, parts):
        found.append((slice(at, at + type_.size), _writer(type_)))
        at += -(-type_.size // 4) * 4
    return found


def _writer(type_: DataType) -> Callable[[bytes], str]:
    if type_ in ADDRESS.values():
        return _address_text
    if type_ == PROTOCOL:
        return _protocol_text
    return _network_number if type_.byte_order == 2 else _host_number


def _address_text(packed: bytes) -> str:
    return format_address(Address(packed))


def _protocol_text(packed: bytes) -> str:
    return _PROTOCOL_NAMES.get(packed) or str(packed[0])


def _network_number(packed: bytes) -> str:
    return str(int.from_bytes(packed, "big"))


def _host_number(packed: bytes) -> str:
    return str(int.from_bytes(packed, sys.byteorder))


def _range_text(first: bytes, last: bytes, text_of: Callable[[bytes], str]) -> str:
    if first == last:
        return text_of(first)
    differing = int.from_bytes(first, "big") ^ int.from_bytes(last, "big")
    free = differing.bit_length()
    if text_of is _address_text and differing + 1 == 1 << free:
        return f"{text_of(first)}/{len(first) * 8 - free}"
    return f"{text_of(first)}-{text_of(last)}"


_PROTOCOL_NAMES = {bytes([protocol]): protocol.name.lower() for protocol in Protocol}


# Decoding.


def parse_elements(span: Span) -> Iterator[Element]:
    """Yield the elements in the attributes of a message about them. Raises Malformed."""
    with decoding("an element"):
        for data, start, end in _lists(span):
            if rows := _alike(data, start, end, _PLAIN, None):
                yield from starmap(Element, rows)
            else:
                for _, first, last in attribute_spans(data, start, end):
                    yield _parse_element(data, first, last)


def parse_plain(span: Span) -> Iterator[tuple[bytes, Found]]:
    """Yield the key of each element in the attributes of a message about them, and what is found there.

    Elements that have a timeout are plain, too. The key of a catch-all is b"". Raises Malformed.
    """
    with decoding("an element"):
        for data, start, end in _lists(span):
            yield from _alike(data, start, end, _PLAIN_OR_TIMED, None) or _with_keys_alike(data, start, end)


def parse_packets(span: Span) -> Iterator[tuple[bytes, int]]:
    """Yield the key and the packets of each element of a set that counts them. Raises Malformed."""
    with decoding("a counted element"):
        for data, start, end in _lists(span):
            if rows := _alike(data, start, end, _COUNTED, 0):
                yield from rows
            else:
                for _, first, last in attribute_spans(data, start, end):
                    element = _parse_element(data, first, last)
                    yield element.key, element.packets


def _lists(span: Span) -> Iterator[Span]:
    for kind, start, end in attribute_spans(*span):
        if kind == _ELEMENTS and start != end:
            yield span[0], start, end


def _parse_element(data: bytes, start: int, end: int) -> Element:
    found = attributes(data, start, end)
    flags = int.from_bytes(found.get(_FLAGS, b""), "big")
    listed = found.get(_EXPRESSIONS, b"")
    expressions = [listed[first:last] for _, first, last in attribute_spans(listed, 0, len(listed))]
    if _EXPRESSION in found:
        expressions.append(found[_EXPRESSION])
    key, last = (attributes(found.get(kind, b"")).get(_VALUE, b"") for kind in (_KEY, _LAST))
    return Element(
        key, _parse_data(found[_DATA]) if _DATA in found else None, last, bool(flags & _END),
        int.from_bytes(found.get(_TIMEOUT, b""), "big"), tuple(expressions), text(found.get(_OBJECT, b"")))


def _parse_data(data: bytes) -> Data:
    verdict = parse_verdict(data)
    return attributes(data).get(_VALUE, b"") if verdict is None else verdict


# Lists of the kernel's, whose elements are mostly alike.

_Shape = Mapping[int, "str | bytes | _Shape"]
"""By kind of attribute, its value: a column of this name, any value (""), these bytes, or attributes."""

_ANY: Final = ""
_KEYED: Final[_Shape] = {_KEY: {_VALUE: "key"}, _EXPIRATION: _ANY, _NOTES: _ANY, _PADDING: _ANY}
_PLAIN: Final[_Shape] = {**_KEYED, _DATA: {_VALUE: "data"}}
_PLAIN_OR_TIMED: Final[_Shape] = {**_PLAIN, _TIMEOUT: _ANY}
_COUNTER: Final[_Shape] = {_BYTES: _ANY, _PACKETS: "packets", _COUNTER_PADDING: _ANY}
_COUNTED: Final[_Shape] = {
    **_KEYED, _TIMEOUT: _ANY, _EXPRESSION: {_EXPRESSION_NAME: b"counter\0", _EXPRESSION_DATA: _COUNTER}}


def _alike(data: bytes, start: int, end: int, shape: _Shape, default: T) -> list[tuple[bytes, T]]:
    """Return two columns of a list of elements; none if some have another *shape*, or other sizes.

    *default* is in place of a second column that the shape does not find.
    """
    size = _ATTRIBUTE.unpack_from(data, start)[0]
    if (end - start) % size:
        return []
    same, columns = [(start, start + 4)], dict[str, tuple[int, int]]()
    if not _measure(data, start + 4, start + size, shape, same, columns):
        return []
    count = (end - start) // size
    for first, last in same:
        for at in range(first, last):
            if data[at:end:size] != data[at : at + 1] * count:
                return []
    layout, at = ">", start
    for name, (first, last) in columns.items():
        layout += f"{first - at}x" + ("Q" if name == "packets" else f"{last - first}s")
        at = last
    rows = struct.iter_unpack(f"{layout}{start + size - at}x", data[start:end])
    return [(key, default) for key, in rows] if len(columns) == 1 else list(rows)


def _measure(
    data: bytes, start: int, end: int, shape: _Shape, same: list[tuple[int, int]],
    columns: dict[str, tuple[int, int]],
) -> bool:
    """Find the bytes that elements of *shape* share, and the columns, of which the key is the first.

    Return False for other shapes.
    """
    for kind, first, last in attribute_spans(data, start, end):
        same.append((first - 4, first))
        inner = shape.get(kind)
        if inner is None:
            return False
        if isinstance(inner, bytes):
            same.append((first, last))
            if data[first:last] != inner:
                return False
        elif isinstance(inner, str):
            if inner == _ANY:
                continue
            if len(columns) != (inner != "key") or (inner == "packets" and last - first != 8):
                return False
            columns[inner] = first, last
        elif not _measure(data, first, last, inner, same, columns):
            return False
    first, last = columns.get("key", (0, 0))
    return first < last


def _with_keys_alike(data: bytes, start: int, end: int) -> list[tuple[bytes, Found]]:
    """Return the elements of a list of verdicts: these have keys of one size, and share few values."""
    rows: list[tuple[bytes, Found]] = []
    head, key_end, behind = b"", 0, 0
    for _, first, last in attribute_spans(data, start, end):
        if head and data[first : first + 8] == head:
            found = _parse_behind_key(data[first + behind : last])
            key = data[first + 8 : first + key_end]
            rows.append((key, found._replace(key=key) if type(found) is Element else found))
            continue
        element = _parse_element(data, first, last)
        rows.append((element.key, _found(element) if element.key else element))
        if element.key:
            size, kind, value_size, value_kind = _KEY_HEADERS.unpack_from(data, first)
            key_end, behind = 4 + value_size, size + -size % 4
            is_first = (kind & _KIND, value_kind & _KIND) == (_KEY, _VALUE)
            if is_first and value_size == 4 + len(element.key) and behind == key_end + -key_end % 4:
                head = data[first : first + 8]
    return rows


_KEY_HEADERS = struct.Struct("=HHHH")
"""Sizes and kinds of a key's attribute, and of the value in it."""
_KIND = 0x3FFF
"""Mask of an attribute's kind, without flags."""


@lru_cache(maxsize=4096)
def _parse_behind_key(data: bytes) -> Found:
    """Return what is found in the attributes that follow an element's key."""
    return _found(_parse_element(data, 0, len(data)))


def _found(element: Element) -> Found:
    """Return the data of an element that has a key, if it has nothing else that matters to lookups."""
    _, data, last, is_end, _, expressions, object_ = element
    return element if last or is_end or expressions or object_ else data


# Dumps.


def by_key(
    parse: Callable[[Span], Iterable[tuple[Key, T]]], answers: Iterable[Span]
) -> dict[Key, T]:
    """Collect what *parse* finds in the *answers* to a dump. Raises InterruptedError if some are missing.

    For each part of a dump the kernel walks the hash table from its start, and skips as many elements as it
    has sent (nft_rhash_walk). Soon after many additions or deletions it resizes the table, which changes the
    order. It does not set NLM_F_DUMP_INTR then, but sends another element twice for each one that is missing.
    """
    found: dict[Key, T] = {}
    sent = 0
    for data, start, end in answers:
        pairs = list(parse((data, start + NFGENMSG.size, end)))
        sent += len(pairs)
        found.update(pairs)
    if sent != len(found):
        raise InterruptedError(errno.EINTR, "a hash table was resized while it was read")
    return found


def elements_by_place(span: Span) -> Iterator[tuple[tuple[bytes, bytes, bool], Element]]:
    """Yield elements as `parse_elements` does, with what tells each from all others of its container."""
    for element in parse_elements(span):
        yield (element.key, element.last, element.is_end), element
