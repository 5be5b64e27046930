"""Manifest files, from bytes to readings of the API objects in them."""

from codecs import BOM_UTF8
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw, Struct, structs

from kproxy_core.objects import decode
from kproxy_core.objects.reading import quoted, shown
from kproxy_core.objects.yaml.documents import NotYaml, documents
from kproxy_core.store.events import BadObject, limit_complaints

RESOURCES: dict[str, decode.Resource[Any, Any]] = {
    resource.kind: resource
    for resource in (
        decode.SERVICES, decode.ENDPOINT_SLICES, decode.ENDPOINTS, decode.NODES, decode.SERVICE_CIDRS
    )
}
"""The kinds that a manifest may hold for a proxy. Other kinds are ignored."""

Key = tuple[str, tuple[str, str]]
"""Kind, and namespace and name, of an object."""

_MAX_LISTS = 4
"""Limit for the nesting of Lists."""
MOST_STRAY = 1000
"""Limit for documents and items that are no API objects: a file with more of them is no manifest."""


class _Head(Struct, frozen=True, rename="camel"):
    api_version: Any = None
    kind: Any = None
    items: Raw = Raw(b"null")


_decode_head = msgspec.json.Decoder(_Head).decode
_decode_items = msgspec.json.Decoder(list[Raw] | None).decode


@dataclass(slots=True)
class Manifest:
    objects: list[tuple[Key, Any]] = field(default_factory=list)
    """Every object with a usable name, and its `Reading.value`, in the order of the file."""
    bad: list[BadObject] = field(default_factory=list)
    """The problems in the file, at most `MOST_COMPLAINTS` and one that counts the rest."""
    stray: int = 0
    """Documents and items that are no API objects."""

    def _add(self, where: str, resource: decode.Resource[Any, Any], value: bytes | Raw) -> None:
        reading = resource.from_json(value)
        if reading.name is not None:
            self.objects.append(((resource.kind, reading.name), reading.value))
        for bad in reading.bad:
            self.bad.append(bad if bad.name else structs.replace(bad, name=where))

    def _complain(self, kind: str, where: str, path: str, problem: str) -> None:
        self.bad.append(BadObject(shown(kind), where, path, problem))
        self.stray += 1
        if self.stray > MOST_STRAY:
            raise decode.Malformed(f"more than {MOST_STRAY} documents or items are no API objects")


def read_manifest(name: str, data: bytes) -> Manifest:
    """Return the objects in *data*, the content of the file *name*.

    It is read as JSON if the name or the first character says so, else as YAML. Raises Malformed if the file
    as a whole is neither.
    """
    if not data or data.isspace():
        raise decode.Malformed("is empty")
    manifest = _read(name, data, shown(name))
    manifest.bad = limit_complaints(manifest.bad, "file", shown(name))
    return manifest


def _read(name: str, data: bytes, where: str) -> Manifest:
    is_json = name.endswith(".json")
    if is_json or data[:64].lstrip().startswith(b"{"):
        manifest = Manifest()
        try:
            _collect(manifest, where, data.removeprefix(BOM_UTF8))
            return manifest
        except decode.UNDECODABLE as error:
            if is_json:
                raise decode.Malformed(f"is not a JSON object: {decode.explained(error).problem}") from error
            # YAML may start with a brace, too.
    manifest = Manifest()
    try:
        for i, value in enumerate(documents(data), 1):
            if value is not None:
                _collect_value(manifest, f"{where} document {i}" if i > 1 else where, value)
    except NotYaml as error:
        raise decode.Malformed(f"is not YAML: {error}") from error
    return manifest


def _collect_value(manifest: Manifest, where: str, value: object, lists: int = 0) -> None:
    try:
        _collect(manifest, where, msgspec.json.encode(value), lists)
    except decode.UNDECODABLE as error:
        manifest._complain("object", where, "", decode.explained(error).problem)


def _collect(manifest: Manifest, where: str, value: bytes | Raw, lists: int = 0) -> None:
    """Add the object or objects of *value*. Raises one of UNDECODABLE if it is no JSON object."""
    head = _decode_head(value)
    kind, version = head.kind, head.api_version
    if not isinstance(kind, str) or not kind:
        return manifest._complain("object", where, "kind", "is missing")
    if not isinstance(version, str) or not version:
        return manifest._complain(kind, where, "apiVersion", "is missing")
    if kind == "List" and version == "v1":
        return _collect_items(manifest, where, head, None, lists + 1)
    resource = RESOURCES.get(kind.removesuffix("List"))
    if resource is None or _group(version) != _group(resource.api_version):
        return None  # another kind, perhaps one of the same name in another API
    if version != resource.api_version:
        return manifest._complain(
            kind, where, "apiVersion", f"{quoted(version)} is not {resource.api_version}")
    if kind != resource.kind:
        return _collect_items(manifest, where, head, resource, lists + 1)
    return manifest._add(where, resource, value)


def _collect_items(
    manifest: Manifest, where: str, head: _Head, resource: decode.Resource[Any, Any] | None, lists: int
) -> None:
    """Add the items of a list: of *resource*, or None: each of the kind that it names itself."""
    if lists > _MAX_LISTS:
        return manifest._complain(head.kind, where, "", "lists are nested too deeply")
    try:
        items = _decode_items(head.items) or []
    except decode.UNDECODABLE:
        return manifest._complain(head.kind, where, "items", "is not a list")
    for i, item in enumerate(items):
        place = f"{where} items[{i}]"
        if resource is None:
            _collect_value(manifest, place, item, lists)
        else:
            manifest._add(place, resource, item)
    return None


def _group(version: str) -> str:
    return version.rpartition("/")[0]
