"""API objects, lists and watch events, from Kubernetes' protobuf to readings."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import date, timedelta
from functools import cache, lru_cache, partial
from typing import Any, Generic, TypeVar, cast

from google.protobuf.descriptor_pb2 import (
    EDITION_2023,
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from msgspec import UNSET

from kproxy_core.kube import decode, wire
from kproxy_core.kube.reading import (
    MAX_ENDPOINTS,
    SPECIAL_FIRST_BYTES,
    FieldError,
    Reading,
    read_endpoints,
    shown,
)
from kproxy_core.model.address import parse_address
from kproxy_core.model.service import Endpoint

T = TypeVar("T")
V = TypeVar("V")
W = TypeVar("W", bound=decode.HasMetadata)

MAGIC = b"k8s\x00"
"""First bytes of every answer."""

_INVALID = "is not a valid protobuf message"
_THREE_BYTES = 1 << 14
"""The least size whose encoding takes three bytes."""
_new = tuple.__new__
_PACKAGE = "kproxy"

_MESSAGES = {
    # runtime and meta/v1
    "TypeMeta": "api_version=1 string, kind=2 string",
    "RawExtension": "raw=1 bytes",
    "Unknown": "type_meta=1 bytes, raw=2 bytes, content_encoding=3 string",
    "List": "metadata=1 ListMeta, items=2 repeated bytes",
    "WatchEvent": "type=1 string, object=2 RawExtension",
    "ListMeta": "resource_version=2 string, next_page=3 string",
    "Time": "seconds=1 int64",
    "ObjectMeta": "name=1 string, namespace=3 string, resource_version=6 string, creation_timestamp=8 Time, "
                  "deletion_timestamp=9 Time, labels=11 map, annotations=12 map",
    "Object": "metadata=1 ObjectMeta",
    "Version": "resource_version=6 string",
    "Versioned": "metadata=1 Version",
    "Identity": "name=1 string, namespace=3 string",
    "Identified": "metadata=1 Identity",
    "StatusDetails": "retry_after_seconds=5 int32",
    "Status": "message=3 string, reason=4 string, details=5 StatusDetails, code=6 int32",
    # core/v1
    "Service": "metadata=1 ObjectMeta, spec=2 ServiceSpec, status=3 bytes",
    "ServiceSpec": "ports=1 repeated bytes, cluster_ip=3 string, type=4 string, "
                   "external_ips=5 repeated string, session_affinity=7 string, "
                   "load_balancer_source_ranges=9 repeated string, external_traffic_policy=11 string, "
                   "health_check_node_port=12 int32, publish_not_ready_addresses=13 bool, "
                   "session_affinity_config=14 SessionAffinityConfig, cluster_ips=18 repeated string, "
                   "ip_families=19 repeated string, internal_traffic_policy=22 string",
    "ServicePort": "name=1 string, protocol=2 string, port=3 int32, node_port=5 int32",
    "SessionAffinityConfig": "client_ip=1 ClientIPConfig",
    "ClientIPConfig": "timeout_seconds=1 int32",
    "ServiceStatus": "load_balancer=1 LoadBalancer",
    "LoadBalancer": "ingress=1 repeated Ingress",
    "Ingress": "ip=1 string, ip_mode=3 string",
    "Node": "metadata=1 ObjectMeta, spec=2 NodeSpec, status=3 NodeStatus",
    "NodeSpec": "pod_cidr=1 string, taints=5 repeated Taint, pod_cidrs=7 repeated string",
    "NodeStatus": "addresses=5 repeated NodeAddress",
    "NodeAddress": "type=1 string, address=2 string",
    "Taint": "key=1 string",
    # discovery.k8s.io/v1
    "EndpointSlice": "metadata=1 ObjectMeta, endpoints=2 repeated bytes, ports=3 repeated bytes, "
                     "address_type=4 string",
    "Endpoint": "addresses=1 repeated string, conditions=2 bytes, node_name=6 string, hints=8 bytes",
    "Conditions": "ready=1 bool, serving=2 bool, terminating=3 bool",
    "Hint": "name=1 string",
    "Hints": "for_zones=1 repeated Hint, for_nodes=2 repeated Hint",
    "SlicePort": "name=1 string, protocol=2 string, port=3 int32",
    # networking.k8s.io/v1
    "ServiceCIDR": "metadata=1 ObjectMeta, spec=2 ServiceCIDRSpec",
    "ServiceCIDRSpec": "cidrs=1 repeated string",
}
"""The protobuf messages of Kubernetes 1.36, with the fields that a proxy reads. Parsing skips all others.

