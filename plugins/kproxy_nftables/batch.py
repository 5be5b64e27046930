"""Elements as netlink messages: one batch is one transaction.

Layouts: include/uapi/linux/netfilter/nf_tables.h and nfnetlink.h. Values in a
message are in host order unless the kernel says otherwise; every attribute is
padded to 4 bytes, which all our keys and values are by themselves.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache

from kproxy_core.model.address import Family
from kproxy_nftables.names import TABLE
from kproxy_nftables.wanted import Element, Value

NFNL_SUBSYS_NFTABLES = 10
NEWSETELEM, GETSETELEM, DELSETELEM = 12, 13, 14
GETTABLE, GETCHAIN, GETSET, GETGEN = 1, 4, 10, 16

NFPROTO = {Family.IPV4: 2, Family.IPV6: 10}

_NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_DUMP, _NLM_F_CREATE = 1, 4, 0x300, 0x400
_BATCH_BEGIN, _BATCH_END = 16, 17
_NESTED = 0x8000
_LIST_TABLE, _LIST_SET, _LIST_ELEMENTS = 1, 2, 3
_LIST_ELEM = 1
_ELEM_KEY, _ELEM_DATA = 1, 2
_DATA_VALUE, _DATA_VERDICT = 1, 2
_VERDICT_CODE, _VERDICT_CHAIN = 1, 2
_VERDICTS = {"drop": 0, "accept": 1, "jump": -3, "goto": -4}
_VERDICT_NAMES = {code: name for name, code in _VERDICTS.items()}

_HEADER = struct.Struct("=IHHIIBBH")
"""nlmsghdr and nfgenmsg."""
HEADER_SIZE = _HEADER.size
_ATTRIBUTE = struct.Struct("=HH")
_MESSAGE_SPACE = 60_000
"""Bytes of elements in one message; the length field of the list has 16 bits."""


def message(
    kind: int, family: int, flags: int, sequence: int, payload: bytes = b"", res_id: int = 0
) -> bytes:
    """One nfnetlink message."""
    size = HEADER_SIZE + len(payload)
    return _HEADER.pack(size, kind, flags, sequence, 0, family, 0, res_id) + payload


def request(kind: int, family: Family, sequence: int, payload: bytes = b"", *, dump: bool = False) -> bytes:
    """A question to nf_tables."""
    flags = _NLM_F_REQUEST | (_NLM_F_DUMP if dump else 0)
    return message(NFNL_SUBSYS_NFTABLES << 8 | kind, NFPROTO[family], flags, sequence, payload)


def attribute(kind: int, value: bytes) -> bytes:
    """One netlink attribute, padded."""
    return _ATTRIBUTE.pack(len(value) + 4, kind) + value + bytes(-len(value) % 4)


def text_attribute(kind: int, text: str) -> bytes:
    """A netlink attribute that holds a name."""
    return attribute(kind, text.encode() + b"\0")


def element_list(container: str) -> bytes:
    """The attributes that name a *container* in element messages."""
    return text_attribute(_LIST_TABLE, TABLE) + text_attribute(_LIST_SET, container)


def batches(
    family: Family, deletes: Sequence[Element], adds: Sequence[Element], limit: int
) -> Iterator[tuple[bytes, int]]:
    """The transactions that delete and add elements, as (bytes, sequence number of the acknowledgement).

    One transaction, deletions first, unless it would exceed *limit* bytes, which is what
    the kernel takes in one go. Deleting and adding the same key in one transaction is
    atomic for packets; so that this holds for every key in any number of transactions, a
    key is replaced within one message pair where the batch must be split.
    """
    pieces = [*_messages(DELSETELEM, deletes), *_messages(NEWSETELEM, adds)]
    size = sum(len(list_) for _, list_ in pieces) + (len(pieces) + 2) * HEADER_SIZE
    if size <= limit:
        yield _transaction(family, pieces)
        return
    step = max(1, limit // 1024)
    by_key = {(element[0], element[1]): element for element in deletes}
    for start in range(0, len(adds), step):
        part = adds[start : start + step]
        replaced = [by_key.pop(e[:2]) for e in part if e[:2] in by_key]
        yield _transaction(family, [*_messages(DELSETELEM, replaced), *_messages(NEWSETELEM, part)])
    rest = list(by_key.values())
    for start in range(0, len(rest), step):
        yield _transaction(family, list(_messages(DELSETELEM, rest[start : start + step])))


def _transaction(family: Family, pieces: Iterable[tuple[int, bytes]]) -> tuple[bytes, int]:
    nfproto = NFPROTO[family]
    subsystem = struct.unpack("=H", struct.pack(">H", NFNL_SUBSYS_NFTABLES))[0]
    out = [message(_BATCH_BEGIN, 0, _NLM_F_REQUEST, 1, res_id=subsystem)]
    sequence = 1
    pieces = list(pieces)
    for kind, payload in pieces:
        sequence += 1
        flags = _NLM_F_REQUEST
        if kind == NEWSETELEM:
            flags |= _NLM_F_CREATE
        if sequence == len(pieces) + 1:
            flags |= _NLM_F_ACK
        out.append(message(NFNL_SUBSYS_NFTABLES << 8 | kind, nfproto, flags, sequence, payload))
    out.append(message(_BATCH_END, 0, _NLM_F_REQUEST, sequence + 1, res_id=subsystem))
    return b"".join(out), sequence


def _messages(kind: int, elements: Sequence[Element]) -> Iterator[tuple[int, bytes]]:
    """Payloads for *elements*, grouped by container and cut to size."""
    by_container: dict[str, list[bytes]] = {}
    with_data = kind == NEWSETELEM
    for container, key, value in elements:
        encoded = _element(key, value if with_data else None)
        try:
            by_container[container].append(encoded)
        except KeyError:
            by_container[container] = [encoded]
    for container, encoded_elements in by_container.items():
        head = element_list(container)
        start = size = 0
        for at, encoded in enumerate(encoded_elements):
            if size + len(encoded) > _MESSAGE_SPACE:
                yield kind, head + _nest(_LIST_ELEMENTS, b"".join(encoded_elements[start:at]))
                start, size = at, 0
            size += len(encoded)
        yield kind, head + _nest(_LIST_ELEMENTS, b"".join(encoded_elements[start:]))


def _nest(kind: int, value: bytes) -> bytes:
    return _ATTRIBUTE.pack(len(value) + 4, kind | _NESTED) + value


def _element(key: bytes, value: Value) -> bytes:
    if value is None:
        return _key_head(len(key), 0) + key
    if isinstance(value, bytes):
        size = len(value)
        return _key_head(len(key), size + 8) + key + _value_head(size) + value
    verdict = _verdict(value)
    return _key_head(len(key), len(verdict)) + key + verdict


@cache
def _key_head(key_size: int, rest: int) -> bytes:
    """The attribute headers in front of a key that *rest* bytes of data follow."""
    return (
        _ATTRIBUTE.pack(12 + key_size + rest, _LIST_ELEM | _NESTED)
        + _ATTRIBUTE.pack(8 + key_size, _ELEM_KEY | _NESTED)
        + _ATTRIBUTE.pack(4 + key_size, _DATA_VALUE)
    )


@cache
def _value_head(size: int) -> bytes:
    return _ATTRIBUTE.pack(8 + size, _ELEM_DATA | _NESTED) + _ATTRIBUTE.pack(4 + size, _DATA_VALUE)


@lru_cache(maxsize=4096)  # chains of Services come and go
def _verdict(text: str) -> bytes:
    action, _, chain = text.partition(" ")
    inner = attribute(_VERDICT_CODE, struct.pack(">i", _VERDICTS[action]))
    if chain:
        inner += text_attribute(_VERDICT_CHAIN, chain)
    return _nest(_ELEM_DATA, _nest(_DATA_VERDICT, inner))


def parse_attributes(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The attributes in ``data[start:end]`` as (kind, start of value, end of value)."""
    while start + 4 <= end:
        size, kind = _ATTRIBUTE.unpack_from(data, start)
        if size < 4:
            return
        yield kind & 0x3FFF, start + 4, start + size
        start += (size + 3) & ~3


def parse_elements(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, Value]]:
    """The (key, value) of each element in the attributes of an element message."""
    for kind, list_start, list_end in parse_attributes(data, start, end):
        if kind != _LIST_ELEMENTS:
            continue
        for _, element_start, element_end in parse_attributes(data, list_start, list_end):
            key, value = b"", None
            for part, part_start, part_end in parse_attributes(data, element_start, element_end):
                if part == _ELEM_KEY:
                    # The only attribute within is the value.
                    key = data[part_start + 4 : part_end]
                elif part == _ELEM_DATA:
                    value = _parse_data(data, part_start, part_end)
            yield key, value


def _parse_data(data: bytes, start: int, end: int) -> Value:
    size, kind = _ATTRIBUTE.unpack_from(data, start)
    if kind & 0x3FFF == _DATA_VALUE:
        return data[start + 4 : start + size]
    text = ""
    for part, part_start, part_end in parse_attributes(data, start + 4, start + size):
        if part == _VERDICT_CODE:
            text = _VERDICT_NAMES.get(struct.unpack_from(">i", data, part_start)[0], "?") + text
        elif part == _VERDICT_CHAIN:
            text += " " + data[part_start : part_end - 1].decode(errors="replace")
    return text
