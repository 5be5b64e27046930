"""API objects from the wire to the model: every field checked, every finding named."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain
from sys import intern
from typing import Any, Generic, TypeVar

from msgspec import UNSET, Struct
from msgspec.structs import replace

from kproxy_core.kube import wire
from kproxy_core.model.address import (
    Address,
    Cidr,
    Family,
    Protocol,
    family_of,
    format_address,
    parse_address,
    parse_cidr,
)
from kproxy_core.model.events import (
    BadObject,
    NodeSet,
    ServiceCidrSet,
    ServiceGone,
    ServiceSet,
    SliceGone,
    SliceSet,
)
from kproxy_core.model.node import NodeObject
from kproxy_core.model.service import (
    DEFAULT_WEIGHT,
    HIGHEST_WEIGHT,
    Endpoint,
    EndpointSlice,
    PortSpec,
    Service,
    ServiceName,
    SliceName,
    SlicePort,
    parse_last_resort,
)

M = TypeVar("M", bound=wire.ObjectMeta)
N = TypeVar("N", bound=tuple[str, str])
T = TypeVar("T")
V = TypeVar("V")
W = TypeVar("W")

AFFINITY_SECONDS = 10800
"""The API server's default for the timeout of ClientIP affinity."""
MAX_ENDPOINTS = 1000
MAX_PORTS = 20_000
"""Limits of the API server for one slice."""
MAX_DESTINATIONS = 100_000
"""Limit for endpoints times ports, far above any real slice, to bound memory."""
DELETION_TAINT = "ToBeDeletedByClusterAutoscaler"
"""Set by the cluster autoscaler before it removes the node: load balancers should avoid it (KEP-3836)."""

PROTOCOLS: dict[str | None, Protocol] = {None: Protocol.TCP, "": Protocol.TCP} | {
    protocol.name: protocol for protocol in Protocol
}
"""A port's protocol as the API spells it; absent means TCP."""

_FEW_PORTS = 16
_SPECIAL_FIRST_OCTETS = frozenset({0, 127, *range(224, 240)})
SPECIAL_FIRST_BYTES = _SPECIAL_FIRST_OCTETS | {255}
"""The first bytes of all addresses that `is_special` finds, and of some others."""
_LABEL = r"[a-z0-9][-a-z0-9]{0,62}(?<!-)"
is_label = re.compile(_LABEL).fullmatch
_PART = r"[a-z0-9][-a-z0-9]*(?<!-)"
_is_subdomain = re.compile(rf"(?=.{{1,253}}\Z){_PART}(?:\.{_PART})*").fullmatch

_MAX_AFFINITY_SECONDS = 86400
_TYPES = frozenset({None, "", "ClusterIP", "NodePort", "LoadBalancer"})
_FAMILIES: dict[str | None, Family] = {family.label: family for family in Family}
_NO_CONDITIONS = wire.Conditions()
_NO_SETTINGS = wire.ServiceAnnotations()
_NOWHERE: frozenset[str] = frozenset()
_new = tuple.__new__  # half the time of a NamedTuple's constructor, which is a Python function


class Reading(Struct, Generic[V], frozen=True, gc=False):
    """One API object, read."""

    name: tuple[str, str] | None
    """Namespace ("" for kinds that have none) and name; None: they are invalid."""
    value: V | None
    """The decoded object; None: it is refused as a whole, for the reason in `bad`."""
    bad: tuple[BadObject, ...] = ()
    """The invalid parts."""


class FieldError(Exception):
    """An invalid field. Raised if it makes the whole object unusable."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem


class FieldErrors(list[FieldError]):
    """The invalid fields of one object. A list, which is created quickly: nearly every object has none."""

    __slots__ = ()

    def add(self, field: str, problem: str) -> None:
        self.append(FieldError(field, problem))

    def bad(self, kind: str, namespace: str | None, name: str | None) -> tuple[BadObject, ...]:
        """Return the errors as those of the object *name*."""
        name = f"{namespace}/{name}" if namespace and name else name or ""
        return tuple(BadObject(kind, shown(name), found.field, found.problem) for found in self)


ReadPorts = Callable[[Sequence[W], str, FieldErrors], tuple[V, ...]]
"""Returns the valid ones of an object's ports, which are at a path in it."""


