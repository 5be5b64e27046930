"""Limits of what one Service may take of a node, counted in elements of the kernel.

A port that is dialled at many addresses, or whose endpoints have weights or are chosen by a hash, takes far
more elements than its objects have bytes. Beyond the limits a Service gets a cheaper form, and never holds up
others.
"""

from collections.abc import Mapping

from kproxy_core.model.address import Family
from kproxy_core.model.service import EndpointSlice, Service
from kproxy_core.plan.endpoints import MOST_DESTINATIONS, count_destinations

GIANT = 10_000
"""Threshold in elements for a giant: a change of such a Service takes some 0.1 s."""

MOST_ELEMENTS = 400_000
"""Limit for the endpoints of one Service times the frontends of their ports: more endpoints are not used."""

MOST_SLOTS_OF_SERVICE = 65_536
"""Limit for the slots of one Service, for weights and hashes, times their frontends."""

MOST_SLOTS_OF_NODE = 524_288
"""The same limit for all Services of a node."""


def frontends_of_port(service: Service, family: Family) -> int:
    """Return at how many frontends each port of *service* is dialled, at most."""
    addresses = (*service.external_ips, *service.load_balancer_ips)
    shared = sum(len(each) == family.size for each in addresses) + (service.cluster_ip(family) is not None)
    return max(1, shared + max(
        (bool(port.node_port) + sum(len(each) == family.size for each in port.addresses)
         for port in service.ports), default=0))


def most_destinations(service: Service | None, family: Family) -> int:
    """Return the limit for the endpoints times ports of *service*."""
    if service is None:
        return MOST_DESTINATIONS
    return min(MOST_DESTINATIONS, MOST_ELEMENTS // frontends_of_port(service, family))


def slots_of_port(service: Service, family: Family, room: int = MOST_SLOTS_OF_SERVICE) -> int:
    """Return the limit for the slots of each port of *service*, if it may take *room* in all."""
    return room // (frontends_of_port(service, family) * max(1, len(service.ports)))


def count_elements(
    service: Service | None, slices: Mapping[str, EndpointSlice] | None, family: Family
) -> int:
    """Return the elements of a Service's endpoints, or more: hashes and weights are not counted."""
    destinations = count_destinations(slices)
    return destinations * frontends_of_port(service, family) if service is not None else destinations
