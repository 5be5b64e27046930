"""Service ports of every kind, one Service each: the input that a backend must accept."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from msgspec import structs

from kproxy_conformance.builders import endpoint, endpoint_slice, node_view, plans, service
from kproxy_conformance.network.addresses import resolve
from kproxy_core.model.address import Family
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan

Plans = dict[ServicePortKey, ServicePlan]


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of the topology in one IP family."""

    family: Family
    node: str
    """The node's own address, which serves node ports."""
    pods: str
    """Network of all pods of the cluster."""
    near: tuple[str, str]
    """Addresses of pods on this node."""
    far: str
    """A pod on another node."""
    clients: tuple[str, str]
    """Two addresses of one client outside the cluster."""

    def cluster_ip(self, number: int) -> str:
        return resolve(f"vip{number}", self.family.label.lower())

    def external_ip(self, number: int) -> str:
        return resolve(f"ext{number}", self.family.label.lower())

    @property
    def bits(self) -> int:
        return self.family.bits

    def view(self) -> NodeView:
        """Return the node as backends see it."""
        return node_view(
            "node1", family=self.family, pods=self.pods, node_port_addresses=self.node, ip=self.node
        )


def _addresses(family: Family) -> Addresses:
    node, pods, pod1, pod2, far, *clients = (
        resolve(symbol, family.label.lower())
        for symbol in ("node", "cluster_net", "pod1", "pod2", "pod3", "client", "client_alt")
    )
    return Addresses(family, node, pods, (pod1, pod2), far, (clients[0], clients[1]))


ADDRESSES: Mapping[Family, Addresses] = {family: _addresses(family) for family in Family}


@dataclass(frozen=True, slots=True)
class Feature:
    """One Service with a feature of its own."""

    name: str
    number: int
    """Selects unique addresses and node ports."""
    ports: tuple[str, ...] = ("80",)
    endpoints: str = "near other far"
    """Pods: ``near``, ``other`` (as near), ``far``; ``many``; "" for none."""
    external_ip: bool = False
    load_balancer: bool = False
    ranges: bool = False
    affinity: int = 0
    internal_local: bool = False
    external_local: bool = False
    service_name: str = ""
    claimed: bool = False
    """An older Service owns its ClusterIP."""

    def plans(self, family: Family, *, others: bool = False) -> Plans:
        """Return its plans; with *others*, after a change of its endpoints."""
        at = ADDRESSES[family]
        name = self.service_name or self.name
        made = service(
            name,
            *self.ports,
            ip=at.cluster_ip(self.number),
            external_ips=at.external_ip(self.number) if self.external_ip else "",
            load_balancer_ips=at.external_ip(self.number + 100) if self.load_balancer else "",
            source_ranges=f"{at.clients[0]}/{at.bits} {at.pods}" if self.ranges else "",
            affinity=self.affinity,
            internal_local=self.internal_local,
            external_local=self.external_local,
            health_check_node_port=31000 + self.number if self.external_local and self.load_balancer else 0,
        )
        places = {
            "near": endpoint(at.near[0], "node1"),
            "other": endpoint(at.near[1], "node1"),
            "far": endpoint(at.far, "node2"),
        }
        chosen = [places[word] for word in self.endpoints.split() if word in places]
        if self.endpoints == "many":
            chosen = [endpoint(resolve(f"many{n}", family.label.lower()), "node2") for n in range(1, 26)]
        if others:
            chosen = chosen[1:] if len(chosen) > 1 else list(places.values())[:2]
        ports = [
            f"{spec.partition(':')[0] + ':' if ':' in spec else ''}8080{_protocol(spec)}"
            for spec in self.ports
        ]
        found = plans(at.view(), made, endpoint_slice(name, *chosen, ports=ports, family=family))
        if self.claimed:
            return {key: structs.replace(plan, cluster_ip=None) for key, plan in found.items()}
        return found


def _protocol(spec: str) -> str:
    return "".join(f"/{name}" for name in ("TCP", "UDP", "SCTP") if f"/{name}" in spec)


_LONG = "namespace-" + "n" * 53 + "/service-" + "s" * 55

FEATURES = tuple(replace(feature, number=number) for number, feature in enumerate([
    Feature("cluster-ip", 0),
    Feature("udp", 0, ("53/UDP@30102",)),
    Feature("sctp", 0, ("9/SCTP@30103",)),
    Feature("two-protocols-on-one-port", 0, ("tcp:53/TCP@30104", "udp:53/UDP@30104")),
    Feature("several-ports", 0, ("http:80@30105", "https:443@30205", "metrics:9090")),
    Feature("one-endpoint", 0, ("80@30106",), endpoints="near"),
    Feature("many-endpoints", 0, endpoints="many"),
    Feature("no-endpoints", 0, ("80@30108",), "", external_ip=True, load_balancer=True),
    Feature("node-port", 0, ("80@30109",)),
    Feature("external-ip", 0, external_ip=True),
    Feature("load-balancer", 0, ("80@30111",), load_balancer=True),
    Feature("source-ranges", 0, ("80@30112",), load_balancer=True, ranges=True),
    Feature("affinity", 0, ("80@30113",), affinity=600),
    Feature("internal-policy-local", 0, internal_local=True),
    Feature("internal-policy-local-none-here", 0, endpoints="far", internal_local=True),
    Feature("external-policy-local", 0, ("80@30116",), load_balancer=True, external_local=True),
    Feature("external-policy-local-none-here", 0, ("80@30117",), "far", external_ip=True,
            load_balancer=True, external_local=True),
    Feature("all-of-it", 0, ("a:80@30118", "b:80/UDP@30118"), external_ip=True, load_balancer=True,
            ranges=True, affinity=10, internal_local=True, external_local=True),
    Feature("long-names", 0, ("a-port-of-names:80",), service_name=_LONG),
    Feature("cluster-ip-of-another", 0, ("80@30120",), claimed=True),
], start=1))  # fmt: skip


def everything(family: Family) -> Plans:
    """Return the plans of all features."""
    return {key: plan for feature in FEATURES for key, plan in feature.plans(family).items()}


def many(count: int, family: Family) -> Plans:
    """Return the plans of *count* additional plain Services."""
    found: Plans = {}
    at = ADDRESSES[family]
    for number in range(count):
        made = service(f"beside-{number}", ip=at.cluster_ip(256 + number))
        found |= plans(at.view(), made, endpoint_slice(f"beside-{number}", at.near[0], at.far, family=family))
    return found