def shown(text: str, limit: int = 80) -> str:
    """Return *text* for one line of a log: unchanged if plain and short, else quoted and cut."""
    plain = text.isascii() and text.isprintable() and len(text) <= limit
    return text if plain else quoted(text, limit)


def checked_label(text: str | None, field: str) -> str:
    """Return *text* if it is a DNS label (RFC 1123: at most 63 of a-z, 0-9, "-"). Raises FieldError."""
    if text and is_label(text):
        return text
    raise FieldError(field, f"{quoted(text)} is not a DNS label" if text else "is missing")


def checked_subdomain(text: str | None, field: str) -> str:
    """Return *text* if it is a name of at most 253 characters, of parts and dots. Raises FieldError.

    As IsDNS1123Subdomain of Kubernetes, a part may be longer than a DNS label.
    """
    if text and (is_label(text) or _is_subdomain(text)):
        return text
    raise FieldError(field, f"{quoted(text)} is not a DNS name" if text else "is missing")


def read_namespaced(
    kind: str, obj: W, meta: M, named: Callable[[str, str | None], N],
    value: Callable[[N, W, M, FieldErrors], V],
) -> Reading[V]:
    """Read *obj*, of a namespaced *kind*: *named* makes its name, *value* its value. Both may raise Refused.

    A namespace is a DNS label, and that of a manifest without one is ``default``.
    """
    namespace = meta.namespace or "default"
    found = FieldErrors()
    name = None
    try:
        name = named(_namespace(namespace), meta.name)
        read = value(name, obj, meta, found)
    except FieldError as refused:
        found.append(refused)
        return Reading(name, None, found.bad(kind, namespace, meta.name))
    return Reading(name, read, found.bad(kind, namespace, meta.name) if found else ())


def share_ports(read: ReadPorts[W, V]) -> ReadPorts[W, V]:
    """Cache the results of *read* for valid ports, because most objects have the same ports as others.

    Objects with many ports are not cached, to bound memory.
    """
    @lru_cache(maxsize=1024)
    def read_good(ports: tuple[W, ...]) -> tuple[V, ...]:
        found = FieldErrors()
        kept = read(ports, "", found)
        if found:
            raise found.pop()
        return kept

    def read_shared(ports: Sequence[W], path: str, found: FieldErrors) -> tuple[V, ...]:
        if len(ports) > _FEW_PORTS:
            return read(ports, path, found)
        try:
            return read_good(tuple(ports))
        except FieldError:
            return read(ports, path, found)

    return read_shared


@lru_cache(maxsize=1024)
def _namespace(text: str) -> str:
    """Return *text*, interned, if it is a DNS label. Raises FieldError. Cached, because namespaces recur."""
    return sys.intern(checked_label(text, "metadata.namespace"))


def origin_of(meta: wire.ObjectMeta) -> str:
    """Return the resource version in words; "" without one, as in a manifest."""
    return f"resource version {meta.resource_version}" if meta.resource_version else ""


def service_name(namespace: str, name: str | None) -> ServiceName:
    """Return the checked name of a Service. It is interned: many objects hold it. Raises FieldError."""
    return ServiceName(namespace, sys.intern(checked_label(name, "metadata.name")))


def checked_address(text: str | None, field: str, at: int | str) -> Address:
    """Return the address *text* if it can receive traffic. *at* completes *field*. Raises FieldError."""
    try:
        address = parse_address(text or "")
    except ValueError:
        raise FieldError(field.format(at), f"{quoted(text)} is not an IP address") from None
    if is_special(address):
        problem = f"{text} is an unspecified, loopback, multicast or broadcast address"
        raise FieldError(field.format(at), problem)
    return address


