"""Services as declared by users, with every field checked and parsed once.

The rules for each field are in kube-proxy 1.36, pkg/proxy/serviceport.go and
servicechangetracker.go; a Service that yields no service port at all (headless,
ExternalName, owned by another proxy) never becomes one of these values.
"""

from typing import NamedTuple

from msgspec import Struct

from kproxy_core.model.address import Address, Cidr, Family, Protocol


class ServiceName(NamedTuple):
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class ServicePortKey(NamedTuple):
    """The identity of a service port. Ports match by name and protocol, never by number."""

    namespace: str
    name: str
    port_name: str
    protocol: Protocol

    @property
    def service(self) -> ServiceName:
        return ServiceName(self.namespace, self.name)

    def __str__(self) -> str:
        suffix = f":{self.port_name}" if self.port_name else ""
        return f"{self.namespace}/{self.name}{suffix}"


class PortSpec(Struct, frozen=True, gc=False):
    """One entry of ``spec.ports``."""

    name: str
    protocol: Protocol
    port: int
    node_port: int = 0
    """0: none."""


class Service(Struct, frozen=True, gc=False, kw_only=True):
    """One Service. Address tuples hold both families, in the order of the object."""

    name: ServiceName
    created: str = ""
    """``metadata.creationTimestamp`` (RFC 3339, UTC); "" if unknown. Decides between rival claims."""
    ports: tuple[PortSpec, ...]
    cluster_ips: tuple[Address, ...]
    external_ips: tuple[Address, ...] = ()
    load_balancer_ips: tuple[Address, ...] = ()
    """``status.loadBalancer.ingress`` of ipMode VIP."""
    source_ranges: tuple[Cidr, ...] = ()
    """`Family.no_source` where nobody is admitted."""
    affinity_seconds: int = 0
    """Timeout of ClientIP session affinity; 0: no affinity."""
    internal_policy_local: bool = False
    external_policy_local: bool = False
    """Already false for a Service that is not externally accessible by its type."""
    health_check_node_port: int = 0

    def cluster_ip(self, family: Family) -> Address | None:
        for address in self.cluster_ips:
            if len(address) == family.size:
                return address
        return None
