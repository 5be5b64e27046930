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

from kproxy_core.testing.network.addresses import FAMILIES, LOCAL, resolve
from kproxy_core.testing.network.cgroup import NodeCgroup
from kproxy_core.testing.network.namespaces import Namespace

HOSTS = ("lan", "node", "node2", "client", "pod1", "pod2", "pod3", "pod4")
PODS = ("pod1", "pod2", "pod3", "pod4")


class Topology:
    """The namespaces, links, addresses and routes."""

    def __init__(self, node_cgroup: NodeCgroup | None = None) -> None:
        """*node_cgroup*: the sockets of the node and its pods are created there."""
        self.node_cgroup = node_cgroup
        self.hosts: dict[str, Namespace] = {}
        try:
            for name in HOSTS:
                self.hosts[name] = Namespace(name, node_cgroup if name in LOCAL else None)
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

    def _add_veth(self, host: str, device: str, peer: str, peer_device: str) -> None:
        self[host].ip(
            f"link add {device} type veth peer name {peer_device} netns {self[peer].path}",
            f"link set {device} up",
        )
        self[peer].ip(f"link set {peer_device} up")

    def _connect(self) -> None:
        self["lan"].ip("link add br0 type bridge", "link set br0 up")
        for host in ("node", "node2", "client"):
            self._add_veth("lan", f"to-{host}", host, "eth0")
            self["lan"].ip(f"link set to-{host} master br0")
        self._add_veth("node", "eth1", "client", "eth1")
        self._add_veth("node", "kcveth1", "pod1", "eth0")
        self._add_veth("node", "kcveth2", "pod2", "eth0")
        self._add_veth("node2", "kcveth3", "pod3", "eth0")
        self._add_veth("node2", "kcveth4", "pod4", "eth0")
        self["node"].ip(
            "link add kcbr0 type bridge", "link set kcveth1 master kcbr0",
            "link set kcveth1 type bridge_slave hairpin on", "link set kcbr0 up",
        )  # fmt: skip

    def _set_addresses_and_routes(self, family: str) -> None:
        at = {symbol: resolve(symbol, family) for symbol in _SYMBOLS}
        bits, wide = ("32", "24") if family == "ipv4" else ("128", "64")
        nodad = "" if family == "ipv4" else " nodad"
        # IPv6 would otherwise prefer the second address as a source.
        second = "" if family == "ipv4" else " nodad preferred_lft 0"
        self["lan"].ip(
            f"addr add {at['gateway']}/{wide} dev br0{nodad}",
            f"route add blackhole {at['any_net']}",
        )
        self["node"].ip(
            f"addr add {at['node']}/{wide} dev eth0{nodad}",
            f"addr add {at['node_alt']}/{wide} dev eth0{second}",
            f"addr add {at['node_net2']}/{wide} dev eth1{nodad}",
            f"addr add {at['node_pods']}/{bits} dev kcbr0{nodad}",
            f"addr add {at['node_pods']}/{bits} dev kcveth2{nodad}",
            f"route add {at['pod1']}/{bits} dev kcbr0",
            f"route add {at['pod2']}/{bits} dev kcveth2",
            f"route add {at['remote_pod_net']} via {at['node2']}",
            f"route add {at['many_net']} via {at['node2']}",
            f"route add {at['crowd_net']} via {at['client']}",
            f"route add default via {at['gateway']} src {at['node']}",
        )
        self["node2"].ip(
            f"addr add {at['node2']}/{wide} dev eth0{nodad}",
            f"route add {at['pod3']}/{bits} dev kcveth3",
            f"route add {at['pod4']}/{bits} dev kcveth4",
            f"addr add {at['node2_pods']}/{bits} dev kcveth3{nodad}",
            f"addr add {at['node2_pods']}/{bits} dev kcveth4{nodad}",
            f"route add {at['many_net']} via {at['pod3']} dev kcveth3 onlink",
            f"route add {at['local_pod_net']} via {at['node']}",
            f"route add {at['crowd_net']} via {at['client']}",
            f"route add default via {at['gateway']}",
        )
        self["client"].ip(
            f"addr add {at['client']}/{wide} dev eth0{nodad}",
            f"addr add {at['client_alt']}/{wide} dev eth0{second}",
            f"addr add {at['client_net2']}/{wide} dev eth1{nodad}",
            f"route add local {at['crowd_net']} dev lo",
            *(f"route add {at[network]} via {at['node']}" for network in _BEHIND_THE_NODE),
            f"route add default via {at['gateway']} src {at['client']}",
        )
        for pod in PODS:
            router = at["node_pods" if pod in LOCAL else "node2_pods"]
            self[pod].ip(
                f"addr add {at[pod]}/{bits} dev eth0{nodad}",
                f"route add {router}/{bits} dev eth0",
                f"route add default via {router} dev eth0 src {at[pod]}",
            )
        self["pod3"].ip(f"route add local {at['many_net']} dev lo")


_BEHIND_THE_NODE = ("cluster_net", "service_net", "lb_net", "ext_net")
_SYMBOLS = (
    "any_net", "client", "client_alt", "client_net2", "crowd_net", "gateway", "local_pod_net", "many_net",
    "node", "node2", "node2_pods", "node_alt", "node_net2", "node_pods", "remote_pod_net",
    *PODS, *_BEHIND_THE_NODE,
)  # fmt: skip
