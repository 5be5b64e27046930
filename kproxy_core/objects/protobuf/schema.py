"""The protobuf messages of Kubernetes 1.36: only the fields that a proxy reads. Parsing skips all others.

Numbers and types are those of the API's generated.proto files: core/v1, discovery/v1, networking/v1, meta/v1
and runtime. Field names are those of `objects.wire`. Two types differ: ``map`` is a map of strings, and
``bytes`` also stands for a message that `convert` parses on its own, because the same few values recur in
thousands of objects.
"""

from functools import cache
from typing import Any

from google.protobuf.descriptor_pb2 import (
    EDITION_2023,
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

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
                   "health_check_node_port=12 int32, session_affinity_config=14 SessionAffinityConfig, "
                   "cluster_ips=18 repeated string, ip_families=19 repeated string, "
                   "internal_traffic_policy=22 string",
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

_PACKAGE = "kproxy"


def _described() -> bytes:
    """Return the messages as a serialized file descriptor.

    Of an edition with field presence, like proto2, and in which strings must be UTF-8, as proto2's need not.
    """
    file = FileDescriptorProto(name="kproxy.proto", package=_PACKAGE, syntax="editions", edition=EDITION_2023)
    for name, fields in _MESSAGES.items():
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


_pool = DescriptorPool()
_pool.AddSerializedFile(_described())


@cache
def parser(name: str) -> Any:
    """Return the function that parses bytes as the message *name*. It raises DecodeError."""
    return GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")).FromString
