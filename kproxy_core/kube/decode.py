"""API objects, lists and watch events, from JSON to readings.

A list page, or a watch event, is decoded into typed structs in one pass. Only if that fails are its objects
decoded one by one, so that a bad one is refused with its name and field while the others are used.
"""

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Raw, Struct, field

from kproxy_core.kube import wire
from kproxy_core.kube.reading import (
    FieldError,
    FieldErrors,
    Reading,
    checked_label,
    checked_subdomain,
    mirror_endpoints,
    read_node,
    read_service,
    read_service_cidr,
    read_slice,
)
from kproxy_core.model import events
from kproxy_core.model.service import ServiceName, SliceName

log = logging.getLogger("kproxy.kube")


class HasMetadata(Protocol):
    """An API object as it travels."""

    @property
    def metadata(self) -> wire.ObjectMeta | None: ...


T = TypeVar("T")
W = TypeVar("W", bound=HasMetadata)
V = TypeVar("V")
Name = tuple[str, str]
"""Namespace ("" for kinds that have none) and name."""

UNDECODABLE = (msgspec.MsgspecError, RecursionError, ValueError)
"""Errors of msgspec for invalid bytes or values: ValueError for text that is not UTF-8 and for huge numbers,
RecursionError for deep nesting."""

MAX_OBJECT_BYTES = 3 << 20
"""Size in bytes of the largest object that an API server accepts; larger ones are not decoded."""


class Malformed(Exception):
    """Neither JSON nor protobuf, or not a list or watch event of the API."""


class StatusDetails(Struct, frozen=True, gc=False, rename="camel"):
    """meta/v1 StatusDetails."""

    retry_after_seconds: int | None = None


class Status(Struct, frozen=True, gc=False):
    """meta/v1 Status: the reason why a request failed."""

    code: int | None = None
    reason: str | None = None
    message: str | None = None
    details: StatusDetails | None = None


class Page(NamedTuple, Generic[V]):
    resource_version: str
    next_page: str
    """``metadata.continue``; "" on the last page."""
    readings: list[Reading[V]]


class WatchEvent(Struct, Generic[V], frozen=True, gc=False):
    type: str
    """ADDED, MODIFIED, DELETED, BOOKMARK or ERROR."""
    resource_version: str
    """Of the object or bookmark; "" in an ERROR."""
    reading: Reading[V] | None = None
    """The object of ADDED, MODIFIED and DELETED."""
    status: Status | None = None
    """The content of an ERROR."""
    initial_events_end: bool = False
    """This BOOKMARK ends the initial events of a watch-list (KEP-3157)."""


class _ListMeta(Struct, frozen=True, gc=False):
    resource_version: str | None = field(default=None, name="resourceVersion")
    next_page: str | None = field(default=None, name="continue")


class _List(Struct, Generic[T], frozen=True):
    metadata: _ListMeta | None = None
    items: list[T] | None = None


class _Line(Struct, Generic[T], frozen=True):
    type: str
    object: T


class _Head(Struct, Generic[T], frozen=True):
    metadata: T | None = None


class _Identity(Struct, frozen=True):
    name: Any = None
    namespace: Any = None


class _Identified(Struct, frozen=True):
    metadata: _Identity | None = None
    name: Any = None
    """Of a kind without metadata."""


_decode_raw_list = msgspec.json.Decoder(_List[Raw]).decode
_decode_raw_line = msgspec.json.Decoder(_Line[Raw]).decode
_decode_versioned = msgspec.json.Decoder(_Head[wire.ObjectMeta]).decode
_decode_status = msgspec.json.Decoder(Status).decode
_decode_identified = msgspec.json.Decoder(_Identified).decode


class Decoder(Protocol[V]):
    def page(self, data: bytes) -> Page[V]:
        """Read one page of a LIST. Raises Malformed if it is no list at all."""

    def watch_event(self, data: bytes) -> WatchEvent[V]:
        """Read one event of a WATCH. Raises Malformed if it is none."""


