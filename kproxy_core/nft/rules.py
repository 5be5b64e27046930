"""Rules of nf_tables as values that have both nft's text and the kernel's expressions. Pure.

A rule is a tuple of statements, written in nft's order:

    (ct_status("dnat"), among((saddr, daddr), "hairpins"), MASQUERADE)

is ``ct status dnat ip saddr . ip daddr @hairpins masquerade fully-random``. Attributes and constants are
those of linux/netfilter/nf_tables.h; the choice of expressions is that of libnftables 1.0.6.
"""

import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from kproxy_core.model.address import Address, Cidr, Family, Protocol, format_address
from kproxy_core.netlink.messages import (
    Span,
    attribute,
    attribute_spans,
    attributes,
    decoding,
    nested,
    text,
    text_attribute,
    u32,
)

Attributes = Mapping[int, bytes]
"""Values of netlink attributes by kind."""


class Expression(NamedTuple):
    """One operation of a rule, as the kernel executes it."""

    name: str
    attributes: Attributes

    def encode(self) -> bytes:
        """Return the attribute that holds this expression in a list."""
        parts = [attribute(kind, value) for kind, value in self.attributes.items()]
        return nested(1, text_attribute(1, self.name), nested(2, *parts))

    def is_same(self, other: "Expression") -> bool:
        """Return whether the kernel may list one for the other."""
        if self.name != other.name:
            return False
        if self.name != "dynset" or not (_INNER in self.attributes and _INNER in other.attributes):
            return same_attributes(self.attributes, other.attributes)
        mine, yours = (dict(each.attributes) for each in (self, other))
        inner = [_parse_expression(attributes(found.pop(_INNER))) for found in (mine, yours)]
        return same_attributes(mine, yours) and inner[0].is_same(inner[1])


_INNER = 7
"""Attribute of a dynset: the counter of its elements. Some machines have the kernel pad the numbers in it."""


class Statement(NamedTuple):
    """A match or an action of a rule."""

    text: str
    expressions: tuple[Expression, ...]


Rule = tuple[Statement, ...]


def rule_text(rule: Rule) -> str:
    """Return *rule* as nft writes it."""
    return " ".join(statement.text for statement in rule)


def rule_expressions(rule: Rule) -> list[Expression]:
    return [expression for statement in rule for expression in statement.expressions]


def same_attributes(one: Attributes, other: Attributes) -> bool:
    """Return whether two objects have equal attributes.

    The kernel also lists attributes that were left out, with zeros; which ones depends on its version.
    """
    return all(
        mine == yours or not (any(mine) or any(yours))
        for kind in one.keys() | other.keys()
        for mine, yours in [(one.get(kind, b""), other.get(kind, b""))]
    )


def parse_expressions(listed: bytes) -> Iterator[Expression]:
    """Yield the expressions of a rule that the kernel lists."""
    for _, start, end in attribute_spans(listed, 0, len(listed)):
        yield _parse_expression(attributes(listed, start, end))


def _parse_expression(parts: Attributes) -> Expression:
    return Expression(parts[1].rstrip(b"\0").decode(errors="replace"), attributes(parts.get(2, b"")))


class HeldRule(NamedTuple):
    """A rule that the kernel lists."""

    handle: int
    expressions: tuple[Expression, ...]
    notes: bytes
    """User data, such as nft's comment."""

    def equals(self, rule: Rule) -> bool:
        """Return whether it is *rule*, expression by expression, and without a comment."""
        wanted = rule_expressions(rule)
        return not self.notes and len(wanted) == len(self.expressions) and all(
            map(Expression.is_same, wanted, self.expressions))


def parse_rule(span: Span) -> tuple[str, HeldRule]:
    """Return a listed rule and the name of its chain. Raises Malformed."""
    with decoding("a rule"):
        found = attributes(*span)
        handle = int.from_bytes(found[3], "big")
        expressions = tuple(parse_expressions(found.get(4, b"")))
        return text(found[2]), HeldRule(handle, expressions, found.get(7, b""))


# Types of data, with their numbers in libnftables' datatype.h. In a concatenation each takes 6 bits.


