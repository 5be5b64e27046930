"""The result of decoding one API object, and the checks that all kinds share."""

import re
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Generic, TypeVar

from msgspec import Struct

from kproxy_core.model.address import Address, Cidr, Protocol, parse_address, parse_cidr
from kproxy_core.model.service import ServiceName
from kproxy_core.objects import wire
from kproxy_core.store.events import BadObject

M = TypeVar("M", bound=wire.ObjectMeta)
N = TypeVar("N", bound=tuple[str, str])
V = TypeVar("V")
W = TypeVar("W")

PROTOCOLS: dict[str | None, Protocol] = {None: Protocol.TCP, "": Protocol.TCP} | {
    protocol.name: protocol for protocol in Protocol
}
"""A port's protocol as the API spells it; absent means TCP."""

_FEW_PORTS = 16
_SPECIAL_FIRST_OCTETS = frozenset({0, 127, *range(224, 240)})
SPECIAL_FIRST_BYTES = _SPECIAL_FIRST_OCTETS | {255}
"""The first bytes of all addresses that `is_special` finds, and of some others."""
_LABEL = r"[a-z0-9][-a-z0-9]{0,62}(?<!-)"
is_label = re.compile(_LABEL).fullmatch
_is_subdomain = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*").fullmatch


class Reading(Struct, Generic[V], frozen=True, gc=False):
    """One API object, read."""

    name: tuple[str, str] | None
    """Namespace ("" for kinds that have none) and name; None: they are unusable too."""
    value: V | None
    """The decoded object; None: it is refused as a whole, for the reason in `bad`."""
    bad: tuple[BadObject, ...] = ()
    """The parts that could not be used."""


class Refused(Exception):
    """An object is unusable as a whole because of one field."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem


class Findings(list[Refused]):
    """The problems of one object. A list, because nearly every object has none: it is made quickly."""

    __slots__ = ()

    def add(self, field: str, problem: str) -> None:
        self.append(Refused(field, problem))

    def bad(self, kind: str, namespace: str | None, name: str | None) -> tuple[BadObject, ...]:
        """Return the problems as those of the object *name*."""
        name = f"{namespace}/{name}" if namespace and name else name or ""
        return tuple(BadObject(kind, shown(name), found.field, found.problem) for found in self)


ReadPorts = Callable[[Sequence[W], str, Findings], tuple[V, ...]]
"""Returns the usable ones of an object's ports, which are at a path in it."""


def shown(text: str, limit: int = 80) -> str:
    """Return *text* for one line of a log: unchanged if plain and short, else quoted and cut."""
    plain = text.isascii() and text.isprintable() and len(text) <= limit
    return text if plain else quoted(text, limit)


def checked_label(text: str | None, field: str) -> str:
    """Return *text* if it is a DNS label (RFC 1123: at most 63 of a-z, 0-9, "-"). Raises Refused."""
    if text and is_label(text):
        return text
    raise Refused(field, f"{quoted(text)} is not a DNS label" if text else "is missing")


def checked_subdomain(text: str | None, field: str) -> str:
    """Return *text* if it is DNS labels joined by dots, at most 253 characters. Raises Refused."""
    if text and (is_label(text) or _is_subdomain(text)):
        return text
    raise Refused(field, f"{quoted(text)} is not a DNS name" if text else "is missing")


def read_namespaced(
    kind: str, obj: W, meta: M, named: Callable[[str, str | None], N],
    value: Callable[[N, W, M, Findings], V],
) -> Reading[V]:
    """Read *obj*, of a namespaced *kind*: *named* makes its name, *value* its value. Both may raise Refused.

    A namespace is a DNS label, and that of a manifest without one is ``default``.
    """
    namespace = meta.namespace or "default"
    found = Findings()
    name = None
    try:
        name = named(_namespace(namespace), meta.name)
        read = value(name, obj, meta, found)
    except Refused as refused:
        found.append(refused)
        return Reading(name, None, found.bad(kind, namespace, meta.name))
    return Reading(name, read, found.bad(kind, namespace, meta.name) if found else ())


def share_ports(read: ReadPorts[W, V]) -> ReadPorts[W, V]:
    """Let the function *read* return one tuple for equal good ports: most objects have those of others.

    Only a few ports of one object are cached, to bound memory.
    """
    @lru_cache(maxsize=1024)
    def read_good(ports: tuple[W, ...]) -> tuple[V, ...]:
        found = Findings()
        kept = read(ports, "", found)
        if found:
            raise found.pop()
        return kept

    def read_shared(ports: Sequence[W], path: str, found: Findings) -> tuple[V, ...]:
        if len(ports) > _FEW_PORTS:
            return read(ports, path, found)
        try:
            return read_good(tuple(ports))
        except Refused:
            return read(ports, path, found)

    return read_shared


@lru_cache(maxsize=1024)
def _namespace(text: str) -> str:
    """Return *text*, interned, if it is a DNS label. Raises Refused. Cached, because namespaces recur."""
    return sys.intern(checked_label(text, "metadata.namespace"))


def origin_of(meta: wire.ObjectMeta) -> str:
    """Return the resource version in words; "" without one, as in a manifest."""
    return f"resource version {meta.resource_version}" if meta.resource_version else ""


def service_name(namespace: str, name: str | None) -> ServiceName:
    """Return the checked name of a Service. It is interned: many objects hold it. Raises Refused."""
    return ServiceName(namespace, sys.intern(checked_label(name, "metadata.name")))


def checked_address(text: str | None, field: str, at: int) -> Address:
    """Return the address *text* if it can receive traffic; *field* has a place for *at*. Raises Refused."""
    try:
        address = parse_address(text or "")
    except ValueError:
        raise Refused(field.format(at), f"{quoted(text)} is not an IP address") from None
    if is_special(address):
        problem = f"{text} is an unspecified, loopback, multicast or broadcast address"
        raise Refused(field.format(at), problem)
    return address


def checked_cidr(text: str | None, field: str, at: int) -> Cidr:
    """Return the network *text*; *field* has a place for *at*. Raises Refused."""
    try:
        return parse_cidr(text or "")
    except ValueError:
        raise Refused(field.format(at), f"{quoted(text)} is not a CIDR") from None


def is_special(address: Address) -> bool:
    """Return whether *address* is unspecified, loopback, multicast or broadcast.

    An API server keeps those out of Services and endpoints; a directory of manifests has none.
    """
    if len(address) == 4:
        return address[0] in _SPECIAL_FIRST_OCTETS or address == b"\xff\xff\xff\xff"
    return address[0] == 0xFF or (address[15] < 2 and not any(address[:15]))


def quoted(text: str | None, limit: int = 60) -> str:
    """Return a string from outside for the text of a problem: quoted, in ASCII, cut."""
    if text is None:
        return "nothing"
    return ascii(text if len(text) <= limit else text[:limit] + "...")
