"""Tables of nf_tables as values: objects, commands that write them, and objects that the kernel lists. Pure.

A command has nft's text and the kernel's message. Attributes are those of linux/netfilter/nf_tables.h.
"""

import errno
import re
import struct
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kproxy_core.linux.messages import (
    KIND,
    NLM_F_CREATE,
    NetlinkRequest,
    Span,
    TooLong,
    attribute,
    attribute_spans,
    attributes,
    decoding,
    fitting,
    nested,
    payload,
    text,
    text_attribute,
)
from kproxy_core.linux.nft_rules import (
    ADDRESS,
    PROTOCOL,
    VERDICT,
    Attributes,
    DataType,
    Expression,
    Field,
    Rule,
    parse_expressions,
    rule_expressions,
    rule_text,
    same_attributes,
    user_data,
)
from kproxy_core.model.address import Address, Cidr, Family, Protocol, format_address

_NEWTABLE, _DELTABLE = KIND | 0, KIND | 2
_NEWCHAIN, _DELCHAIN = KIND | 3, KIND | 5
_NEWRULE, _DELRULE = KIND | 6, KIND | 8
_NEWSET, _DELSET = KIND | 9, KIND | 11
_NEWSETELEM, _DELSETELEM = KIND | 12, KIND | 14
_DELOBJ = KIND | 20
_NEWFLOWTABLE, _DELFLOWTABLE = KIND | 22, KIND | 24
_APPEND = 0x800

OWNER, PERSIST, DORMANT = 2, 4, 1
"""Flags of a table: only the socket that made it may change it (Linux 5.12); it outlives that socket (6.9);
none of its rules is in effect."""


class Command(NamedTuple):
    """A change of one object: as nft writes it, and as the kernel takes it."""

    text: str
    request: NetlinkRequest


def commands_text(commands: Iterable[Command]) -> str:
    """Return *commands* as input for ``nft -f``."""
    return "".join(f"{command.text}\n" for command in commands)


class Hook(NamedTuple):
    """The hook of a base chain."""

    type: str
    name: str
    priority: int


class Chain(NamedTuple):
    """A chain with its rules; *hook* makes it a base chain."""

    name: str
    rules: tuple[Rule, ...] = ()
    hook: Hook | None = None


class Container(NamedTuple):
    """A set, or with *value* a map."""

    name: str
    key: tuple[DataType | Field, ...]
    """Fields where nft cannot name the type."""
    value: tuple[DataType | Field, ...] = ()
    interval: bool = False
    dynamic: bool = False
    """Rules add elements, which have a timeout."""
    timeout: int = 0
    """Timeout in seconds of elements without one of their own; 0: none."""
    size: int = 0
    """Limit for the elements; 0: none."""
    constant: tuple[Address | Cidr, ...] | None = None
    """All elements; None: they are written and compared one by one."""


class Flowtable(NamedTuple):
    name: str
    devices: tuple[str, ...]


class StatefulObject(NamedTuple):
    """A counter, a limit or the like, which only rules of another process use."""

    name: str
    type: int
    """NFT_OBJECT_*"""


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

Object = Chain | Container | Flowtable
Leftover = Object | StatefulObject
"""An object of a table that is not wanted."""

Layout = Mapping[str, Object]
"""The objects of a table by name, in the order in which they can be created."""