def checked_cidr(text: str | None, field: str, at: int) -> Cidr:
    """Return the network *text*. *at* completes *field*. Raises FieldError."""
    try:
        return parse_cidr(text or "")
    except ValueError:
        raise FieldError(field.format(at), f"{quoted(text)} is not a CIDR") from None


def is_special(address: Address) -> bool:
    """Return whether *address* is unspecified, loopback, multicast or broadcast.

    An API server keeps those out of Services and endpoints; a directory of manifests has none.
    """
    if len(address) == 4:
        return address[0] in _SPECIAL_FIRST_OCTETS or address == b"\xff\xff\xff\xff"
    return address[0] == 0xFF or (address[15] < 2 and not any(address[:15]))


def quoted(text: str | None, limit: int = 60) -> str:
    """Return a string from outside for the text of a problem: quoted, in ASCII, cut."""
    if text is None:
        return "nothing"
    return ascii(text if len(text) <= limit else text[:limit] + "...")


# Services, as in kube-proxy 1.36 (pkg/proxy/serviceport.go, pkg/proxy/util). Absent fields get the API
# server's defaults.

def read_service(obj: wire.Service) -> Reading[ServiceSet | ServiceGone]:
    """Read *obj*; ServiceGone if this proxy does not serve it."""
    meta = obj.metadata or wire.ServiceMeta()
    return read_namespaced("Service", obj, meta, service_name, _to_service)


def _to_service(
    name: ServiceName, obj: wire.Service, meta: wire.ServiceMeta, found: FieldErrors
) -> ServiceSet | ServiceGone:
    spec = obj.spec or wire.ServiceSpec()
    if meta.labels is not None and meta.labels.proxy_name is not UNSET:
        return ServiceGone(name)
    if spec.type == "ExternalName":
        return ServiceGone(name)
    if spec.type not in _TYPES:
        raise FieldError("spec.type", f"{quoted(spec.type)} is not a type of Service")
    cluster_ips = _cluster_ips(spec)
    if not cluster_ips or not spec.ports:
        return ServiceGone(name)
    ports = _read_ports(spec.ports, "spec.ports", found)
    external_ips: tuple[Address, ...] = ()
    if spec.external_ips:
        external_ips = _each(spec.external_ips, "spec.externalIPs[{}]", checked_address, found)
    source_ranges: tuple[Cidr, ...] = ()
    if spec.load_balancer_source_ranges:
        source_ranges = _source_ranges(spec.load_balancer_source_ranges, found)
    external_local = _is_local(spec.external_traffic_policy, "spec.externalTrafficPolicy", found) and (
        spec.type in ("NodePort", "LoadBalancer") or bool(spec.external_ips)
    )
    service = Service(
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
    )
    if meta.annotations is not None and meta.annotations != _NO_SETTINGS:
        service = _with_settings(service, meta.annotations, found)
    if spec.publish_not_ready_addresses:  # Its clients do not care about readiness.
        service = replace(service, last_resort=0)
    return ServiceSet(service, origin_of(meta))


def _with_settings(service: Service, given: wire.ServiceAnnotations, found: FieldErrors) -> Service:
    return replace(
        service,
        removed_endpoints=_setting(given.removed_endpoints, "kproxy.dev/removed-endpoints",
                                   _one_of("keep", "reset"), "", found),
        endpoint_health=_setting(given.endpoint_health, "kproxy.dev/endpoint-health",
                                 _one_of("off", "passive"), "", found),
        last_resort=_setting(given.last_resort, "kproxy.dev/last-resort", parse_last_resort, None, found),
        hash_by=_setting(given.hash_by, "kproxy.dev/hash", _one_of("client", "flow"), "", found),
    )  # fmt: skip


