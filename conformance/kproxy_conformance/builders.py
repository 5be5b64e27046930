"""Short notations for Services, endpoints, nodes and updates in tests.

Addresses and ports are given as text, in the words of the field: ``10.96.0.1``,
``http:80/TCP@30080`` (a port's name, number, protocol and node port; only the number is needed).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from kproxy_core.contract.values import Scope, Update
from kproxy_core.model.address import Address, Cidr, Family, Protocol, family_of, parse_address, parse_cidr
from kproxy_core.model.node import LocalSource, NodeView
from kproxy_core.model.service import (
    Destination,
    Endpoint,
    EndpointSlice,
    PortSpec,
    Service,
    ServiceName,
    ServicePortKey,
    SliceName,
    SlicePort,
)
from kproxy_core.plan.service_plan import ServicePlan, plan_service

_PORT = re.compile(r"(?:(?P<name>[^:]*):)?(?P<port>\d+)(?:/(?P<protocol>TCP|UDP|SCTP))?(?:@(?P<node>\d+))?")


def service_name(text: str) -> ServiceName:
    """Parse ``namespace/name``; the namespace is ``default`` if omitted."""
    namespace, _, name = text.rpartition("/")
    return ServiceName(namespace or "default", name)


def addresses(text: str) -> tuple[Address, ...]:
    """Parse addresses separated by blanks."""
    return tuple(map(parse_address, text.split()))


def cidrs(text: str) -> tuple[Cidr, ...]:
    """Parse networks separated by blanks."""
    return tuple(map(parse_cidr, text.split()))


def destinations(text: str) -> tuple[Destination, ...]:
    """Parse destinations such as ``10.0.0.1:80 [fd00::1]:80``."""
    return tuple(map(Destination.parse, text.split()))


def port_spec(text: str) -> PortSpec:
    """Parse one Service port, e.g. ``80`` or ``dns:53/UDP@30053``."""
    found = _PORT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a port")
    return PortSpec(
        found["name"] or "", Protocol[found["protocol"] or "TCP"], int(found["port"]), int(found["node"] or 0)
    )


def service(
    name: str = "web", *ports: str, ip: str = "10.96.0.1", created: str = "2026-01-01T00:00:00Z",
    external_ips: str = "", load_balancer_ips: str = "", source_ranges: str = "", affinity: int = 0,
    internal_local: bool = False, external_local: bool = False, health_check_node_port: int = 0,
    removed_endpoints: Literal["", "keep", "reset"] = "", endpoint_health: Literal["", "off", "passive"] = "",
    last_resort: float | None = None, hash_by: Literal["", "client", "flow"] = "",
) -> Service:
    """Return a Service; without *ports* it has ``80``. *ip* may list one address of each family."""
    return Service(
        name=service_name(name),
        created=created,
        ports=tuple(map(port_spec, ports or ("80",))),
        cluster_ips=addresses(ip),
        external_ips=addresses(external_ips),
        load_balancer_ips=addresses(load_balancer_ips),
        source_ranges=cidrs(source_ranges),
        affinity_seconds=affinity,
        internal_policy_local=internal_local,
        external_policy_local=external_local,
        health_check_node_port=health_check_node_port,
        removed_endpoints=removed_endpoints,
        endpoint_health=endpoint_health,
        last_resort=last_resort,
        hash_by=hash_by,
    )


def endpoint(
    address: str, node: str = "", *, ready: bool = True, serving: bool | None = None,
    terminating: bool = False, zones: str = "", nodes: str = "",
) -> Endpoint:
    """Return an endpoint. *serving* defaults to *ready*. *zones* and *nodes* are its hints."""
    return Endpoint(
        parse_address(address),
        node,
        ready=ready,
        serving=ready if serving is None else serving,
        terminating=terminating,
        zone_hints=frozenset(zones.split()),
        node_hints=frozenset(nodes.split()),
    )


def endpoint_slice(
    service: str, *endpoints: Endpoint | str, ports: Sequence[str] = ("8080",), name: str = "",
    family: Family | None = None, weight: int | None = None,
) -> EndpointSlice:
    """Return a slice of *service*, of the family of its endpoints. Plain text stands for a ready endpoint."""
    of = service_name(service)
    built = tuple(endpoint(e) if isinstance(e, str) else e for e in endpoints)
    specs = map(port_spec, ports)
    return EndpointSlice(
        name=SliceName(of.namespace, name or f"{of.name}-1"),
        service=of,
        family=family or (family_of(built[0].address) if built else Family.IPV4),
        ports=tuple(SlicePort(spec.name, spec.protocol, spec.port) for spec in specs),
        endpoints=built,
        weight=weight,
    )


def node_view(
    name: str = "node1", *, family: Family = Family.IPV4, zone: str = "", pods: str = "",
    node_port_addresses: str = "", anywhere: bool = False, ip: str = "", service_cidrs: str = "",
    masquerade_all: bool = False, removed_endpoints: str = "keep",
) -> NodeView:
    """Return a node. *pods* is the network of local traffic."""
    return NodeView(
        family=family,
        name=name,
        zone=zone,
        local_source=LocalSource(cidr=parse_cidr(pods)) if pods else None,
        node_port_addresses=tuple(sorted(addresses(node_port_addresses))),
        node_ports_anywhere=anywhere,
        node_ports_on_loopback=anywhere,
        node_ip=parse_address(ip) if ip else None,
        service_cidrs=cidrs(service_cidrs),
        masquerade_all=masquerade_all,
        removed_endpoints=removed_endpoints,
    )


def plans(node: NodeView, service: Service, *slices: EndpointSlice) -> dict[ServicePortKey, ServicePlan]:
    by_name = {piece.name.name: piece for piece in slices}
    return {plan.key: plan for plan in plan_service(service, by_name, node)}


def full_update(node: NodeView, plans: Mapping[ServicePortKey, ServicePlan]) -> Update:
    """Return the update of a process that has just started."""
    return Update(node.family, Scope.RESYNC, node, dict(plans), plans, node_changed=True)


def changed_update(
    node: NodeView, plans: Mapping[ServicePortKey, ServicePlan], changed: Iterable[ServicePortKey]
) -> Update:
    """Return the update after *changed* have become what *plans* says, or were removed from it."""
    return Update(node.family, Scope.CHANGED, node, {key: plans.get(key) for key in changed}, plans)
