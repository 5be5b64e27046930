"""API objects, lists and watch events, from protobuf to readings.

Every answer is an envelope: the magic bytes and a runtime.Unknown with the kind and the bytes of the object.
The items of a list are parsed one by one: a bad object refuses only itself, and only one is in memory as
messages.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError

from kproxy_core.objects.decode import (
    MAX_OBJECT_BYTES,
    HasMetadata,
    Malformed,
    Page,
    Resource,
    Status,
    StatusDetails,
    WatchEvent,
    bookmark,
)
from kproxy_core.objects.protobuf.convert import to_meta, to_node, to_service, to_service_cidr, to_slice
from kproxy_core.objects.protobuf.fields import byte_fields
from kproxy_core.objects.protobuf.schema import parser
from kproxy_core.objects.reading import Reading, Refused, shown

W = TypeVar("W", bound=HasMetadata)
V = TypeVar("V")

MAGIC = b"k8s\x00"
"""First bytes of every answer."""

_CONVERT: dict[str, Callable[[Any], Any]] = {
    "Service": to_service, "EndpointSlice": to_slice, "Node": to_node, "ServiceCIDR": to_service_cidr,
}
"""The kinds that an API server is asked for."""

_INVALID = "is not a valid protobuf message"

_LIST_METADATA, _LIST_ITEMS = 1, 2
_UNKNOWN_TYPE_META, _UNKNOWN_RAW, _UNKNOWN_CONTENT_ENCODING = 1, 2, 3
"""Fields of runtime.Unknown."""
_NOTHING = memoryview(b"")

_parse_type_meta = parser("TypeMeta")
_parse_list_meta = parser("ListMeta")
_parse_watch_event = parser("WatchEvent")
_parse_object = parser("Object")
_parse_identified = parser("Identified")
_parse_versioned = parser("Versioned")
_parse_status = parser("Status")


class ProtobufDecoder(Generic[W, V]):
    """Decodes objects of one kind from protobuf, as their `Resource` does from JSON."""

    def __init__(self, resource: Resource[W, V]) -> None:
        self._resource = resource
        self._convert: Callable[[Any], W] = _CONVERT[resource.kind]
        self._parse = parser(resource.kind)

    def page(self, data: bytes) -> Page[V]:
        """Read one page of a LIST. Raises Malformed if it is no list at all."""
        items, described = [], _NOTHING
        try:
            for number, content in byte_fields(
                    _opened(data, f"{self._resource.kind}List", self._resource.api_version)):
                if number == _LIST_ITEMS:
                    items.append(content)
                elif number == _LIST_METADATA:
                    described = content
            meta = _parse_list_meta(described)
        except DecodeError as error:
            raise Malformed(_INVALID) from error
        return Page(meta.resource_version, meta.next_page, [self._reading(item) for item in items])

    def watch_event(self, data: bytes) -> WatchEvent[V]:
        """Read one event of a WATCH. Raises Malformed if it is none."""
        try:
            event = _parse_watch_event(data)
            if event.type == "ERROR":
                return WatchEvent(event.type, "", status=read_status(event.object.raw))
            raw = _opened(event.object.raw, self._resource.kind, self._resource.api_version)
            if event.type == "BOOKMARK":
                return bookmark(to_meta(_parse_object(raw).metadata))
            reading = self._reading(raw)
            version = _parse_versioned(raw).metadata.resource_version
        except DecodeError as error:
            raise Malformed(_INVALID) from error
        return WatchEvent(event.type, version, reading)

    def _reading(self, raw: memoryview) -> Reading[V]:
        if len(raw) > MAX_OBJECT_BYTES:
            return self._refused(f"is larger than {MAX_OBJECT_BYTES >> 20} MiB", raw)
        try:
            return self._resource.read(self._convert(self._parse(raw)))
        except DecodeError:
            return self._refused(_INVALID, raw)

    def _refused(self, problem: str, raw: memoryview) -> Reading[V]:
        """Return the refusal of an object that can't be parsed, with its name if that can be."""
        try:
            meta = _parse_identified(raw).metadata
            name, namespace = meta.name, meta.namespace
        except DecodeError:
            name = namespace = None
        return self._resource.refused(Refused("", problem), name, namespace)


def read_status(data: bytes) -> Status:
    """Read a Status in its envelope. Raises Malformed."""
    try:
        status = _parse_status(_opened(data, "Status", "v1"))
    except DecodeError as error:
        raise Malformed(_INVALID) from error
    return Status(status.code, status.reason, status.message,
                  StatusDetails(status.details.retry_after_seconds))


def _opened(data: bytes, kind: str, api_version: str) -> memoryview:
    """Return the bytes of the object in an envelope. Raises Malformed, DecodeError."""
    if not data.startswith(MAGIC):
        raise Malformed("no protobuf of Kubernetes: it does not begin with its magic bytes")
    fields = dict(byte_fields(memoryview(data)[len(MAGIC):]))
    found = _parse_type_meta(fields.get(_UNKNOWN_TYPE_META, _NOTHING))
    if (found.kind, found.api_version) != (kind, api_version):
        raise Malformed(f"{shown(found.api_version)} {shown(found.kind)} instead of {api_version} {kind}")
    if fields.get(_UNKNOWN_CONTENT_ENCODING):
        raise Malformed("an encoded object, which is not supported")
    return fields.get(_UNKNOWN_RAW, _NOTHING)
