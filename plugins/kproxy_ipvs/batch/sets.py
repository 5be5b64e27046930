"""Entries of ipsets as netlink messages (linux/netfilter/ipset/ip_set.h, protocol 6)."""

import errno
import os
import struct
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import NamedTuple

from kproxy_core.host.netlink.messages import attribute, nested
from kproxy_core.model.address import Family, Protocol, parse_address
from kproxy_ipvs.kernel.exchange import Request
from kproxy_ipvs.names import SetKind
from kproxy_ipvs.wanted import Element

_SUBSYSTEM = 6 << 8
_ADD, _DELETE = 9, 10

_PROTOCOL, _NAME, _DATA, _ENTRIES, _LINE = 1, 2, 7, 8, 9
_IP, _PORT, _NUMBER, _IP2, _LENGTH2, _MARK = 1, 4, 7, 20, 21, 27
_ADDRESS = {Family.IPV4: 1, Family.IPV6: 2}
_NET_ORDER = 0x4000
"""NLA_F_NET_BYTEORDER"""

_NUMBERS = {protocol.name.lower(): bytes([protocol]) for protocol in Protocol}

_PER_MESSAGE = 300
"""Entries in one message: together they are one attribute, which can't be longer than 64 KiB."""

_OWN_ERRORS = 4096
_PROBLEMS = {errno.ENOENT: "there is no such set", 4352: "it is full"}
"""Among them IPSET_ERR_HASH_FULL."""


class Batch(NamedTuple):
    """Some entries for one set."""

    name: str
    request: Request


def batches(family: Family, elements: Iterable[Element], *, delete: bool = False) -> Iterator[Batch]:
    """Messages that add or delete *elements*, whether or not they are there."""
    header = struct.pack("=BBH", family.af, 0, 0) + attribute(_PROTOCOL, b"\x06")
    for kind, group in groupby(elements, key=lambda element: element.set):
        name = kind.full_name(family)
        start = header + attribute(_NAME, name.encode() + b"\0") + attribute(_LINE, bytes(4))
        while some := list(islice(group, _PER_MESSAGE)):
            entries = nested(_ENTRIES, *(nested(_DATA, *_entry(family, kind, e)) for e in some))
            yield Batch(name, Request(_SUBSYSTEM | (_DELETE if delete else _ADD), 0, start + entries))


def render(family: Family, kinds: Iterable[SetKind], elements: Iterable[Element] = ()) -> str:
    """The input of ``ipset restore`` that makes sets and their entries."""
    lines = [f"create {kind.create(family)}\n" for kind in kinds]
    for kind, entry, mark in elements:
        option = f" skbmark {mark:#x}" if mark else ""
        lines.append(f"add {kind.full_name(family)} {entry}{option}\n")
    return "".join(lines)


def problem(code: int) -> str:
    """What error *code* of an ipset means."""
    return _PROBLEMS.get(code) or (f"error {code}" if code >= _OWN_ERRORS else os.strerror(code))


def _entry(family: Family, kind: SetKind, element: Element) -> Iterator[bytes]:
    """The attributes of an entry, from its text as ipset has it."""
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
        # With all bits in the mask the packet's whole mark is replaced: IPVS compares all of it.
        yield attribute(_MARK | _NET_ORDER, struct.pack(">II", element.mark, 0xFFFFFFFF))


def _address(kind: int, family: Family, text: str) -> bytes:
    return nested(kind, attribute(_ADDRESS[family] | _NET_ORDER, parse_address(text)))


def _port(text: str) -> bytes:
    return attribute(_PORT | _NET_ORDER, int(text).to_bytes(2, "big"))
