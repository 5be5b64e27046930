"""Parsed protobuf messages to the structs that JSON is decoded to, so that both are read alike.

An API server sends "" and 0 in protobuf for most fields that JSON leaves out; the readings do not differ.
"""

from collections.abc import Callable
from datetime import date, timedelta
from functools import lru_cache
from typing import Any, TypeVar, cast

from msgspec import UNSET

from kproxy_core.model.endpoint import Endpoint
from kproxy_core.objects import wire
from kproxy_core.objects.protobuf.schema import parser
from kproxy_core.objects.slice import read_endpoints

T = TypeVar("T")

_parse_endpoint = parser("Endpoint")  # not looked up each time: most messages are endpoints


def to_service(message: Any) -> wire.Service:
    meta, spec = message.metadata, message.spec
    return wire.Service(
        wire.ServiceMeta(
            meta.name, meta.namespace, meta.resource_version,
            creation_timestamp=_time(meta.creation_timestamp),
            labels=wire.ServiceLabels(meta.labels.get("service.kubernetes.io/service-proxy-name", UNSET))),
        wire.ServiceSpec(
            spec.type, spec.cluster_ip or None, spec.cluster_ips, spec.ip_families,
            [_service_port(port) for port in spec.ports], spec.external_ips,
            spec.load_balancer_source_ranges, spec.session_affinity,
            _affinity(spec.session_affinity_config) if spec.HasField("session_affinity_config") else None,
            spec.external_traffic_policy, spec.internal_traffic_policy, spec.health_check_node_port),
        _service_status(message.status))


def to_slice(message: Any) -> wire.EndpointSlice:
    meta = message.metadata
    labels, annotations = meta.labels, meta.annotations
    return wire.EndpointSlice(
        wire.SliceMeta(
            meta.name, meta.namespace, meta.resource_version,
            labels=wire.SliceLabels(
                labels.get("kubernetes.io/service-name"),
                labels.get("service.kubernetes.io/headless", UNSET)),
            annotations=wire.SliceAnnotations(
                trigger_time=annotations.get("endpoints.kubernetes.io/last-change-trigger-time"))),
        message.address_type,
        cast("list[wire.Endpoint]", [_endpoint(raw) for raw in message.endpoints]),
        [_slice_port(port) for port in message.ports])


def to_node(message: Any) -> wire.Node:
    meta, spec = message.metadata, message.spec
    return wire.Node(
        wire.NodeMeta(
            meta.name, meta.namespace, meta.resource_version,
            labels=wire.NodeLabels(meta.labels.get("topology.kubernetes.io/zone")),
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


@_shared(512, 4096)
def _endpoint(raw: bytes) -> wire.Endpoint | Endpoint:
    """Read an endpoint. In a slice that changes, nearly all are as they were before."""
    message = _parse_endpoint(raw)
    hints = message.hints
    found = wire.Endpoint(message.addresses, _conditions(message.conditions), message.node_name,
                          _hints(hints) if hints else None)
    (read,) = read_endpoints((found,))
    return read or found  # which the reader of the slice reports


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