Numbers and types are those of the API's generated.proto files: core/v1, discovery/v1, networking/v1, meta/v1
and runtime. Field names are those of `wire`. Two types differ: ``map`` is a map of strings, and ``bytes``
also stands for a message that is parsed and cached on its own, because the same few values recur in thousands
of objects.
"""


def message_classes(messages: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the function that returns the class of one of *messages*, which are described as above."""
    pool = DescriptorPool()
    pool.AddSerializedFile(_described(messages))
    return lambda name: GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


def _described(messages: Mapping[str, str]) -> bytes:
    """Return *messages* as a serialized file descriptor.

    Its edition has field presence, as proto2, and requires strings in UTF-8, which proto2 does not.
    """
    file = FileDescriptorProto(name="kproxy.proto", package=_PACKAGE, syntax="editions", edition=EDITION_2023)
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for text in fields.split(", "):
            field, _, described = text.partition("=")
            number, *repeated, kind = described.split()
            _add_field(message, field, int(number), kind, is_repeated=bool(repeated))
    data: bytes = file.SerializeToString()
    return data


def _add_field(
    message: DescriptorProto, name: str, number: int, kind: str, *, is_repeated: bool = False,
) -> None:
    field = message.field.add(name=name, number=number)
    field.label = (FieldDescriptorProto.LABEL_REPEATED if is_repeated or kind == "map"
                   else FieldDescriptorProto.LABEL_OPTIONAL)
    if kind.islower() and kind != "map":
        field.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
        return
    field.type = FieldDescriptorProto.TYPE_MESSAGE
    field.type_name = f".{_PACKAGE}.{kind}"
    if kind == "map":
        entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
        entry.options.map_entry = True
        _add_field(entry, "key", 1, "string")
        _add_field(entry, "value", 2, "string")
        field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"


_message = message_classes(_MESSAGES)


@cache
def parser(name: str) -> Any:
    """Return the function that parses bytes as the message *name*. It raises DecodeError."""
    return _message(name).FromString


# Conversion to the structs that JSON is decoded to, so that both are read alike. An API server sends "" and 0
# in protobuf for most fields that JSON omits; the readings do not differ.

_parse_endpoint = parser("Endpoint")  # not looked up each time: most messages are endpoints


def to_service(message: Any) -> wire.Service:
    meta, spec = message.metadata, message.spec
    return wire.Service(
        wire.ServiceMeta(
            meta.name, meta.namespace, meta.resource_version,
            creation_timestamp=_time(meta.creation_timestamp),
            labels=wire.ServiceLabels(meta.labels.get("service.kubernetes.io/service-proxy-name", UNSET)),
            annotations=_service_annotations(meta.annotations) if meta.annotations else None),
        wire.ServiceSpec(
            spec.type, spec.cluster_ip or None, spec.cluster_ips, spec.ip_families,
            [_service_port(port) for port in spec.ports], spec.external_ips,
            spec.load_balancer_source_ranges, spec.session_affinity,
            _affinity(spec.session_affinity_config) if spec.HasField("session_affinity_config") else None,
            spec.external_traffic_policy, spec.internal_traffic_policy, spec.health_check_node_port,
            spec.publish_not_ready_addresses),
        _service_status(message.status))


def _service_annotations(given: Any) -> wire.ServiceAnnotations:
    return wire.ServiceAnnotations(
        removed_endpoints=given.get("kproxy.dev/removed-endpoints"),
        endpoint_health=given.get("kproxy.dev/endpoint-health"),
        last_resort=given.get("kproxy.dev/last-resort"),
        hash_by=given.get("kproxy.dev/hash"))


def to_slice(message: Any, read: Callable[[bytes], wire.Endpoint | Endpoint]) -> wire.EndpointSlice:
    """*read* reads an endpoint."""
    meta, endpoints = message.metadata, message.endpoints
    if len(endpoints) > MAX_ENDPOINTS:
        read = _no_endpoint  # the reader of the slice refuses so many
    labels, annotations = meta.labels, meta.annotations
    return wire.EndpointSlice(
        wire.SliceMeta(
            meta.name, meta.namespace, meta.resource_version,
            labels=wire.SliceLabels(
                labels.get("kubernetes.io/service-name"),
                labels.get("service.kubernetes.io/headless", UNSET)),
            annotations=wire.SliceAnnotations(
                trigger_time=annotations.get("endpoints.kubernetes.io/last-change-trigger-time"),
                weight=annotations.get("kproxy.dev/weight"),
                cilium_weight=annotations.get("service.cilium.io/weight"))),
        message.address_type,
        cast("list[wire.Endpoint]", [read(raw) for raw in endpoints]),
        [_slice_port(port) for port in message.ports])