def _setting(
    given: object, annotation: str, read: Callable[[str], T], default: T, found: FieldErrors
) -> T:
    """Return the value of an annotation that this proxy defines; *default* if it is absent or wrong."""
    if given is None:
        return default
    try:
        if not isinstance(given, str):
            raise ValueError("must be a string, in quotes")
        return read(given)
    except ValueError as error:
        found.add(f"metadata.annotations[{annotation}]", f"{quoted(str(given))} is ignored: it {error}")
        return default


def _one_of(*words: str) -> Callable[[str], Any]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"must be {' or '.join(words)}")
        return text

    return read


def _whole_number(highest: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= highest):
            raise ValueError(f"must be a whole number from 0 to {highest}")
        return int(text)

    return read


def _cluster_ips(spec: wire.ServiceSpec) -> tuple[Address, ...]:
    """Return the ClusterIPs, one a family; () for a headless Service. Raises FieldError."""
    texts, path = spec.cluster_ips, "spec.clusterIPs[{}]"
    if not texts:
        texts, path = [spec.cluster_ip], "spec.clusterIP"
    first = spec.cluster_ip or texts[0]  # "" is absent, as in protobuf
    if not first or first == "None":
        return ()
    if first != texts[0]:
        raise FieldError(path.format(0), f"{quoted(texts[0])} differs from spec.clusterIP")
    labels = spec.ip_families or ()
    for i, label in enumerate(labels):
        if label not in _FAMILIES:
            raise FieldError(f"spec.ipFamilies[{i}]", f"{quoted(label)} is not an IP family")
    by_family: dict[Family, Address] = {}
    for i, text in enumerate(texts[:len(labels)] if labels else texts):
        address = checked_address(text, path, i)
        family = family_of(address)
        if labels and family.label != labels[i]:
            problem = f"{text} is not an {labels[i]} address, as spec.ipFamilies says"
            raise FieldError(path.format(i), problem)
        by_family.setdefault(family, address)
    return tuple(by_family.values())


@share_ports
def _read_ports(
    ports: Sequence[wire.ServicePort], path: str, found: FieldErrors
) -> tuple[PortSpec, ...]:
    """Return the valid ones of *ports*. Raises FieldError if there are none."""
    kept: dict[tuple[str, int], PortSpec] = {}
    for i, port in enumerate(ports):
        name = port.name or ""
        protocol = PROTOCOLS.get(port.protocol)
        number = port.port or 0
        node_port = port.node_port or 0
        if protocol is None:
            found.add(f"{path}[{i}].protocol", f"{quoted(port.protocol)} is not TCP, UDP or SCTP")
        elif not 0 < number < 65536:
            problem = "is missing" if port.port is None else f"{number} is not a port (1 to 65535)"
            found.add(f"{path}[{i}].port", problem)
        elif not 0 <= node_port < 65536:
            found.add(f"{path}[{i}].nodePort", f"{node_port} is not a port (1 to 65535)")
        elif name and not is_label(name):
            found.add(f"{path}[{i}].name", f"{quoted(name)} is not a DNS label")
        elif (name, protocol) in kept:
            other = f"a second {protocol.name} port with the name {quoted(name)}"
            found.add(f"{path}[{i}].name", other)
        else:
            name = sys.intern(name)
            kept[name, protocol] = PortSpec(name, protocol, number, node_port)
    if not kept:
        raise found.pop()
    return tuple(kept.values())


def _load_balancer_ips(status: wire.ServiceStatus | None, found: FieldErrors) -> tuple[Address, ...]:
    """Return the addresses to serve: no host names, and none with ``ipMode: Proxy`` (KEP-1860)."""
    if status is None or status.load_balancer is None or not status.load_balancer.ingress:
        return ()
    texts = [entry.ip if entry.ip_mode in (None, "VIP") else None for entry in status.load_balancer.ingress]
    return _each(texts, "status.loadBalancer.ingress[{}].ip", checked_address, found)


