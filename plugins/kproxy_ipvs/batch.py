"""Encoding of rules (iptables-restore), virtual servers (ip_vs.h) and ipsets (ip_set.h, protocol 6). Pure."""

import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from kproxy_core.contract import (
    FAMILY_BY_AF,
    Address,
    Destination,
    Family,
    Protocol,
    format_address,
    parse_address,
)
from kproxy_core.netlink.messages import (
    NFGENMSG,
    NLA_F_NESTED,
    NLA_F_NET_BYTEORDER,
    NetlinkRequest,
    Span,
    attribute,
    attribute_spans,
    attributes,
    decoding,
    fitting,
    nested,
    text,
    text_attribute,
)
from kproxy_ipvs.names import FILTER, MANGLE, NAT, REPLACEMENT, SetKind
from kproxy_ipvs.skeleton import JUMPS
from kproxy_ipvs.wanted import Scheduling, ServerKey, SetEntry
from kproxy_xtables.rules import Jump, RulesByChain, append_commands, missing_jumps

# Rules.

TABLES = (MANGLE, FILTER, NAT)
"""In writing order: mangle and filter must admit packets before nat sends them to IPVS."""


def difference(held: RulesByChain, want: RulesByChain, jumps: Iterable[Jump] = JUMPS) -> str:
    """Return the iptables-restore input that corrects our chains and *jumps*; "" if they are correct.

    A chain that differs is replaced as a whole.
    """
    parts: list[str] = []
    for table in TABLES:
        chains = [key for key in want if key[0] == table and held.get(key) != want[key]]
        lines = [f":{chain} - [0:0]\n" for _, chain in chains]
        lines += [append_commands(key[1], want[key]) for key in chains]
        lines += [f"{jump.command}\n" for jump in missing_jumps(jumps, held) if jump.table == table]
        if lines:
            parts.append(f"*{table}\n{''.join(lines)}COMMIT\n")
    return "".join(parts)


# Virtual servers, as generic netlink messages of the family IPVS.

GENERIC = struct.Struct("=BBH")
"""genlmsghdr: command, version, reserved. Begins the payload of generic netlink messages."""

_NEW_SERVICE, _SET_SERVICE, _DELETE_SERVICE, _GET_SERVICE = 1, 2, 3, 4
_NEW_DEST, _SET_DEST, _DELETE_DEST, _GET_DEST = 5, 6, 7, 8
_SET_CONFIG = 12
_VERSION = 1

_FLAGS = 0x1 | 0x4 | 0x8 | 0x10 | 0x20
"""All flags that can be set: persistence, one packet scheduling and the scheduler's own."""

_DESTINATION = struct.Struct("=HH HH16s HH2s2x HHI HHI HHI HHI HHH2x")
"""A real server, packed at once because they are the most numerous: attributes with address, port, forwarding
method (0: NAT), weight, two thresholds (none) and address family."""

_NETMASK = {Family.IPV4: b"\xff\xff\xff\xff", Family.IPV6: struct.pack("=I", 128)}


class PutServer(NamedTuple):
    """Creates a virtual server, or changes its scheduling."""

    key: ServerKey
    scheduling: Scheduling
    new: bool


class PutDestination(NamedTuple):
    """Creates a real server, or changes its weight."""

    key: ServerKey
    where: Destination
    weight: int
    new: bool


class DeleteDestination(NamedTuple):
    key: ServerKey
    where: Destination


class DeleteServer(NamedTuple):
    key: ServerKey


RealServerOperation = PutDestination | DeleteDestination
Operation = PutServer | RealServerOperation | DeleteServer


class RealServer(NamedTuple):
    """A real server as the kernel lists it."""

    where: Destination
    weight: int
    active: int
    """Connections in handshake or open."""
    inactive: int
    """Connections closing or recently closed; for UDP, all connections."""

    @property
    def connections(self) -> int:
        return self.active + self.inactive


def encode(operation: Operation) -> bytes:
    match operation:
        case PutServer(key, scheduling, new):
            return _payload(_NEW_SERVICE if new else _SET_SERVICE, _service(key, scheduling))
        case PutDestination(key, where, weight, new):
            return _payload(_NEW_DEST if new else _SET_DEST, _named(key) + _destination(key, where, weight))
        case DeleteDestination(key, where):
            return _payload(_DELETE_DEST, _named(key) + _destination(key, where))
        case DeleteServer(key):
            return _payload(_DELETE_SERVICE, _service(key))