def to_node(message: Any) -> wire.Node:
    meta, spec = message.metadata, message.spec
    return wire.Node(
        wire.NodeMeta(
            meta.name, meta.namespace, meta.resource_version,
            labels=dict(meta.labels),
            deletion_timestamp=_time(meta.deletion_timestamp)),
        wire.NodeSpec(spec.pod_cidr, spec.pod_cidrs, [wire.Taint(taint.key) for taint in spec.taints]),
        wire.NodeStatus([wire.NodeAddress(entry.type, entry.address) for entry in message.status.addresses]))


def to_service_cidr(message: Any) -> wire.ServiceCIDR:
    return wire.ServiceCIDR(to_meta(message.metadata), wire.ServiceCIDRSpec(message.spec.cidrs))


def to_meta(meta: Any) -> wire.ObjectMeta:
    return wire.ObjectMeta(
        meta.name, meta.namespace, meta.resource_version,
        wire.Annotations(meta.annotations.get("k8s.io/initial-events-end")))


def _affinity(config: Any) -> wire.SessionAffinityConfig:
    client_ip = config.client_ip
    return wire.SessionAffinityConfig(wire.ClientIPConfig(
        client_ip.timeout_seconds if client_ip.HasField("timeout_seconds") else None))


def _time(message: Any) -> str | None:
    """Return a Time as JSON has it; None: it is absent or zero."""
    seconds = message.seconds
    if not seconds:
        return None
    days, rest = divmod(seconds, 86400)
    return f"{_date(days)}T{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}Z"


@lru_cache(maxsize=1024)
def _date(days: int) -> str:
    try:
        return (date(1970, 1, 1) + timedelta(days)).isoformat()
    except OverflowError:
        return f"{days} days after 1970"  # which the reader of the object reports


def _shared(size: int, count: int) -> Callable[[Callable[[bytes], T]], Callable[[bytes], T]]:
    """Cache the results for the last *count* messages of less than *size* bytes: most recur."""
    def shared(convert: Callable[[bytes], T]) -> Callable[[bytes], T]:
        cached = lru_cache(maxsize=count)(convert)
        return lambda raw: cached(raw) if len(raw) < size else convert(raw)

    return shared


@_shared(256, 64)
def type_meta(raw: bytes) -> tuple[str, str]:
    """Return kind and API version."""
    message = parser("TypeMeta")(raw)
    return message.kind, message.api_version


def read_endpoint(raw: bytes) -> wire.Endpoint | Endpoint:
    """Read an endpoint. Raises DecodeError.

    API servers write its address, its conditions and its pod, which no other endpoint has, and then its node
    and its hints, which thousands share: those are read once. An endpoint that is written in another way, or
    has an address that the reader of the slice must see, is parsed as a whole.
    """
    try:
        conditions = raw[1] + 2
        pod = raw[conditions + 1] + conditions + 2
        size = raw[pod + 1]
        node = pod + 2 + size if size < 128 else pod + 3 + (size & 127 | raw[pod + 2] << 7)
        if (raw[0] == 0x0a and raw[conditions] == 0x12 and raw[pod] == 0x22 and conditions < 64 and pod < 128
                and node <= len(raw) < _THREE_BYTES):
            address = parse_address(raw[2:conditions].decode())
            if address[0] not in SPECIAL_FIRST_BYTES:
                return _new(Endpoint, (address, *_after_address(raw[conditions:pod] + raw[node:])))
    except (DecodeError, IndexError, ValueError):
        pass
    found = any_endpoint(raw)
    (read,) = read_endpoints((found,))
    return read or found  # which the reader of the slice reports


def _no_endpoint(_: bytes) -> wire.Endpoint:
    return wire.Endpoint()


def any_endpoint(raw: bytes) -> wire.Endpoint:
    """Parse an endpoint as a whole. Raises DecodeError."""
    message = _parse_endpoint(raw)
    hints = message.hints
    return wire.Endpoint(message.addresses, _conditions(message.conditions), message.node_name,
                         _hints(hints) if hints else None)


@_shared(256, 8192)
def _after_address(raw: bytes) -> tuple[object, ...]:
    """Return the fields of an `Endpoint` after its address, from one without. Raises DecodeError."""
    found = any_endpoint(raw)
    (read,) = read_endpoints([wire.Endpoint(["192.0.2.1"], found.conditions, found.node_name, found.hints)])
    assert read is not None
    return read[1:]


_same_endpoint = _shared(512, 4096)(read_endpoint)
"""As `read_endpoint`, for a slice that has changed: nearly all of its endpoints are as they were."""


@_shared(256, 1024)
def _conditions(raw: bytes) -> wire.Conditions:
    message = parser("Conditions")(raw)
    return wire.Conditions(*[
        getattr(message, name) if message.HasField(name) else None
        for name in ("ready", "serving", "terminating")])


@_shared(256, 1024)
def _hints(raw: bytes) -> wire.Hints:
    message = parser("Hints")(raw)
    return wire.Hints([wire.Hint(hint.name) for hint in message.for_zones],
                      [wire.Hint(hint.name) for hint in message.for_nodes])


