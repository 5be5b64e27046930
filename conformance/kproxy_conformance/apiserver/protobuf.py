"""Kubernetes JSON to Kubernetes protobuf, as an API server of 1.36 encodes it.

Independent of `kproxy_core.kube.protobuf`, which it serves to test: no protobuf package is used. Fields
that are not in these tables are left out.
"""

import datetime
import json
from collections.abc import Mapping
from typing import Any

CONTENT_TYPE = "application/vnd.kubernetes.protobuf"

MAGIC = b"k8s\x00"

Json = Mapping[str, Any]
Fields = dict[str, tuple[int, Any]]
"""Number and type of each field of a message: str, int, bool, a marker, the fields of a message, or a list of
one of these."""

_MAP = "map"
_TIME = "time"
_JSON = "json"
_REFERENCE: Fields = {"kind": (1, str), "namespace": (2, str), "name": (3, str), "uid": (4, str)}
_META: Fields = {
    "name": (1, str), "generateName": (2, str), "namespace": (3, str), "uid": (5, str),
    "resourceVersion": (6, str), "generation": (7, int), "creationTimestamp": (8, _TIME),
    "deletionTimestamp": (9, _TIME), "labels": (11, _MAP), "annotations": (12, _MAP),
    "ownerReferences": (13, [{
        "kind": (1, str), "name": (3, str), "uid": (4, str), "apiVersion": (5, str), "controller": (6, bool),
        "blockOwnerDeletion": (7, bool)}]),
    "managedFields": (17, [{
        "manager": (1, str), "operation": (2, str), "apiVersion": (3, str), "time": (4, _TIME),
        "fieldsType": (6, str), "fieldsV1": (7, _JSON), "subresource": (8, str)}]),
}
_LIST_META: Fields = {"resourceVersion": (2, str), "continue": (3, str), "remainingItemCount": (4, int)}
_KINDS: dict[str, tuple[str, Fields]] = {
    "Service": ("v1", {
        "metadata": (1, _META),
        "spec": (2, {
            "ports": (1, [{
                "name": (1, str), "protocol": (2, str), "port": (3, int), "nodePort": (5, int),
                "appProtocol": (6, str)}]),
            "selector": (2, _MAP), "clusterIP": (3, str), "type": (4, str), "externalIPs": (5, [str]),
            "sessionAffinity": (7, str), "loadBalancerSourceRanges": (9, [str]), "externalName": (10, str),
            "externalTrafficPolicy": (11, str), "healthCheckNodePort": (12, int),
            "publishNotReadyAddresses": (13, bool),
            "sessionAffinityConfig": (14, {"clientIP": (1, {"timeoutSeconds": (1, int)})}),
            "ipFamilyPolicy": (17, str), "clusterIPs": (18, [str]), "ipFamilies": (19, [str]),
            "internalTrafficPolicy": (22, str)}),
        "status": (3, {"loadBalancer": (1, {
            "ingress": (1, [{"ip": (1, str), "hostname": (2, str), "ipMode": (3, str)}])})}),
    }),
    "EndpointSlice": ("discovery.k8s.io/v1", {
        "metadata": (1, _META),
        "endpoints": (2, [{
            "addresses": (1, [str]),
            "conditions": (2, {"ready": (1, bool), "serving": (2, bool), "terminating": (3, bool)}),
            "targetRef": (4, _REFERENCE), "nodeName": (6, str), "zone": (7, str),
            "hints": (8, {"forZones": (1, [{"name": (1, str)}]), "forNodes": (2, [{"name": (1, str)}])})}]),
        "ports": (3, [{"name": (1, str), "protocol": (2, str), "port": (3, int), "appProtocol": (4, str)}]),
        "addressType": (4, str),
    }),
    "Node": ("v1", {
        "metadata": (1, _META),
        "spec": (2, {
            "podCIDR": (1, str), "taints": (5, [{"key": (1, str), "value": (2, str), "effect": (3, str)}]),
            "podCIDRs": (7, [str])}),
        "status": (3, {"addresses": (5, [{"type": (1, str), "address": (2, str)}])}),
    }),
    "ServiceCIDR": ("networking.k8s.io/v1", {
        "metadata": (1, _META), "spec": (2, {"cidrs": (1, [str])})}),
    "Status": ("v1", {
        "metadata": (1, _LIST_META), "status": (2, str), "message": (3, str), "reason": (4, str),
        "details": (5, {"retryAfterSeconds": (5, int)}), "code": (6, int)}),
}  # fmt: skip


def encode_object(kind: str, obj: Json) -> bytes:
    """Return one object, or a Status, in its envelope. Raises what a field of another type leads to."""
    api_version, fields = _KINDS[kind]
    return envelope(kind, api_version, _message(fields, obj))


def api_version(kind: str) -> str:
    return _KINDS[kind][0]


def encode_list(kind: str, meta: Json, items: list[bytes]) -> bytes:
    """Return a list of the *items* of `encode_item` in its envelope."""
    listed = b"".join([_field(1, _message(_LIST_META, meta)), *(_field(2, item) for item in items)])
    return envelope(f"{kind}List", _KINDS[kind][0], listed)


def encode_item(kind: str, obj: Json) -> bytes:
    """Return one object without an envelope, as lists hold it."""
    return _message(_KINDS[kind][1], obj)


def encode_event(event: str, obj: bytes) -> bytes:
    """Return the frame of a watch event about *obj*, which is in its envelope."""
    return frame(_field(1, event.encode()) + _field(2, _field(1, obj)))


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def envelope(kind: str, api_version: str, raw: bytes) -> bytes:
    """Return *raw* in a runtime.Unknown, after the magic bytes."""
    about = _field(1, api_version.encode()) + _field(2, kind.encode())
    return MAGIC + _field(1, about) + _field(2, raw) + _field(3, b"") + _field(4, b"")


def _message(fields: Fields, obj: Json) -> bytes:
    encoded = []
    for name, (number, kind) in fields.items():
        value = obj.get(name)
        if value is None:
            continue
        values, kind = (value, kind[0]) if isinstance(kind, list) else ([value], kind)
        if not isinstance(values, list):
            raise TypeError(f"{name} is not a list")
        encoded += [_value(number, kind, value) for value in values]
    return b"".join(encoded)


def _value(number: int, kind: Any, value: Any) -> bytes:
    if kind is str:
        return _field(number, value.encode())
    if kind is int or kind is bool:
        if type(value) is not kind or not -1 << 31 <= value < 1 << 31:
            raise TypeError(f"{value!r} is not of type {kind.__name__}")
        return _varint(number << 3) + _varint(int(value))
    if kind == _MAP:
        return b"".join(_field(number, _field(1, key.encode()) + _field(2, text.encode()))
                        for key, text in value.items())
    if kind == _JSON:
        return _field(number, _field(1, json.dumps(value, separators=(",", ":")).encode()))
    if kind == _TIME:
        moment = datetime.datetime.fromisoformat(value)
        if moment.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone")
        return _field(number, b"\x08" + _varint(int(moment.timestamp())))
    return _field(number, _message(kind, value))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])
