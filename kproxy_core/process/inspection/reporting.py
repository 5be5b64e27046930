"""The part of a report that the plans and objects make up; see `kproxy_core.cli.inspection.reporting`."""

from collections.abc import Mapping
from typing import Any

from kproxy_core.explain.change import document
from kproxy_core.model.address import Family, format_address
from kproxy_core.objects.encode import encode_node, encode_service, encode_service_cidr, encode_slice
from kproxy_core.store.store import Store
from kproxy_core.sync.family_plans import FamilyPlans

Json = dict[str, Any]


def described(plans: Mapping[Family, FamilyPlans], store: Store) -> Json:
    """Return objects, plans and the node, so that another machine can plan the same. On the loop's thread."""
    views = [of_family.node for of_family in plans.values()]
    own = [view.node_ip for view in views if view.node_ip is not None]
    pods = [view.local_source.cidr for view in views if view.local_source and view.local_source.cidr]
    name, zone = views[0].name, views[0].zone
    cidrs = [cidr for view in views for cidr in view.service_cidrs]
    objects = [encode_node(name, zone, own, pods)]
    objects += [encode_service_cidr(cidrs)] if cidrs else []
    objects += [encode_service(service) for _, service in sorted(store.services.items())]
    objects += [encode_slice(piece) for piece in store.all_slices()]
    addresses = {address for view in views for address in view.node_port_addresses}
    return {
        "node": {"name": name, "zone": zone, "families": [view.family.label for view in views],
                 "addresses": sorted(map(format_address, addresses)),
                 "origins": {str(service): origin for service, origin in sorted(store.origins.items())}},
        "objects": objects,
        "plans": [document(plan) for of_family in plans.values() for plan in of_family.plans.values()],
    }  # fmt: skip