def _each(
    texts: Iterable[str | None], field: str, check: Callable[[str | None, str, int], T],
    found: FieldErrors,
) -> tuple[T, ...]:
    """Return the results of *check* for *texts*, each once. Blank texts are dropped, bad ones reported."""
    kept: dict[T, None] = {}
    for i, text in enumerate(texts):
        if text and (text := text.strip()):
            try:
                kept[check(text, field, i)] = None
            except FieldError as refused:
                found.append(refused)
    return tuple(kept)


def _source_ranges(texts: Sequence[str | None], found: FieldErrors) -> tuple[Cidr, ...]:
    """Return the networks that restrict clients; none of a family in which one covers every address.

    Beside an invalid entry, only valid ones admit clients: a family without any admits nobody. kube-proxy
    ignores such entries, because API servers reject them; manifests may have them.
    """
    ranges: dict[Cidr, None] = {}
    is_valid = True
    for i, text in enumerate(texts):
        try:
            ranges[checked_cidr(text and text.strip(), "spec.loadBalancerSourceRanges[{}]", i)] = None
        except FieldError as refused:
            found.add(refused.field, f"{refused.problem}; only clients in valid ranges are admitted")
            is_valid = False
    open_to_all = {r.family for r in ranges if r.prefix == 0}
    kept = tuple(r for r in ranges if r.family not in open_to_all)
    if is_valid:
        return kept
    ranged = {r.family for r in ranges}
    return kept + tuple(family.no_source for family in Family if family not in ranged)


def _affinity_seconds(spec: wire.ServiceSpec, found: FieldErrors) -> int:
    if spec.session_affinity in (None, "", "None"):
        return 0
    if spec.session_affinity != "ClientIP":
        unknown = quoted(spec.session_affinity)
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


def _is_local(policy: str | None, field: str, found: FieldErrors) -> bool:
    if policy not in (None, "", "Cluster", "Local"):
        found.add(field, f"{quoted(policy)} is neither Cluster nor Local; using Cluster")
    return policy == "Local"


def _health_check_node_port(port: int | None, found: FieldErrors) -> int:
    if port is not None and 0 < port < 65536:
        return port
    problem = f"{port} is not a port (1 to 65535)" if port else "is 0: no health check is served"
    found.add("spec.healthCheckNodePort", problem)
    return 0


def _created(stamp: str | None, found: FieldErrors) -> str:
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
        found.add("metadata.creationTimestamp", f"{quoted(stamp)} is not a time (RFC 3339)")
        return ""


# EndpointSlices, as in kube-proxy 1.36 (pkg/proxy/endpointslicecache.go). Absent fields get the API server's
# defaults.

def read_slice(obj: wire.EndpointSlice) -> Reading[SliceSet | SliceGone]:
    """Read *obj*; SliceGone if it can't belong to a Service that is served."""
    meta = obj.metadata or wire.SliceMeta()
    return read_namespaced("EndpointSlice", obj, meta, _slice_name, _to_slice)


def _slice_name(namespace: str, name: str | None) -> SliceName:
    return _new(SliceName, (namespace, checked_subdomain(name, "metadata.name")))