class Resource(Struct, Generic[W, V], frozen=True, eq=False, dict=True):
    """One kind of API object: its place in the API, how to decode it, and the events that follow from it."""

    kind: str
    api_version: str
    plural: str
    struct: type[W]
    reader: Callable[[W], Reading[V]]
    make_gone: Callable[[Name], events.Event] | None = None
    """Makes the event for an object that was deleted or is not for this proxy; None: no such event exists."""
    namespaced: bool = True
    optional: bool = False
    """Older servers do not serve this kind, and older roles do not allow reading it."""

    @property
    def path(self) -> str:
        return f"/{'apis' if '/' in self.api_version else 'api'}/{self.api_version}/{self.plural}"

    # Created on first use: a start needs a decoder of lines for each kind, and no other.

    @cached_property
    def _decode(self) -> Callable[[bytes | Raw], W]:
        return msgspec.json.Decoder(self.struct).decode

    @cached_property
    def _decode_list(self) -> Callable[[bytes], _List[W]]:
        return msgspec.json.Decoder(_List[self.struct]).decode  # type: ignore[name-defined]

    @cached_property
    def _decode_line(self) -> Callable[[bytes], _Line[W]]:
        return msgspec.json.Decoder(_Line[self.struct]).decode  # type: ignore[name-defined]

    def gone(self, name: Name) -> events.Event:
        """Return the event for the object *name* that was deleted or can no longer be used."""
        assert self.make_gone is not None
        return self.make_gone(name)

    def read(self, obj: W) -> Reading[V]:
        """Return the value of *obj*, or its refusal, also if a bug keeps it from being read."""
        try:
            return self.reader(obj)
        except Exception as error:  # the other objects must not wait for it
            meta = getattr(obj, "metadata", None) or _Identity(getattr(obj, "name", None))
            log.exception("bug: an object cannot be read", extra={"fields": {"kind": self.kind}})
            return self.refused(FieldError("", f"cannot be read: {error!r}"), meta.name, meta.namespace)

    def from_json(self, data: bytes | Raw) -> Reading[V]:
        if len(data) > MAX_OBJECT_BYTES:
            return self._undecodable(FieldError("", f"is larger than {MAX_OBJECT_BYTES >> 20} MiB"), data)
        try:
            decoded = self._decode(data)
        except UNDECODABLE as error:
            return self._undecodable(explained(error), data)
        return self.read(decoded)

    def page(self, data: bytes) -> Page[V]:
        try:
            page = self._decode_list(data)
        except UNDECODABLE:
            return self._page_by_object(data)
        return _page(page.metadata, [self.read(item) for item in page.items or ()])

    def _page_by_object(self, data: bytes) -> Page[V]:
        try:
            page = _decode_raw_list(data)
        except UNDECODABLE as error:
            raise Malformed(str(error)) from error
        return _page(page.metadata, [self.from_json(item) for item in page.items or ()])

    def watch_event(self, data: bytes) -> WatchEvent[V]:
        try:
            line = self._decode_line(data) if len(data) <= MAX_OBJECT_BYTES else None
        except UNDECODABLE:
            line = None
        if line is None or line.type == "ERROR":
            return self._watch_event_by_part(data)
        meta = line.object.metadata
        if line.type == "BOOKMARK":
            return bookmark(meta)
        return WatchEvent(line.type, (meta and meta.resource_version) or "", self.read(line.object))

    def _watch_event_by_part(self, data: bytes) -> WatchEvent[V]:
        try:
            line = _decode_raw_line(data)
            if line.type == "ERROR":
                return WatchEvent(line.type, "", status=_decode_status(line.object))
            meta = _decode_versioned(line.object).metadata
        except UNDECODABLE as error:
            raise Malformed(str(error)) from error
        if line.type == "BOOKMARK":
            return bookmark(meta)
        return WatchEvent(line.type, (meta and meta.resource_version) or "", self.from_json(line.object))

    def _undecodable(self, refused: FieldError, data: bytes | Raw) -> Reading[V]:
        """Return the refusal of an object that can't be decoded, with its name if possible."""
        try:
            found = _decode_identified(data)
            meta = found.metadata or _Identity(found.name)
        except UNDECODABLE:
            meta = _Identity()
        return self.refused(refused, meta.name, meta.namespace)

    def refused(self, refused: FieldError, name: object, namespace: object) -> Reading[V]:
        """Return the refusal of an object with a *name* and *namespace* that may be anything."""
        if not isinstance(name, str):
            name = None
        if not self.namespaced:
            namespace = ""
        elif namespace in (None, ""):
            namespace = "default"
        elif not isinstance(namespace, str):
            namespace = "?"
        bad = FieldErrors([refused]).bad(self.kind, namespace, name)
        try:
            if self.namespaced:
                checked_label(namespace, "metadata.namespace")
            return Reading((namespace, checked_subdomain(name, "metadata.name")), None, bad)
        except FieldError:
            return Reading(None, None, bad)


def _page(meta: _ListMeta | None, readings: list[Reading[V]]) -> Page[V]:
    meta = meta or _ListMeta()
    return Page(meta.resource_version or "", meta.next_page or "", readings)


def bookmark(meta: wire.ObjectMeta | None) -> WatchEvent[Any]:
    meta = meta or wire.ObjectMeta()
    end = meta.annotations is not None and meta.annotations.initial_events_end == "true"
    return WatchEvent("BOOKMARK", meta.resource_version or "", initial_events_end=end)


def explained(error: Exception) -> FieldError:
    """Return field and problem of one of UNDECODABLE, in the words of msgspec,
    like "Expected `int | null`, got `str` - at `$.spec.ports[0].port`".
    """
    if isinstance(error, RecursionError):
        return FieldError("", "nested too deeply")
    problem, _, path = str(error).replace("`", "").replace(" | null", "").partition(" - at ")
    if not problem.startswith("JSON"):
        problem = problem[:1].lower() + problem[1:]
    return FieldError(path.removeprefix("$").removeprefix("."), problem)


SERVICES = Resource(
    "Service", "v1", "services", wire.Service, read_service,
    lambda name: events.ServiceGone(ServiceName(*name)))
ENDPOINT_SLICES = Resource(
    "EndpointSlice", "discovery.k8s.io/v1", "endpointslices", wire.EndpointSlice, read_slice,
    lambda name: events.SliceGone(SliceName(*name)))
ENDPOINTS = Resource("Endpoints", "v1", "endpoints", wire.Endpoints, mirror_endpoints)
NODES = Resource("Node", "v1", "nodes", wire.Node, read_node, lambda _: events.NodeGone(), namespaced=False)
SERVICE_CIDRS = Resource(
    "ServiceCIDR", "networking.k8s.io/v1", "servicecidrs", wire.ServiceCIDR, read_service_cidr,
    lambda name: events.ServiceCidrGone(name[1]), namespaced=False, optional=True)
