"""Entries of ipsets as netlink messages (linux/netfilter/ipset/ip_set.h, protocol 6), and as text."""

from collections.abc import Iterable, Iterator
from itertools import groupby, islice

from kproxy_core.host.netlink.messages import (
    NFGENMSG,
    NLA_F_NET_BYTEORDER,
    Request,
    Span,
    attribute,
    attribute_spans,
    attributes,
    nested,
    text_attribute,
)
from kproxy_core.model.address import Address, Family, Protocol, format_address, parse_address
from kproxy_ipvs.names import SetKind
from kproxy_ipvs.wanted import Element

_SUBSYSTEM = 6 << 8
LIST_SET = _SUBSYSTEM | 7
_DESTROY_SET = _SUBSYSTEM | 3
_ADD, _DELETE = _SUBSYSTEM | 9, _SUBSYSTEM | 10

_PROTOCOL, _NAME, _DATA, _ENTRIES, _LINE = 1, 2, 7, 8, 9
_IP, _PORT, _NUMBER, _IP2, _LENGTH2, _MARK = 1, 4, 7, 20, 21, 27
_ADDRESS = {Family.IPV4: 1, Family.IPV6: 2}

_NUMBERS = {protocol.name.lower(): bytes([protocol]) for protocol in Protocol}
_PROTOCOLS = {number: name for name, number in _NUMBERS.items()}

_PER_MESSAGE = 300
"""Entries per message. All of them are one attribute, whose length is limited to 64 KiB."""


def batches(
    family: Family, elements: Iterable[Element], *, delete: bool = False
) -> Iterator[tuple[str, Request]]:
    """Encode the addition or deletion of *elements*: each request with the full name of its set.

    Existing or missing entries are no error.
    """
    for kind, group in groupby(elements, key=lambda element: element.set):
        name = kind.full_name(family)
        start = _named(name, family) + attribute(_LINE, bytes(4))
        while some := list(islice(group, _PER_MESSAGE)):
            entries = nested(_ENTRIES, *(nested(_DATA, *_entry(family, kind, e)) for e in some))
            yield name, Request(_DELETE if delete else _ADD, 0, start + entries)


def list_set(family: Family, kind: SetKind) -> bytes:
    """Encode the payload of the dump request for one set."""
    return _named(kind.full_name(family), family)


def destroy_set(name: str) -> Request:
    """Encode the deletion of a set by its full name."""
    return Request(_DESTROY_SET, 0, _named(name))


def decode_entries(family: Family, answers: Iterable[Span]) -> dict[str, int]:
    """Return the entries in the *answers* to `list_set` as ipset prints them, with their marks."""
    found: dict[str, int] = {}
    for data, start, end in answers:
        for outer, first, last in attribute_spans(data, start + NFGENMSG.size, end):
            if outer == _ENTRIES:
                for _, begin, until in attribute_spans(data, first, last):
                    entry = attributes(data, begin, until)
                    mark = int.from_bytes(entry[_MARK][:4], "big") if _MARK in entry else 0
                    found[_formatted(family, entry)] = mark
    return found


def render(family: Family, kinds: Iterable[SetKind], elements: Iterable[Element] = ()) -> str:
    """Return the input of ``ipset restore`` that creates sets and their entries."""
    lines = [f"create {kind.create(family)}\n" for kind in kinds]
    for kind, entry, mark in elements:
        option = f" skbmark {mark:#x}" if mark else ""
        lines.append(f"add {kind.full_name(family)} {entry}{option}\n")
    return "".join(lines)


def _named(name: str, family: Family = Family.IPV4) -> bytes:
    return NFGENMSG.pack(family.af, 0, 0) + attribute(_PROTOCOL, b"\x06") + text_attribute(_NAME, name)


def _entry(family: Family, kind: SetKind, element: Element) -> Iterator[bytes]:
    if kind.type == "bitmap:port":
        yield _port(element.entry)
        return
    address, *more = element.entry.split(",")
    yield _address(_IP, family, address)
    if more:
        protocol, _, port = more[0].partition(":")
        yield _port(port)
        yield attribute(_NUMBER, _NUMBERS[protocol])
    if len(more) > 1:
        other, _, length = more[1].partition("/")
        yield _address(_IP2, family, other)
        if kind.type.endswith(",net"):
            yield attribute(_LENGTH2, bytes([int(length or family.bits)]))
    if element.mark:
        # With all bits in the mask the packet's whole mark is replaced, as IPVS compares all of it.
        yield attribute(_MARK | NLA_F_NET_BYTEORDER, element.mark.to_bytes(4, "big") + b"\xff\xff\xff\xff")


def _address(kind: int, family: Family, text: str) -> bytes:
    return nested(kind, attribute(_ADDRESS[family] | NLA_F_NET_BYTEORDER, parse_address(text)))


def _port(text: str) -> bytes:
    return attribute(_PORT | NLA_F_NET_BYTEORDER, int(text).to_bytes(2, "big"))


def _formatted(family: Family, entry: dict[int, bytes]) -> str:
    port = str(int.from_bytes(entry.get(_PORT, b""), "big"))
    if _IP not in entry:
        return port
    text = _address_text(family, entry[_IP])
    if _PORT in entry:
        number = entry[_NUMBER]
        text += f",{_PROTOCOLS.get(number) or number[0]}:{port}"
    if _IP2 in entry:
        text += f",{_address_text(family, entry[_IP2])}"
    length = entry.get(_LENGTH2, b"")
    return f"{text}/{length[0]}" if length and length[0] != family.bits else text


def _address_text(family: Family, value: bytes) -> str:
    # The address is the only nested attribute, behind a header of four bytes.
    return format_address(Address(value[4 : 4 + family.size]))