@_shared(256, 1024)
def _service_port(raw: bytes) -> wire.ServicePort:
    message = parser("ServicePort")(raw)
    return wire.ServicePort(message.name, message.protocol, message.port, message.node_port)


@_shared(256, 1024)
def _service_status(raw: bytes) -> wire.ServiceStatus:
    return wire.ServiceStatus(wire.LoadBalancer([
        wire.Ingress(entry.ip, entry.ip_mode if entry.HasField("ip_mode") else None)
        for entry in parser("ServiceStatus")(raw).load_balancer.ingress]))


@_shared(256, 1024)
def _slice_port(raw: bytes) -> wire.SlicePort:
    message = parser("SlicePort")(raw)
    return wire.SlicePort(message.name, message.protocol, message.port)


_CONVERT: dict[str, Callable[[Any], Any]] = {
    "Service": to_service, "EndpointSlice": partial(to_slice, read=read_endpoint), "Node": to_node,
    "ServiceCIDR": to_service_cidr,
}
"""The kinds that an API server is asked for."""

_CONVERT_CHANGED = _CONVERT | {"EndpointSlice": partial(to_slice, read=_same_endpoint)}


class ProtobufDecoder(Generic[W, V]):
    """Decodes objects of one kind from protobuf, as their `Resource` does from JSON.

    Every answer is an envelope: the magic bytes and a runtime.Unknown with the kind and the bytes of the
    object. The items of a list are parsed one by one: an invalid object refuses only itself, and only one is
    in memory as messages.
    """

    def __init__(self, resource: decode.Resource[W, V]) -> None:
        self._resource = resource
        self._convert: Callable[[Any], W] = _CONVERT[resource.kind]
        self._convert_changed: Callable[[Any], W] = _CONVERT_CHANGED[resource.kind]
        self._parse = parser(resource.kind)

    def page(self, data: bytes) -> decode.Page[V]:
        kind = f"{self._resource.kind}List"
        try:
            page = parser("List")(_opened(data, kind, self._resource.api_version))
        except DecodeError as error:
            raise decode.Malformed(f"a {kind} that {_INVALID}") from error
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
                return decode.bookmark(to_meta(parser("Object")(raw).metadata))
            if len(raw) <= decode.MAX_OBJECT_BYTES:
                with suppress(DecodeError):
                    found = self._parse(raw)
                    convert = self._convert_changed if kind == "MODIFIED" else self._convert
                    reading = self._resource.read(convert(found))
                    return decode.WatchEvent(kind, found.metadata.resource_version, reading)
            version = parser("Versioned")(raw).metadata.resource_version
            return decode.WatchEvent(kind, version, self._reading(raw))
        except DecodeError as error:
            raise decode.Malformed(f"an event of a {self._resource.kind} that {_INVALID}") from error

    def _reading(self, raw: bytes) -> Reading[V]:
        if len(raw) > decode.MAX_OBJECT_BYTES:
            return self._refused(f"is larger than {decode.MAX_OBJECT_BYTES >> 20} MiB", raw)
        try:
            return self._resource.read(self._convert(self._parse(raw)))
        except DecodeError:
            return self._refused(_INVALID, raw)

    def _refused(self, problem: str, raw: bytes) -> Reading[V]:
        """Return the refusal of an object that can't be parsed, with its name if possible."""
        try:
            meta = parser("Identified")(raw).metadata
            name, namespace = meta.name, meta.namespace
        except DecodeError:
            name = namespace = None
        return self._resource.refused(FieldError("", problem), name, namespace)


def read_status(data: bytes) -> decode.Status:
    """Read a Status in its envelope. Raises Malformed."""
    try:
        status = parser("Status")(_opened(data, "Status", "v1"))
    except DecodeError as error:
        raise decode.Malformed(f"a Status that {_INVALID}") from error
    return decode.Status(status.code, status.reason, status.message,
                  decode.StatusDetails(status.details.retry_after_seconds))


def _opened(data: bytes, kind: str, api_version: str) -> bytes:
    """Return the bytes of the object in an envelope. Raises Malformed, DecodeError."""
    if not data.startswith(MAGIC):
        raise decode.Malformed(f"a {kind} that does not begin with the magic bytes of Kubernetes' protobuf")
    envelope = parser("Unknown")(memoryview(data)[len(MAGIC):])
    found = type_meta(envelope.type_meta)
    if found != (kind, api_version):
        raise decode.Malformed(f"{shown(found[1])} {shown(found[0])} instead of {api_version} {kind}")
    if envelope.content_encoding:
        raise decode.Malformed(f"a {kind} in another encoding, which is not supported")
    raw: bytes = envelope.raw
    return raw
