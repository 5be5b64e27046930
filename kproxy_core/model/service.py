"""Services and their EndpointSlices, with every field checked and parsed.

The rules for each field are in kube-proxy 1.36, pkg/proxy/serviceport.go and servicechangetracker.go.
"""

from functools import cached_property
from typing import Literal, NamedTuple

from msgspec import Struct

from kproxy_core.model.address import Address, Cidr, Family, Protocol, parse_address
from kproxy_core.model.duration import Duration

LONGEST_LAST_RESORT = Duration(3600)
DEFAULT_WEIGHT = 100
"""The weight of endpoints whose slice has none, and the highest that our annotation takes."""
HIGHEST_WEIGHT = 65535
"""The highest that Cilium's annotation takes."""


def parse_last_resort(text: str) -> float:
    """Read ``off`` or a duration, in seconds; 0: off. Raises ValueError."""
    if text == "off":
        return 0
    try:
        seconds = Duration.parse(text)
    except ValueError:
        seconds = Duration(0)
    if 1 <= seconds <= LONGEST_LAST_RESORT:
        return seconds
    raise ValueError(f"must be off, or a duration from 1s to {LONGEST_LAST_RESORT}")


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
    addresses: tuple[Address, ...] = ()
    """Addresses at which only this port is served, as load balancer IPs: those of a Forward."""


class Service(Struct, frozen=True, gc=False, kw_only=True):
    """A Service with service ports: not headless, not of type ExternalName, not for another proxy.

    Or the Service that a Forward stands for.

    Address tuples hold both families, in the order of the object.
    """

    name: ServiceName
    created: str = ""
    """``metadata.creationTimestamp`` (RFC 3339, UTC); "" if unknown. Decides between conflicting claims."""
    ports: tuple[PortSpec, ...]
    cluster_ips: tuple[Address, ...]
    """Empty for a Forward, which is served in the families of its ports' addresses and of its endpoints."""
    external_ips: tuple[Address, ...] = ()
    load_balancer_ips: tuple[Address, ...] = ()
    """``status.loadBalancer.ingress`` of ipMode VIP."""
    source_ranges: tuple[Cidr, ...] = ()
    """`Family.no_source` for a family that admits no client."""
    affinity_seconds: int = 0
    """Timeout of ClientIP session affinity; 0: no affinity."""
    internal_policy_local: bool = False
    external_policy_local: bool = False
    """False for a Service that is not externally accessible by its type."""
    health_check_node_port: int = 0
    removed_endpoints: Literal["", "keep", "reset"] = ""
    """What happens to connections to endpoints that were removed; "": what the node's configuration says."""
    endpoint_health: Literal["", "off", "passive"] = ""
    """Whether silent endpoints are avoided; "": what the node's configuration says."""
    last_resort: float | None = None
    """Seconds for which the endpoints that were ready last are used while none is ready; 0: never, as with
    publishNotReadyAddresses; None: what the node's configuration says."""
    hash_by: Literal["", "client", "flow"] = ""
    """What chooses the endpoint: a hash of the client's address or of the flow; "": chance."""

    def cluster_ip(self, family: Family) -> Address | None:
        for address in self.cluster_ips:
            if len(address) == family.size:
                return address
        return None


# EndpointSlices.

class Endpoint(NamedTuple):
    """One address of an EndpointSlice, with its conditions (defaults for absent ones)."""

    address: Address
    node: str = ""
    """Name of the node it is on; "" if unknown."""
    ready: bool = True
    serving: bool = True
    terminating: bool = False
    zone_hints: frozenset[str] = frozenset()
    node_hints: frozenset[str] = frozenset()


class SlicePort(NamedTuple):
    """One port of an EndpointSlice that has a name (perhaps empty) and a number."""

    name: str
    protocol: Protocol
    port: int


class SliceName(NamedTuple):
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Destination(NamedTuple):
    """The address and port of an endpoint, at which a connection ends."""

    address: Address
    port: int

    @classmethod
    def parse(cls, text: str) -> "Destination":
        """Read ``address:port``, with IPv6 in brackets. Raises ValueError."""
        host, _, port = text.rpartition(":")
        return cls(parse_address(host.strip("[]")), int(port))


Candidate = tuple[Destination, Endpoint]
"""An endpoint of one service port, with its conditions."""

Row = tuple[bytes, Candidate]
"""A candidate after its address and port in network order, by which candidates are sorted."""


class Check(Struct, frozen=True, gc=False):
    """How this node checks endpoints: by a TCP connection, or by a request over HTTP."""

    every: float
    """Seconds between two checks of an endpoint."""
    path: str = ""
    """The path that is requested; "": a connection is enough."""


class EndpointSlice(Struct, frozen=True, dict=True):
    name: SliceName
    service: ServiceName
    family: Family
    ports: tuple[SlicePort, ...]
    endpoints: tuple[Endpoint, ...]
    weight: int | None = None
    """Of each of its endpoints, 0 (no new connections) to `HIGHEST_WEIGHT`; None: not given."""

    @cached_property
    def rows(self) -> dict[tuple[str, Protocol], list[Row]]:
        """Results of planning derived from this slice, by name and protocol of a service port."""
        return {}

    @cached_property
    def parts(self) -> dict[tuple[int, str], "EndpointSlice"]:
        """The slice with fewer endpoints, by their number and the node whose endpoints come first."""
        return {}

    @cached_property
    def numbers(self) -> dict[tuple[str, Protocol], list[int]]:
        """The numbers of `ports`, by name and protocol."""
        found: dict[tuple[str, Protocol], list[int]] = {}
        for name, protocol, number in self.ports:
            found.setdefault((name, protocol), []).append(number)
        return found
