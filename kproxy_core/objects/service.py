"""Services, from the wire to the model.

As kube-proxy 1.36, pkg/proxy/serviceport.go and pkg/proxy/util. Absent fields get the API server's defaults.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from msgspec import UNSET

from kproxy_core.model.address import Address, Cidr, Family, family_of
from kproxy_core.model.service import PortSpec, Service, ServiceName
from kproxy_core.objects import reading, wire
from kproxy_core.store.events import ServiceGone, ServiceSet

AFFINITY_SECONDS = 10800
"""The API server's default for the timeout of ClientIP affinity."""
_MAX_AFFINITY_SECONDS = 86400
_TYPES = frozenset({None, "", "ClusterIP", "NodePort", "LoadBalancer"})
_FAMILIES: dict[str | None, Family] = {family.label: family for family in Family}

T = TypeVar("T")


def read_service(obj: wire.Service) -> reading.Reading[ServiceSet | ServiceGone]:
    """Read *obj*; ServiceGone if this proxy does not serve it."""
    meta = obj.metadata or wire.ServiceMeta()
    return reading.read_namespaced("Service", obj, meta, reading.service_name, _value)


def _value(
    name: ServiceName, obj: wire.Service, meta: wire.ServiceMeta, found: reading.Findings
) -> ServiceSet | ServiceGone:
    spec = obj.spec or wire.ServiceSpec()
    if meta.labels is not None and meta.labels.proxy_name is not UNSET:
        return ServiceGone(name)
    if spec.type == "ExternalName":
        return ServiceGone(name)
    if spec.type not in _TYPES:
        raise reading.Refused("spec.type", f"{reading.quoted(spec.type)} is not a type of Service")
    cluster_ips = _cluster_ips(spec)
    if not cluster_ips or not spec.ports:
        return ServiceGone(name)
    ports = _read_ports(spec.ports, "spec.ports", found)
    external_ips: tuple[Address, ...] = ()
    if spec.external_ips:
        external_ips = _each(spec.external_ips, "spec.externalIPs[{}]", reading.checked_address, found)
    source_ranges: tuple[Cidr, ...] = ()
    if spec.load_balancer_source_ranges:
        source_ranges = _source_ranges(spec.load_balancer_source_ranges, found)
    external_local = _is_local(spec.external_traffic_policy, "spec.externalTrafficPolicy", found) and (
        spec.type in ("NodePort", "LoadBalancer") or bool(spec.external_ips)
    )
    return ServiceSet(Service(
        name=name,
        ports=ports,
        cluster_ips=cluster_ips,
        created=_created(meta.creation_timestamp, found),
        external_ips=external_ips,
        load_balancer_ips=_load_balancer_ips(obj.status, found),
        source_ranges=source_ranges,
        affinity_seconds=_affinity_seconds(spec, found),
        internal_policy_local=_is_local(spec.internal_traffic_policy, "spec.internalTrafficPolicy", found),
        external_policy_local=external_local,
        health_check_node_port=(
            _health_check_node_port(spec.health_check_node_port, found)
            if external_local and spec.type == "LoadBalancer" else 0
        ),
    ), reading.origin_of(meta))


def _cluster_ips(spec: wire.ServiceSpec) -> tuple[Address, ...]:
    """Return the ClusterIPs, one a family; () if there are none, as of a headless Service. Raises Refused."""
    texts, path = spec.cluster_ips, "spec.clusterIPs[{}]"
    if not texts:
        texts, path = [spec.cluster_ip], "spec.clusterIP"
    first = texts[0] if spec.cluster_ip is None else spec.cluster_ip
    if not first or first == "None":
        return ()
    if first != texts[0]:
        raise reading.Refused(path.format(0), f"{reading.quoted(texts[0])} differs from spec.clusterIP")
    labels = spec.ip_families or ()
    for i, label in enumerate(labels):
        if label not in _FAMILIES:
            raise reading.Refused(f"spec.ipFamilies[{i}]", f"{reading.quoted(label)} is not an IP family")
    by_family: dict[Family, Address] = {}
    for i, text in enumerate(texts[:len(labels)] if labels else texts):
        address = reading.checked_address(text, path, i)
        family = family_of(address)
        if labels and family.label != labels[i]:
            problem = f"{text} is not an {labels[i]} address, as spec.ipFamilies says"
            raise reading.Refused(path.format(i), problem)
        by_family.setdefault(family, address)
    return tuple(by_family.values())


