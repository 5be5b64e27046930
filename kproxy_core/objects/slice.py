"""EndpointSlices, from the wire to the model.

As kube-proxy 1.36, pkg/proxy/endpointslicecache.go. Absent fields get the API server's defaults.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import lru_cache
from sys import intern

from msgspec import UNSET

from kproxy_core.model.address import Family, format_address, parse_address
from kproxy_core.model.endpoint import Endpoint, EndpointSlice, SliceName, SlicePort
from kproxy_core.model.service import ServiceName
from kproxy_core.objects import reading, wire
from kproxy_core.store.events import SliceGone, SliceSet

MAX_ENDPOINTS = 1000
"""Limit of the API server for one slice."""
MAX_PORTS = 20_000
"""Limit of the API server for one slice."""
MAX_DESTINATIONS = 100_000
"""Limit for endpoints times ports, far above any real slice, to bound memory."""
_FAMILIES = {family.label: family for family in Family}
_new = tuple.__new__


def read_slice(obj: wire.EndpointSlice) -> reading.Reading[SliceSet | SliceGone]:
    """Read *obj*; SliceGone if it can't belong to a Service that is served."""
    meta = obj.metadata or wire.SliceMeta()
    return reading.read_namespaced("EndpointSlice", obj, meta, _slice_name, _value)


def _slice_name(namespace: str, name: str | None) -> SliceName:
    return _new(SliceName, (namespace, reading.checked_subdomain(name, "metadata.name")))


def _value(
    name: SliceName, obj: wire.EndpointSlice, meta: wire.SliceMeta, found: reading.Findings
) -> SliceSet | SliceGone:
    labels = meta.labels
    if labels is None or not labels.service_name or labels.headless is not UNSET:
        return SliceGone(name)
    if obj.address_type == "FQDN":
        return SliceGone(name)
    if not obj.address_type:
        raise reading.Refused("addressType", "is missing")
    family = _FAMILIES.get(obj.address_type)
    if family is None:
        raise reading.Refused("addressType", f"{reading.quoted(obj.address_type)} is not IPv4, IPv6 or FQDN")
    service = reading.checked_label(labels.service_name, "metadata.labels[kubernetes.io/service-name]")
    endpoints: Sequence[wire.Endpoint | Endpoint] = obj.endpoints or []
    ports = obj.ports or []
    if len(endpoints) > MAX_ENDPOINTS:
        raise reading.Refused("endpoints", f"{len(endpoints)} of them; a slice holds at most {MAX_ENDPOINTS}")
    if len(ports) > MAX_PORTS:
        raise reading.Refused("ports", f"{len(ports)} of them; a slice holds at most {MAX_PORTS}")
    if len(endpoints) * len(ports) > MAX_DESTINATIONS:
        many = f"{len(ports)} of them with {len(endpoints)} endpoints each is too much"
        raise reading.Refused("ports", many)
    stamp = meta.annotations.trigger_time if meta.annotations else None
    piece = EndpointSlice(
        name,
        _new(ServiceName, (name.namespace, intern(service))),
        family,
        read_ports(ports, "ports", found),
        _endpoints(endpoints, family, found),
    )
    return SliceSet(piece, reading.origin_of(meta), read_trigger_time(stamp, found) if stamp else None)


@reading.share_ports
def read_ports(ports: Sequence[wire.SlicePort], path: str, found: reading.Findings) -> tuple[SlicePort, ...]:
    """Return the usable ones of *ports*, which are at *path* in the object."""
    kept = []
    for i, port in enumerate(ports):
        name = "" if port.name is UNSET else port.name
        protocol = reading.PROTOCOLS.get(port.protocol)
        if name is None:
            found.add(f"{path}[{i}].name", "is null")
        elif protocol is None:
            found.add(f"{path}[{i}].protocol", f"{reading.quoted(port.protocol)} is not TCP, UDP or SCTP")
        elif not port.port:
            found.add(f"{path}[{i}].port", "is not given: a port for every number is not supported")
        elif not 0 < port.port < 65536:
            found.add(f"{path}[{i}].port", f"{port.port} is not a port (1 to 65535)")
        elif name and not reading.is_label(name):
            found.add(f"{path}[{i}].name", f"{reading.quoted(name)} is not a DNS label")
        else:
            kept.append(SlicePort(intern(name), protocol, port.port))
    return tuple(kept)


def _endpoints(
    endpoints: Sequence[wire.Endpoint | Endpoint], family: Family, found: reading.Findings
) -> tuple[Endpoint, ...]:
    size = family.size
    read = read_endpoints(endpoints)
    kept = tuple([endpoint for endpoint in read if endpoint is not None and len(endpoint.address) == size])
    if len(kept) < len(read):
        for i, (entry, endpoint) in enumerate(zip(endpoints, read, strict=True)):
            if endpoint is None or len(endpoint.address) != size:
                _report(entry, f"endpoints[{i}].addresses[0]", family, found)
    return kept


def _report(entry: wire.Endpoint | Endpoint, path: str, family: Family, found: reading.Findings) -> None:
    """Report the address of an endpoint that cannot be used: the first, as the API defines no others."""
    if isinstance(entry, Endpoint):
        text = format_address(entry.address)
    elif entry.addresses:
        text = entry.addresses[0]
    else:
        return
    found.add(path, f"{reading.quoted(text)} is not a usable {family.label} address")


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
        if address is None or (address[0] in reading.SPECIAL_FIRST_BYTES and reading.is_special(address)):
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


_NO_CONDITIONS = wire.Conditions()
_NOWHERE: frozenset[str] = frozenset()


def _hinted(hints: list[wire.Hint] | None) -> frozenset[str]:
    return _shared_names(tuple([hint.name or "" for hint in hints])) if hints else _NOWHERE


@lru_cache(maxsize=1024)
def _shared_names(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(map(intern, names))


def read_trigger_time(stamp: str, found: reading.Findings) -> float | None:
    """Return *stamp* (RFC 3339, any fraction) in seconds since the epoch."""
    try:
        moment = datetime.fromisoformat(stamp)
        if moment.tzinfo is not None:
            return moment.timestamp()
    except (ValueError, OverflowError):
        pass
    found.add(
        "metadata.annotations[endpoints.kubernetes.io/last-change-trigger-time]",
        f"{reading.quoted(stamp)} is not a time (RFC 3339)",
    )
    return None
