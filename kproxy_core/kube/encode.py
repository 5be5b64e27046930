"""The model's objects as Kubernetes JSON, with the fields that a proxy reads: the reverse of `reading`."""

from collections.abc import Iterable, Mapping
from typing import Any

from kproxy_core.model.address import Address, Cidr, format_address, format_socket
from kproxy_core.model.duration import Duration
from kproxy_core.model.service import Endpoint, EndpointSlice, Service, ServiceName

Json = dict[str, Any]


def encode_objects(services: Mapping[ServiceName, Service], slices: Iterable[EndpointSlice]) -> list[Json]:
    """Return Services and Forwards by name, then the EndpointSlices of Services. Looks at each slice once."""
    forwards: dict[ServiceName, list[EndpointSlice]] = {
        name: [] for name, service in services.items() if not service.cluster_ips}
    of_services: list[EndpointSlice] = []
    for piece in slices:
        forwards.get(piece.service, of_services).append(piece)
    return [
        *(encode_forward(service, forwards[name]) if name in forwards else encode_service(service)
          for name, service in sorted(services.items())),
        *map(encode_slice, of_services),
    ]  # fmt: skip


def encode_forward(service: Service, slices: Iterable[EndpointSlice]) -> Json:
    """Return the Forward that stands for *service* and its *slices*, with the endpoints that are ready."""
    listen = [
        f"{where}/{port.protocol.name.lower()}" for port in service.ports for where in (
            *(format_socket(address, port.port) for address in port.addresses),
            *([f"node:{port.node_port}"] if port.node_port else ()))
    ]
    to = [
        format_socket(endpoint.address, piece.ports[0].port)
        + ("" if piece.weight is None else f" weight={piece.weight}")
        for piece in slices for endpoint in piece.endpoints if endpoint.ready
    ]
    return {"apiVersion": "kproxy.dev/v1", "kind": "Forward", "name": service.name.name, "listen": listen,
            "to": to}  # fmt: skip


def encode_service(service: Service) -> Json:
    spec: Json = {
        "type": _type(service), "clusterIP": format_address(service.cluster_ips[0]),
        "clusterIPs": _texts(service.cluster_ips),
        "ports": [
            {"name": port.name, "protocol": port.protocol.name, "port": port.port, "nodePort": port.node_port}
            for port in service.ports
        ],
        "externalIPs": _texts(service.external_ips),
        "loadBalancerSourceRanges": list(map(str, service.source_ranges)),
        "internalTrafficPolicy": _policy(is_local=service.internal_policy_local),
        "externalTrafficPolicy": _policy(is_local=service.external_policy_local),
    }  # fmt: skip
    if service.affinity_seconds:
        spec["sessionAffinity"] = "ClientIP"
        spec["sessionAffinityConfig"] = {"clientIP": {"timeoutSeconds": service.affinity_seconds}}
    if service.health_check_node_port:
        spec["healthCheckNodePort"] = service.health_check_node_port
    ingress = [{"ip": text, "ipMode": "VIP"} for text in _texts(service.load_balancer_ips)]
    return {
        "apiVersion": "v1", "kind": "Service", "metadata": {
            "namespace": service.name.namespace, "name": service.name.name,
            **({"creationTimestamp": service.created} if service.created else {}),
            **_annotations({
                "kproxy.dev/removed-endpoints": service.removed_endpoints,
                "kproxy.dev/endpoint-health": service.endpoint_health,
                "kproxy.dev/last-resort": _last_resort(service.last_resort),
                "kproxy.dev/hash": service.hash_by})},
        "spec": spec, "status": {"loadBalancer": {"ingress": ingress}},
    }  # fmt: skip


def encode_slice(piece: EndpointSlice) -> Json:
    return {
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": {
            "namespace": piece.name.namespace, "name": piece.name.name,
            "labels": {"kubernetes.io/service-name": piece.service.name},
            **_annotations({"service.cilium.io/weight": "" if piece.weight is None else str(piece.weight)})},
        "addressType": piece.family.label,
        "ports": [
            {"name": port.name, "protocol": port.protocol.name, "port": port.port} for port in piece.ports],
        "endpoints": list(map(_endpoint, piece.endpoints)),
    }  # fmt: skip


def encode_node(name: str, zone: str, addresses: Iterable[Address], pod_cidrs: Iterable[Cidr]) -> Json:
    return {
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": zone} if zone else {}},
        "spec": {"podCIDRs": list(map(str, pod_cidrs))},
        "status": {"addresses": [{"type": "InternalIP", "address": text} for text in _texts(addresses)]},
    }  # fmt: skip


def encode_service_cidr(cidrs: Iterable[Cidr]) -> Json:
    return {
        "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": {"name": "kubernetes"},
        "spec": {"cidrs": list(map(str, cidrs))},
    }  # fmt: skip


def _annotations(values: Json) -> Json:
    given = {key: value for key, value in values.items() if value}
    return {"annotations": given} if given else {}


def _last_resort(seconds: float | None) -> str:
    return "" if seconds is None else str(Duration(seconds)) if seconds else "off"


def _type(service: Service) -> str:
    if service.health_check_node_port:
        return "LoadBalancer"
    return "NodePort" if service.external_policy_local else "ClusterIP"


def _endpoint(endpoint: Endpoint) -> Json:
    hints = {
        "forZones": [{"name": name} for name in sorted(endpoint.zone_hints)],
        "forNodes": [{"name": name} for name in sorted(endpoint.node_hints)],
    }  # fmt: skip
    return {
        "addresses": [format_address(endpoint.address)],
        "conditions": {
            "ready": endpoint.ready, "serving": endpoint.serving, "terminating": endpoint.terminating},
        **({"nodeName": endpoint.node} if endpoint.node else {}),
        **({"hints": hints} if any(hints.values()) else {}),
    }  # fmt: skip


def _texts(addresses: Iterable[Address]) -> list[str]:
    return list(map(format_address, addresses))


def _policy(*, is_local: bool) -> str:
    return "Local" if is_local else "Cluster"
