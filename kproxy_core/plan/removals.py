"""Fields of Services that Kubernetes will stop serving, and the Services that depend on them.

The versions are plans of Kubernetes: KEP-5707 for externalIPs.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kproxy_core.model.address import Address
from kproxy_core.model.service import ServiceName
from kproxy_core.plan.service_plan import ServicePlan


class Field(NamedTuple):
    """A field of Services that is on its way out."""

    path: str
    gate: str
    """The feature gate that still lets kube-proxy serve it."""
    off_by_default: str
    """The version in which the gate is planned to be off by default."""
    removed: str
    """The version from which the gate is planned not to be settable any more."""


EXTERNAL_IPS = Field("spec.externalIPs", "AllowServiceExternalIPs", "1.40", "1.43")


class Removal(NamedTuple):
    """Addresses of one Service that kube-proxy will stop serving."""

    service: ServiceName
    field: Field
    addresses: tuple[Address, ...]
    """IPv4 first, each family sorted."""


def removals(plans: Iterable[ServicePlan]) -> list[Removal]:
    """Return the Services in *plans* of any families that depend on such a field, sorted by name.

    An external IP that is also a ClusterIP or load balancer IP of the Service is served without the field.
    """
    found: dict[ServiceName, set[Address]] = {}
    for plan in plans:
        if plan.external_ips:
            found.setdefault(plan.key.service, set()).update(plan.external_ips)
    return [
        Removal(service, EXTERNAL_IPS, tuple(sorted(addresses, key=lambda address: (len(address), address))))
        for service, addresses in sorted(found.items())
    ]