def _to_slice(
    name: SliceName, obj: wire.EndpointSlice, meta: wire.SliceMeta, found: FieldErrors
) -> SliceSet | SliceGone:
    labels = meta.labels
    if labels is None or not labels.service_name or labels.headless is not UNSET:
        return SliceGone(name)
    if obj.address_type == "FQDN":
        return SliceGone(name)
    if not obj.address_type:
        raise FieldError("addressType", "is missing")
    family = _FAMILIES.get(obj.address_type)
    if family is None:
        raise FieldError("addressType", f"{quoted(obj.address_type)} is not IPv4, IPv6 or FQDN")
    service = checked_label(labels.service_name, "metadata.labels[kubernetes.io/service-name]")
    endpoints: Sequence[wire.Endpoint | Endpoint] = obj.endpoints or []
    ports = obj.ports or []
    if len(endpoints) > MAX_ENDPOINTS:
        raise FieldError("endpoints", f"{len(endpoints)} of them; a slice holds at most {MAX_ENDPOINTS}")
    if len(ports) > MAX_PORTS:
        raise FieldError("ports", f"{len(ports)} of them; a slice holds at most {MAX_PORTS}")
    if len(endpoints) * len(ports) > MAX_DESTINATIONS:
        many = f"{len(ports)} of them with {len(endpoints)} endpoints each is too much"
        raise FieldError("ports", many)
    annotations = meta.annotations or wire.SliceAnnotations()
    stamp = annotations.trigger_time
    piece = EndpointSlice(
        name,
        _new(ServiceName, (name.namespace, intern(service))),
        family,
        read_ports(ports, "ports", found),
        _endpoints(endpoints, family, found),
        _weight(annotations, found),
    )
    return SliceSet(piece, origin_of(meta), read_trigger_time(stamp, found) if stamp else None)


def _weight(given: wire.SliceAnnotations, found: FieldErrors) -> int | None:
    """Return the weight by our annotation, else by Cilium's (cilium #46061)."""
    ours = _setting(given.weight, "kproxy.dev/weight", _whole_number(DEFAULT_WEIGHT), None, found)
    if ours is not None:
        return ours
    highest = _whole_number(HIGHEST_WEIGHT)
    return _setting(given.cilium_weight, "service.cilium.io/weight", highest, None, found)


@share_ports
def read_ports(ports: Sequence[wire.SlicePort], path: str, found: FieldErrors) -> tuple[SlicePort, ...]:
    """Return the usable ones of *ports*, which are at *path* in the object."""
    kept = []
    for i, port in enumerate(ports):
        name = "" if port.name is UNSET else port.name
        protocol = PROTOCOLS.get(port.protocol)
        if name is None:
            found.add(f"{path}[{i}].name", "is null")
        elif protocol is None:
            found.add(f"{path}[{i}].protocol", f"{quoted(port.protocol)} is not TCP, UDP or SCTP")
        elif not port.port:
            found.add(f"{path}[{i}].port", "is not given: a port for every number is not supported")
        elif not 0 < port.port < 65536:
            found.add(f"{path}[{i}].port", f"{port.port} is not a port (1 to 65535)")
        elif name and not is_label(name):
            found.add(f"{path}[{i}].name", f"{quoted(name)} is not a DNS label")
        else:
            kept.append(SlicePort(intern(name), protocol, port.port))
    return tuple(kept)


def _endpoints(
    endpoints: Sequence[wire.Endpoint | Endpoint], family: Family, found: FieldErrors
) -> tuple[Endpoint, ...]:
    size = family.size
    read = read_endpoints(endpoints)
    kept = tuple([endpoint for endpoint in read if endpoint is not None and len(endpoint.address) == size])
    if len(kept) < len(read):
        for i, (entry, endpoint) in enumerate(zip(endpoints, read, strict=True)):
            if endpoint is None or len(endpoint.address) != size:
                _report(entry, f"endpoints[{i}].addresses[0]", family, found)
    return kept


def _report(entry: wire.Endpoint | Endpoint, path: str, family: Family, found: FieldErrors) -> None:
    """Report the address of an endpoint that cannot be used: the first, as the API defines no others."""
    if isinstance(entry, Endpoint):
        text = format_address(entry.address)
    elif entry.addresses:
        text = entry.addresses[0]
    else:
        return
    found.add(path, f"{quoted(text)} is not a usable {family.label} address")


