"""The hosts that every scenario is played with.

                      lan (a bridge; also the default gateway, which drops silently)
        +------------------+-----------------+---------------+
        | eth0             | eth0            | eth0          |
      node               node2            client             |
       |  \\ eth1 ------------------------- eth1 (second network)
     kcbr0  kcveth2        |  |
       |      |         kcveth3 kcveth4
     pod1   pod2         pod3 pod4

`node` is the node under test. Everything is dual-stack. Packets that no host takes end at `lan`, which drops
them silently, so that "dropped" and "refused" can be told apart. Pods have /32 (/128) addresses and reach
even their neighbours through the node, as with a point-to-point CNI plugin. pod1 is behind a bridge and pod2
behind a plain veth, so that the interface-based modes of local-traffic detection can tell them apart.
"""

from collections.abc import Callable

from kproxy_conformance.network.addresses import FAMILIES, LOCAL, resolve
from kproxy_conformance.network.cgroup import NodeCgroup
from kproxy_conformance.network.namespaces import Namespace

HOSTS = ("lan", "node", "node2", "client", "pod1", "pod2", "pod3", "pod4")
PODS = ("pod1", "pod2", "pod3", "pod4")


class Topology:
    def __init__(
        self, node_cgroup: NodeCgroup | None = None,
        make: Callable[[str, NodeCgroup | None], Namespace] = Namespace,
    ) -> None:  # fmt: skip
        """*node_cgroup*: the sockets of the node and its pods are created there. *make* makes each host."""
        self.node_cgroup = node_cgroup
        self.hosts: dict[str, Namespace] = {}
        try:
            for name in HOSTS:
                self.hosts[name] = make(name, node_cgroup if name in LOCAL else None)
            for name in ("node", "node2"):
                self.hosts[name].forward()
            self._connect()
            for family in FAMILIES:
                self._set_addresses_and_routes(family)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Namespace:
        return self.hosts[name]

    def close(self) -> None:
        for namespace in self.hosts.values():
            namespace.close()
        self.hosts.clear()

    def _connect(self) -> None:
        for host in ("node", "node2", "client"):
            self["lan"].add_veth(f"to-{host}", self[host], "eth0")
        self["lan"].add_bridge("br0", "to-node", "to-node2", "to-client")
        self["node"].add_veth("eth1", self["client"], "eth1")
        for number, pod in enumerate(PODS, 1):
            self["node" if pod in LOCAL else "node2"].add_veth(f"kcveth{number}", self[pod], "eth0")
        self["node"].add_bridge("kcbr0", "kcveth1")
        self["node"].reflect("kcveth1")

    def _set_addresses_and_routes(self, family: str) -> None:
        at = {symbol: resolve(symbol, family) for symbol in _SYMBOLS}
        one, net = ("/32", "/24") if family == "ipv4" else ("/128", "/64")
        lan, node, node2, client = (self[name] for name in ("lan", "node", "node2", "client"))

        lan.add_address(at["gateway"] + net, "br0")
        lan.add_route(at["any_net"], kind="blackhole")

        node.add_address(at["node"] + net, "eth0")
        node.add_address(at["node_alt"] + net, "eth0", preferred=False)
        node.add_address(at["node_net2"] + net, "eth1")
        for device, pod in (("kcbr0", "pod1"), ("kcveth2", "pod2")):
            node.add_address(at["node_pods"] + one, device)
            node.add_route(at[pod] + one, device=device)
        for network, router in (("remote_pod_net", "node2"), ("many_net", "node2"), ("crowd_net", "client")):
            node.add_route(at[network], via=at[router])
        node.add_route(at["any_net"], via=at["gateway"], source=at["node"])

        node2.add_address(at["node2"] + net, "eth0")
        for device, pod in (("kcveth3", "pod3"), ("kcveth4", "pod4")):
            node2.add_route(at[pod] + one, device=device)
            node2.add_address(at["node2_pods"] + one, device)
        node2.add_route(at["many_net"], via=at["pod3"], device="kcveth3", onlink=True)
        node2.add_route(at["local_pod_net"], via=at["node"])
        node2.add_route(at["crowd_net"], via=at["client"])
        node2.add_route(at["any_net"], via=at["gateway"])

        client.add_address(at["client"] + net, "eth0")
        client.add_address(at["client_alt"] + net, "eth0", preferred=False)
        client.add_address(at["client_net2"] + net, "eth1")
        client.add_route(at["crowd_net"], device="lo", kind="local")
        for network in _BEHIND_THE_NODE:
            client.add_route(at[network], via=at["node"])
        client.add_route(at["any_net"], via=at["gateway"], source=at["client"])

        for pod in PODS:
            router = at["node_pods" if pod in LOCAL else "node2_pods"]
            self[pod].add_address(at[pod] + one, "eth0")
            self[pod].add_route(router + one, device="eth0")
            self[pod].add_route(at["any_net"], via=router, device="eth0", source=at[pod])
        self["pod3"].add_route(at["many_net"], device="lo", kind="local")


_BEHIND_THE_NODE = ("cluster_net", "service_net", "lb_net", "ext_net")
_SYMBOLS = (
    "any_net", "client", "client_alt", "client_net2", "crowd_net", "gateway", "local_pod_net", "many_net",
    "node", "node2", "node2_pods", "node_alt", "node_net2", "node_pods", "remote_pod_net",
    *PODS, *_BEHIND_THE_NODE,
)  # fmt: skip
