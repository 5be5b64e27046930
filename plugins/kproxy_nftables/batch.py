"""Elements as netlink messages.

Layouts: linux/netfilter/nf_tables.h and nfnetlink.h. Attributes are padded to 4 bytes; all our keys and
values have such a length already.
"""

import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache

from kproxy_core.model.address import Family
from kproxy_core.netlink.messages import (
    NLA_F_NESTED,
    NLM_F_CREATE,
    NetlinkRequest,
    attribute,
    attribute_spans,
    attributes,
    decoding,
    fitting,
    nested,
    payload,
    text_attribute,
)
from kproxy_core.nft.messages import KIND
from kproxy_nftables.names import CLUSTER_IPS, TABLE, VERDICT_MAPS
from kproxy_nftables.wanted import Element, Value

_NEWSETELEM, GETSETELEM, _DELSETELEM = KIND | 12, KIND | 13, KIND | 14

_LIST_TABLE, _LIST_SET, _LIST_ELEMENTS = 1, 2, 3
_LIST_ELEM = 1
_ELEM_KEY, _ELEM_DATA = 1, 2
_IGNORED = frozenset((4, 5, 6, 8))
"""Timeout and expiry, which clients with session affinity have, comment and padding."""
FOREIGN = "foreign"
"""The value of an element with a limit or the like, which decides whether the element matches."""
_DATA_VALUE, _DATA_VERDICT = 1, 2
_VERDICT_CODE, _VERDICT_CHAIN = 1, 2
_VERDICTS = {"drop": 0, "accept": 1, "jump": -3, "goto": -4}
_VERDICT_NAMES = {code: name for name, code in _VERDICTS.items()}

_ATTRIBUTE = struct.Struct("=HH")
_HEADERS = 20
"""Bytes of nlmsghdr and nfgenmsg, with which every message begins."""
MOST_ELEMENTS = 1 << 15
"""Limit for the elements of one transaction. The kernel grows a hash table between transactions, so in a
large one each further element takes longer: 250,000 take 2.7 s at once and 0.6 s in such parts."""

_RANKS = {CLUSTER_IPS: 2} | dict.fromkeys(VERDICT_MAPS, 1)
"""Containers whose elements must not exist before those of other containers do."""


def element_list(container: str) -> bytes:
    """Encode the attributes that name a *container* in element messages."""
    return text_attribute(_LIST_TABLE, TABLE) + text_attribute(_LIST_SET, container)


def one_element(container: str, key: bytes) -> bytes:
    """Encode the attributes that name one element of a *container*."""
    return element_list(container) + nested(_LIST_ELEMENTS, _element(key, None))