def read_endpoints(entries: Iterable[wire.Endpoint | Endpoint]) -> list[Endpoint | None]:
    """Read *entries*; None for one without an address that traffic can be sent to.

    One loop, and no call of a constructor that is a Python function: most objects are endpoints.
    """
    found: list[Endpoint | None] = []
    for entry in entries:
        if isinstance(entry, Endpoint):
            found.append(entry)
            continue
        try:
            address = parse_address(entry.addresses[0]) if entry.addresses else None
        except ValueError:
            address = None
        if address is None or (address[0] in SPECIAL_FIRST_BYTES and is_special(address)):
            found.append(None)
            continue
        is_ = entry.conditions or _NO_CONDITIONS
        zones = nodes = _NOWHERE
        if entry.hints is not None:
            zones, nodes = _hinted(entry.hints.for_zones), _hinted(entry.hints.for_nodes)
        found.append(_new(Endpoint, (
            address, intern(entry.node_name or ""),
            is_.ready is not False, is_.serving is not False, is_.terminating is True, zones, nodes)))
    return found


def _hinted(hints: list[wire.Hint] | None) -> frozenset[str]:
    return _shared_names(tuple([hint.name or "" for hint in hints])) if hints else _NOWHERE


@lru_cache(maxsize=1024)
def _shared_names(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(map(intern, names))


def read_trigger_time(stamp: str, found: FieldErrors) -> float | None:
    """Return *stamp* (RFC 3339, any fraction) in seconds since the epoch."""
    try:
        moment = datetime.fromisoformat(stamp)
        if moment.tzinfo is not None:
            return moment.timestamp()
    except (ValueError, OverflowError):
        pass
    found.add(
        "metadata.annotations[endpoints.kubernetes.io/last-change-trigger-time]",
        f"{quoted(stamp)} is not a time (RFC 3339)",
    )
    return None


# Endpoints.

def mirror_endpoints(obj: wire.Endpoints) -> Reading[tuple[EndpointSlice, ...]]:
    """Read the EndpointSlices that mirror *obj*, one for each subset and family; none if it opts out.

    As Kubernetes 1.36 (pkg/controller/endpointslicemirroring), which mirrors only for Services without a
    selector, because a controller makes the slices of the others. Where no controller runs, the selector does
    not matter.
    """
    meta = obj.metadata or wire.EndpointsMeta()
    subsets = (obj.subsets or ()) if _is_mirrored(meta) else ()

    return read_namespaced("Endpoints", subsets, meta, service_name, _to_mirrors)


def _to_mirrors(
    service: ServiceName, subsets: Sequence[wire.EndpointSubset], _: wire.EndpointsMeta,
    found: FieldErrors,
) -> tuple[EndpointSlice, ...]:
    pieces = (_mirror_subset(service, i, subset, found) for i, subset in enumerate(subsets))
    return tuple(chain.from_iterable(pieces))


def _is_mirrored(meta: wire.EndpointsMeta) -> bool:
    labels = meta.labels or wire.EndpointsLabels()
    annotations = meta.annotations or wire.EndpointsAnnotations()
    return labels.skip_mirror != "true" and labels.headless is UNSET and annotations.leader is UNSET


def _mirror_subset(
    service: ServiceName, index: int, subset: wire.EndpointSubset, found: FieldErrors
) -> list[EndpointSlice]:
    path = f"subsets[{index}]"
    ready, not_ready = subset.addresses or [], subset.not_ready_addresses or []
    count = len(ready) + len(not_ready)
    if count > MAX_ENDPOINTS:
        raise FieldError(path, f"{count} addresses; at most {MAX_ENDPOINTS} are mirrored")
    given = subset.ports or []
    if count * len(given) > MAX_DESTINATIONS:
        raise FieldError(path, f"{count} addresses with {len(given)} ports each are too many")
    ports = read_ports(given, f"{path}.ports", found)
    of_family: dict[Family, dict[Address, Endpoint]] = {}
    for field, entries in (("addresses", ready), ("notReadyAddresses", not_ready)):
        for i, entry in enumerate(entries):
            try:
                address = checked_address(entry.ip, f"{path}.{field}[{{}}].ip", i)
            except FieldError as refused:
                found.append(refused)
                continue
            node = sys.intern(entry.node_name or "")
            endpoint = Endpoint(address, node, ready=field == "addresses")
            of_family.setdefault(family_of(address), {}).setdefault(address, endpoint)
    return [
        # No real slice has a colon in its name.
        EndpointSlice(
            SliceName(service.namespace, f"endpoints:{service.name}:{index}:{family.label}"),
            service, family, ports, tuple(endpoints.values()),
        )
        for family, endpoints in of_family.items()
    ]


# Nodes and ServiceCIDRs.

def read_node(obj: wire.Node) -> Reading[NodeSet]:
    """Read any Node; the source selects this node's own."""
    meta = obj.metadata or wire.NodeMeta()
    spec = obj.spec or wire.NodeSpec()
    found = FieldErrors()
    try:
        name = checked_subdomain(meta.name, "metadata.name")
    except FieldError as refused:
        return Reading(None, None, FieldErrors([refused]).bad("Node", None, meta.name))
    labels = _labels(meta.labels or {}, found)
    node = NodeObject(
        name,
        zone=labels.get("topology.kubernetes.io/zone", ""),
        addresses=_addresses(obj.status, found),
        pod_cidrs=_pod_cidrs(spec, found),
        eligible=not meta.deletion_timestamp
        and all(taint.key != DELETION_TAINT for taint in spec.taints or ()),
        labels=labels,
    )
    return Reading(("", name), NodeSet(node), found.bad("Node", None, name))


def _labels(given: Mapping[str, object], found: FieldErrors) -> dict[str, str]:
    labels = {}
    for key, value in given.items():
        if isinstance(value, str):
            labels[key] = value
        elif value is not None:
            found.add(f"metadata.labels[{shown(key)}]", "is not text")
    return labels


def _pod_cidrs(spec: wire.NodeSpec, found: FieldErrors) -> tuple[Cidr, ...]:
    if spec.pod_cidrs:
        return read_cidrs("spec.podCIDRs[{}]", spec.pod_cidrs, found)
    return read_cidrs("spec.podCIDR", [spec.pod_cidr], found) if spec.pod_cidr else ()


def _addresses(status: wire.NodeStatus | None, found: FieldErrors) -> tuple[Address, ...]:
    """Return the InternalIPs, then the ExternalIPs."""
    kept: dict[Address, None] = {}
    entries = list(enumerate(status.addresses or ())) if status is not None else []
    for kind in ("InternalIP", "ExternalIP"):
        for i, entry in entries:
            if entry.type == kind:
                try:
                    kept[checked_address(entry.address, "status.addresses[{}].address", i)] = None
                except FieldError as refused:
                    found.append(refused)
    return tuple(kept)


def read_service_cidr(obj: wire.ServiceCIDR) -> Reading[ServiceCidrSet]:
    name = obj.metadata.name if obj.metadata else None
    found = FieldErrors()
    try:
        key = ("", checked_subdomain(name, "metadata.name"))
    except FieldError as refused:
        return Reading(None, None, FieldErrors([refused]).bad("ServiceCIDR", None, name))
    cidrs = read_cidrs("spec.cidrs[{}]", (obj.spec.cidrs if obj.spec else None) or [], found)
    return Reading(key, ServiceCidrSet(key[1], cidrs), found.bad("ServiceCIDR", None, name))


def read_cidrs(path: str, texts: list[str | None], found: FieldErrors) -> tuple[Cidr, ...]:
    """Return the valid networks among *texts*, each once."""
    kept: dict[Cidr, None] = {}
    for i, text in enumerate(texts):
        try:
            kept[checked_cidr(text, path, i)] = None
        except FieldError as refused:
            found.append(refused)
    return tuple(kept)