class DataType(NamedTuple):
    """A type of keys and values in sets and maps."""

    name: str
    number: int
    size: int
    """Bytes."""
    byte_order: int
    """In a set's user data: 0 none, 1 the host's, 2 big-endian."""


VERDICT: Final = DataType("verdict", 1, 16, 0)
INTEGER: Final = DataType("integer", 4, 4, 0)
PROTOCOL: Final = DataType("inet_proto", 12, 1, 1)
PORT: Final = DataType("inet_service", 13, 2, 2)
MARK: Final = DataType("mark", 19, 4, 1)
INTERFACE: Final = DataType("ifname", 41, 16, 1)
ADDRESS: Final = {
    Family.IPV4: DataType("ipv4_addr", 7, 4, 2),
    Family.IPV6: DataType("ipv6_addr", 8, 16, 2),
}
_TYPES: Final = {
    each.number: each for each in (INTEGER, PROTOCOL, PORT, MARK, INTERFACE, *ADDRESS.values())}


def types_of_number(number: int) -> tuple[DataType, ...]:
    """Return the types of the parts of keys by the number that a set has for them; () if one is not known."""
    found = []
    while number:
        if (type_ := _TYPES.get(number & 63)) is None:
            return ()
        found.append(type_)
        number >>= 6
    return tuple(reversed(found))


# Fields that a rule can read of a packet.


class Field(NamedTuple):
    """A field of a packet's headers, of its connection, or of what the kernel knows about it."""

    text: str
    type: DataType
    expression: str
    attributes: Attributes
    """Those of the expression that loads it, without the register, which is 1."""
    typeof: bytes = b""
    """libnftables' description for the user data of sets, where a set may be declared by this field."""
    protocol: Protocol | None = None
    """The protocol whose header has it, which a rule must match before."""
    of: "tuple[Field, ...]" = ()
    """The fields that it is computed from."""

    def load(self, register: int) -> Expression:
        return Expression(self.expression, {1: u32(register), **self.attributes})


Key = tuple[Field, ...]
"""Fields that are looked up together."""

Part = DataType | Field
"""A part of the keys or values of a set or a map; a field where nft cannot name the type."""
Parts = Sequence[Part]


def type_of(part: Part) -> DataType:
    return part.type if isinstance(part, Field) else part


def key_text(key: Key) -> str:
    return " . ".join(field.text for field in key)


_PAYLOAD, _META, _NUMGEN = 7, 9, 23
"""libnftables' numbers of fields in user data."""


def _host_u32(value: int) -> bytes:
    return struct.pack("=I", value)


def user_data(kind: int, value: bytes) -> bytes:
    """Encode an item of libnftables' user data: an attribute with a header of two bytes."""
    return bytes((kind, len(value))) + value


def _typeof(number: int, *parts: int) -> bytes:
    inner = b"".join(user_data(kind, _host_u32(value)) for kind, value in enumerate(parts))
    return user_data(0, _host_u32(number)) + user_data(1, inner)


def _header_field(
    text: str, type_: DataType, base: int, offset: int, typeof: tuple[int, int],
    protocol: Protocol | None = None,
) -> Field:
    """Return a field of a header. *typeof* are libnftables' numbers of the protocol and of the field."""
    where = {2: u32(base), 3: u32(offset), 4: u32(type_.size)}
    return Field(text, type_, "payload", where, _typeof(_PAYLOAD, *typeof), protocol)


def source_address(family: Family) -> Field:
    if family is Family.IPV4:
        return _header_field("ip saddr", ADDRESS[family], 1, 12, (12, 11))
    return _header_field("ip6 saddr", ADDRESS[family], 1, 8, (13, 8))


def destination_address(family: Family) -> Field:
    if family is Family.IPV4:
        return _header_field("ip daddr", ADDRESS[family], 1, 16, (12, 12))
    return _header_field("ip6 daddr", ADDRESS[family], 1, 24, (13, 9))


