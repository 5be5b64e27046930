"""API objects, lists and watch events, from protobuf to readings.

Every answer is an envelope: the magic bytes and a runtime.Unknown with the kind and the bytes of the object.
The items of a list are parsed one by one: a bad object refuses only itself, and only one is in memory as
messages.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError

from kproxy_core.objects import decode
from kproxy_core.objects.protobuf import convert
from kproxy_core.objects.protobuf.schema import parser
from kproxy_core.objects.reading import Reading, Refused, shown

W = TypeVar("W", bound=decode.HasMetadata)
V = TypeVar("V")

MAGIC = b"k8s\x00"
"""First bytes of every answer."""

_CONVERT: dict[str, Callable[[Any], Any]] = {
    "Service": convert.to_service, "EndpointSlice": convert.to_slice, "Node": convert.to_node,
    "ServiceCIDR": convert.to_service_cidr,
}
"""The kinds that an API server is asked for."""

_INVALID = "is not a valid protobuf message"


class ProtobufDecoder(Generic[W, V]):
    """Decodes objects of one kind from protobuf, as their `Resource` does from JSON."""

    def __init__(self, resource: decode.Resource[W, V]) -> None:
        self._resource = resource
        self._convert: Callable[[Any], W] = _CONVERT[resource.kind]
        self._parse = parser(resource.kind)

    def page(self, data: bytes) -> decode.Page[V]:
        try:
            page = parser("List")(_opened(data, f"{self._resource.kind}List", self._resource.api_version))
        except DecodeError as error:
            raise decode.Malformed(_INVALID) from error
        meta = page.metadata
        readings = [self._reading(item) for item in page.items]
        return decode.Page(meta.resource_version, meta.next_page, readings)

    def watch_event(self, data: bytes) -> decode.WatchEvent[V]:
        try:
            event = parser("WatchEvent")(data)
            kind, content = event.type, event.object.raw
            if kind == "ERROR":
                return decode.WatchEvent(kind, "", status=read_status(content))
            raw = _opened(content, self._resource.kind, self._resource.api_version)
            if kind == "BOOKMARK":
                return decode.bookmark(convert.to_meta(parser("Object")(raw).metadata))
            if len(raw) <= decode.MAX_OBJECT_BYTES:
                with suppress(DecodeError):
                    found = self._parse(raw)
                    reading = self._resource.read(self._convert(found))
                    return decode.WatchEvent(kind, found.metadata.resource_version, reading)
            version = parser("Versioned")(raw).metadata.resource_version
            return decode.WatchEvent(kind, version, self._reading(raw))
        except DecodeError as error:
            raise decode.Malformed(_INVALID) from error

    def _reading(self, raw: bytes) -> Reading[V]:
        if len(raw) > decode.MAX_OBJECT_BYTES:
            return self._refused(f"is larger than {decode.MAX_OBJECT_BYTES >> 20} MiB", raw)
        try:
            return self._resource.read(self._convert(self._parse(raw)))
        except DecodeError:
            return self._refused(_INVALID, raw)

    def _refused(self, problem: str, raw: bytes) -> Reading[V]:
        """Return the refusal of an object that can't be parsed, with its name if that can be."""
        try:
            meta = parser("Identified")(raw).metadata
            name, namespace = meta.name, meta.namespace
        except DecodeError:
            name = namespace = None
        return self._resource.refused(Refused("", problem), name, namespace)


def read_status(data: bytes) -> decode.Status:
    """Read a Status in its envelope. Raises Malformed."""
    try:
        status = parser("Status")(_opened(data, "Status", "v1"))
    except DecodeError as error:
        raise decode.Malformed(_INVALID) from error
    return decode.Status(status.code, status.reason, status.message,
                  decode.StatusDetails(status.details.retry_after_seconds))


def _opened(data: bytes, kind: str, api_version: str) -> bytes:
    """Return the bytes of the object in an envelope. Raises Malformed, DecodeError."""
    if not data.startswith(MAGIC):
        raise decode.Malformed("no protobuf of Kubernetes: it does not begin with its magic bytes")
    envelope = parser("Unknown")(memoryview(data)[len(MAGIC):])
    found = convert.type_meta(envelope.type_meta)
    if found != (kind, api_version):
        raise decode.Malformed(f"{shown(found[1])} {shown(found[0])} instead of {api_version} {kind}")
    if envelope.content_encoding:
        raise decode.Malformed("an encoded object, which is not supported")
    raw: bytes = envelope.raw
    return raw