class Table(NamedTuple):
    family: Family
    name: str
    comment: str = ""
    flags: int = 0

    @property
    def where(self) -> str:
        return f"{self.family.ip} {self.name}"

    # Commands.

    def create(self) -> Command:
        """Create the table, or claim it from a process that has ended."""
        settings = [f'comment "{self.comment}";'] if self.comment else []
        if self.flags & DORMANT:
            settings.append("flags dormant;")
        shown = f" {{ {' '.join(settings)} }}" if settings else ""
        return self._command(
            f"add table {self.where}{shown}", _NEWTABLE, *_encoded(self.attributes()), flags=NLM_F_CREATE)

    def delete(self) -> Command:
        """Delete the table, which must exist."""
        return self._command(f"delete table {self.where}", _DELTABLE)

    def replace(self, objects: Iterable[Object]) -> Iterator[Command]:
        """Create the table with *objects*, instead of one that may exist."""
        yield from (self.create(), self.delete(), self.create())
        yield from self.write(objects)

    def attributes(self) -> Attributes:
        found = {2: _u32(self.flags)}
        if self.comment:
            found[6] = user_data(0, self.comment.encode() + b"\0")
        return found

    def write(self, objects: Iterable[Object]) -> Iterator[Command]:
        """Create *objects*, or bring existing ones to them: chains are flushed and filled.

        Raises TooLong if one does not fit into netlink messages.
        """
        for item in objects:
            try:
                if isinstance(item, Chain):
                    yield from self._write_chain(item)
                elif isinstance(item, Container):
                    yield from self._write_container(item)
                else:
                    yield from self._write_flowtable(item)
            except TooLong as error:
                raise TooLong(f"{item.name} in table {self.where}: {error}") from error

    def remove(self, objects: Iterable[Leftover]) -> Iterator[Command]:
        """Delete *objects*. All chains are flushed first, because their rules refer to the other objects."""
        objects = tuple(objects)
        chains = [item for item in objects if isinstance(item, Chain)]
        yield from (self.flush_chain(item.name) for item in chains)
        for item in objects:
            if isinstance(item, Container):
                yield self._command(
                    f"delete {_word(item)} {self.where} {item.name}", _DELSET, text_attribute(2, item.name))
            elif isinstance(item, Flowtable):
                yield self._delete_flowtable(item)
        for item in objects:  # Sets may refer to them.
            if isinstance(item, StatefulObject):
                yield self._command(
                    f"delete {_OBJECT_WORDS.get(item.type, 'object')} {self.where} {item.name}", _DELOBJ,
                    text_attribute(2, item.name), _attribute_u32(3, item.type))
        for item in chains:
            yield self._delete_chain(item)

    def _write_chain(self, chain: Chain) -> Iterator[Command]:
        hook = chain.hook
        shown = ""
        if hook is not None:
            shown = f" {{ type {hook.type} hook {hook.name} priority {hook.priority}; policy accept; }}"
        yield self._command(
            f"add chain {self.where} {chain.name}{shown}", _NEWCHAIN, text_attribute(3, chain.name),
            *_encoded(chain_attributes(chain, self.family)), flags=NLM_F_CREATE)
        yield self.flush_chain(chain.name)
        for rule in chain.rules:
            expressions = nested(4, *(expression.encode() for expression in rule_expressions(rule)))
            yield self._command(
                f"add rule {self.where} {chain.name} {rule_text(rule)}", _NEWRULE,
                text_attribute(2, chain.name), expressions, flags=NLM_F_CREATE | _APPEND)

    def flush_chain(self, name: str) -> Command:
        return self._command(f"flush chain {self.where} {name}", _DELRULE, text_attribute(2, name))

    def _delete_chain(self, chain: Chain) -> Command:
        return self._command(
            f"delete chain {self.where} {chain.name}", _DELCHAIN, text_attribute(3, chain.name))

    def _write_container(self, container: Container) -> Iterator[Command]:
        yield self._command(
            f"add {_word(container)} {self.where} {container.name} {{ {_declaration(container)} }}", _NEWSET,
            text_attribute(2, container.name), *_encoded(container_attributes(container)),
            attribute(10, _u32(1)), flags=NLM_F_CREATE)
        if container.constant is not None:
            yield from self.fill(container)

    def fill(self, container: Container) -> Iterator[Command]:
        """Replace the elements of a set by its constant ones."""
        yield self.empty(container)
        yield from self._elements("add", _NEWSETELEM, container, [
            (str(item) if isinstance(item, Cidr) else format_address(item),
             b"".join(map(_element, _constant_elements(item))))
            for item in container.constant or ()
        ])  # fmt: skip

    def add_elements(self, container: Container, elements: Iterable[Element]) -> Iterator[Command]:
        """Add *elements*; those that exist must have the same values."""
        return self._elements("add", _NEWSETELEM, container, _entries(container, elements))

    def delete_elements(self, container: Container, elements: Iterable[Element]) -> Iterator[Command]:
        """Delete *elements*, which must exist."""
        return self._elements("delete", _DELSETELEM, container, _entries(container, elements))

    def change_elements(
        self, container: Container, held: Collection[Element], wanted: Collection[Element]
    ) -> Iterator[Command]:
        """Turn the *held* elements into the *wanted* ones."""
        yield from self.delete_elements(container, sorted(frozenset(held).difference(wanted)))
        yield from self.add_elements(container, sorted(frozenset(wanted).difference(held)))

    def empty(self, container: Container) -> Command:
        """Delete all elements of a set or a map."""
        return self._command(
            f"flush {_word(container)} {self.where} {container.name}", _DELSETELEM,
            text_attribute(2, container.name))

    def _elements(
        self, verb: str, kind: int, container: Container, entries: Sequence[tuple[str, bytes]]
    ) -> Iterator[Command]:
        """Yield commands for elements, each given as text and encoded, cut to the size of messages."""
        encoded = [data for _, data in entries]
        for part in fitting(encoded):
            shown = ", ".join(text for text, _ in entries[part])
            yield self._command(
                f"{verb} element {self.where} {container.name} {{ {shown} }}", kind,
                text_attribute(2, container.name), nested(3, *encoded[part]),
                flags=NLM_F_CREATE if kind == _NEWSETELEM else 0)

    def _write_flowtable(self, flowtable: Flowtable) -> Iterator[Command]:
        """Replace the flowtable: adding it removes no device. The next packets add their flows again."""
        hook = "hook ingress priority 0;"
        listed = ", ".join(f'"{device}"' for device in flowtable.devices)
        name = text_attribute(2, flowtable.name)
        yield self._command(
            f"add flowtable {self.where} {flowtable.name} {{ {hook} }}", _NEWFLOWTABLE, name,
            nested(3, _attribute_u32(1, 0), _attribute_u32(2, 0)), flags=NLM_F_CREATE)
        yield self._delete_flowtable(flowtable)
        devices = nested(3, *(text_attribute(1, device) for device in flowtable.devices))
        yield self._command(
            f"add flowtable {self.where} {flowtable.name} {{ {hook} devices = {{ {listed} }}; counter; }}",
            _NEWFLOWTABLE, name, nested(3, _attribute_u32(1, 0), _attribute_u32(2, 0), devices),
            _attribute_u32(7, _COUNTED), flags=NLM_F_CREATE)

    def _delete_flowtable(self, flowtable: Flowtable) -> Command:
        return self._command(
            f"delete flowtable {self.where} {flowtable.name}", _DELFLOWTABLE,
            text_attribute(2, flowtable.name))

    def _command(self, shown: str, kind: int, *parts: bytes, flags: int = 0) -> Command:
        body = payload(self.family, text_attribute(1, self.name), *parts)
        return Command(shown, NetlinkRequest(kind, flags, body))


