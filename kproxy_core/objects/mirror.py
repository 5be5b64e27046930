"""Endpoints objects as the EndpointSlices that a control plane would make of them.

Kubernetes 1.36, pkg/controller/endpointslicemirroring. There it is done only for
Services without a selector, as a controller makes the slices of the others. Where
no controller runs, the selector does not matter: whatever Endpoints exist were
written for use.
"""

import sys
from collections.abc import Sequence
from itertools import chain

from msgspec import UNSET

from kproxy_core.model.address import Address, Family, family_of
from kproxy_core.model.endpoint import Endpoint, EndpointSlice, SliceName
from kproxy_core.model.service import ServiceName
from kproxy_core.objects import reading, wire
from kproxy_core.objects.slice import MAX_DESTINATIONS, MAX_ENDPOINTS, read_ports


def read_endpoints(obj: wire.Endpoints) -> reading.Reading[tuple[EndpointSlice, ...]]:
    """Read the slices that mirror *obj*, one for each subset and family; none if it is not to be mirrored."""
    meta = obj.metadata or wire.EndpointsMeta()
    subsets = (obj.subsets or ()) if _is_mirrored(meta) else ()

    return reading.read_namespaced("Endpoints", subsets, meta, reading.service_name, _value)


def _value(
    service: ServiceName, subsets: Sequence[wire.EndpointSubset], _: wire.EndpointsMeta,
    found: reading.Findings,
) -> tuple[EndpointSlice, ...]:
    pieces = (_slices(service, i, subset, found) for i, subset in enumerate(subsets))
    return tuple(chain.from_iterable(pieces))


def _is_mirrored(meta: wire.EndpointsMeta) -> bool:
    labels = meta.labels or wire.EndpointsLabels()
    annotations = meta.annotations or wire.EndpointsAnnotations()
    return labels.skip_mirror != "true" and labels.headless is UNSET and annotations.leader is UNSET


def _slices(
    service: ServiceName, index: int, subset: wire.EndpointSubset, found: reading.Findings
) -> list[EndpointSlice]:
    path = f"subsets[{index}]"
    ready, not_ready = subset.addresses or [], subset.not_ready_addresses or []
    count = len(ready) + len(not_ready)
    if count > MAX_ENDPOINTS:
        raise reading.Refused(path, f"{count} addresses; at most {MAX_ENDPOINTS} are mirrored")
    given = subset.ports or []
    if count * len(given) > MAX_DESTINATIONS:
        raise reading.Refused(path, f"{count} addresses with {len(given)} ports each are too many")
    ports = read_ports(given, f"{path}.ports", found)
    of_family: dict[Family, dict[Address, Endpoint]] = {}
    for field, entries in (("addresses", ready), ("notReadyAddresses", not_ready)):
        for i, entry in enumerate(entries):
            try:
                address = reading.checked_address(entry.ip, f"{path}.{field}[{{}}].ip", i)
            except reading.Refused as refused:
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
