"""A kernel in memory that answers nf_tables' netlink requests, for tests without privileges.

    with FakeKernel() as kernel:
        backend.sync(update)

Within the block, `NetlinkSocket.open` opens sockets of NETLINK_NETFILTER in the fake; everything above these
sockets is the real code. Sockets of other protocols are Linux's. The fake

- runs a transaction whole or not at all, answers each refused request with the kernel's error number, and
  checks transactions without an end;
- lists tables, chains, rules, sets and maps with their elements, stateful objects and flowtables as the
  kernel does, in parts of 32 KiB, and announces commits to the members of NFNLGRP_NFTABLES;
- fails on order: see `FakeKernel.refuse`, `lose_answers`, `lose_notifications` and `interrupt`.

No packet meets its rules, and its elements do not expire. It has no anonymous sets, no chains that belong to
a rule, no devices, and of the stateful objects counters, quotas and limits: the others are refused with
EOPNOTSUPP, unknown devices and expressions with ENOENT.

Judged by Linux 6.18: tests send the same requests to both, and compare answers, listings and notifications.
Errors and limits are those of net/netfilter/nf_tables_api.c and nfnetlink.c.
"""

import errno
import os
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from types import MappingProxyType
from typing import Final, NamedTuple, Self, TypeVar

from kproxy_core.netlink import messages as netlink
from kproxy_core.netlink.messages import (
    HEADER,
    NETLINK_NETFILTER,
    NFGENMSG,
    NLM_F_ACK,
    NLM_F_CREATE,
    NLM_F_DUMP,
    NLM_F_DUMP_INTR,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    NLMSG_DONE,
    NLMSG_ERROR,
    Malformed,
    attribute,
    attributes,
    text,
    text_attribute,
    u32_attribute,
)
from kproxy_core.netlink.socket_filter import JUMP_IF_EQUAL, LOAD_WORD, Instruction
from kproxy_core.netlink.sockets import Linux, RawSocket, opening_in
from kproxy_core.nft.messages import (
    DELSETELEM,
    FAMILIES,
    GETCHAIN,
    GETFLOWTABLE,
    GETOBJ,
    GETRULE,
    GETSET,
    GETSETELEM,
    GETTABLE,
    KIND,
    NEWSETELEM,
)
from kproxy_core.nft.objects import DORMANT, OWNER, PERSIST
from kproxy_core.nft.rules import NFT_GOTO, NFT_JUMP, Attributes, Verdict, parse_verdict
from kproxy_core.nft.watch import COMMITS_GROUP

K = TypeVar("K")
V = TypeVar("V")
Handled = TypeVar("Handled", "_Chain", "_Rule", "_Set", "_Object", "_Flowtable")

NEWTABLE, DELTABLE = KIND | 0, KIND | 2
NEWCHAIN, DELCHAIN = KIND | 3, KIND | 5
NEWRULE, DELRULE = KIND | 6, KIND | 8
NEWSET, DELSET = KIND | 9, KIND | 11
NEWGEN, GETGEN = KIND | 15, KIND | 16
NEWOBJ, DELOBJ = KIND | 18, KIND | 20
NEWFLOWTABLE, DELFLOWTABLE = KIND | 22, KIND | 24
BATCH_BEGIN, BATCH_END = 16, 17
"""The messages around a transaction: refusing BATCH_BEGIN refuses all of it."""

_NLM_F_MULTI, _NLM_F_CAPPED, _NLM_F_NONREC, _NLM_F_APPEND = 2, 0x100, 0x100, 0x800
_PART = (32 << 10) - 320
"""Bytes of a part of a dump, without those that the kernel needs for a buffer (netlink_dump)."""
_DATAGRAM = 4096 - 320
"""Bytes of a datagram of notifications (NLMSG_GOODSIZE)."""
_DEFAULT_SPACE = 212992
"""net.core.rmem_default and wmem_default, in bytes."""
_JUMPS = 16
"""NFT_JUMP_STACK_SIZE"""
_DYNAMIC_SIZE = 0xFFFF
"""Size of a set without one to which rules add elements (nft_dynset_init)."""
_LONGEST_VALUE = 64
"""NFT_DATA_VALUE_MAXLEN"""

_CONSTANT, _INTERVAL, _MAP, _TIMEOUT, _EVALUATED, _OBJECTS, _CONCATENATED = 2, 4, 8, 16, 32, 64, 128
_VERDICTS = 0xFFFFFF00
_BASE_CHAIN = 1
_END, _CATCH_ALL = 1, 2
_OBJECT_TYPES = {1: "counter", 2: "quota", 4: "limit"}

_CHAIN_TYPES: Final[Mapping[bytes, Mapping[int, Collection[int]]]] = {
    b"filter\0": {1: range(5), 2: range(5), 10: range(5), 3: range(2), 7: range(5)},
    b"nat\0": {1: (0, 1, 3, 4), 2: (0, 1, 3, 4), 10: (0, 1, 3, 4)},
    b"route\0": {1: (3,), 2: (3,), 10: (3,)},
}  # fmt: skip
"""The hooks of base chains, by type and family."""
_LATEST_BEFORE_NAT = -200
"""NF_IP_PRI_CONNTRACK: chains of type nat must have a later priority."""


class _Shape(NamedTuple):
    """How the kernel lists the attributes of an expression."""

    order: tuple[int, ...]
    defaults: Attributes = MappingProxyType({})
    registers: tuple[int, ...] = ()
    hooks: Collection[int] | None = None
    """The hooks at which the expression works; None: all."""
    is_nat: bool = False
    """It works in chains of type nat only."""


_ZERO = bytes(4)
_SHAPES: Final = {
    "bitwise": _Shape((1, 2, 3, 6, 4, 5, 7), {6: _ZERO}, (1, 2)),
    "cmp": _Shape((1, 2, 3), {}, (1,)),
    "counter": _Shape((1, 2), {1: bytes(8), 2: bytes(8)}),
    "ct": _Shape((1, 2, 3, 4), {}, (1, 4)),
    "dynset": _Shape((4, 5, 3, 1, 6, 7, 9), {6: bytes(8), 9: _ZERO}, (4, 5)),
    "fib": _Shape((1, 2, 3), {}, (1,)),
    "flow_offload": _Shape((1,), hooks=(2,)),
    "hash": _Shape((1, 2, 3, 4, 5, 6, 7), {7: _ZERO}, (1, 2)),
    "immediate": _Shape((1, 2), {}, (1,)),
    "limit": _Shape((1, 2, 3, 4, 5), {3: (5).to_bytes(4, "big"), 4: _ZERO, 5: _ZERO}),
    "lookup": _Shape((1, 2, 3, 5), {5: _ZERO}, (2, 3)),
    "masq": _Shape((1, 2, 3), {}, (2, 3), (4,), is_nat=True),
    "meta": _Shape((2, 1, 3), {}, (1, 3)),
    "nat": _Shape((1, 2, 3, 4, 5, 6, 7), {}, (3, 4, 5, 6), (0, 1, 3, 4), is_nat=True),
    "notrack": _Shape(()),
    "numgen": _Shape((1, 2, 3, 4), {4: _ZERO}, (1,)),
    "objref": _Shape((2, 1)),
    "payload": _Shape((1, 2, 3, 4, 5, 6, 7, 8), {}, (1, 5)),
    "quota": _Shape((1, 4, 2), {4: bytes(8), 2: _ZERO}),
    "redir": _Shape((1, 2, 3), {}, (1, 2), (0, 3), is_nat=True),
    "reject": _Shape((1, 2), hooks=(0, 1, 2, 3)),
}  # fmt: skip


# What the kernel holds.

_Use = tuple[str, Hashable]
"""Kind and name of an object that a rule or an element refers to."""


class _Rule(NamedTuple):
    handle: int
    expressions: bytes
    """As listed."""
    notes: bytes | None
    uses: tuple[_Use, ...]
    limited: tuple[str, ...]
    """Its expressions that do not work in every base chain."""


@dataclass
class _Chain:
    name: str
    handle: int
    hook: tuple[int, int] | None
    """Number and priority of a base chain's."""
    type: bytes
    policy: int
    flags: int
    notes: bytes | None
    rules: list[_Rule] = field(default_factory=list)

    def clone(self) -> "_Chain":
        return replace(self, rules=self.rules.copy())


class _Element(NamedTuple):
    data: bytes | None
    """As listed."""
    object: str
    listed: bytes
    """Its attributes."""
    uses: tuple[_Use, ...]


_ElementKey = tuple[bytes, bytes, bool]
"""Key, last key, and whether it is the first key behind an interval. The key b"" is the catch-all."""