_OBJECT_WORDS = {
    1: "counter", 2: "quota", 3: "ct helper", 4: "limit", 7: "ct timeout", 8: "secmark", 9: "ct expectation",
    10: "synproxy",
}  # fmt: skip
"""nft's words for NFT_OBJECT_*."""

_COUNTED = 2
"""NFT_FLOWTABLE_COUNTER: connection tracking sees the bytes of offloaded flows."""


def _u32(value: int) -> bytes:
    return struct.pack(">I", value)


def _attribute_u32(kind: int, value: int) -> bytes:
    return attribute(kind, _u32(value))


def _encoded(values: Attributes) -> list[bytes]:
    return [attribute(kind, value) for kind, value in values.items()]


_POLICY = 5
_HOOKS = {"prerouting": 0, "input": 1, "forward": 2, "output": 3, "postrouting": 4}


def chain_attributes(chain: Chain, family: Family) -> Attributes:
    """Return the attributes that tell one chain from another of its name: hook, policy and type."""
    if chain.hook is None:
        return {}
    priority = attribute(2, struct.pack(">i", chain.hook.priority))
    return {
        4: _attribute_u32(1, _HOOKS[chain.hook.name]) + priority, _POLICY: _u32(1),
        7: chain.hook.type.encode() + b"\0",
    }  # fmt: skip


_MAP, _INTERVAL, _TIMEOUT, _DYNAMIC, _CONCATENATION = 8, 4, 16, 32, 128
_VERDICTS = 0xFFFFFF00