DESTINATION_PORT: Final = _header_field("th dport", PORT, 2, 2, (11, 2))
SOURCE_PORT_OF: Final = {
    Protocol.TCP: _header_field("tcp sport", PORT, 2, 0, (8, 1), Protocol.TCP),
    Protocol.UDP: _header_field("udp sport", PORT, 2, 0, (6, 1), Protocol.UDP),
    Protocol.SCTP: _header_field("sctp sport", PORT, 2, 0, (10, 1), Protocol.SCTP),
}
DESTINATION_PORT_OF: Final = {
    Protocol.TCP: _header_field("tcp dport", PORT, 2, 2, (8, 2), Protocol.TCP),
    Protocol.UDP: _header_field("udp dport", PORT, 2, 2, (6, 2), Protocol.UDP),
    Protocol.SCTP: _header_field("sctp dport", PORT, 2, 2, (10, 2), Protocol.SCTP),
}


def _meta(text: str, type_: DataType, key: int) -> Field:
    return Field(text, type_, "meta", {2: u32(key)}, _typeof(_META, key))


L4_PROTOCOL: Final = _meta("meta l4proto", PROTOCOL, 16)
META_MARK: Final = _meta("meta mark", MARK, 3)
INPUT_INTERFACE: Final = _meta("iifname", INTERFACE, 6)


def _tracked(text: str, type_: DataType, key: int, *, reply: bool = False) -> Field:
    """Return a field of the original or the reply direction of a packet's connection."""
    direction = "reply" if reply else "original"
    return Field(f"ct {direction} {text}", type_, "ct", {2: u32(key), 3: bytes([reply])})


def original_source(family: Family) -> Field:
    """Return the address that opened the connection."""
    return _tracked(f"{family.ip} saddr", ADDRESS[family], 19 if family is Family.IPV4 else 21)


def original_destination(family: Family) -> Field:
    """Return the address that was dialled, before any translation."""
    return _tracked(f"{family.ip} daddr", ADDRESS[family], 20 if family is Family.IPV4 else 22)


ORIGINAL_PORT: Final = _tracked("proto-dst", PORT, 12)
"""The port that was dialled, before any translation."""


def answering_address(family: Family) -> Field:
    """Return the address from which a connection is answered: that of its endpoint."""
    return _tracked(f"{family.ip} saddr", ADDRESS[family], 19 if family is Family.IPV4 else 21, reply=True)


ANSWERING_PORT: Final = _tracked("proto-src", PORT, 11, reply=True)
"""The port from which a connection is answered."""


def random_number(count: int) -> Field:
    """Return a number from 0 to *count* - 1."""
    return Field(
        f"numgen random mod {count}", INTEGER, "numgen", {2: u32(count), 3: u32(1), 4: u32(0)},
        _typeof(_NUMGEN, 1, count, 0),
    )  # fmt: skip


def hashed(key: Key, count: int, seed: int) -> Field:
    """Return a number from 0 to *count* - 1 that depends on *key* only: the kernel's jhash of it."""
    size = 4 * _words(key)
    return Field(
        f"jhash {key_text(key)} mod {count} seed {seed:#x}", INTEGER, "hash",
        {3: u32(size), 4: u32(count), 5: u32(seed), 6: u32(0), 7: u32(0)}, of=key,
    )  # fmt: skip


# Matches.

_EQUAL, _DIFFERENT = 0, 1


def _compared(value: bytes, how: int = _EQUAL, register: int = 1) -> Expression:
    return Expression("cmp", {1: u32(register), 2: u32(how), 3: _value(value)})


def _value(value: bytes) -> bytes:
    return attribute(1, value)


def _bitwise(mask: bytes, xor: bytes) -> Expression:
    size = len(mask)
    return Expression(
        "bitwise", {1: u32(1), 2: u32(1), 3: u32(size), 4: _value(mask), 5: _value(xor)})


def equals(field: Field, value: Address | Cidr | Protocol | int | str) -> Statement:
    """Match packets with *value* in *field*: an address or a network, a protocol, a number.

    An interface is given by its name, or by a prefix of its name with ``*``.
    """
    return _compare(field, value, _EQUAL)


def differs(field: Field, value: Address | Cidr | Protocol | int | str) -> Statement:
    """Match packets with any other value in *field*; see `equals`."""
    return _compare(field, value, _DIFFERENT)