@dataclass
class _Set:
    name: str
    handle: int
    flags: int
    key_size: int
    data_type: int
    data_size: int
    object_type: int
    size: int
    parts: bytes
    """The sizes of the parts of a concatenation, as listed."""
    timeout: int
    settings: Attributes
    """Attributes that are listed as they were given."""
    expressions: bytes
    elements: dict[_ElementKey, _Element] = field(default_factory=dict)

    def clone(self) -> "_Set":
        return replace(self, elements=self.elements.copy())

    @property
    def is_ordered(self) -> bool:
        """Whether an interval has a start and an end, two elements."""
        return bool(self.flags & _INTERVAL) and not self.flags & _CONCATENATED

    @property
    def holds(self) -> int:
        """The number of elements without the catch-all."""
        return len(self.elements) - ((b"", b"", False) in self.elements)

    @property
    def listed(self) -> Mapping[_ElementKey, _Element]:
        """The elements in the kernel's order: intervals from the last one down, others in any."""
        if not self.is_ordered:
            return self.elements
        return dict(
            sorted(self.elements.items(), key=lambda item: (item[0][0], not item[0][2]), reverse=True)
        )

    def is_like(self, other: "_Set") -> bool:
        return (self.flags, self.key_size, self.settings.get(4), self.data_type, self.data_size, self.parts,
                bool(self.expressions)) == (
            other.flags, other.key_size, other.settings.get(4), other.data_type, other.data_size, other.parts,
            bool(other.expressions))  # fmt: skip


class _Object(NamedTuple):
    name: str
    type: int
    handle: int
    data: bytes


class _Flowtable(NamedTuple):
    name: str
    handle: int
    hook: int
    priority: int
    flags: int


@dataclass
class _Table:
    family: int
    name: str
    handle: int
    flags: int
    notes: bytes | None
    owner: int
    handles: Iterator[int]
    """Those of its objects. Refused transactions use up some."""
    chains: dict[str, _Chain] = field(default_factory=dict)
    sets: dict[str, _Set] = field(default_factory=dict)
    objects: dict[tuple[str, int], _Object] = field(default_factory=dict)
    flowtables: dict[str, _Flowtable] = field(default_factory=dict)
    uses: Counter[_Use] = field(default_factory=Counter)

    def clone(self) -> "_Table":
        return replace(
            self, chains={name: chain.clone() for name, chain in self.chains.items()},
            sets={name: each.clone() for name, each in self.sets.items()}, objects=self.objects.copy(),
            flowtables=self.flowtables.copy(), uses=self.uses.copy())  # fmt: skip

    @property
    def is_owned(self) -> bool:
        return bool(self.flags & OWNER)

    def check_valid(self) -> None:
        """Raise the error for rules that lead too deep, or do not work at their hook."""
        led_to = {
            "chain": {name: {name} for name in self.chains},
            "set": {
                each.name: {str(of) for element in each.elements.values() for _, of in element.uses}
                for each in self.sets.values() if each.data_type == _VERDICTS
            },
        }  # fmt: skip
        for base in self.chains.values():
            if base.hook is not None:
                chains = {base.name}
                for _ in range(_JUMPS):
                    found = set[str]()
                    for name in chains:
                        self._check_places(self.chains[name], base)
                        for kind, of in (use for rule in self.chains[name].rules for use in rule.uses):
                            found |= led_to.get(kind, {}).get(str(of), set())
                    chains = found
                if chains:
                    raise _refusal(errno.EMLINK)

    def _check_places(self, chain: _Chain, base: _Chain) -> None:
        assert base.hook is not None
        for name in (name for rule in chain.rules for name in rule.limited):
            shape = _SHAPES[name]
            is_elsewhere = shape.hooks is not None and base.hook[0] not in shape.hooks
            if is_elsewhere or (shape.is_nat and base.type != b"nat\0"):
                raise _refusal(errno.EOPNOTSUPP)


_TableKey = tuple[int, str]
_Tables = dict[_TableKey, _Table]


