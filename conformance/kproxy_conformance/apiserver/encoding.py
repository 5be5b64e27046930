"""The two encodings in which the API server answers."""

from collections.abc import Iterable
from typing import Protocol

from kproxy_conformance.apiserver import protobuf
from kproxy_conformance.apiserver.store import Entry, Json, Resource, encode


class Encoding(Protocol):
    """Encodes lists, watch events and refusals."""

    content_type: str
    watch_type: str
    """Content type of a watch."""

    def list(self, resource: Resource, meta: Json, entries: Iterable[Entry]) -> bytes: ...

    def event(self, kind: str, resource: Resource, entry: Entry) -> bytes: ...

    def bookmark(self, resource: Resource, obj: Json) -> bytes: ...

    def status(self, body: Json) -> bytes: ...

    def error(self, body: Json) -> bytes:
        """Return the event that ends a watch with the Status *body*."""


class _Json:
    content_type = watch_type = "application/json"

    def list(self, resource: Resource, meta: Json, entries: Iterable[Entry]) -> bytes:
        head = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "metadata": meta}
        return encode(head)[:-1] + b',"items":[' + b",".join(entry.body for entry in entries) + b"]}"

    def event(self, kind: str, resource: Resource, entry: Entry) -> bytes:
        return _line(kind, resource.full(entry))

    def bookmark(self, _: Resource, obj: Json) -> bytes:
        return _line("BOOKMARK", encode(obj))

    def status(self, body: Json) -> bytes:
        return encode(body)

    def error(self, body: Json) -> bytes:
        return _line("ERROR", encode(body))


class _Protobuf:
    content_type = protobuf.CONTENT_TYPE
    watch_type = f"{content_type};stream=watch"

    def list(self, resource: Resource, meta: Json, entries: Iterable[Entry]) -> bytes:
        return protobuf.encode_list(resource.kind, meta, [entry.protobuf for entry in entries])

    def event(self, kind: str, resource: Resource, entry: Entry) -> bytes:
        return protobuf.encode_event(
            kind, protobuf.envelope(resource.kind, resource.api_version, entry.protobuf))

    def bookmark(self, resource: Resource, obj: Json) -> bytes:
        return protobuf.encode_event("BOOKMARK", protobuf.encode_object(resource.kind, obj))

    def status(self, body: Json) -> bytes:
        return protobuf.encode_object("Status", body)

    def error(self, body: Json) -> bytes:
        return protobuf.encode_event("ERROR", self.status(body))


class WithoutManagedFields:
    """Encodes objects as *base* does, without their managed fields."""

    def __init__(self, base: Encoding) -> None:
        self._base = base
        self.content_type, self.watch_type = base.content_type, base.watch_type
        self.bookmark, self.status, self.error = base.bookmark, base.status, base.error

    def list(self, resource: Resource, meta: Json, entries: Iterable[Entry]) -> bytes:
        return self._base.list(resource, meta, [entry.stripped for entry in entries])

    def event(self, kind: str, resource: Resource, entry: Entry) -> bytes:
        return self._base.event(kind, resource, entry.stripped)


def _line(kind: str, obj: bytes) -> bytes:
    return b'{"type":"%s","object":%s}\n' % (kind.encode(), obj)


JSON: Encoding = _Json()
PROTOBUF: Encoding = _Protobuf()