def _compare(field: Field, value: Address | Cidr | Protocol | int | str, how: int) -> Statement:
    sign = "!= " if how == _DIFFERENT else ""
    found: tuple[Expression, ...]
    load = field.load(1)
    if isinstance(value, Cidr):
        text = str(value)
        if value.prefix == value.family.bits:
            found = (load, _compared(value.network, how))
        elif value.prefix and value.prefix % 8 == 0:  # libnftables loads the bytes of the prefix only.
            size = value.prefix // 8
            load = Expression(load.name, {**load.attributes, 4: u32(size)})
            found = (load, _compared(value.network[:size], how))
        else:
            mask = ((1 << value.prefix) - 1) << (value.family.bits - value.prefix)
            packed = mask.to_bytes(value.family.size, "big")
            found = (load, _bitwise(packed, bytes(len(packed))), _compared(value.network, how))
    elif isinstance(value, Protocol):
        text, found = value.name.lower(), (load, _compared(bytes([value]), how))
    elif isinstance(value, int):
        big = field.type.byte_order == 2
        text = str(value) if big else f"{value:#010x}"
        packed = value.to_bytes(field.type.size, "big" if big else sys.byteorder)
        found = (load, _compared(packed, how))
    elif isinstance(value, str):
        text, data = f'"{value}"', value.encode()
        packed = data[:-1] if value.endswith("*") else data.ljust(INTERFACE.size, b"\0")
        found = (load, _compared(packed, how))
    else:
        text, found = format_address(value), (load, _compared(value, how))
    return Statement(f"{field.text} {sign}{text}", (*_protocol_match(field), *found))


def _protocol_match(*fields: Field) -> tuple[Expression, ...]:
    """Return the expressions that match the protocol which one of *fields* needs; nft does not write them."""
    protocol = next((field.protocol for field in fields if field.protocol is not None), None)
    return () if protocol is None else (L4_PROTOCOL.load(1), _compared(bytes([protocol])))


_LOCAL = 2  # RTN_LOCAL, linux/rtnetlink.h


def is_local(of: Literal["saddr", "daddr"]) -> Statement:
    """Match packets whose source or destination is an address of this node."""
    which = {"saddr": 1, "daddr": 2}[of]
    fib = Expression("fib", {1: u32(1), 2: u32(3), 3: u32(which)})
    return Statement(f"fib {of} type local", (fib, _compared(_host_u32(_LOCAL))))


def ct_state(state: Literal["new", "established"]) -> Statement:
    bit = {"established": 2, "new": 8}[state]
    return Statement(f"ct state {state}", _bits(0, bit, _DIFFERENT))


CT_ORIGINAL: Final = Statement(
    "ct direction original", (Expression("ct", {1: u32(1), 2: u32(1)}), _compared(b"\0")))
"""Match packets of the side that opened the connection."""


def ct_status(status: Literal["dnat"], *, negate: bool = False) -> Statement:
    """Match packets of connections with *status*, or with *negate* of all others."""
    bit = {"dnat": 32}[status]
    sign = "! " if negate else ""
    return Statement(f"ct status {sign}{status}", _bits(2, bit, _EQUAL if negate else _DIFFERENT))


def _bits(key: int, bit: int, how: int) -> tuple[Expression, ...]:
    load = Expression("ct", {1: u32(1), 2: u32(key)})
    return load, _bitwise(_host_u32(bit), bytes(4)), _compared(bytes(4), how)


CT_UNTRACKED: Final = Statement("ct state untracked", _bits(0, 64, _DIFFERENT))
CT_INVALID: Final = Statement("ct state invalid", _bits(0, 1, _DIFFERENT))
"""Match packets that a rule keeps from being tracked, or that belong to no connection and begin none."""


_TCP_FLAGS = {"fin": 1, "syn": 2, "rst": 4, "psh": 8, "ack": 16}
"""Bits in a TCP header."""