def _refusal(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def _u32(found: Attributes, kind: int, default: int = 0) -> int:
    return int.from_bytes(found[kind], "big") if kind in found else default


def _name(found: Attributes, kind: int) -> str:
    """Return a name. Raises OSError: without one, the request is refused."""
    if kind not in found:
        raise _refusal(errno.EINVAL)
    return text(found[kind])


def _be64(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack(">Q", value))


# Listings.


def _list_table(table: _Table, deleted: bool) -> bytes:
    used = len(table.chains) + len(table.sets) + len(table.objects) + len(table.flowtables)
    out = text_attribute(1, table.name) + u32_attribute(3, used) + _be64(4, table.handle)
    if deleted:
        return out
    out += u32_attribute(2, table.flags)
    if table.is_owned:
        out += u32_attribute(7, table.owner)
    return out + (attribute(6, table.notes) if table.notes is not None else b"")


def _list_chain(table: _Table, chain: _Chain, deleted: bool) -> bytes:
    out = text_attribute(1, table.name) + text_attribute(3, chain.name) + _be64(2, chain.handle)
    if deleted:
        return out
    if chain.hook is not None:
        number, priority = chain.hook
        hook = u32_attribute(1, number) + attribute(2, struct.pack(">i", priority))
        out += attribute(4, hook) + u32_attribute(5, chain.policy) + attribute(7, chain.type)
    if chain.flags:
        out += u32_attribute(10, chain.flags)
    out += u32_attribute(6, len(chain.rules) + table.uses["chain", chain.name])
    return out + (attribute(12, chain.notes) if chain.notes is not None else b"")


def _list_rule(table: _Table, chain: _Chain, rule: _Rule, before: int) -> bytes:
    out = text_attribute(1, table.name) + text_attribute(2, chain.name) + _be64(3, rule.handle)
    if before:
        out += _be64(6, before)
    out += attribute(4, rule.expressions)
    return out + (attribute(7, rule.notes) if rule.notes is not None else b"")


def _list_set(table: _Table, found: _Set, deleted: bool) -> bytes:
    out = text_attribute(1, table.name) + text_attribute(2, found.name) + _be64(16, found.handle)
    if deleted:
        return out
    if found.flags:
        out += u32_attribute(3, found.flags)
    out += attribute(4, found.settings.get(4, _ZERO)) + u32_attribute(5, found.key_size)
    if found.flags & _MAP:
        out += u32_attribute(6, found.data_type) + u32_attribute(7, found.data_size)
    if found.flags & _OBJECTS:
        out += u32_attribute(15, found.object_type)
    if found.timeout:
        out += _be64(11, found.timeout)
    out += b"".join(attribute(kind, found.settings[kind]) for kind in (12, 8, 13) if kind in found.settings)
    size = u32_attribute(1, found.size) if found.size else b""
    out += attribute(9, size + found.parts)
    out += u32_attribute(20, found.holds // 2 if found.is_ordered else found.holds)
    return out + (attribute(17, found.expressions) if found.expressions else b"")


def _list_elements(table: _Table, found: _Set, elements: Iterable[_Element]) -> bytes:
    listed = b"".join(attribute(1, element.listed) for element in elements)
    return text_attribute(1, table.name) + text_attribute(2, found.name) + attribute(3, listed)


def _list_object(table: _Table, found: _Object, deleted: bool) -> bytes:
    out = text_attribute(1, table.name) + text_attribute(2, found.name) + u32_attribute(3, found.type)
    out += _be64(6, found.handle)
    if deleted:
        return out
    used = table.uses["object", (found.name, found.type)]
    return out + u32_attribute(5, used) + attribute(4, found.data)


def _list_flowtable(table: _Table, found: _Flowtable, deleted: bool) -> bytes:
    out = text_attribute(1, table.name) + text_attribute(2, found.name) + _be64(5, found.handle)
    if deleted:
        return out
    out += u32_attribute(4, table.uses["flowtable", found.name]) + u32_attribute(7, found.flags)
    hook = u32_attribute(1, found.hook) + attribute(2, struct.pack(">i", found.priority)) + attribute(3, b"")
    return out + attribute(3, hook)


def _parts(messages: Iterable[bytes]) -> Iterator[bytes]:
    """Join *messages* to datagrams of a dump."""
    part = b""
    for each in messages:
        if part and len(part) + len(each) > _PART:
            yield part
            part = b""
        part += each
    if part:
        yield part


# Rules and elements of requests.


class _Expressions(NamedTuple):
    listed: bytes
    uses: tuple[_Use, ...]
    limited: tuple[str, ...]


def _register(value: bytes) -> bytes:
    """Return the number by which the kernel lists a register (nft_dump_register)."""
    number = int.from_bytes(value, "big")
    if number < 8:
        return value
    word = number - 8
    return (number if word % 4 else 1 + word // 4).to_bytes(4, "big")


def _compile(table: _Table, expressions: Iterable[bytes]) -> _Expressions:
    """Return *expressions* as the kernel lists them. Raises OSError."""
    listed, uses, limited = b"", list[_Use](), list[str]()
    for expression in expressions:
        parts = attributes(expression)
        name = text(parts.get(1, b""))
        if not name:
            raise _refusal(errno.EINVAL)
        shape = _SHAPES.get(name)
        if shape is None:
            raise _refusal(errno.ENOENT)
        found = {**shape.defaults, **attributes(parts.get(2, b""))}
        found |= {kind: _register(found[kind]) for kind in shape.registers if kind in found}
        uses += _used(table, name, found)
        if shape.hooks is not None:
            limited.append(name)
        data = b"".join(attribute(kind, found[kind]) for kind in shape.order if kind in found)
        listed += attribute(1, text_attribute(1, name) + (attribute(2, data) if shape.order else b""))
    return _Expressions(listed, tuple(uses), tuple(limited))


def _used(table: _Table, name: str, found: dict[int, bytes]) -> Iterator[_Use]:
    """Yield what an expression refers to, and list its data as the kernel does. Raises OSError."""
    if name in ("lookup", "dynset"):
        of = _existing(table.sets, _name(found, 1))
        if name == "lookup" and (3 in found) and not of.flags & _MAP:
            raise _refusal(errno.EINVAL)
        if name == "dynset":
            of.size = of.size or _DYNAMIC_SIZE
            if not of.flags & _EVALUATED:
                raise _refusal(errno.EOPNOTSUPP)
            if 6 in found and any(found[6]) and not of.flags & _TIMEOUT:
                raise _refusal(errno.EOPNOTSUPP)
            if 7 in found:
                inner = _compile(table, [found[7]])
                found[7] = attributes(inner.listed)[1]
        yield "set", of.name
    elif name == "objref" and 2 in found:
        key = text(found[2]), _u32(found, 1)
        _existing(table.objects, key)
        yield "object", key
    elif name == "flow_offload":
        yield "flowtable", _existing(table.flowtables, _name(found, 1)).name
    elif name == "immediate":
        verdict = parse_verdict(found.get(2, b""))
        if verdict is not None:
            if found.get(1) != _ZERO:
                raise _refusal(errno.EINVAL)
            found[2] = _listed_verdict(verdict)
            yield from _led_to(table, verdict)


def _listed_verdict(verdict: Verdict) -> bytes:
    return (verdict if verdict.code in (NFT_JUMP, NFT_GOTO) else Verdict(verdict.code)).encode()


def _led_to(table: _Table, verdict: Verdict) -> Iterator[_Use]:
    """Yield the chain of *verdict*, if it has one. Raises OSError."""
    if verdict.code in (NFT_JUMP, NFT_GOTO):
        if not verdict.chain:
            raise _refusal(errno.EINVAL)
        chain = _existing(table.chains, verdict.chain)
        if chain.hook is not None:
            raise _refusal(errno.EOPNOTSUPP)
        yield "chain", chain.name
    elif not (-5 <= verdict.code <= 1 or verdict.code & 0xFF == 3):
        raise _refusal(errno.EINVAL)


def _existing(objects: Mapping[K, V], name: K) -> V:
    found = objects.get(name)
    if found is None:
        raise _refusal(errno.ENOENT)
    return found


def _element(table: _Table, container: _Set, found: Attributes) -> tuple[_ElementKey, _Element]:
    """Return an element of a request to add it. Raises OSError."""
    flags = _u32(found, 3)
    key = _element_key(container, found)
    is_end = key[2]
    for kind, is_needed in ((2, container.flags & _MAP), (9, container.flags & _OBJECTS)):
        if kind in found if not is_needed else kind not in found and not is_end:
            raise _refusal(errno.EINVAL)
    if is_end and not {2, 4, 5, 6, 7, 9, 10, 11}.isdisjoint(found):
        raise _refusal(errno.EINVAL)
    if (4 in found or 5 in found) and not container.flags & _TIMEOUT:
        raise _refusal(errno.EINVAL)
    timeout = int.from_bytes(found[4], "big") if 4 in found else 0 if is_end else container.timeout
    uses = list[_Use]()
    expressions = container.expressions if not is_end else b""
    if 7 in found:
        expressions = attributes(_compile(table, [found[7]]).listed)[1]
        if container.expressions and attributes(container.expressions)[1] != attributes(expressions)[1]:
            raise _refusal(errno.EOPNOTSUPP)
    elif 11 in found:
        raise _refusal(errno.EOPNOTSUPP)
    out = b""
    if key[0]:
        out += attribute(1, attribute(1, key[0]))
        if key[1]:
            out += attribute(10, attribute(1, key[1]))
    data = object_ = None
    if 9 in found:
        object_ = text(found[9])
        _existing(table.objects, (object_, container.object_type))
        uses.append(("object", (object_, container.object_type)))
    if 2 in found:
        verdict = parse_verdict(found[2])
        if (verdict is not None) != (container.data_type == _VERDICTS):
            raise _refusal(errno.EINVAL)
        if verdict is None:
            value = attributes(found[2]).get(1, b"")
            if len(value) != container.data_size:
                raise _refusal(errno.EINVAL)
            data = attribute(1, value)
        else:
            uses += _led_to(table, verdict)
            data = _listed_verdict(verdict)
        out += attribute(2, data)
    if expressions:
        out += attribute(7, expressions)
    if object_ is not None:
        out += text_attribute(9, object_)
    if flags:
        out += u32_attribute(3, flags)
    if timeout:
        if timeout != container.timeout:
            out += _be64(4, timeout)
        out += _be64(5, timeout)
    if 6 in found:
        out += attribute(6, found[6])
    return key, _Element(data, object_ or "", out, tuple(uses))


def _element_key(container: _Set, found: Attributes) -> _ElementKey:
    """Return the key of an element in a request. Raises OSError."""
    flags = _u32(found, 3)
    is_end, is_catch_all = bool(flags & _END), bool(flags & _CATCH_ALL)
    if flags & ~(_END | _CATCH_ALL):
        raise _refusal(errno.EOPNOTSUPP)
    if is_end and (is_catch_all or not container.flags & _INTERVAL):
        raise _refusal(errno.EINVAL)
    if is_catch_all == (1 in found):
        raise _refusal(errno.EINVAL)
    values = [attributes(found[kind]).get(1, b"") for kind in (1, 10) if kind in found]
    if any(len(value) != container.key_size for value in values):
        raise _refusal(errno.EINVAL)
    if is_catch_all:
        return b"", b"", False
    last = values[1] if len(values) > 1 else b""
    return values[0], last if container.flags & _CONCATENATED else b"", is_end


def _is_clash(container: _Set, key: _ElementKey) -> bool:
    """Whether a new element would overlap an interval of which it is not part."""
    first, last, is_end = key
    if not first:
        return False
    if container.flags & _CONCATENATED and container.flags & _INTERVAL:
        points = [first, last or first]
        return any(
            other[0] and any(_covers(container, other, point) for point in points)
            for other in container.elements)  # fmt: skip
    if not container.is_ordered:
        return False
    others = [(other[0], not other[2]) for other in container.elements if other[0]]
    # At one key, an interval ends before the next one begins.
    here = first, not is_end
    before = max((other for other in others if other < here), default=None)
    after = min((other for other in others if other > here), default=None)
    if not is_end:
        return before is not None and before[1]
    return (before is not None and not before[1]) or (after is not None and not after[1])


def _covers(container: _Set, key: _ElementKey, point: bytes) -> bool:
    """Whether each part of *point* is in the interval of that part."""
    first, last, _ = key
    at = 0
    for part in _part_sizes(container):
        if not first[at : at + part] <= point[at : at + part] <= (last or first)[at : at + part]:
            return False
        at += -(-part // 4) * 4
    return True


def _part_sizes(container: _Set) -> list[int]:
    concatenation = attributes(container.parts).get(2, b"")
    return [
        _u32(attributes(concatenation[start:end]), 1)
        for _, start, end in netlink.attribute_spans(concatenation, 0, len(concatenation))
    ]  # fmt: skip


# Transactions.


class _Event(NamedTuple):
    """A change that is announced when it is committed."""

    kind: int
    flags: int
    sequence: int
    family: int
    listed: Callable[[], bytes]
    elements_of: _Set | None


class _Request(NamedTuple):
    kind: int
    flags: int
    sequence: int
    family: int
    attributes: Attributes


class _Transaction:
    """Changes of one transaction, which `FakeKernel` keeps or drops."""

    def __init__(self, tables: _Tables, handles: Iterator[int], port: int, *, validates: bool) -> None:
        self.tables = tables.copy()
        self.events: list[_Event] = []
        self._handles = handles
        self._port = port
        self._validates = validates
        self._own: set[_TableKey] = set()
        """The tables that are copies already."""
        self._updated: set[_TableKey] = set()
        """The tables that can no longer become dormant or awake (nft_table_pending_update)."""
        self._switched: set[_TableKey] = set()
        """The tables that became dormant or awake; those take no new base chain (nf_tables_addchain)."""

    def run(self, request: _Request) -> None:
        """Raises OSError with the kernel's error number."""
        action = _ACTIONS.get(request.kind)
        if action is None:
            raise _refusal(errno.EINVAL)
        action(self, request)
        if self._validates and request.kind in (NEWRULE, NEWSETELEM):
            self._table(request).check_valid()

    def check_valid(self) -> None:
        for key in self._own & self.tables.keys():
            self.tables[key].check_valid()

    def _table(self, request: _Request) -> _Table:
        """Return the table of *request*, to be changed. Raises OSError."""
        key = request.family, _name(request.attributes, 1)
        if key not in self.tables:
            raise _refusal(errno.ENOENT)
        return self._changed(key)

    def _changed(self, key: _TableKey) -> _Table:
        table = self.tables[key]
        if table.is_owned and table.owner != self._port:
            raise _refusal(errno.EPERM)
        if key not in self._own:
            self._own.add(key)
            self.tables[key] = table = table.clone()
        return table

    def _announce(
        self, request: _Request, kind: int, listed: Callable[[], bytes], elements_of: _Set | None = None
    ) -> None:
        flags = request.flags & (NLM_F_CREATE | NLM_F_EXCL)
        if kind in (NEWRULE, DELRULE) and request.flags & (_NLM_F_APPEND | NLM_F_REPLACE):
            flags |= _NLM_F_APPEND
        sequence = request.sequence
        if elements_of is not None:
            sequence = 0
            last = self.events[-1] if self.events else None
            if last is not None and last.kind == kind and last.elements_of is elements_of:
                flags = last.flags  # The kernel joins them (nft_trans_collapse_set_elem).
        self.events.append(_Event(kind, flags, sequence, request.family, listed, elements_of))

    # Tables.

    def new_table(self, request: _Request) -> None:
        found = request.attributes
        key = request.family, _name(found, 1)
        flags = _u32(found, 2)
        if key in self.tables:
            table = self._changed(key)
            if request.flags & NLM_F_EXCL:
                raise _refusal(errno.EEXIST)
            if request.flags & NLM_F_REPLACE:
                raise _refusal(errno.EOPNOTSUPP)
            if 2 in found and flags != table.flags:
                self._update_table(request, table, flags)
            return
        if request.family not in FAMILIES:
            raise _refusal(errno.EOPNOTSUPP)
        if flags & ~(OWNER | PERSIST | DORMANT):
            raise _refusal(errno.EOPNOTSUPP)
        owner = self._port if flags & OWNER else 0
        self.tables[key] = table = _Table(
            request.family, key[1], next(self._handles), flags, found.get(6), owner, count(1)
        )
        self._own.add(key)
        self._announce(request, NEWTABLE, partial(_list_table, table, deleted=False))

    def _update_table(self, request: _Request, table: _Table, flags: int) -> None:
        is_orphan = table.flags & (OWNER | PERSIST) == PERSIST
        if flags & ~(OWNER | PERSIST | DORMANT) or (flags ^ table.flags) & PERSIST:
            raise _refusal(errno.EOPNOTSUPP)
        if (table.is_owned and not flags & OWNER) or (flags & OWNER and not table.is_owned and not is_orphan):
            raise _refusal(errno.EOPNOTSUPP)
        key = table.family, table.name
        if key in self._updated:
            raise _refusal(errno.EINVAL)
        if (flags ^ table.flags) & DORMANT:
            self._updated.add(key)
            self._switched.add(key)
        if flags & OWNER:
            table.owner = self._port
        table.flags = flags
        self._announce(request, NEWTABLE, partial(_list_table, table, deleted=False))

    def delete_table(self, request: _Request) -> None:
        found = request.attributes
        keys = [
            key for key, table in self.tables.items()
            if request.family in (0, key[0]) and (1 not in found or text(found[1]) == key[1])
            and (4 not in found or 1 in found or _u32(found, 4) == table.handle)
        ]  # fmt: skip
        is_one = request.family and (1 in found or 4 in found)
        if is_one and not keys:
            raise _refusal(errno.ENOENT)
        for key in keys:
            if not is_one and self.tables[key].is_owned and self.tables[key].owner != self._port:
                continue
            table = self._changed(key)
            if is_one and request.flags & _NLM_F_NONREC and _in_table(table):
                raise _refusal(errno.EBUSY)
            self._flush_table(request._replace(family=key[0]), table)
            del self.tables[key]
            self._updated.discard(key)
            self._switched.discard(key)

    def _flush_table(self, request: _Request, table: _Table) -> None:
        for chain in table.chains.values():
            self._flush_chain(request, table, chain)
        for each in list(table.sets.values()):
            self._drop_set(request, table, each)
        for flowtable in list(table.flowtables.values()):
            self._drop_flowtable(request, table, flowtable)
        for object_ in list(table.objects.values()):
            self._drop_object(request, table, object_)
        for chain in list(table.chains.values()):
            self._drop_chain(request, table, chain)
        self._announce(request, DELTABLE, partial(_list_table, table, deleted=True))

    # Chains and rules.

    def new_chain(self, request: _Request) -> None:
        table, found = self._table(request), request.attributes
        name = text(found[3]) if 3 in found else ""
        chain = table.chains.get(name)
        if 2 in found:
            chain = _with_handle(table.chains.values(), found[2])
        elif not name:
            raise _refusal(errno.EINVAL if 11 not in found else errno.EOPNOTSUPP)
        if 5 in found:
            if (chain is None and 4 not in found) or (chain is not None and chain.hook is None):
                raise _refusal(errno.EOPNOTSUPP)
            if _u32(found, 5) > 1:
                raise _refusal(errno.EINVAL)
        if _u32(found, 10) & ~_BASE_CHAIN:
            raise _refusal(errno.EOPNOTSUPP)
        if chain is not None:
            self._update_chain(request, table, chain)
            return
        if 4 in found and (table.family, table.name) in self._switched:
            raise _refusal(errno.EINVAL)
        hook = _hook(found, table.family) if 4 in found else None
        if hook is None and _u32(found, 10):
            raise _refusal(errno.EINVAL)
        table.chains[name] = chain = _Chain(
            name, next(table.handles), hook, found.get(7, b"filter\0") if hook else b"", _u32(found, 5, 1),
            _BASE_CHAIN if hook else 0, found.get(12))  # fmt: skip
        self._announce(request, NEWCHAIN, partial(_list_chain, table, chain, deleted=False))

    def _update_chain(self, request: _Request, table: _Table, chain: _Chain) -> None:
        found = request.attributes
        if request.flags & NLM_F_EXCL:
            raise _refusal(errno.EEXIST)
        if request.flags & NLM_F_REPLACE:
            raise _refusal(errno.EOPNOTSUPP)
        if 4 in found:
            if chain.hook is None:
                raise _refusal(errno.EEXIST)
            if _hook(found, table.family) != chain.hook:
                raise _refusal(errno.EOPNOTSUPP)
            if found.get(7, chain.type) != chain.type:
                raise _refusal(errno.EEXIST)
        if 2 in found and 3 in found and text(found[3]) != chain.name:
            raise _refusal(errno.EOPNOTSUPP)
        chain.policy = _u32(found, 5, chain.policy)
        self._updated.add((table.family, table.name))
        self._announce(request, NEWCHAIN, partial(_list_chain, table, chain, deleted=False))

    def delete_chain(self, request: _Request) -> None:
        table, found = self._table(request), request.attributes
        chain = (
            _with_handle(table.chains.values(), found[2])
            if 2 in found
            else _existing(table.chains, _name(found, 3))
        )
        if request.flags & _NLM_F_NONREC and (chain.rules or table.uses["chain", chain.name]):
            raise _refusal(errno.EBUSY)
        is_used = table.uses["chain", chain.name] > 0  # Also by a rule of its own.
        self._flush_chain(request, table, chain)
        if is_used:
            raise _refusal(errno.EBUSY)
        self._drop_chain(request, table, chain)

    def _drop_chain(self, request: _Request, table: _Table, chain: _Chain) -> None:
        del table.chains[chain.name]
        if chain.hook is not None:
            self._updated.add((table.family, table.name))
        self._announce(request, DELCHAIN, partial(_list_chain, table, chain, deleted=True))

    def new_rule(self, request: _Request) -> None:
        table, found = self._table(request), request.attributes
        if 2 not in found:
            raise _refusal(errno.EINVAL if 11 not in found else errno.EOPNOTSUPP)
        chain = _existing(table.chains, text(found[2]))
        rules = chain.rules
        old = None
        if 3 in found:
            old = _with_handle(rules, found[3])
            if request.flags & NLM_F_EXCL:
                raise _refusal(errno.EEXIST)
            if not request.flags & NLM_F_REPLACE:
                raise _refusal(errno.EOPNOTSUPP)
            handle = old.handle
        else:
            if not request.flags & NLM_F_CREATE or request.flags & NLM_F_REPLACE:
                raise _refusal(errno.EINVAL)
            handle = next(table.handles)
            if 6 in found:
                old = _with_handle(rules, found[6])
        listed = found.get(4, b"")
        spans = netlink.attribute_spans(listed, 0, len(listed))
        made = _compile(table, (listed[start:end] for kind, start, end in spans if kind == 1))
        rule = _Rule(handle, made.listed, found.get(7), made.uses, made.limited)
        table.uses.update(rule.uses)
        if 3 in found:
            assert old is not None
            self._drop_rule(request, table, chain, old, place := rules.index(old))
        elif request.flags & _NLM_F_APPEND:
            place = rules.index(old) + 1 if old is not None else len(rules)
        else:
            place = rules.index(old) if old is not None else 0
        rules.insert(place, rule)
        self._announce(request, NEWRULE, partial(_announced_rule, table, chain, rule))

    def delete_rule(self, request: _Request) -> None:
        table, found = self._table(request), request.attributes
        if 2 not in found:
            if 3 in found:
                raise _refusal(errno.EINVAL)
            for each in table.chains.values():
                self._flush_chain(request, table, each)
            return
        chain = _existing(table.chains, text(found[2]))
        if 3 in found:
            rule = _with_handle(chain.rules, found[3])
            self._drop_rule(request, table, chain, rule, chain.rules.index(rule))
        else:
            self._flush_chain(request, table, chain)

    def _flush_chain(self, request: _Request, table: _Table, chain: _Chain) -> None:
        while chain.rules:
            self._drop_rule(request, table, chain, chain.rules[0], 0)

    def _drop_rule(self, request: _Request, table: _Table, chain: _Chain, rule: _Rule, place: int) -> None:
        del chain.rules[place]
        table.uses.subtract(rule.uses)
        self._announce(request, DELRULE, partial(_list_rule, table, chain, rule, 0))

    # Sets and their elements.

    def new_set(self, request: _Request) -> None:
        found = request.attributes
        if not {1, 2, 5, 10} <= found.keys():
            raise _refusal(errno.EINVAL)
        wanted = _set(found)
        table = self._table(request)
        held = table.sets.get(wanted.name)
        if held is not None:
            if request.flags & NLM_F_EXCL:
                raise _refusal(errno.EEXIST)
            if request.flags & NLM_F_REPLACE:
                raise _refusal(errno.EOPNOTSUPP)
            if not held.is_like(wanted):
                raise _refusal(errno.EEXIST)
            held.timeout = wanted.timeout or held.timeout
            held.size = wanted.size or held.size
        else:
            if not request.flags & NLM_F_CREATE:
                raise _refusal(errno.ENOENT)
            if 17 in found:
                wanted.expressions = attributes(_compile(table, [found[17]]).listed)[1]
            wanted.handle = next(table.handles)
            table.sets[wanted.name] = held = wanted
        self._announce(request, NEWSET, partial(_list_set, table, held, deleted=False))

    def delete_set(self, request: _Request) -> None:
        table, found = self._table(request), request.attributes
        held = (
            _with_handle(table.sets.values(), found[16])
            if 16 in found
            else _existing(table.sets, _name(found, 2))
        )
        if table.uses["set", held.name] or (request.flags & _NLM_F_NONREC and held.holds):
            raise _refusal(errno.EBUSY)
        self._drop_set(request, table, held)

    def _drop_set(self, request: _Request, table: _Table, held: _Set) -> None:
        for element in held.elements.values():
            table.uses.subtract(element.uses)
        del table.sets[held.name]
        self._announce(request, DELSET, partial(_list_set, table, held, deleted=True))

    def new_elements(self, request: _Request) -> None:
        table, found = self._table(request), request.attributes
        if 3 not in found:
            raise _refusal(errno.EINVAL)
        held = _existing(table.sets, _name(found, 2))
        if held.flags & _CONSTANT and table.uses["set", held.name]:
            raise _refusal(errno.EBUSY)
        for wanted in _listed_elements(found[3]):
            key, element = _element(table, held, wanted)
            if (same := held.elements.get(key)) is not None:
                is_other = (same.data, same.object) != (element.data, element.object)
                if is_other or request.flags & NLM_F_EXCL:
                    raise _refusal(errno.EEXIST)
                continue
            if _is_clash(held, key):
                raise _refusal(errno.EEXIST)
            most = held.size * 2 if held.is_ordered else held.size
            if most and key[0] and held.holds >= most:
                raise _refusal(errno.ENFILE)
            held.elements[key] = element
            table.uses.update(element.uses)
            self._announce(request, NEWSETELEM, partial(_list_elements, table, held, [element]), held)

    def delete_elements(self, request: _Request) -> None:
        table, found = self._table(request), request.attributes
        held = _existing(table.sets, _name(found, 2))
        if held.flags & _CONSTANT and table.uses["set", held.name]:
            raise _refusal(errno.EBUSY)
        keys = list(held.listed) if 3 not in found else (
            _element_key(held, each) for each in _listed_elements(found[3]))  # fmt: skip
        for key in keys:
            element = held.elements.pop(key, None)
            if element is None:
                raise _refusal(errno.ENOENT)
            table.uses.subtract(element.uses)
            self._announce(request, DELSETELEM, partial(_list_elements, table, held, [element]), held)

    # Stateful objects and flowtables.

    def new_object(self, request: _Request) -> None:
        found = request.attributes
        if not {1, 2, 3, 4} <= found.keys():
            raise _refusal(errno.EINVAL)
        table = self._table(request)
        key = _name(found, 2), _u32(found, 3)
        if key in table.objects:
            if request.flags & NLM_F_EXCL:
                raise _refusal(errno.EEXIST)
            if request.flags & NLM_F_REPLACE:
                raise _refusal(errno.EOPNOTSUPP)
            return
        if key[1] not in _OBJECT_TYPES:
            raise _refusal(errno.EOPNOTSUPP)
        shape = _SHAPES[_OBJECT_TYPES[key[1]]]
        settings = {**shape.defaults, **attributes(found[4])}
        data = b"".join(attribute(kind, settings[kind]) for kind in shape.order if kind in settings)
        table.objects[key] = made = _Object(*key, next(table.handles), data)
        self._announce(request, NEWOBJ, partial(_list_object, table, made, deleted=False))

    def delete_object(self, request: _Request) -> None:
        table, found = self._table(request), request.attributes
        if 3 not in found or (2 not in found and 6 not in found):
            raise _refusal(errno.EINVAL)
        held = (
            _with_handle(table.objects.values(), found[6])
            if 6 in found
            else _existing(table.objects, (text(found[2]), _u32(found, 3)))
        )
        if table.uses["object", (held.name, held.type)]:
            raise _refusal(errno.EBUSY)
        self._drop_object(request, table, held)

    def _drop_object(self, request: _Request, table: _Table, held: _Object) -> None:
        del table.objects[held.name, held.type]
        self._announce(request, DELOBJ, partial(_list_object, table, held, deleted=True))

    def new_flowtable(self, request: _Request) -> None:
        found = request.attributes
        if not {1, 2, 3} <= found.keys():
            raise _refusal(errno.EINVAL)
        table, name = self._table(request), text(found[2])
        hook = attributes(found[3])
        if hook.get(3):
            raise _refusal(errno.ENOENT)
        if (held := table.flowtables.get(name)) is not None:
            if request.flags & NLM_F_EXCL:
                raise _refusal(errno.EEXIST)
            if request.flags & NLM_F_REPLACE:
                raise _refusal(errno.EOPNOTSUPP)
            if _u32(found, 7, held.flags) != held.flags:
                raise _refusal(errno.EOPNOTSUPP)
        else:
            priority = int.from_bytes(hook.get(2, b""), "big", signed=True)
            table.flowtables[name] = held = _Flowtable(
                name, next(table.handles), _u32(hook, 1), priority, _u32(found, 7)
            )
        self._announce(request, NEWFLOWTABLE, partial(_list_flowtable, table, held, deleted=False))

    def delete_flowtable(self, request: _Request) -> None:
        table, found = self._table(request), request.attributes
        held = (
            _with_handle(table.flowtables.values(), found[5])
            if 5 in found
            else _existing(table.flowtables, _name(found, 2))
        )
        if table.uses["flowtable", held.name]:
            raise _refusal(errno.EBUSY)
        self._drop_flowtable(request, table, held)

    def _drop_flowtable(self, request: _Request, table: _Table, held: _Flowtable) -> None:
        del table.flowtables[held.name]
        self._announce(request, DELFLOWTABLE, partial(_list_flowtable, table, held, deleted=True))


_ACTIONS: Final[Mapping[int, Callable[[_Transaction, _Request], None]]] = {
    NEWTABLE: _Transaction.new_table, DELTABLE: _Transaction.delete_table,
    NEWCHAIN: _Transaction.new_chain, DELCHAIN: _Transaction.delete_chain,
    NEWRULE: _Transaction.new_rule, DELRULE: _Transaction.delete_rule,
    NEWSET: _Transaction.new_set, DELSET: _Transaction.delete_set,
    NEWSETELEM: _Transaction.new_elements, DELSETELEM: _Transaction.delete_elements,
    NEWOBJ: _Transaction.new_object, DELOBJ: _Transaction.delete_object,
    NEWFLOWTABLE: _Transaction.new_flowtable, DELFLOWTABLE: _Transaction.delete_flowtable,
}  # fmt: skip


def _in_table(table: _Table) -> bool:
    return bool(table.chains or table.sets or table.objects or table.flowtables)


def _announced_rule(table: _Table, chain: _Chain, rule: _Rule) -> bytes:
    handles = [each.handle for each in chain.rules]
    place = handles.index(rule.handle) if rule.handle in handles[:-1] else 0
    return _list_rule(table, chain, rule, handles[place - 1] if place else 0)


def _with_handle(objects: Iterable[Handled], handle: bytes) -> Handled:
    """Raises OSError."""
    number = int.from_bytes(handle, "big")
    for each in objects:
        if each.handle == number:
            return each
    raise _refusal(errno.ENOENT)


def _hook(found: Attributes, family: int) -> tuple[int, int]:
    """Return number and priority of the hook that a chain wants. Raises OSError."""
    hook = attributes(found[4])
    if not {1, 2} <= hook.keys():
        raise _refusal(errno.EINVAL)
    types = _CHAIN_TYPES.get(found.get(7, b"filter\0"))
    if types is None:
        raise _refusal(errno.ENOENT)
    hooks = types.get(family)
    number, priority = _u32(hook, 1), int.from_bytes(hook[2], "big", signed=True)
    if hooks is None:
        raise _refusal(errno.ENOENT)
    if number not in hooks:
        raise _refusal(errno.EOPNOTSUPP)
    if found.get(7) == b"nat\0" and priority <= _LATEST_BEFORE_NAT:
        raise _refusal(errno.EOPNOTSUPP)
    return number, priority


def _set(found: Attributes) -> _Set:
    """Return the set of a request. Raises OSError."""
    flags, key_size = _u32(found, 3), _u32(found, 5)
    if not 0 < key_size <= _LONGEST_VALUE:
        raise _refusal(errno.EINVAL)
    known = _CONSTANT | _INTERVAL | _MAP | _TIMEOUT | _EVALUATED | _OBJECTS | _CONCATENATED
    if flags & ~known or not ~flags & (_MAP | _OBJECTS) or not ~flags & (_EVALUATED | _OBJECTS):
        raise _refusal(errno.EOPNOTSUPP)
    if (6 in found) != bool(flags & _MAP) or (15 in found) != bool(flags & _OBJECTS):
        raise _refusal(errno.EINVAL)
    data_type, data_size = _u32(found, 6), _u32(found, 7)
    if data_type == _VERDICTS:
        data_size = 16
    elif flags & _MAP and not 0 < data_size <= _LONGEST_VALUE:
        raise _refusal(errno.EINVAL)
    if (11 in found or 12 in found) and not flags & _TIMEOUT:
        raise _refusal(errno.EINVAL)
    description = attributes(found.get(9, b""))
    parts = b""
    if 2 in description:
        lengths = b"".join(
            attribute(1, u32_attribute(1, _u32(attributes(description[2][start:end]), 1)))
            for _, start, end in netlink.attribute_spans(description[2], 0, len(description[2]))
        )
        parts = attribute(2, lengths)
    if bool(parts) != bool(flags & _CONCATENATED):
        raise _refusal(errno.EINVAL)
    return _Set(
        _name(found, 2),
        0,
        flags,
        key_size,
        data_type,
        data_size,
        _u32(found, 15),
        _u32(description, 1),
        parts,
        int.from_bytes(found.get(11, b""), "big"),
        {kind: found[kind] for kind in (4, 8, 12, 13) if kind in found},
        found.get(17, b""),
    )


def _listed_elements(listed: bytes) -> Iterator[Attributes]:
    for _, start, end in netlink.attribute_spans(listed, 0, len(listed)):
        yield attributes(listed, start, end)


# The kernel.


_Message = tuple[int, int, int, int, int]
"""Kind, flags, sequence number, and start and end of the payload."""


class _Fault(NamedTuple):
    """An error that requests are answered with."""

    code: int
    kind: int
    after: int
    times: int


class FakeKernel:
    """nf_tables of one network namespace, in memory. Thread-safe.

    Enter it to have this process's sockets opened in it; `open_socket` opens one without that.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._tables: _Tables = {}
        self._generation = 1
        self._handles = count(1)
        self._ports = count(1)
        self._sockets: list[FakeSocket] = []
        self._faults: list[_Fault] = []
        self._interrupted = 0
        self._lost_commits = 0
        self._lost_answers: list[tuple[int, int]] = []
        self._entered = ExitStack()
        self.author = os.getpid(), _own_name()
        """Process id and name that commits are announced with."""
        self.requests: Counter[int] = Counter()
        """The requests so far, by kind, refused ones included."""

    def __enter__(self) -> Self:
        self._entered.enter_context(opening_in(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def namespace(self) -> Hashable:
        return id(self)

    def open_socket(
        self, protocol: int, *, groups: Collection[int] = (), accept: Sequence[Instruction] = (),
        receive_space: int = 0, send_space: int = 0,
    ) -> RawSocket:  # fmt: skip
        """Open a socket in this kernel, or of another protocol than NETLINK_NETFILTER in Linux."""
        if protocol != NETLINK_NETFILTER:
            return Linux().open_socket(
                protocol, groups=groups, accept=accept, receive_space=receive_space, send_space=send_space
            )
        with self.lock:
            # As Linux, the first socket gets the process's id, and further ones arbitrary numbers.
            port = next(number for number in self._port_numbers() if number not in self._bound())
            made = FakeSocket(self, port, groups, accept, receive_space, send_space)
            self._sockets.append(made)
            return made

    def _port_numbers(self) -> Iterator[int]:
        yield os.getpid()
        yield from (0x80000000 + number for number in self._ports)

    def _bound(self) -> set[int]:
        return {each.port for each in self._sockets}

    # Faults.

    def refuse(self, code: int, *, kind: int = 0, after: int = 0, times: int = 1) -> None:
        """Answer *times* requests with error number *code*, after *after* others; of *kind*, or 0: of any.

        The transaction of a refused request is not run. Refuse BATCH_BEGIN for an error about a transaction
        as a whole, such as EPERM or ERESTART.
        """
        with self.lock:
            self._faults.append(_Fault(code, kind, after, times))

    def lose_answers(self, *, kind: int = 0, after: int = 0) -> None:
        """Let a socket's buffer overflow after *after* datagrams of answers (ENOBUFS); the others are lost.

        They are those to the next request of *kind*, or 0: of any. BATCH_BEGIN: to the next transaction,
        which is run.
        """
        with self.lock:
            self._lost_answers.append((kind, after))

    def lose_notifications(self, commits: int = 1) -> None:
        """Let the buffers of all listening sockets overflow at the next *commits* (ENOBUFS)."""
        with self.lock:
            self._lost_commits += commits

    def interrupt(self, dumps: int = 1) -> None:
        """Mark the next *dumps* as interrupted by a commit (NLM_F_DUMP_INTR)."""
        with self.lock:
            self._interrupted += dumps

    def _fault(self, kind: int) -> None:
        """Raise the error that a request is to be answered with, if there is one."""
        self.requests[kind] += 1
        for at, fault in enumerate(self._faults):
            if fault.kind not in (0, kind) or (not fault.kind and kind in (BATCH_BEGIN, BATCH_END)):
                continue
            if fault.after:
                self._faults[at] = fault._replace(after=fault.after - 1)
                continue
            self._faults[at] = fault._replace(times=fault.times - 1)
            if fault.times == 1:
                del self._faults[at]
            raise _refusal(fault.code)

    # Requests.

    def take(self, sock: "FakeSocket", data: bytes) -> None:
        """Answer what *sock* sends."""
        with self.lock:
            found = list(netlink.messages(data))
            if found and found[0][0] == BATCH_BEGIN:
                sock.put(BATCH_BEGIN, self._run(sock, data, found))
                return
            for kind, flags, sequence, start, end in found:
                sock.put(kind, self._answer(sock, data, (kind, flags, sequence, start, end)))

    def _run(self, sock: "FakeSocket", data: bytes, found: Sequence[_Message]) -> list[bytes]:
        kind, flags, sequence, start, end = found[0]
        first = sequence
        try:
            self._fault(BATCH_BEGIN)
            if end - start < NFGENMSG.size:
                raise _refusal(errno.EINVAL)
            if int.from_bytes(data[start + 2 : start + 4], "big") << 8 != KIND:
                raise _refusal(errno.EOPNOTSUPP)
            expected = _u32(attributes(data, start + NFGENMSG.size, end), 1)
            if expected and expected != self._generation:
                raise _refusal(errno.ERESTART)
        except OSError as error:
            return [self._error(sock, error.errno or 0, kind, flags, first)]
        made, answers, is_whole = self._attempt(sock, data, found, validates=False)
        if made is not None:
            try:
                made.check_valid()
            except OSError:
                made, answers, is_whole = self._attempt(sock, data, found, validates=True)
        if made is not None and is_whole:
            self._commit(sock, made, found[1][2])
        return answers

    def _attempt(
        self, sock: "FakeSocket", data: bytes, found: Sequence[_Message], *, validates: bool
    ) -> tuple[_Transaction | None, list[bytes], bool]:
        """Run requests; return the transaction if none is refused, the answers, and whether it has an end."""
        made = _Transaction(self._tables, self._handles, sock.port, validates=validates)
        answers: list[bytes] = []
        is_refused = False
        for kind, flags, sequence, start, end in found[1:]:
            if kind == BATCH_END:
                return None if is_refused else made, answers, True
            code = 0
            try:
                if not validates:
                    self._fault(kind)
                if kind & 0xFF00 != KIND or end - start < NFGENMSG.size:
                    raise _refusal(errno.EINVAL)
                made.run(
                    _Request(kind, flags, sequence, data[start], attributes(data, start + NFGENMSG.size, end))
                )
            except Malformed:
                code = errno.EINVAL
            except OSError as error:
                code = error.errno or 0
            is_refused = is_refused or bool(code)
            if code or flags & NLM_F_ACK:
                answers.append(self._error(sock, code, kind, flags, sequence))
        return None if is_refused else made, answers, False

    def _commit(self, sock: "FakeSocket", made: _Transaction, first: int) -> None:
        """Keep *made*, and announce it; *first* is the sequence number of its first request."""
        if not made.events:
            return
        self._tables = made.tables
        self._generation += 1
        datagrams = [b""]
        for event in made.events:
            packed = self._message(
                event.kind, event.flags, event.sequence, sock.port, event.family, event.listed()
            )
            if len(datagrams[-1]) + len(packed) > _DATAGRAM:
                datagrams.append(b"")
            datagrams[-1] += packed
        datagrams.append(self._message(NEWGEN, 0, first, sock.port, 0, self._generation_shown()))
        is_lost = self._lost_commits > 0
        self._lost_commits -= is_lost
        for each in self._sockets:
            if COMMITS_GROUP in each.groups:
                each.hear(datagrams, is_lost=is_lost)

    def _generation_shown(self) -> bytes:
        pid, name = self.author
        return u32_attribute(1, self._generation) + u32_attribute(2, pid) + text_attribute(3, name)

    def _message(self, kind: int, flags: int, sequence: int, port: int, family: int, body: bytes) -> bytes:
        generation = struct.pack(">H", self._generation & 0xFFFF)
        size = HEADER.size + NFGENMSG.size + len(body)
        return HEADER.pack(size, kind, flags, sequence, port) + bytes([family, 0]) + generation + body

    @staticmethod
    def _error(sock: "FakeSocket", code: int, kind: int, flags: int, sequence: int) -> bytes:
        size = HEADER.size * 2 + 4
        request = HEADER.pack(HEADER.size, kind, flags, sequence, 0)
        return (
            HEADER.pack(size, NLMSG_ERROR, _NLM_F_CAPPED, sequence, sock.port)
            + struct.pack("=i", -code)
            + request
        )

    def _answer(self, sock: "FakeSocket", data: bytes, found: _Message) -> Iterable[bytes]:
        kind, flags, sequence, start, end = found
        answers: list[bytes] = []
        code = 0
        try:
            self._fault(kind)
            if end - start < NFGENMSG.size:
                return []
            if kind not in _LISTINGS and kind != GETGEN:
                raise _refusal(errno.EINVAL)
            request = _Request(
                kind, flags, sequence, data[start], attributes(data, start + NFGENMSG.size, end)
            )
            if kind == GETGEN:
                answers.append(self._message(NEWGEN, 0, sequence, sock.port, 0, self._generation_shown()))
            elif flags & NLM_F_DUMP == NLM_F_DUMP:
                if sock.is_dumping:
                    raise _refusal(errno.EBUSY)
                return self._dump(sock, request)
            else:
                answers.extend(
                    self._message(kind - 1, 0, sequence, sock.port, request.family, body)
                    for body in self._named(request)
                )
        except Malformed:
            code = errno.EINVAL
        except OSError as error:
            code = error.errno or 0
        if code or flags & NLM_F_ACK:
            answers.append(self._error(sock, code, kind, flags, sequence))
        return answers

    def _named(self, request: _Request) -> Iterator[bytes]:
        """Yield the objects that a request names. Raises OSError."""
        found, kind = request.attributes, request.kind
        needed = {GETTABLE: {1}, GETCHAIN: {1, 3}, GETRULE: {1}, GETSETELEM: {1, 2, 3}, GETOBJ: {1, 2, 3}}
        if not needed.get(kind, {1, 2}) <= found.keys():
            raise _refusal(errno.EINVAL)
        table = _existing(self._tables, (request.family, text(found[1])))
        if kind == GETTABLE:
            yield _list_table(table, deleted=False)
        elif kind == GETCHAIN:
            yield _list_chain(table, _existing(table.chains, text(found[3])), deleted=False)
        elif kind == GETRULE:
            chain = _existing(table.chains, _name(found, 2))
            if 3 not in found:
                raise _refusal(errno.EINVAL)
            yield _list_rule(table, chain, _with_handle(chain.rules, found[3]), 0)
        elif kind == GETSET:
            yield _list_set(table, _existing(table.sets, text(found[2])), deleted=False)
        elif kind == GETSETELEM:
            held = _existing(table.sets, text(found[2]))
            for each in _listed_elements(found[3]):
                yield _list_elements(table, held, [_get(held, _element_key(held, each))])
        elif kind == GETOBJ:
            yield _list_object(
                table, _existing(table.objects, (text(found[2]), _u32(found, 3))), deleted=False
            )
        else:
            yield _list_flowtable(table, _existing(table.flowtables, text(found[2])), deleted=False)

    def _dump(self, sock: "FakeSocket", request: _Request) -> Iterator[bytes]:
        """Yield the datagrams of a dump. Raises OSError at the first one."""
        found = request.attributes
        if request.kind in (GETSET, GETSETELEM) and (1 in found or request.kind == GETSETELEM):
            table = _existing(self._tables, (request.family, _name(found, 1)))
            if request.kind == GETSETELEM:
                _existing(table.sets, _name(found, 2))
        generation = self._generation
        is_interrupted = self._interrupted > 0
        self._interrupted -= is_interrupted
        flags = _NLM_F_MULTI | (_NLM_F_APPEND if request.kind in (GETRULE, GETOBJ) else 0)
        messages = [
            self._message(request.kind - 1, flags, request.sequence, sock.port, family, body)
            for family, body in _LISTINGS[request.kind](self._tables.values(), request)
        ]  # fmt: skip

        def parts() -> Iterator[bytes]:
            for part in _parts(messages):
                with self.lock:
                    is_changed = is_interrupted or generation != self._generation
                yield _interrupted(part) if is_changed else part
            with self.lock:
                is_changed = is_interrupted or generation != self._generation
            more = NLM_F_DUMP_INTR if is_changed else 0
            yield HEADER.pack(
                HEADER.size + 4, NLMSG_DONE, _NLM_F_MULTI | more, request.sequence, sock.port
            ) + bytes(4)

        return parts()

    def take_loss(self, kind: int) -> int | None:
        """Return after how many datagrams the answers to a request of *kind* are lost; None: they are not."""
        for at, (lost, after) in enumerate(self._lost_answers):
            if lost in (0, kind):
                del self._lost_answers[at]
                return after
        return None

    def forget(self, sock: "FakeSocket") -> None:
        """Delete the tables that *sock* owns, or leave those to anybody that outlive it."""
        with self.lock:
            self._sockets.remove(sock)
            for key, table in list(self._tables.items()):
                if table.is_owned and table.owner == sock.port:
                    if table.flags & PERSIST:
                        self._tables[key] = replace(table, flags=table.flags & ~OWNER, owner=0)
                    else:
                        del self._tables[key]


def _own_name() -> str:
    with open("/proc/self/comm", encoding="utf-8", errors="replace") as file:
        return file.read().strip()


def _interrupted(part: bytes) -> bytes:
    """Return *part* of a dump with NLM_F_DUMP_INTR in each message."""
    out = bytearray(part)
    for _, flags, _, start, _ in netlink.messages(part):
        struct.pack_into("=H", out, start - HEADER.size + 6, flags | NLM_F_DUMP_INTR)
    return bytes(out)


def _get(held: _Set, key: _ElementKey) -> _Element:
    """Return the element that holds *key*. Raises OSError."""
    if (found := held.elements.get(key)) is not None or not key[0]:
        if found is None:
            raise _refusal(errno.ENOENT)
        return found
    if held.is_ordered:
        below = [other for other in held.elements if other[0] and other[0] <= key[0]]
        nearest = max(below, key=lambda other: (other[0], not other[2]), default=None)
        if nearest is not None and not nearest[2] and not key[2]:
            return held.elements[nearest]
    elif held.flags & _CONCATENATED:
        for other, element in held.elements.items():
            if other[0] and _covers(held, other, key[0]):
                return element
    raise _refusal(errno.ENOENT)


_Listed = Iterator[tuple[int, bytes]]


def _of_family(tables: Iterable[_Table], request: _Request, *, named: bool = True) -> Iterator[_Table]:
    name = text(request.attributes[1]) if named and 1 in request.attributes else None
    for table in tables:
        if request.family in (0, table.family) and name in (None, table.name):
            yield table


def _tables_listed(tables: Iterable[_Table], request: _Request) -> _Listed:
    for table in _of_family(tables, request, named=False):
        yield table.family, _list_table(table, deleted=False)


def _chains_listed(tables: Iterable[_Table], request: _Request) -> _Listed:
    for table in _of_family(tables, request, named=False):
        for chain in table.chains.values():
            yield table.family, _list_chain(table, chain, deleted=False)


def _rules_listed(tables: Iterable[_Table], request: _Request) -> _Listed:
    of = text(request.attributes[2]) if 2 in request.attributes else None
    for table in _of_family(tables, request):
        for chain in table.chains.values():
            if of in (None, chain.name):
                before = 0
                for rule in chain.rules:
                    yield table.family, _list_rule(table, chain, rule, before)
                    before = rule.handle


def _sets_listed(tables: Iterable[_Table], request: _Request) -> _Listed:
    for table in _of_family(tables, request):
        for each in table.sets.values():
            yield table.family, _list_set(table, each, deleted=False)


def _elements_listed(tables: Iterable[_Table], request: _Request) -> _Listed:
    (table,) = _of_family(tables, request)
    held = table.sets[text(request.attributes[2])]
    part, size = list[_Element](), 0
    for element in held.listed.values():
        if size + len(element.listed) + 4 > _PART - 1024:
            yield table.family, _list_elements(table, held, part)
            part, size = [], 0
        part.append(element)
        size += len(element.listed) + 4
    yield table.family, _list_elements(table, held, part)


def _objects_listed(tables: Iterable[_Table], request: _Request) -> _Listed:
    for table in _of_family(tables, request):
        for each in table.objects.values():
            if _u32(request.attributes, 3, each.type) == each.type:
                yield table.family, _list_object(table, each, deleted=False)


def _flowtables_listed(tables: Iterable[_Table], request: _Request) -> _Listed:
    for table in _of_family(tables, request):
        for each in table.flowtables.values():
            yield table.family, _list_flowtable(table, each, deleted=False)


_LISTINGS: Final[Mapping[int, Callable[[Iterable[_Table], _Request], _Listed]]] = {
    GETTABLE: _tables_listed, GETCHAIN: _chains_listed, GETRULE: _rules_listed, GETSET: _sets_listed,
    GETSETELEM: _elements_listed, GETOBJ: _objects_listed, GETFLOWTABLE: _flowtables_listed,
}  # fmt: skip


_LOST: Final = b"lost"
"""In the place of answers that the socket's buffer has no space for."""


class FakeSocket:
    """A netlink socket of a `FakeKernel`, as far as `kproxy_core.netlink.sockets.NetlinkSocket` needs one."""

    def __init__(
        self, kernel: FakeKernel, port: int, groups: Collection[int], accept: Sequence[Instruction],
        receive_space: int, send_space: int,
    ) -> None:  # fmt: skip
        self.port = port
        self.groups = frozenset(groups)
        self._kernel = kernel
        self._accept = accept
        self._receive_space = receive_space * 2 or _DEFAULT_SPACE
        self._send_space = send_space * 2 or _DEFAULT_SPACE
        self._queue: deque[bytes] = deque()
        self._queued = 0
        self._is_overrun = False
        self._dump: Iterator[bytes] | None = None
        """The parts of a dump that are not queued yet."""
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._event

    def getsockname(self) -> tuple[int, int]:
        return self.port, 0

    def getsockopt(self, level: int, option: int, /) -> int:
        """Return SO_SNDBUF; nothing else is asked for."""
        return self._send_space

    def close(self) -> None:
        if self._event >= 0:
            os.close(self._event)
            self._event = -1
            self._kernel.forget(self)

    def send(self, data: bytes, /) -> int:
        if self._event < 0:
            raise _refusal(errno.EBADF)
        if len(data) > self._send_space - 32:
            raise _refusal(errno.EMSGSIZE)
        self._kernel.take(self, data)
        return len(data)

    def recv(self, size: int, flags: int, /) -> bytes:
        with self._kernel.lock:
            if self._event < 0:
                raise _refusal(errno.EBADF)
            if self._is_overrun:
                self._is_overrun = False
                self._show_readiness()
                raise _refusal(errno.ENOBUFS)
            if not self._queue:
                self._show_readiness()
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            data = self._queue.popleft()
            if data is _LOST:
                self._show_readiness()
                raise _refusal(errno.ENOBUFS)
            self._queued -= len(data)
            self._continue_dump()
            self._show_readiness()
            return data[:size]

    def put(self, kind: int, answers: Iterable[bytes]) -> None:
        """Queue *answers* to a request of *kind*; those of a dump are made when they are received."""
        if (after := self._kernel.take_loss(kind)) is not None:
            for data in islice(answers, after):
                self._push(data)
            self._queue.append(_LOST)
        elif isinstance(answers, list):
            for data in answers:
                self._push(data)
        else:
            self._dump = iter(answers)
            self._continue_dump()
        self._show_readiness()

    @property
    def is_dumping(self) -> bool:
        return self._dump is not None

    def _continue_dump(self) -> None:
        """Queue the next part of a dump. As in Linux, it is made when the one before it is received."""
        if self._dump is not None:
            data = next(self._dump, None)
            if data is None:
                self._dump = None
            else:
                self._push(data)

    def hear(self, datagrams: Iterable[bytes], *, is_lost: bool) -> None:
        """Queue notifications, unless they are lost or the socket's filter drops them."""
        for data in datagrams:
            if _accepts(self._accept, data):
                if is_lost:
                    self._is_overrun = True
                else:
                    self._push(data)
        self._show_readiness()

    def _push(self, data: bytes) -> None:
        if self._queued + len(data) > self._receive_space:
            self._is_overrun = True
            return
        self._queue.append(data)
        self._queued += len(data)

    def _show_readiness(self) -> None:
        """Have `fileno` polled as readable while something can be received."""
        if self._queue or self._is_overrun:
            os.eventfd_write(self._event, 1)
        else:
            with suppress(BlockingIOError):
                os.eventfd_read(self._event)


def _accepts(program: Sequence[Instruction], data: bytes) -> bool:
    """Run a socket's filter on a datagram."""
    at = value = 0
    while at < len(program):
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == LOAD_WORD:
            if operand + 4 > len(data):
                return False
            value = int.from_bytes(data[operand : operand + 4], "big")
        elif code == JUMP_IF_EQUAL:
            at += if_true if value == operand else if_false
        else:
            return bool(operand)
    return True