def container_attributes(container: Container) -> Attributes:
    """Return the attributes that the kernel keeps of a set or a map; none of them can be changed later."""
    flags = (
        (_MAP if container.value else 0) | (_INTERVAL if container.interval else 0)
        | (_DYNAMIC | _TIMEOUT if container.dynamic else 0)
    )  # fmt: skip
    found = {4: _u32(_number(container.key)), 5: _u32(_size(container.key))}
    description = b""
    if container.interval and len(container.key) > 1:
        flags |= _CONCATENATION
        lengths = (attribute(1, _attribute_u32(1, _type(part).size)) for part in container.key)
        description = attribute(2, b"".join(lengths))
    if container.value:
        type_ = _VERDICTS if container.value == (VERDICT,) else _number(container.value)
        found |= {6: _u32(type_), 7: _u32(_size(container.value))}
    if container.timeout:
        found[11] = struct.pack(">Q", container.timeout * 1000)
    if container.size:
        description += _attribute_u32(1, container.size)
    return {3: _u32(flags), **found, 9: description, 13: _notes(container)}


def _type(part: DataType | Field) -> DataType:
    return part.type if isinstance(part, Field) else part


def _number(parts: Sequence[DataType | Field]) -> int:
    number = 0
    for part in parts:
        number = number << 6 | _type(part).number
    return number