def tcp_flags(*given: str, of: tuple[str, ...]) -> Statement:
    """Match TCP packets that have, of the flags *of*, exactly the *given* ones."""
    load = Expression("payload", {1: u32(1), 2: u32(2), 3: u32(13), 4: u32(1)})
    mask, value = (bytes([sum(_TCP_FLAGS[name] for name in names)]) for names in (of, given))
    return Statement(
        f"tcp flags & ({' | '.join(of)}) == {' | '.join(given)}",
        (L4_PROTOCOL.load(1), _compared(bytes([Protocol.TCP])), load, _bitwise(mask, bytes(1)),
         _compared(value)))


SCTP_INIT: Final = Statement("@th,96,8 0x1", (
    Expression("payload", {1: u32(1), 2: u32(2), 3: u32(12), 4: u32(1)}), _compared(b"\x01")))
"""Match SCTP packets that open an association, by their first chunk (RFC 9260)."""


def is_of(family: Family) -> Statement:
    """Match packets of *family*, for tables that see packets of all protocols."""
    kind = {Family.IPV4: 0x0800, Family.IPV6: 0x86DD}[family]
    protocol = Expression("meta", {1: u32(1), 2: u32(1)})
    return Statement(f"meta protocol {family.ip}", (protocol, _compared(kind.to_bytes(2, "big"))))


def has_mark(bit: int) -> Statement:
    """Match packets with *bit* in their mark."""
    bits = _bitwise(_host_u32(bit), bytes(4))
    return Statement(
        f"meta mark and {bit:#010x} != 0", (META_MARK.load(1), bits, _compared(bytes(4), _DIFFERENT)))


def among(key: Key, container: str) -> Statement:
    """Match packets whose *key* is in the set *container*."""
    loads, _ = _load(key)
    lookup = Expression("lookup", {1: _name(container), 2: u32(1)})
    return Statement(f"{key_text(key)} @{container}", (*_protocol_match(*key), *loads, lookup))


def _load(key: Iterable[Field], word: int = 0) -> tuple[list[Expression], int]:
    """Return the expressions that load *key* from the register of *word* on, and the next free word.

    Every field begins with a word of four bytes, as in keys of sets.
    """
    key = tuple(key)
    behind = word + _words(key) + _GAP
    loads = []
    for field in key:
        load = field.load(_register(word))
        if field.of:
            inputs, _ = _load(field.of, behind)
            source, destination = u32(_register(behind)), load.attributes[1]
            loads += [*inputs, Expression(load.name, {1: source, 2: destination, **field.attributes})]
        else:
            loads.append(load)
        word += _words((field,))
    return loads, word


_GAP = 4
"""Words that libnftables leaves free between a key and the input of a hash in it."""


