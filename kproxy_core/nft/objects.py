"""Tables of nf_tables as values: objects, commands that write them, and objects that the kernel lists. Pure.

A command has nft's text and the kernel's message. Attributes are those of linux/netfilter/nf_tables.h.
"""

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kproxy_core.model.address import Address, Cidr, Family, format_address
from kproxy_core.netlink.messages import (
    NFGENMSG,
    NLM_F_CREATE,
    NetlinkRequest,
    TooLong,
    attribute,
    fitting,
    nested,
    text_attribute,
    u32,
    u32_attribute,
)
from kproxy_core.nft.elements import (
    Element,
    element_list,
    element_request,
    element_texts,
    elements_of,
    encode_element,
)
from kproxy_core.nft.messages import DELSETELEM, KIND, NEWSETELEM, Command
from kproxy_core.nft.rules import (
    VERDICT,
    Attributes,
    Field,
    Part,
    Parts,
    Rule,
    rule_expressions,
    rule_text,
    type_of,
    user_data,
)

_NEWTABLE, _DELTABLE = KIND | 0, KIND | 2
_NEWCHAIN, _DELCHAIN = KIND | 3, KIND | 5
_NEWRULE, _DELRULE = KIND | 6, KIND | 8
_NEWSET, _DELSET = KIND | 9, KIND | 11
_DELOBJ = KIND | 20
_NEWFLOWTABLE, _DELFLOWTABLE = KIND | 22, KIND | 24
_APPEND = 0x800
_NETDEV = 5
"""NFPROTO_NETDEV."""

OWNER, PERSIST, DORMANT = 2, 4, 1
"""Flags of a table: only the socket that made it may change it (Linux 5.12); it outlives that socket (6.9);
none of its rules is in effect."""


class Hook(NamedTuple):
    """The hook of a base chain."""

    type: str
    name: str
    priority: int
    devices: tuple[str, ...] = ()
    """Those of hook ``ingress``."""


class Chain(NamedTuple):
    """A chain with its rules; *hook* makes it a base chain."""

    name: str
    rules: tuple[Rule, ...] = ()
    hook: Hook | None = None


