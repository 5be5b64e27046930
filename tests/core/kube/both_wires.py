"""Objects decoded from JSON and, where it can express them, from protobuf: the readings must not differ."""

from typing import Any

import msgspec

from kproxy_conformance.apiserver import protobuf
from kproxy_core.kube.decode import Resource
from kproxy_core.kube.protobuf import ProtobufDecoder
from kproxy_core.kube.reading import Reading

Json = dict[str, Any]


def read_alike(resource: Resource[Any, Any], obj: Json) -> Reading[Any]:
    """The reading of *obj* from JSON."""
    reading = resource.from_json(msgspec.json.encode(obj))
    try:
        item = protobuf.encode_item(resource.kind, _without_nulls(obj))
    except (AttributeError, TypeError, ValueError):
        return reading
    found, = ProtobufDecoder(resource).page(protobuf.encode_list(resource.kind, {}, [item])).readings
    assert (found.name, found.value) == (reading.name, reading.value)
    # An absent number is 0 in protobuf: the words differ, the field does not.
    assert [bad.field for bad in found.bad] == [bad.field for bad in reading.bad]
    return reading


def _without_nulls(value: Any, depth: int = 0) -> Any:
    """*value* without the nulls that stand for absence. Raises ValueError for others: protobuf has none."""
    if value is None:
        raise ValueError("null")
    if isinstance(value, list):
        return [_without_nulls(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item, depth + 1) for key, item in value.items()
                if item is not None or depth > 1}
    return value