def _words(key: Iterable[Field]) -> int:
    return sum(-(-field.type.size // 4) for field in key)


def _register(word: int) -> int:
    """Return the number of the register at *word*, as the kernel lists it (nft_dump_register)."""
    return 8 + word if word % 4 else 1 + word // 4


def _name(text: str) -> bytes:
    return text.encode() + b"\0"


_PACKETS = 0


def limit(per_second: int) -> Statement:
    """Match *per_second* packets a second, and as many at once."""
    rate = {1: struct.pack(">Q", per_second), 2: struct.pack(">Q", 1), 3: u32(per_second), 4: u32(_PACKETS)}
    return Statement(
        f"limit rate {per_second}/second burst {per_second} packets", (Expression("limit", rate),))


# Actions.

COUNTER: Final = Statement("counter", (Expression("counter", {1: bytes(8), 2: bytes(8)}),))
"""Count the packets that match so far."""


def counted(rule: HeldRule) -> int | None:
    """Return the packets that `COUNTER` has counted in a listed *rule*; None if it has no counter."""
    found = (each.attributes.get(2, b"") for each in rule.expressions if each.name == "counter")
    return next((int.from_bytes(packets, "big") for packets in found), None)


def vmap(key: Key, container: str) -> Statement:
    """Apply the verdict of *key* in the map *container*; without one, the next rule decides."""
    loads, _ = _load(key)
    lookup = Expression("lookup", {1: _name(container), 2: u32(1), 3: u32(0)})
    return Statement(f"{key_text(key)} vmap @{container}", (*_protocol_match(*key), *loads, lookup))


class Verdict(NamedTuple):
    """What becomes of a packet: the verdict of a rule, or of a map's element."""

    code: int
    """One of NF_* and NFT_*, or that of a later kernel; NF_QUEUE with a queue's number in its upper half."""
    chain: str = ""

    @property
    def text(self) -> str:
        """The verdict as nft writes it: ``goto services``."""
        word = _VERDICT_WORDS.get(self.code, "?")
        return f"{word} {self.chain}" if self.chain else word

    def encode(self) -> bytes:
        """Return the attribute in which data of a rule or of an element is this verdict."""
        parts = [attribute(1, struct.pack(">i", self.code))]
        if self.chain:
            parts.append(text_attribute(2, self.chain))
        return attribute(VERDICT_DATA, b"".join(parts))


NF_DROP, NF_ACCEPT, NF_QUEUE = 0, 1, 3
NFT_CONTINUE, NFT_BREAK, NFT_JUMP, NFT_GOTO, NFT_RETURN = -1, -2, -3, -4, -5
"""Codes of verdicts (linux/netfilter.h, nf_tables.h)."""
_VERDICT_WORDS = {
    NF_DROP: "drop", NF_ACCEPT: "accept", NF_QUEUE: "queue", NFT_CONTINUE: "continue",
    NFT_BREAK: "break", NFT_JUMP: "jump", NFT_GOTO: "goto", NFT_RETURN: "return",
}  # fmt: skip
VERDICT_DATA: Final = 2
"""NFTA_DATA_VERDICT, beside NFTA_DATA_VALUE, which is 1."""


def parse_verdict(data: bytes) -> Verdict | None:
    """Return the verdict that *data* of a rule or of an element is; None: it is a value. Raises Malformed."""
    found = attributes(data).get(VERDICT_DATA)
    if found is None:
        return None
    parts = attributes(found)
    return Verdict(int.from_bytes(parts.get(1, b""), "big", signed=True), text(parts.get(2, b"")))


def _apply(verdict: Verdict) -> Statement:
    immediate = Expression("immediate", {1: u32(0), 2: verdict.encode()})
    return Statement(verdict.text, (immediate,))


def jump(chain: str) -> Statement:
    return _apply(Verdict(NFT_JUMP, chain))


def goto(chain: str) -> Statement:
    return _apply(Verdict(NFT_GOTO, chain))


DROP: Final = _apply(Verdict(NF_DROP))

RETURN: Final = _apply(Verdict(NFT_RETURN))

RESET: Final = Statement("reject with tcp reset", (Expression("reject", {1: u32(1)}),))


def reject(family: Family) -> Statement:
    """Refuse with ICMP's "port unreachable"."""
    code = b"\3" if family is Family.IPV4 else b"\4"
    return Statement("reject", (Expression("reject", {1: u32(0), 2: code}),))


def set_mark(bit: int) -> Statement:
    """Add *bit* to the packet's mark."""
    return _change_mark("or", bit, ~bit & 0xFFFFFFFF)


def flip_mark(bit: int) -> Statement:
    """Remove *bit* from the packet's mark if it has it, else add it."""
    return _change_mark("xor", bit, 0xFFFFFFFF)


def _change_mark(operation: str, bit: int, mask: int) -> Statement:
    store = Expression("meta", {2: u32(3), 3: u32(1)})
    return Statement(
        f"meta mark set meta mark {operation} {bit:#010x}",
        (META_MARK.load(1), _bitwise(_host_u32(mask), _host_u32(bit)), store))


TRACE: Final = Statement("meta nftrace set 1", (
    Expression("immediate", {1: u32(1), 2: _value(b"\1")}), Expression("meta", {2: u32(12), 3: u32(1)}),
))  # fmt: skip
"""Announce each rule that the packet meets."""

_FULLY_RANDOM = 1 << 4
_MAPS_ADDRESS, _MAPS_PORT = 1, 2
_DNAT = 1

MASQUERADE: Final = Statement("masquerade fully-random", (Expression("masq", {1: u32(_FULLY_RANDOM)}),))


def _dnat(family: Family, address: int, port: int) -> Expression:
    """Return the translation to the contents of two registers."""
    return Expression("nat", {
        1: u32(_DNAT), 2: u32(int(family.af)), 3: u32(address), 4: u32(address), 5: u32(port),
        6: u32(port), 7: u32(_MAPS_ADDRESS | _MAPS_PORT),
    })  # fmt: skip


def dnat_to_endpoint(family: Family, key: Key, container: str) -> Statement:
    """Translate the destination to the ``address . port`` of *key* in the map *container*."""
    loads, _ = _load(key)
    lookup = Expression("lookup", {1: _name(container), 2: u32(1), 3: u32(1)})
    nat = _dnat(family, 1, _register(family.size // 4))
    return Statement(
        f"dnat {family.ip} to {key_text(key)} map @{container}",
        (*_protocol_match(*key), *loads, lookup, nat))


def dnat_to_address(family: Family, key: Key, container: str, port: int) -> Statement:
    """Translate the destination to the address of *key* in the map *container*, and to *port*."""
    loads, _ = _load(key)
    lookup = Expression("lookup", {1: _name(container), 2: u32(1), 3: u32(1)})
    number = Expression("immediate", {1: u32(2), 2: _value(struct.pack(">H", port))})
    return Statement(
        f"dnat {family.ip} to {key_text(key)} map @{container} : {port}",
        (*loads, lookup, number, _dnat(family, 1, 2)))


def dnat_to_port(address: Address, key: Key, container: str) -> Statement:
    """Translate the destination to *address* and the port of *key* in the map *container*."""
    family = Family.IPV4 if len(address) == 4 else Family.IPV6
    shown = format_address(address) if family is Family.IPV4 else f"[{format_address(address)}]"
    fixed = Expression("immediate", {1: u32(1), 2: _value(address)})
    loads, _ = _load(key, 4)
    lookup = Expression("lookup", {1: _name(container), 2: u32(2), 3: u32(2)})
    return Statement(
        f"dnat to {shown}:{key_text(key)} map @{container}", (fixed, *loads, lookup, _dnat(family, 1, 2)))


def redirect_to_port(key: Key, container: str) -> Statement:
    """Translate the destination to this node and the port of *key* in the map *container*."""
    loads, _ = _load(key)
    lookup = Expression("lookup", {1: _name(container), 2: u32(1), 3: u32(1)})
    redirect = Expression("redir", {1: u32(1), 2: u32(1), 3: u32(_MAPS_PORT)})
    return Statement(f"redirect to :{key_text(key)} map @{container}", (*loads, lookup, redirect))


_UPDATE = 1


def update(container: str, key: Key, *, value: Field | None = None, seconds: int = 0) -> Statement:
    """Add *key* to a set, or with *value* to a map, or restart its timeout: *seconds*, or the set's own."""
    return _update(container, key, value, seconds, "", {})


def count(container: str, key: Key) -> Statement:
    """Add *key* to a set, or begin its timeout again, and count the packet in its element."""
    zero = attribute(1, bytes(8)) + attribute(2, bytes(8))
    counter = text_attribute(1, "counter") + attribute(2, zero)
    return _update(container, key, None, 0, " counter", {_INNER: counter})


def _update(
    container: str, key: Key, value: Field | None, seconds: int, suffix: str, more: Attributes
) -> Statement:
    loads, word = _load(key)
    settings: dict[int, bytes] = {1: _name(container), 3: u32(_UPDATE), 4: u32(1)}
    text = key_text(key)
    if seconds:
        text += f" timeout {seconds}s"
        settings[6] = struct.pack(">Q", seconds * 1000)
    if value is not None:
        text += f" : {value.text}"
        register = _register(-(-word // 4) * 4)
        loads.append(value.load(register))
        settings[5] = u32(register)
    return Statement(
        f"update @{container} {{ {text}{suffix} }}",
        (*loads, Expression("dynset", {**settings, **more})))


def offload(flowtable: str) -> Statement:
    """Forward further packets of the flow by *flowtable*."""
    return Statement(f"flow add @{flowtable}", (Expression("flow_offload", {1: _name(flowtable)}),))