def _size(parts: Sequence[DataType | Field]) -> int:
    if len(parts) == 1:
        return _type(parts[0]).size
    return sum(-(-_type(part).size // 4) * 4 for part in parts)


_KEY_ORDER, _VALUE_ORDER, _KEY_TYPE, _VALUE_TYPE, _VALUE_INTERVAL = 0, 1, 3, 4, 6
_OF_VERDICT, _CONCATENATED = 1, 13


def _notes(container: Container) -> bytes:
    """Return the user data from which nft prints types, as libnftables 1.0.6 writes it and 1.1.3 reads it."""
    notes = user_data(_KEY_ORDER, _order(container.key))
    if container.value:
        notes += user_data(_VALUE_ORDER, _order(container.value))
    notes += _described(_KEY_TYPE, container.key)
    if container.value:
        if container.value == (VERDICT,) and isinstance(container.key[0], Field):
            notes += user_data(_VALUE_TYPE, _expression(_OF_VERDICT, b""))
        notes += _described(_VALUE_TYPE, container.value) + user_data(_VALUE_INTERVAL, bytes(4))
    return notes


def _expression(number: int, description: bytes) -> bytes:
    return user_data(0, struct.pack("=I", number)) + user_data(1, description)


def _order(parts: Sequence[DataType | Field]) -> bytes:
    return struct.pack("=I", _type(parts[0]).byte_order if len(parts) == 1 else 0)


def _described(kind: int, parts: Sequence[DataType | Field]) -> bytes:
    fields = [part for part in parts if isinstance(part, Field)]
    if len(parts) == 1:
        return user_data(kind, fields[0].typeof) if fields else b""
    inner = b"".join(user_data(number, field.typeof) for number, field in enumerate(fields))
    return user_data(kind, _expression(_CONCATENATED, inner))


def _declaration(container: Container) -> str:
    word = "typeof" if any(isinstance(part, Field) for part in container.key) else "type"
    shown = f"{word} {_types(container.key)}"
    if container.value:
        shown += f" : {_types(container.value)}"
    flags = [name for name, given in (
        ("interval", container.interval), ("dynamic,timeout", container.dynamic)) if given]
    if flags:
        shown += f"; flags {','.join(flags)}"
    if container.timeout:
        minutes, seconds = divmod(container.timeout, 60)
        shown += f"; timeout {container.timeout}s" if seconds else f"; timeout {minutes}m"
    if container.size:
        shown += f"; size {container.size}"
    return f"{shown};"


def _types(parts: Sequence[DataType | Field]) -> str:
    return " . ".join(part.text if isinstance(part, Field) else part.name for part in parts)


def _word(container: Container) -> str:
    return "map" if container.value else "set"


_END, _CATCH_ALL = 1, 2
"""NFT_SET_ELEM_INTERVAL_END: the element is the first key behind an interval. NFT_SET_ELEM_CATCHALL."""
_STATEFUL = frozenset((7, 9, 11))
"""NFTA_SET_ELEM_EXPR, _OBJREF and _EXPRESSIONS."""


def constant_elements(container: Container) -> list[Element]:
    """Return the constant elements as the kernel holds them."""
    return [element for item in container.constant or () for element in _constant_elements(item)]


def _constant_elements(item: Address | Cidr) -> list[Element]:
    """Return one constant as the kernel holds it: a network has a first key, and the first key behind it."""
    if not isinstance(item, Cidr):
        return [Element(item)]
    size = len(item.network)
    behind = int.from_bytes(item.network, "big") + (1 << (size * 8 - item.prefix))
    if behind == 1 << size * 8:
        return [Element(item.network)]
    return [Element(item.network), Element(behind.to_bytes(size, "big"), is_end=True)]


def _element(element: Element) -> bytes:
    if not element.key:
        return nested(1, _attribute_u32(3, _CATCH_ALL))
    parts = [nested(1, attribute(1, element.key))]
    if element.value:
        parts.append(nested(2, attribute(1, element.value)))
    if element.is_end:
        parts.append(_attribute_u32(3, _END))
    if element.last:
        parts.append(nested(10, attribute(1, element.last)))
    return nested(1, *parts)


CATCH_ALL_LIST: Final = nested(3, _element(CATCH_ALL))
"""The attribute of a request for the catch-all element of a container."""


def _entries(container: Container, elements: Iterable[Element]) -> list[tuple[str, bytes]]:
    return [(element_text(container, element), _element(element)) for element in elements]


def element_text(container: Container, element: Element) -> str:
    """Return *element* as nft writes it: ``192.0.2.0/24 . tcp . 80 : 8080``."""
    if not element.key:
        return "*"
    firsts = _split(container.key, element.key)
    lasts = _split(container.key, element.last) if element.last else firsts
    shown = " . ".join(map(_range_text, map(_type, container.key), firsts, lasts))
    if not element.value:
        return shown
    values = _split(container.value, element.value)
    return f"{shown} : {' . '.join(map(_value_text, map(_type, container.value), values))}"


def _split(parts: Sequence[DataType | Field], packed: bytes) -> list[bytes]:
    """Return the values of the parts of a key, each of which begins with a word of four bytes."""
    found, at = [], 0
    for size in (_type(part).size for part in parts):
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


# Objects that the kernel lists.


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


class HeldTable(NamedTuple):
    """The objects of a table that the kernel lists, without the elements of sets that are not constant.

    Anonymous chains and sets are left out: each belongs to the rule that refers to it.
    """

    attributes: Attributes
    chains: dict[str, Attributes]
    rules: dict[str, list[HeldRule]]
    containers: dict[str, Attributes]
    elements: dict[str, frozenset[Element]]
    """Those of the containers that were asked for."""
    flowtables: dict[str, Flowtable]
    owner: int = 0
    """The netlink port that alone may change the table; 0: any."""
    stateful: Sequence[StatefulObject] = ()
    catch_alls: Collection[str] = ()
    """The containers with a catch-all element, among those whose elements were not asked for."""


def parse_rule(span: Span) -> tuple[str, HeldRule]:
    """Return a listed rule and the name of its chain. Raises Malformed."""
    with decoding("a rule"):
        found = attributes(*span)
        handle = int.from_bytes(found[3], "big")
        expressions = tuple(parse_expressions(found.get(4, b"")))
        return text(found[2]), HeldRule(handle, expressions, found.get(7, b""))


def parse_flowtable(span: Span) -> Flowtable:
    """Return a listed flowtable. Raises Malformed."""
    with decoding("a flowtable"):
        found = attributes(*span)
        hook = attributes(found.get(3, b""))
        devices = hook.get(3, b"")
        names = tuple(text(devices[start:end]) for _, start, end in attribute_spans(devices, 0, len(devices)))
        return Flowtable(text(found[2]), names)


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


class Replacement(Exception):
    """The table differs from the wanted one in a property that cannot be changed."""


def constants(layout: Layout) -> list[str]:
    """Return the names of the sets whose elements are constant."""
    return [
        item.name for item in layout.values()
        if isinstance(item, Container) and item.constant is not None
    ]  # fmt: skip


def difference(table: Table, layout: Layout, held: HeldTable | None) -> list[Command]:
    """Return the commands that bring *held* to *layout*. Keeps unwanted objects; see `unwanted`.

    Elements that are not constant are kept, but for catch-alls. Raises Replacement if the table must be
    replaced as a whole, TooLong.
    """
    if held is None:
        return [table.create(), *table.write(layout.values())]
    commands = []
    if not same_attributes(table.attributes(), held.attributes):
        if not _can_become(table, held):
            raise Replacement
        commands.append(table.create())
    changed = [item for item in layout.values() if not _holds(table, held, item)]
    catch_alls = [item for name in held.catch_alls if isinstance(item := layout.get(name), Container)]
    for container in catch_alls:
        commands += table.delete_elements(container, [CATCH_ALL])
    return [*commands, *table.write(changed)]


def replacement(table: Table, layout: Layout) -> list[Command]:
    """Return the commands that replace an existing table, whatever it holds."""
    return [table.delete(), *difference(table, layout, None)]


def count_changes(table: Table, commands: Sequence[Command], held: HeldTable | None) -> int:
    """Return the number of *commands* without those that create or claim the table itself.

    Waking a dormant table is a change.
    """
    is_dormant = held is not None and bool(_flags(held) & DORMANT)
    return len(commands) - commands.count(table.create()) + is_dormant


def _flags(held: HeldTable) -> int:
    return int.from_bytes(held.attributes.get(2, b""), "big")


def _can_become(table: Table, held: HeldTable) -> bool:
    """Return whether *table* can be made of *held* by waking it, or by claiming it after its owner's end."""
    flags = _flags(held)
    changes = (flags ^ table.flags) & ~DORMANT
    return (not changes or (changes == OWNER and bool(flags & PERSIST) and bool(table.flags & OWNER))) and (
        same_attributes({**table.attributes(), 2: b""}, {**held.attributes, 2: b""}))


def _holds(table: Table, held: HeldTable, item: Object) -> bool:
    """Return whether the kernel has *item* as it should be. Raises Replacement."""
    if isinstance(item, Chain):
        found = held.chains.get(item.name)
        if found is None:
            return False
        wanted = chain_attributes(item, table.family)
        if not same_attributes({**found, _POLICY: b""}, {**wanted, _POLICY: b""}):
            raise Replacement
        if not same_attributes(found, wanted):
            return False
        rules = held.rules.get(item.name, [])
        return len(rules) == len(item.rules) and all(map(HeldRule.equals, rules, item.rules))
    if isinstance(item, Container):
        kept = held.containers.get(item.name)
        if kept is None:
            return False
        if not same_attributes(kept, container_attributes(item)):
            raise Replacement
        return item.constant is None or held.elements.get(item.name) == frozenset(constant_elements(item))
    flowtable = held.flowtables.get(item.name)
    return flowtable is not None and sorted(flowtable.devices) == sorted(item.devices)


def unwanted(held: HeldTable, wanted: Collection[str]) -> list[Leftover]:
    """Return the objects of *held* that are not *wanted*.

    Other processes chose their names: see `is_quotable` before their commands are used as text.
    """
    chains = [Chain(name) for name in sorted(held.chains) if name not in wanted]
    containers = [Container(name, ()) for name in sorted(held.containers) if name not in wanted]
    flowtables = [each for name, each in held.flowtables.items() if name not in wanted]
    return [*chains, *containers, *flowtables, *held.stateful]


is_quotable = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*").fullmatch
"""Matches the names that nft's text can hold, as all of ours; the kernel takes any."""


def completion(
    table: Table, layout: Layout, contents: Mapping[str, Collection[Element]], held: HeldTable | None
) -> list[Command]:
    """Return the commands that bring *held* to *layout*, or replace it if it cannot be brought over.

    *contents* are the elements of containers, by name; *held* must have those, too. Elements of other
    containers, such as counts, are kept. Unwanted objects are deleted.
    """
    try:
        commands = difference(table, layout, held)
    except Replacement:
        return rewrite(table, layout, contents)
    if held is not None:
        commands += table.remove(unwanted(held, layout))
    return [*commands, *_changes(table, layout, contents, held.elements if held is not None else {})]


def rewrite(
    table: Table, layout: Layout, contents: Mapping[str, Collection[Element]]
) -> list[Command]:
    """Return the commands that replace *table*, whatever it holds, if it exists."""
    return [*table.replace(layout.values()), *_changes(table, layout, contents, {})]


def _changes(
    table: Table, layout: Layout, contents: Mapping[str, Collection[Element]],
    held: Mapping[str, Collection[Element]],
) -> Iterator[Command]:
    for name, wanted in contents.items():
        container = layout[name]
        assert isinstance(container, Container)
        yield from table.change_elements(container, held.get(name, ()), wanted)