def dump_servers() -> bytes:
    return _payload(_GET_SERVICE, b"")


def dump_destinations(key: ServerKey) -> bytes:
    return _payload(_GET_DEST, _service(key))


def set_timeouts(tcp: int, tcp_fin: int, udp: int) -> bytes:
    """Encode the timeouts of connections in seconds; 0 keeps the kernel's value."""
    values = ((4, tcp), (5, tcp_fin), (6, udp))
    return _payload(_SET_CONFIG, b"".join(_u32(kind, value) for kind, value in values))


def decode_server(attributes: dict[int, bytes]) -> tuple[ServerKey, Scheduling] | None:
    """Decode the attributes within IPVS_CMD_ATTR_SERVICE; None for an unknown address family.

    Raises Malformed.
    """
    family = FAMILY_BY_AF.get(_number(attributes.get(1, b"")))
    if family is None:
        return None
    if mark := _number(attributes.get(5, b"")):
        key = ServerKey.marked(family, mark)
    else:
        address = Address(attributes.get(3, b"")[: family.size])
        protocol = _number(attributes.get(2, b""))
        key = ServerKey(family, 0, address, protocol, int.from_bytes(attributes.get(4, b""), "big"))
    with decoding("a virtual server"):
        flags, _ = struct.unpack("=II", attributes[7])
        return key, Scheduling(text(attributes.get(6, b"")), flags & _FLAGS, _number(attributes[8]))


def decode_destination(family: Family, attributes: dict[int, bytes]) -> RealServer:
    """Decode the attributes within IPVS_CMD_ATTR_DEST. Raises Malformed."""
    with decoding("a real server"):
        where = Destination(Address(attributes[1][: family.size]), int.from_bytes(attributes[2], "big"))
        return RealServer(where, *(_number(attributes[kind]) for kind in (4, 7, 8)))


def _service(key: ServerKey, scheduling: Scheduling | None = None) -> bytes:
    parts = [_u16(1, key.family.af)]
    if key.address is None:
        parts.append(_u32(5, key.mark))
    else:
        parts += [
            _u16(2, key.protocol), attribute(3, key.address.ljust(16, b"\0")),
            attribute(4, key.port.to_bytes(2, "big")),
        ]  # fmt: skip
    if scheduling is not None:
        parts += [
            text_attribute(6, scheduling.scheduler),
            attribute(7, struct.pack("=II", scheduling.flags, _FLAGS)),
            _u32(8, scheduling.timeout),
            attribute(9, _NETMASK[key.family]),
        ]
    return nested(1, *parts)


@lru_cache(maxsize=8)
def _named(key: ServerKey) -> bytes:
    """Encode a virtual server's identity, which is the same for all its real servers."""
    return _service(key)


def _destination(key: ServerKey, where: Destination, weight: int = 0) -> bytes:
    """Encode a real server. To delete one, the kernel uses its address, port and address family only."""
    return _DESTINATION.pack(
        _DESTINATION.size, 2 | NLA_F_NESTED, 20, 1, where.address, 6, 2, where.port.to_bytes(2, "big"),
        8, 3, 0, 8, 4, weight, 8, 5, 0, 8, 6, 0, 6, 11, key.family.af,
    )  # fmt: skip


def _payload(command: int, attributes: bytes) -> bytes:
    return GENERIC.pack(command, _VERSION, 0) + attributes


