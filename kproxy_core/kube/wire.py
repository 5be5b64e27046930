"""API objects on the wire, with only the fields that a proxy reads.

Types are those that an API server guarantees; `null` equals absent, as in Go. The decoder skips everything
else. Labels and annotations are structs too, except a Node's labels, so that only the relevant ones are ever
built.
"""

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType, field

Text = str | None
Setting = object
"""The value of an annotation that this proxy defines; None: it is absent. A manifest may have anything here,
and is used without the annotation then; an API server admits only strings."""
Label = str | UnsetType | None
"""A label's value; UNSET: it is absent."""

Int32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]


class Annotations(Struct, frozen=True, gc=False):
    initial_events_end: Text = field(default=None, name="k8s.io/initial-events-end")
    """On a bookmark: it ends the initial events of a watch-list (KEP-3157)."""


class ObjectMeta(Struct, frozen=True, gc=False):
    """meta/v1 ObjectMeta, of every kind."""

    name: Text = None
    namespace: Text = None
    resource_version: Text = field(default=None, name="resourceVersion")
    annotations: Annotations | None = None


class ServiceLabels(Struct, frozen=True, gc=False):
    proxy_name: Label = field(default=UNSET, name="service.kubernetes.io/service-proxy-name")


class ServiceAnnotations(Annotations, frozen=True, gc=False):
    removed_endpoints: Setting = field(default=None, name="kproxy.dev/removed-endpoints")
    endpoint_health: Setting = field(default=None, name="kproxy.dev/endpoint-health")
    last_resort: Setting = field(default=None, name="kproxy.dev/last-resort")
    hash_by: Setting = field(default=None, name="kproxy.dev/hash")


class ServiceMeta(ObjectMeta, frozen=True, gc=False):
    creation_timestamp: Text = field(default=None, name="creationTimestamp")
    labels: ServiceLabels | None = None
    annotations: ServiceAnnotations | None = None


class ServicePort(Struct, frozen=True, gc=False, rename="camel"):
    name: Text = None
    protocol: Text = None
    port: Int32 | None = None
    node_port: Int32 | None = None


class ClientIPConfig(Struct, frozen=True, gc=False, rename="camel"):
    timeout_seconds: Int32 | None = None


class SessionAffinityConfig(Struct, frozen=True, gc=False):
    client_ip: ClientIPConfig | None = field(default=None, name="clientIP")


class ServiceSpec(Struct, frozen=True, gc=False, rename="camel"):
    type: Text = None
    cluster_ip: Text = field(default=None, name="clusterIP")
    cluster_ips: list[Text] | None = field(default=None, name="clusterIPs")
    ip_families: list[Text] | None = None
    ports: list[ServicePort] | None = None
    external_ips: list[Text] | None = field(default=None, name="externalIPs")
    load_balancer_source_ranges: list[Text] | None = None
    session_affinity: Text = None
    session_affinity_config: SessionAffinityConfig | None = None
    external_traffic_policy: Text = None
    internal_traffic_policy: Text = None
    health_check_node_port: Int32 | None = None
    publish_not_ready_addresses: bool | None = None


class Ingress(Struct, frozen=True, gc=False, rename="camel"):
    ip: Text = None
    ip_mode: Text = None


class LoadBalancer(Struct, frozen=True, gc=False):
    ingress: list[Ingress] | None = None


class ServiceStatus(Struct, frozen=True, gc=False, rename="camel"):
    load_balancer: LoadBalancer | None = None


class Service(Struct, frozen=True, gc=False):
    metadata: ServiceMeta | None = None
    spec: ServiceSpec | None = None
    status: ServiceStatus | None = None


class SliceLabels(Struct, frozen=True, gc=False):
    service_name: Text = field(default=None, name="kubernetes.io/service-name")
    headless: Label = field(default=UNSET, name="service.kubernetes.io/headless")