class Container(NamedTuple):
    """A set, or with *value* a map."""

    name: str
    key: tuple[Part, ...]
    """Fields where nft cannot name the type."""
    value: tuple[Part, ...] = ()
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
    is_netdev: bool = False
    """A table of family ``netdev`` instead: its chains see what interfaces receive, of every protocol."""

    @property
    def where(self) -> str:
        return f"{'netdev' if self.is_netdev else self.family.ip} {self.name}"

    # Commands.

    def create(self) -> Command:
        """Create the table, or claim it from a process that has ended."""
        settings = [f'comment "{self.comment}";'] if self.comment else []
        if self.flags & DORMANT:
            settings.append("flags dormant;")
        shown = f" {{ {' '.join(settings)} }}" if settings else ""
        return self._command(
            f"add table {self.where}{shown}", _NEWTABLE, *_encoded(self.attributes()), flags=NLM_F_CREATE)

    def wake(self) -> Command:
        """Put the rules of a dormant table into effect. The table must exist."""
        return self._command(f"add table {self.where}", _NEWTABLE, *_encoded({2: u32(0)}))

    def delete(self) -> Command:
        """Delete the table, which must exist."""
        return self._command(f"delete table {self.where}", _DELTABLE)

    def replace(self, objects: Iterable[Object]) -> Iterator[Command]:
        """Create the table with *objects*, instead of one that may exist."""
        yield from (self.create(), self.delete(), self.create())
        yield from self.write(objects)

    def attributes(self) -> Attributes:
        found = {2: u32(self.flags)}
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
                    text_attribute(2, item.name), u32_attribute(3, item.type))
        for item in chains:
            yield self._delete_chain(item)

    def _write_chain(self, chain: Chain) -> Iterator[Command]:
        hook = chain.hook
        shown = ""
        if hook is not None:
            devices = ", ".join(f'"{device}"' for device in hook.devices)
            on = f" devices = {{ {devices} }}" if devices else ""
            shown = (
                f" {{ type {hook.type} hook {hook.name}{on} priority {hook.priority}; policy accept; }}")
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
            attribute(10, u32(1)), flags=NLM_F_CREATE)
        if container.constant is not None:
            yield from self.fill(container)

    def fill(self, container: Container) -> Iterator[Command]:
        """Replace the elements of a set by its constant ones."""
        yield self.empty(container)
        yield from self._elements("add", NEWSETELEM, container, [
            (str(item) if isinstance(item, Cidr) else format_address(item),
             b"".join(map(encode_element, elements_of(item))))
            for item in container.constant or ()
        ])  # fmt: skip

    def add_elements(self, container: Container, elements: Iterable[Element]) -> Iterator[Command]:
        """Add *elements*; those that exist must have the same values."""
        return self._elements("add", NEWSETELEM, container, _entries(container, elements))

    def delete_elements(self, container: Container, elements: Iterable[Element]) -> Iterator[Command]:
        """Delete *elements*, which must exist."""
        return self._elements("delete", DELSETELEM, container, _entries(container, elements))

    def change_elements(
        self, container: Container, held: Collection[Element], wanted: Collection[Element]
    ) -> Iterator[Command]:
        """Turn the *held* elements into the *wanted* ones."""
        yield from self.delete_elements(container, _ordered(frozenset(held).difference(wanted)))
        yield from self.add_elements(container, _ordered(frozenset(wanted).difference(held)))

    def empty(self, container: Container) -> Command:
        """Delete all elements of a set or a map."""
        return self._command(
            f"flush {_word(container)} {self.where} {container.name}", DELSETELEM,
            text_attribute(2, container.name))

    def _elements(
        self, verb: str, kind: int, container: Container, entries: Sequence[tuple[str, bytes]]
    ) -> Iterator[Command]:
        """Yield commands for elements, each given as text and encoded, cut to the size of messages."""
        encoded = [data for _, data in entries]
        for part in fitting(encoded):
            shown = ", ".join(text for text, _ in entries[part])
            request = element_request(
                self.family, self.name, container.name, kind, element_list(*encoded[part]))
            yield Command(f"{verb} element {self.where} {container.name} {{ {shown} }}", request)

    def _write_flowtable(self, flowtable: Flowtable) -> Iterator[Command]:
        """Replace the flowtable: adding it removes no device. The next packets add their flows again."""
        hook = "hook ingress priority 0;"
        listed = ", ".join(f'"{device}"' for device in flowtable.devices)
        name = text_attribute(2, flowtable.name)
        yield self._command(
            f"add flowtable {self.where} {flowtable.name} {{ {hook} }}", _NEWFLOWTABLE, name,
            nested(3, u32_attribute(1, 0), u32_attribute(2, 0)), flags=NLM_F_CREATE)
        yield self._delete_flowtable(flowtable)
        devices = nested(3, *(text_attribute(1, device) for device in flowtable.devices))
        yield self._command(
            f"add flowtable {self.where} {flowtable.name} {{ {hook} devices = {{ {listed} }}; counter; }}",
            _NEWFLOWTABLE, name, nested(3, u32_attribute(1, 0), u32_attribute(2, 0), devices),
            u32_attribute(7, _COUNTED), flags=NLM_F_CREATE)

    def _delete_flowtable(self, flowtable: Flowtable) -> Command:
        return self._command(
            f"delete flowtable {self.where} {flowtable.name}", _DELFLOWTABLE,
            text_attribute(2, flowtable.name))

    def _command(self, shown: str, kind: int, *parts: bytes, flags: int = 0) -> Command:
        number = _NETDEV if self.is_netdev else self.family.af
        body = NFGENMSG.pack(number, 0, 0) + text_attribute(1, self.name) + b"".join(parts)
        return Command(shown, NetlinkRequest(kind, flags, body))


_OBJECT_WORDS = {
    1: "counter", 2: "quota", 3: "ct helper", 4: "limit", 7: "ct timeout", 8: "secmark", 9: "ct expectation",
    10: "synproxy",
}  # fmt: skip
"""nft's words for NFT_OBJECT_*."""