def _u16(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=H", value))


def _u32(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=I", value))


def _number(value: bytes) -> int:
    return int.from_bytes(value, sys.byteorder)


# Ipsets.

_SUBSYSTEM = 6 << 8
LIST_SET = _SUBSYSTEM | 7
_DESTROY_SET = _SUBSYSTEM | 3
_ADD, _DELETE = _SUBSYSTEM | 9, _SUBSYSTEM | 10

_PROTOCOL, _NAME, _OPTIONS, _DATA, _ENTRIES, _LINE, _LIMIT = 1, 2, 6, 7, 8, 9, 19
_HEADER_ONLY = (4).to_bytes(4, "big")
"""IPSET_FLAG_LIST_HEADER of linux/netfilter/ipset/ip_set.h."""
_IP, _PORT, _NUMBER, _IP2, _LENGTH2, _MARK = 1, 4, 7, 20, 21, 27
_ADDRESS = {Family.IPV4: 1, Family.IPV6: 2}

_NUMBERS = {protocol.name.lower(): bytes([protocol]) for protocol in Protocol}
_PROTOCOLS = {number: name for name, number in _NUMBERS.items()}


def batches(
    family: Family, elements: Iterable[SetEntry], *, delete: bool = False
) -> Iterator[tuple[str, NetlinkRequest]]:
    """Encode the addition or deletion of *elements*: each request with the full name of its set.

    Existing or missing entries are no error.
    """
    for kind, group in groupby(elements, key=lambda element: element.set):
        name = kind.full_name(family)
        start = _named_set(name, family) + attribute(_LINE, bytes(4))
        encoded = [nested(_DATA, *_entry(family, kind, entry)) for entry in group]
        for part in fitting(encoded):
            entries = nested(_ENTRIES, *encoded[part])
            yield name, NetlinkRequest(_DELETE if delete else _ADD, 0, start + entries)


def list_set(family: Family, kind: SetKind) -> bytes:
    """Encode the payload of the dump request for one set."""
    return _named_set(kind.full_name(family), family)


def list_header(family: Family, kind: SetKind) -> bytes:
    """Return the payload of the dump request for the properties of one set."""
    return list_set(family, kind) + attribute(_OPTIONS | NLA_F_NET_BYTEORDER, _HEADER_ONLY)


def decode_limit(answers: Iterable[Span]) -> int:
    """Return the most entries that a set may have, from the *answers* to `list_header`; 0: no such limit.

    Raises Malformed.
    """
    limit = 0
    with decoding("the properties of an ipset"):
        for data, start, end in answers:
            found = attributes(data, start + NFGENMSG.size, end)
            limit = int.from_bytes(attributes(found[_DATA], 0, len(found[_DATA])).get(_LIMIT, b""), "big")
    return limit


def destroy_set(name: str) -> NetlinkRequest:
    """Encode the deletion of a set by its full name."""
    return NetlinkRequest(_DESTROY_SET, 0, _named_set(name))


def decode_entries(family: Family, answers: Iterable[Span]) -> dict[str, int]:
    """Return the entries in the *answers* to `list_set` as ipset prints them, with their marks.

    Raises Malformed.
    """
    found: dict[str, int] = {}
    with decoding("an entry of an ipset"):
        for data, start, end in answers:
            for outer, first, last in attribute_spans(data, start + NFGENMSG.size, end):
                if outer == _ENTRIES:
                    for _, begin, until in attribute_spans(data, first, last):
                        entry = attributes(data, begin, until)
                        mark = int.from_bytes(entry[_MARK][:4], "big") if _MARK in entry else 0
                        found[_formatted(family, entry)] = mark
    return found


def render(family: Family, kinds: Iterable[SetKind], elements: Iterable[SetEntry] = ()) -> str:
    """Return the input of ``ipset restore`` that creates sets and their entries."""
    lines = [f"create {kind.create(family)}\n" for kind in kinds]
    for kind, entry, mark in elements:
        option = f" skbmark {mark:#x}" if mark else ""
        lines.append(f"add {kind.full_name(family)} {entry}{option}\n")
    return "".join(lines)


def replace_set(family: Family, kind: SetKind, entries: Mapping[str, int]) -> str:
    """Return the input of ``ipset restore`` that creates a set again while rules use it, with *entries*."""
    new = kind._replace(name=REPLACEMENT.name)
    elements = [SetEntry(new, entry, mark) for entry, mark in entries.items()]
    names = f"{new.full_name(family)} {kind.full_name(family)}"
    return f"{render(family, [new], elements)}swap {names}\ndestroy {new.full_name(family)}\n"


def _named_set(name: str, family: Family = Family.IPV4) -> bytes:
    return NFGENMSG.pack(family.af, 0, 0) + attribute(_PROTOCOL, b"\x06") + text_attribute(_NAME, name)


def _entry(family: Family, kind: SetKind, element: SetEntry) -> Iterator[bytes]:
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