def requests(
    family: Family, deletes: Sequence[Element], adds: Sequence[Element], limit: int, most: int
) -> Iterator[list[NetlinkRequest]]:
    """Yield the requests that delete and add elements, by transaction; at least one transaction.

    One transaction, deletions first, unless it would exceed *limit* bytes or *most* elements. For packets, a
    key that is deleted and added in one transaction is replaced atomically. Therefore a split keeps the
    deletion and the addition of a key in the same transaction, and adds a frontend after its endpoints and
    deletes it before them.
    """
    if len(deletes) + len(adds) <= most:
        pieces = [*_messages(_DELSETELEM, deletes), *_messages(_NEWSETELEM, adds)]
        size = sum(len(list_) for _, list_ in pieces) + (len(pieces) + 2) * _HEADERS
        if size <= limit:
            yield _requests(family, pieces)
            return
    step = max(1, min(limit // 1024, most))
    by_key = {(element[0], element[1]): element for element in deletes}
    ordered = sorted(adds, key=_rank)
    for start in range(0, len(ordered), step):
        part = ordered[start : start + step]
        replaced = [by_key.pop(e[:2]) for e in part if e[:2] in by_key]
        yield _requests(family, [*_messages(_DELSETELEM, replaced), *_messages(_NEWSETELEM, part)])
    rest = sorted(by_key.values(), key=_rank, reverse=True)
    for start in range(0, len(rest), step):
        yield _requests(family, list(_messages(_DELSETELEM, rest[start : start + step])))


def _rank(element: Element) -> int:
    return _RANKS.get(element[0], 0)


def _requests(family: Family, pieces: Sequence[tuple[int, bytes]]) -> list[NetlinkRequest]:
    return [
        NetlinkRequest(kind, NLM_F_CREATE if kind == _NEWSETELEM else 0, payload(family, body))
        for kind, body in pieces
    ]


def _messages(kind: int, elements: Sequence[Element]) -> Iterator[tuple[int, bytes]]:
    """Yield kind and attributes of the messages for *elements*, grouped by container and cut to size."""
    by_container: dict[str, list[Element]] = defaultdict(list)
    for element in elements:
        by_container[element[0]].append(element)
    for container, members in by_container.items():
        head, encoded = element_list(container), _encode(kind, members)
        for part in fitting(encoded):
            yield kind, head + nested(_LIST_ELEMENTS, *encoded[part])


def _encode(kind: int, elements: Sequence[Element]) -> list[bytes]:
    """Encode *elements* of one container."""
    if kind != _NEWSETELEM:
        return [_element(key, None) for _, key, _ in elements]
    _, key, value = elements[0]
    if isinstance(value, bytes):  # All keys and data of a map have the same size.
        head, middle = _data_heads(len(key), len(value))
        return [head + key + middle + value for _, key, value in elements]  # type: ignore[operator]
    return [_element(key, value) for _, key, value in elements]


def _element(key: bytes, value: Value) -> bytes:
    if isinstance(value, bytes):
        head, middle = _data_heads(len(key), len(value))
        return head + key + middle + value
    if value is None:
        return _key_head(len(key), 0) + key
    verdict = _verdict(value)
    return _key_head(len(key), len(verdict)) + key + verdict


@cache
def _key_head(key_size: int, rest: int) -> bytes:
    """Encode the attribute headers in front of a key that is followed by *rest* bytes of data."""
    return (
        _ATTRIBUTE.pack(12 + key_size + rest, _LIST_ELEM | NLA_F_NESTED)
        + _ATTRIBUTE.pack(8 + key_size, _ELEM_KEY | NLA_F_NESTED)
        + _ATTRIBUTE.pack(4 + key_size, _DATA_VALUE)
    )


@cache
def _data_heads(key_size: int, size: int) -> tuple[bytes, bytes]:
    """Encode the attribute headers in front of a key and of the data, of *size* bytes, that follows it."""
    return (
        _key_head(key_size, size + 8),
        _ATTRIBUTE.pack(8 + size, _ELEM_DATA | NLA_F_NESTED) + _ATTRIBUTE.pack(4 + size, _DATA_VALUE),
    )


@lru_cache(maxsize=4096)  # bounded, because Services may own chains
def _verdict(text: str) -> bytes:
    action, _, chain = text.partition(" ")
    inner = attribute(_VERDICT_CODE, struct.pack(">i", _VERDICTS[action]))
    if chain:
        inner += text_attribute(_VERDICT_CHAIN, chain)
    return nested(_ELEM_DATA, nested(_DATA_VERDICT, inner))


def parse_elements(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, Value]]:
    """Yield the (key, value) of each element in the attributes of an element message. Raises Malformed.

    The value is `FOREIGN` if another process has added the element in a form that ours never have. Catch-all
    elements are left out: `nft_tables.difference` deletes them.
    """
    with decoding("an element"):
        for kind, list_start, list_end in attribute_spans(data, start, end):
            if kind != _LIST_ELEMENTS or list_start == list_end:
                continue
            # The kernel writes most elements of a container alike, and there may be 100,000.
            yield from _alike(data, list_start, list_end) or _with_keys_alike(data, list_start, list_end)


def _alike(data: bytes, start: int, end: int) -> list[tuple[bytes, Value]]:
    """Return the elements of a list; none if they differ in more than keys and data."""
    size = _ATTRIBUTE.unpack_from(data, start)[0]
    key, value = _parse_element(data, start + 4, start + size)
    if not isinstance(value, bytes) or not key or size != 20 + len(key) + len(value) or (end - start) % size:
        return []
    layout = struct.Struct(f"12s{len(key)}s8s{len(value)}s")
    heads = layout.unpack_from(data, start)[::2]
    found: list[tuple[bytes, Value]] = []
    for head, name, value_head, where in layout.iter_unpack(data[start:end]):
        if (head, value_head) != heads:
            return []
        found.append((name, where))
    return found


def _with_keys_alike(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, Value]]:
    """Yield the elements of a list of verdicts, or of a set: these differ in keys, and share few values."""
    key, _ = _parse_element(data, start + 4, start + _ATTRIBUTE.unpack_from(data, start)[0])
    head = data[start + 4 : start + 12]
    key_size = 12 + len(key)
    for _, element, element_end in attribute_spans(data, start, end):
        if key and data[element : element + 8] == head:
            key_end = element + key_size - 4
            yield data[element + 8 : key_end], _parse_rest(data[key_end:element_end])
        elif (found := _parse_element(data, element, element_end))[0]:
            yield found


@lru_cache(maxsize=4096)
def _parse_rest(data: bytes) -> Value:
    """Return the value in the attributes that follow an element's key."""
    return _parse_element(data, 0, len(data))[1]


def _parse_element(data: bytes, start: int, end: int) -> tuple[bytes, Value]:
    key, value, is_foreign = b"", None, False
    for part, part_start, part_end in attribute_spans(data, start, end):
        if part == _ELEM_KEY:
            # It holds one attribute, the value.
            key = data[part_start + 4 : part_end]
        elif part == _ELEM_DATA:
            value = _parse_data(data, part_start, part_end)
        elif part not in _IGNORED:
            is_foreign = True
    return key, FOREIGN if is_foreign else value


def _parse_data(data: bytes, start: int, end: int) -> Value:
    size, kind = _ATTRIBUTE.unpack_from(data, start)
    inner = data[start + 4 : start + size]
    return inner if kind & 0x3FFF == _DATA_VALUE else _parse_verdict(inner)


@lru_cache(maxsize=4096)
def _parse_verdict(data: bytes) -> str:
    parts = attributes(data, 0, len(data))
    text = _VERDICT_NAMES.get(struct.unpack(">i", parts[_VERDICT_CODE])[0], "?")
    chain = parts.get(_VERDICT_CHAIN)
    return text if chain is None else f"{text} {chain[:-1].decode(errors='replace')}"