class SliceAnnotations(Annotations, frozen=True, gc=False):
    trigger_time: Text = field(default=None, name="endpoints.kubernetes.io/last-change-trigger-time")
    weight: Setting = field(default=None, name="kproxy.dev/weight")
    cilium_weight: Setting = field(default=None, name="service.cilium.io/weight")


class SliceMeta(ObjectMeta, frozen=True, gc=False):
    labels: SliceLabels | None = None
    annotations: SliceAnnotations | None = None


class SlicePort(Struct, frozen=True, gc=False):
    name: str | UnsetType | None = UNSET
    """UNSET: an API server makes it ""; None: an explicit null."""
    protocol: Text = None
    port: Int32 | None = None


class Conditions(Struct, frozen=True, gc=False):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Hint(Struct, frozen=True, gc=False):
    name: Text = None


class Hints(Struct, frozen=True, gc=False, rename="camel"):
    for_zones: list[Hint] | None = None
    for_nodes: list[Hint] | None = None


class Endpoint(Struct, frozen=True, gc=False, rename="camel"):
    addresses: list[str] | None = None
    conditions: Conditions | None = None
    node_name: Text = None
    hints: Hints | None = None


class EndpointSlice(Struct, frozen=True, gc=False, rename="camel"):
    """discovery.k8s.io/v1 EndpointSlice."""

    metadata: SliceMeta | None = None
    address_type: Text = None
    endpoints: list[Endpoint] | None = None
    """From protobuf, most are `kproxy_core.model.service.Endpoint` already."""
    ports: list[SlicePort] | None = None


class NodeMeta(ObjectMeta, frozen=True, gc=False):
    labels: dict[str, object] | None = None
    """All of them, of the only Node: the configuration says which are relevant. A manifest may have any
    value; an API server admits only strings."""
    deletion_timestamp: Text = field(default=None, name="deletionTimestamp")


class Taint(Struct, frozen=True, gc=False):
    key: Text = None


class NodeSpec(Struct, frozen=True, gc=False):
    pod_cidr: Text = field(default=None, name="podCIDR")
    pod_cidrs: list[Text] | None = field(default=None, name="podCIDRs")
    taints: list[Taint] | None = None


class NodeAddress(Struct, frozen=True, gc=False):
    type: Text = None
    address: Text = None


class NodeStatus(Struct, frozen=True, gc=False):
    addresses: list[NodeAddress] | None = None


class Node(Struct, frozen=True, gc=False):
    metadata: NodeMeta | None = None
    spec: NodeSpec | None = None
    status: NodeStatus | None = None


class ServiceCIDRSpec(Struct, frozen=True, gc=False):
    cidrs: list[Text] | None = None


class ServiceCIDR(Struct, frozen=True, gc=False):
    """networking.k8s.io/v1 ServiceCIDR."""

    metadata: ObjectMeta | None = None
    spec: ServiceCIDRSpec | None = None


class EndpointsLabels(Struct, frozen=True, gc=False):
    headless: Label = field(default=UNSET, name="service.kubernetes.io/headless")
    skip_mirror: Text = field(default=None, name="endpointslice.kubernetes.io/skip-mirror")


class EndpointsAnnotations(Annotations, frozen=True, gc=False):
    leader: Label = field(default=UNSET, name="control-plane.alpha.kubernetes.io/leader")


class EndpointsMeta(ObjectMeta, frozen=True, gc=False):
    labels: EndpointsLabels | None = None
    annotations: EndpointsAnnotations | None = None


class EndpointAddress(Struct, frozen=True, gc=False, rename="camel"):
    ip: Text = None
    node_name: Text = None


class EndpointSubset(Struct, frozen=True, gc=False, rename="camel"):
    addresses: list[EndpointAddress] | None = None
    not_ready_addresses: list[EndpointAddress] | None = None
    ports: list[SlicePort] | None = None


class Endpoints(Struct, frozen=True, gc=False):
    metadata: EndpointsMeta | None = None
    subsets: list[EndpointSubset] | None = None
