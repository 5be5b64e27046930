"""Services of every kind, as hypothesis strategies and as plans."""

from typing import NamedTuple

from hypothesis import strategies as st

from kproxy_conformance.builders import endpoint, endpoint_slice, node_view, plans, service
from kproxy_core.model.address import Family
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan

NODE = "node1"
NODES = {
    Family.IPV4: node_view(NODE, pods="10.244.0.0/16", anywhere=True, ip="192.0.2.1"),
    Family.IPV6: node_view(NODE, family=Family.IPV6, pods="fd00:10::/64", anywhere=True, ip="2001:db8::1"),
}


class Scene(NamedTuple):
    """One Service. Its number determines its addresses."""

    number: int
    protocol: str
    endpoints: tuple[int, ...]
    """Even numbers are on this node."""
    external: str
    """``none``, ``node port``, ``external IP``, ``load balancer`` or ``ranges``."""
    affinity: bool
    internal_local: bool
    external_local: bool

    def plans(self, family: Family) -> dict[ServicePortKey, ServicePlan]:
        """Return its plans."""
        v4 = family is Family.IPV4
        net = "10.96.{}.{}" if v4 else "fd00:96::{:x}:{:x}"
        balanced = self.external in ("load balancer", "ranges")
        made = service(
            f"web{self.number}",
            f"http:80/{self.protocol}" + (f"@{30000 + self.number}" if self.external != "none" else ""),
            ip=net.format(0, self.number + 1),
            external_ips=net.format(1, self.number) if self.external == "external IP" else "",
            load_balancer_ips=net.format(2, self.number) if balanced else "",
            source_ranges=("198.51.100.0/24 192.0.2.0/24" if v4 else "2001:db8::/64")
            if self.external == "ranges" else "",
            affinity=600 if self.affinity else 0,
            internal_local=self.internal_local,
            external_local=self.external_local and self.external != "none",
            health_check_node_port=(
                31000 + self.number if self.external == "load balancer" and self.external_local else 0
            ),
        )  # fmt: skip
        pods = "10.244.0.{}" if v4 else "fd00:10::{:x}"
        found = [
            endpoint(pods.format(number + 1), "other" if number % 2 else NODE) for number in self.endpoints
        ]
        slices = [
            endpoint_slice(f"web{self.number}", *found, ports=(f"http:8080/{self.protocol}",), family=family)
        ]
        return plans(NODES[family], made, *slices)


def scenes(numbers: st.SearchStrategy[int]) -> st.SearchStrategy[Scene]:
    """Return a strategy for Services of all kinds."""
    return st.builds(
        Scene,
        number=numbers,
        protocol=st.sampled_from(["TCP", "UDP", "SCTP"]),
        endpoints=st.lists(st.integers(0, 11), max_size=5, unique=True).map(tuple),
        external=st.sampled_from(["none", "node port", "external IP", "load balancer", "ranges"]),
        affinity=st.booleans(),
        internal_local=st.booleans(),
        external_local=st.booleans(),
    )


def plain(number: int, *endpoints: int) -> Scene:
    """Return a ClusterIP Service."""
    return Scene(number, "TCP", endpoints, "none", False, False, False)


def all_plans(family: Family, *given: Scene) -> dict[ServicePortKey, ServicePlan]:
    """Return the plans of several Services."""
    return {key: plan for scene in given for key, plan in scene.plans(family).items()}


def node(family: Family) -> NodeView:
    return NODES[family]
