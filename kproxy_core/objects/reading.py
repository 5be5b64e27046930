"""The result of decoding one API object, and the checks that all kinds share."""

import re
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

from kproxy_core.model.address import Address, Cidr, Protocol, parse_address, parse_cidr
from kproxy_core.model.service import ServiceName
from kproxy_core.objects import wire
from kproxy_core.store.events import BadObject

N = TypeVar("N", bound=tuple[str, str])
V = TypeVar("V")

PROTOCOLS: dict[str | None, Protocol] = {None: Protocol.TCP, "": Protocol.TCP} | {
    protocol.name: protocol for protocol in Protocol
}
"""A port's protocol as the API spells it; absent means TCP."""

_SPECIAL_FIRST_OCTETS = frozenset({0, 127, *range(224, 240)})
_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_is_label = re.compile(_LABEL).fullmatch
_is_subdomain = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*").fullmatch


class Reading(NamedTuple, Generic[V]):
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


class Findings:
    __slots__ = ("_kind", "_name", "_namespace", "bad")

    def __init__(self, kind: str, namespace: str | None, name: str | None) -> None:
        self._kind = kind
        self._namespace = namespace
        self._name = name
        self.bad: tuple[BadObject, ...] = ()

    def add(self, field: str, problem: str) -> None:
        namespace, name = self._namespace, self._name
        name = f"{namespace}/{name}" if namespace and name else name or ""
        self.bad += (BadObject(self._kind, shown(name), field, problem),)

    def last_refuses(self) -> Refused:
        """Return the refusal of the whole object for the problem added last."""
        *others, last = self.bad
        self.bad = tuple(others)
        return Refused(last.field, last.problem)

    def refuse(self, refused: Refused) -> tuple[BadObject, ...]:
        """Return all problems, with that of *refused*, for which the whole object is refused."""
        self.add(refused.field, refused.problem)
        return self.bad


def shown(text: str, limit: int = 80) -> str:
    """Return *text* for one line of a log: unchanged if plain and short, else quoted and cut."""
    plain = text.isascii() and text.isprintable() and len(text) <= limit
    return text if plain else quoted(text, limit)


def checked_label(text: str | None, field: str) -> str:
    """Return *text* if it is a DNS label (RFC 1123: at most 63 of a-z, 0-9, "-"). Raises Refused."""
    if text and _is_label(text):
        return text
    raise Refused(field, f"{quoted(text)} is not a DNS label" if text else "is missing")


def checked_subdomain(text: str | None, field: str) -> str:
    """Return *text* if it is DNS labels joined by dots, at most 253 characters. Raises Refused."""
    if text and (_is_label(text) or _is_subdomain(text)):
        return text
    raise Refused(field, f"{quoted(text)} is not a DNS name" if text else "is missing")


def read_namespaced(
    kind: str, meta: wire.ObjectMeta, named: Callable[[str, str], N], value: Callable[[N, Findings], V], *,
    check: Callable[[str | None, str], str] = checked_label,
) -> Reading[V]:
    """Read an object of a namespaced *kind*: *named* makes its name, *value* its value. Both may be Refused.

    *check* is for the name; a namespace is a DNS label, and that of a manifest without one is ``default``.
    """
    namespace = meta.namespace or "default"
    found = Findings(kind, namespace, meta.name)
    try:
        if not is_label(namespace):
            raise Refused("metadata.namespace", f"{quoted(namespace)} is not a DNS label")
        namespace = sys.intern(namespace)
        name = named(namespace, check(meta.name, "metadata.name"))
    except Refused as refused:
        return Reading(None, None, found.refuse(refused))
    try:
        return Reading(name, value(name, found), found.bad)
    except Refused as refused:
        return Reading(name, None, found.refuse(refused))


def origin_of(meta: wire.ObjectMeta) -> str:
    """Return the resource version in words; "" without one, as in a manifest."""
    return f"resource version {meta.resource_version}" if meta.resource_version else ""


def service_name(namespace: str, name: str) -> ServiceName:
    """Return the name of a Service. It is interned: many objects hold it."""
    return ServiceName(namespace, sys.intern(name))


def is_label(text: str) -> bool:
    """Return whether *text* is a DNS label. Cached, for names that recur: of namespaces and ports."""
    return len(text) < 64 and _is_known_label(text)


@lru_cache(maxsize=1024)
def _is_known_label(text: str) -> bool:
    return _is_label(text) is not None


def checked_address(text: str | None, field: str) -> Address:
    """Return the address *text* if traffic can be sent to it. Raises Refused."""
    try:
        address = parse_address(text or "")
    except ValueError:
        raise Refused(field, f"{quoted(text)} is not an IP address") from None
    if is_special(address):
        raise Refused(field, f"{text} is an unspecified, loopback, multicast or broadcast address")
    return address


def checked_cidr(text: str | None, field: str) -> Cidr:
    """Return the network *text*. Raises Refused."""
    try:
        return parse_cidr(text or "")
    except ValueError:
        raise Refused(field, f"{quoted(text)} is not a CIDR") from None


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
