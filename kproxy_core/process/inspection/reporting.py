"""The part of a report that the plans and objects make up; see `kproxy_core.cli.inspection.reporting`."""

from collections.abc import Mapping, Sequence
from typing import Any

from kproxy_core.explain.change import document
from kproxy_core.explain.question import Plans
from kproxy_core.model.address import Family, format_address
from kproxy_core.model.endpoint import EndpointSlice
from kproxy_core.model.service import Service, ServiceName
from kproxy_core.objects.encode import encode_node, encode_service, encode_service_cidr, encode_slice

Json = dict[str, Any]


def described(
    plans: Mapping[Family, Plans], services: Mapping[ServiceName, Service], slices: Sequence[EndpointSlice],
    origins: Mapping[ServiceName, str],
) -> Json:
    """Return objects, plans and the node, so that another machine can plan the same."""
    views = [of_family.node for of_family in plans.values()]
    own = [view.node_ip for view in views if view.node_ip is not None]
    pods = [view.local_source.cidr for view in views if view.local_source and view.local_source.cidr]
    name, zone = views[0].name, views[0].zone
    cidrs = [cidr for view in views for cidr in view.service_cidrs]
    encoded = [encode_node(name, zone, own, pods)]
    encoded += [encode_service_cidr(cidrs)] if cidrs else []
    encoded += [encode_service(service) for _, service in sorted(services.items())]
    encoded += [encode_slice(piece) for piece in slices]
    addresses = {address for of_family in plans.values() for address in of_family.addresses}
    return {
        "node": {"name": name, "zone": zone, "families": [view.family.label for view in views],
                 "addresses": sorted(map(format_address, addresses)),
                 "origins": {str(service): origin for service, origin in sorted(origins.items())}},
        "objects": encoded,
        "plans": documents(plans),
    }  # fmt: skip


def documents(plans: Mapping[Family, Plans]) -> list[Json]:
    return [document(plan) for of_family in plans.values() for plan in of_family.plans.values()]