_COUNTED = 2
"""NFT_FLOWTABLE_COUNTER: connection tracking sees the bytes of offloaded flows."""


def _encoded(values: Attributes) -> list[bytes]:
    return [attribute(kind, value) for kind, value in values.items()]


_POLICY = 5
_HOOKS = {"ingress": 0, "prerouting": 0, "input": 1, "forward": 2, "output": 3, "postrouting": 4}


def chain_attributes(chain: Chain, family: Family) -> Attributes:
    """Return the attributes that tell one chain from another of its name: hook, policy and type."""
    if chain.hook is None:
        return {}
    priority = attribute(2, struct.pack(">i", chain.hook.priority))
    devices = b"".join(text_attribute(1, device) for device in chain.hook.devices)
    on = nested(4, devices) if devices else b""
    return {
        4: u32_attribute(1, _HOOKS[chain.hook.name]) + priority + on, _POLICY: u32(1),
        7: chain.hook.type.encode() + b"\0",
    }  # fmt: skip


ANONYMOUS: Final = 1
"""NFT_SET_ANONYMOUS: the set is deleted with the rule that refers to it."""
_MAP, _INTERVAL, _TIMEOUT, _DYNAMIC, _CONCATENATION = 8, 4, 16, 32, 128
_VERDICTS = 0xFFFFFF00


def container_attributes(container: Container) -> Attributes:
    """Return the attributes that the kernel keeps of a set or a map; none of them can be changed later.

    Raises ValueError if it is declared by fields and types: nft aborts when it lists such a map.
    """
    parts = [part for part in (*container.key, *container.value) if part != VERDICT]
    if len({isinstance(part, Field) for part in parts}) > 1:
        raise ValueError(f"{container.name} is declared by fields and types: nft knows one or the other")
    flags = (
        (_MAP if container.value else 0) | (_INTERVAL if container.interval else 0)
        | (_DYNAMIC | _TIMEOUT if container.dynamic else 0)
    )  # fmt: skip
    found = {4: u32(_number(container.key)), 5: u32(packed_size(container.key))}
    description = b""
    if container.interval and len(container.key) > 1:
        flags |= _CONCATENATION
        lengths = (attribute(1, u32_attribute(1, type_of(part).size)) for part in container.key)
        description = attribute(2, b"".join(lengths))
    if container.value:
        type_ = _VERDICTS if container.value == (VERDICT,) else _number(container.value)
        found |= {6: u32(type_), 7: u32(packed_size(container.value))}
    if container.timeout:
        found[11] = struct.pack(">Q", container.timeout * 1000)
    if container.size:
        description += u32_attribute(1, container.size)
    return {3: u32(flags), **found, 9: description, 13: _notes(container)}


def _number(parts: Parts) -> int:
    number = 0
    for part in parts:
        number = number << 6 | type_of(part).number
    return number


def packed_size(parts: Parts) -> int:
    if len(parts) == 1:
        return type_of(parts[0]).size
    return sum(-(-type_of(part).size // 4) * 4 for part in parts)


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


def _order(parts: Parts) -> bytes:
    return struct.pack("=I", type_of(parts[0]).byte_order if len(parts) == 1 else 0)


def _described(kind: int, parts: Parts) -> bytes:
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


def _types(parts: Parts) -> str:
    return " . ".join(part.text if isinstance(part, Field) else part.name for part in parts)


def _word(container: Container) -> str:
    return "map" if container.value else "set"


def constant_elements(container: Container) -> list[Element]:
    """Return the constant elements as the kernel holds them."""
    return [element for item in container.constant or () for element in elements_of(item)]


def _ordered(elements: Iterable[Element]) -> list[Element]:
    """Return *elements* in an order that does not depend on hashes: data may be of several types."""
    return sorted(elements, key=lambda element: (element.key, element.last, element.is_end))


def _entries(container: Container, elements: Iterable[Element]) -> list[tuple[str, bytes]]:
    elements = list(elements)
    shown = element_texts(container.key, container.value, elements)
    return list(zip(shown, map(encode_element, elements), strict=True))