@reading.share_ports
def _read_ports(
    ports: Sequence[wire.ServicePort], path: str, found: reading.Findings
) -> tuple[PortSpec, ...]:
    """Return the valid ones of *ports*. Raises Refused if there are none."""
    kept: dict[tuple[str, int], PortSpec] = {}
    for i, port in enumerate(ports):
        name = port.name or ""
        protocol = reading.PROTOCOLS.get(port.protocol)
        number = port.port or 0
        node_port = port.node_port or 0
        if protocol is None:
            found.add(f"{path}[{i}].protocol", f"{reading.quoted(port.protocol)} is not TCP, UDP or SCTP")
        elif not 0 < number < 65536:
            problem = "is missing" if port.port is None else f"{number} is not a port (1 to 65535)"
            found.add(f"{path}[{i}].port", problem)
        elif not 0 <= node_port < 65536:
            found.add(f"{path}[{i}].nodePort", f"{node_port} is not a port (1 to 65535)")
        elif name and not reading.is_label(name):
            found.add(f"{path}[{i}].name", f"{reading.quoted(name)} is not a DNS label")
        elif (name, protocol) in kept:
            other = f"a second {protocol.name} port with the name {reading.quoted(name)}"
            found.add(f"{path}[{i}].name", other)
        else:
            name = sys.intern(name)
            kept[name, protocol] = PortSpec(name, protocol, number, node_port)
    if not kept:
        raise found.pop()
    return tuple(kept.values())


def _load_balancer_ips(status: wire.ServiceStatus | None, found: reading.Findings) -> tuple[Address, ...]:
    """Return the addresses to serve: no host names, and none with ``ipMode: Proxy`` (KEP-1860)."""
    if status is None or status.load_balancer is None or not status.load_balancer.ingress:
        return ()
    texts = [entry.ip if entry.ip_mode in (None, "VIP") else None for entry in status.load_balancer.ingress]
    return _each(texts, "status.loadBalancer.ingress[{}].ip", reading.checked_address, found)


def _each(
    texts: Iterable[str | None], field: str, check: Callable[[str | None, str, int], T],
    found: reading.Findings,
) -> tuple[T, ...]:
    """Return the results of *check* for *texts*, each once. Blank texts are dropped, bad ones reported."""
    kept: dict[T, None] = {}
    for i, text in enumerate(texts):
        if text and (text := text.strip()):
            try:
                kept[check(text, field, i)] = None
            except reading.Refused as refused:
                found.append(refused)
    return tuple(kept)


def _source_ranges(texts: Sequence[str | None], found: reading.Findings) -> tuple[Cidr, ...]:
    """Return the networks that restrict clients; none of a family in which one covers every address.

    Beside an invalid entry, only valid ones admit clients: a family without any admits nobody. kube-proxy
    ignores such entries, because API servers reject them; manifests may have them.
    """
    ranges: dict[Cidr, None] = {}
    is_valid = True
    for i, text in enumerate(texts):
        try:
            ranges[reading.checked_cidr(text and text.strip(), "spec.loadBalancerSourceRanges[{}]", i)] = None
        except reading.Refused as refused:
            found.add(refused.field, f"{refused.problem}; only clients in valid ranges are admitted")
            is_valid = False
    open_to_all = {r.family for r in ranges if r.prefix == 0}
    kept = tuple(r for r in ranges if r.family not in open_to_all)
    if is_valid:
        return kept
    ranged = {r.family for r in ranges}
    return kept + tuple(family.no_source for family in Family if family not in ranged)


def _affinity_seconds(spec: wire.ServiceSpec, found: reading.Findings) -> int:
    if spec.session_affinity in (None, "", "None"):
        return 0
    if spec.session_affinity != "ClientIP":
        unknown = reading.quoted(spec.session_affinity)
        found.add("spec.sessionAffinity", f"{unknown} is neither None nor ClientIP")
        return 0
    config = spec.session_affinity_config
    seconds = config.client_ip.timeout_seconds if config and config.client_ip else None
    if seconds is None:
        return AFFINITY_SECONDS
    if 0 < seconds <= _MAX_AFFINITY_SECONDS:
        return seconds
    found.add(
        "spec.sessionAffinityConfig.clientIP.timeoutSeconds",
        f"{seconds} is not from 1 to {_MAX_AFFINITY_SECONDS}; using {AFFINITY_SECONDS}",
    )
    return AFFINITY_SECONDS


def _is_local(policy: str | None, field: str, found: reading.Findings) -> bool:
    if policy not in (None, "", "Cluster", "Local"):
        found.add(field, f"{reading.quoted(policy)} is neither Cluster nor Local; using Cluster")
    return policy == "Local"


def _health_check_node_port(port: int | None, found: reading.Findings) -> int:
    if port is not None and 0 < port < 65536:
        return port
    problem = f"{port} is not a port (1 to 65535)" if port else "is 0: no health check is served"
    found.add("spec.healthCheckNodePort", problem)
    return 0


def _created(stamp: str | None, found: reading.Findings) -> str:
    """Return *stamp* in UTC and whole seconds, so that such texts sort by time."""
    if not stamp:
        return ""
    try:
        moment = datetime.fromisoformat(stamp)
        if moment.tzinfo is None:
            raise ValueError(stamp)
        if len(stamp) == 20 and stamp[10] == "T" and stamp.endswith("Z"):
            return sys.intern(stamp)  # as every API server writes it
        utc = moment.astimezone(UTC).replace(tzinfo=None)
        return sys.intern(f"{utc.isoformat(timespec='seconds')}Z")
    except (ValueError, OverflowError):
        found.add("metadata.creationTimestamp", f"{reading.quoted(stamp)} is not a time (RFC 3339)")
        return ""
