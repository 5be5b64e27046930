"""The hosts that every scenario is played with.

                      lan (a bridge; also the default gateway, which drops silently)
        +------------------+-----------------+---------------+
        | eth0             | eth0            | eth0          |
      node               node2            client             |
       |  \\ eth1 ------------------------- eth1 (second network)
       |                   |  |
     pod1, pod2         pod3 pod4

`node` is the node under test. Packets that no host takes end at `lan`, which drops them silently, so that
"dropped" and "refused" can be told apart. A wiring says how pods are attached to their nodes, which families
there are, and what else is unlike the default wiring: there, everything is dual-stack, pods have /32 (/128)
addresses and reach even their neighbours through the node, as with a point-to-point CNI plugin, and pod1 is
behind a bridge and pod2 behind a plain veth, so that the interface-based modes of local-traffic detection can
tell them apart.
"""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from string import Template

from kproxy_conformance.network.addresses import LOCAL, resolve
from kproxy_conformance.network.cgroup import NodeCgroup
from kproxy_conformance.network.cni import Cni, Place
from kproxy_conformance.network.namespaces import CommandFailed, Namespace
from kproxy_conformance.network.rights import MissingRight
from kproxy_conformance.network.wiring import DEFAULT, Wiring, device_of, read
from kproxy_conformance.processes import own_name

HOSTS = ("lan", "node", "node2", "client", "pod1", "pod2", "pod3", "pod4")
PODS = ("pod1", "pod2", "pod3", "pod4")

_MAC = "ee:ee:ee:ee:ee:ee"
"""Of the node's end of a routed veth. Calico gives all of them this one."""
_ROUTER = {"ipv4": "169.254.1.1", "ipv6": "fe80::ecee:eeff:feee:eeee"}
"""The router that a routed pod has: an address that no host has, and the one of `_MAC`."""


class Topology:
    def __init__(
        self, node_cgroup: NodeCgroup | None = None,
        make: Callable[[str, NodeCgroup | None], Namespace] = Namespace, wiring: Wiring | None = None,
    ) -> None:  # fmt: skip
        """*node_cgroup*: the sockets of the node and its pods are created there. *make* makes each host.

        Raises MissingRight if this kernel, or a missing program, does not allow *wiring*.
        """
        self.node_cgroup = node_cgroup
        self.wiring = wiring or read(DEFAULT)
        self.hosts: dict[str, Namespace] = {}
        self._owned = ExitStack()
        try:
            for name in HOSTS:
                if self.wiring.of(name).attach != "host":
                    self.hosts[name] = make(name, node_cgroup if name in LOCAL else None)
                    self._owned.callback(self.hosts[name].close)
            for name in ("node", "node2"):
                self.hosts[name].forward()
            self._configure()
            self._connect()
            for family in self.families:
                self._set_addresses_and_routes(family)
            self._attach_by_plugins()
            self._set_up()
        except BaseException:
            self.close()
            raise

    @property
    def families(self) -> tuple[str, ...]:
        return self.wiring.families

    @property
    def host_pods(self) -> tuple[str, ...]:
        """The pods that share the node's namespace."""
        return tuple(pod for pod in PODS if self[pod] is self["node"])

    def __getitem__(self, name: str) -> Namespace:
        return self.hosts[name]

    def close(self) -> None:
        self._owned.close()
        self.hosts.clear()

    def _configure(self) -> None:
        for setting, value in self.wiring.sysctls.items():
            try:
                self["node"].configure(setting, value)
            except OSError as error:
                raise self._missing(f"{setting}: {error.strerror}") from error

    def _connect(self) -> None:
        for host in ("node", "node2", "client"):
            self["lan"].add_veth(f"to-{host}", self[host], "eth0")
        self["lan"].add_bridge("br0", "to-node", "to-node2", "to-client")
        self["node"].add_veth("eth1", self["client"], "eth1")
        for pod in PODS:
            how, router = self.wiring.of(pod), self._router(pod)
            if how.attach == "host":
                self.hosts[pod] = self["node"]
            elif how.attach != "cni":
                mac = _MAC if how.attach == "routed" else ""
                router.add_veth(device_of(pod), self[pod], "eth0", mac=mac, mtu=self.wiring.mtu)
        for bridge in dict.fromkeys(how.bridge for how in self.wiring.pods.values() if how.bridge):
            self["node"].add_bridge(bridge)
        for pod, how in self.wiring.pods.items():
            if how.attach == "bridge":
                self["node"].add_port(how.bridge, device_of(pod))
                if how.hairpin:
                    self["node"].reflect(device_of(pod))
            if how.attach == "routed":
                device = device_of(pod)
                for setting, value in ((f"conf/{device}/proxy_arp", 1), (f"conf/{device}/rp_filter", 1),
                                       (f"neigh/{device}/proxy_delay", 0)):
                    self["node"].configure(f"net/ipv4/{setting}", value)

    def _router(self, pod: str) -> Namespace:
        return self["node" if pod in LOCAL else "node2"]

    def _set_addresses_and_routes(self, family: str) -> None:
        at = {symbol: resolve(symbol, family) for symbol in _SYMBOLS}
        one, net = ("/32", "/24") if family == "ipv4" else ("/128", "/64")
        lan, node, node2, client = (self[name] for name in ("lan", "node", "node2", "client"))

        lan.add_address(at["gateway"] + net, "br0")
        lan.add_route(at["any_net"], kind="blackhole")

        node.add_address(at["node"] + net, "eth0")
        node.add_address(at["node_alt"] + net, "eth0", preferred=False)
        node.add_address(at["node_net2"] + net, "eth1")
        for network, via in (("remote_pod_net", "node2"), ("many_net", "node2"), ("crowd_net", "client")):
            node.add_route(at[network], via=at[via])
        node.add_route(at["any_net"], via=at["gateway"], source=at["node"])

        node2.add_address(at["node2"] + net, "eth0")

        client.add_address(at["client"] + net, "eth0")
        client.add_address(at["client_alt"] + net, "eth0", preferred=False)
        client.add_address(at["client_net2"] + net, "eth1")
        client.add_route(at["crowd_net"], device="lo", kind="local")
        for network in _BEHIND_THE_NODE:
            client.add_route(at[network], via=at["node"])
        client.add_route(at["any_net"], via=at["gateway"], source=at["client"])

        addressed: set[str] = set()
        for pod in PODS:
            how, router = self.wiring.of(pod), self._router(pod)
            if how.attach == "host":
                node.add_address(at[pod] + one, "lo")
            if how.attach in ("cni", "host"):
                continue
            device, gateway = how.bridge or device_of(pod), at["node_pods" if pod in LOCAL else "node2_pods"]
            if how.attach == "routed":
                gateway = _ROUTER[family]
            elif device not in addressed:
                router.add_address(gateway + one, device)
                addressed.add(device)
            router.add_route(at[pod] + one, device=device)
            self[pod].add_address(at[pod] + one, "eth0")
            self[pod].add_route(gateway + one, device="eth0")
            self[pod].add_route(at["any_net"], via=gateway, device="eth0", source=at[pod])

        node2.add_route(at["many_net"], via=at["pod3"], device="kcveth3", onlink=True)
        node2.add_route(at["local_pod_net"], via=at["node"])
        node2.add_route(at["crowd_net"], via=at["client"])
        node2.add_route(at["any_net"], via=at["gateway"])
        self["pod3"].add_route(at["many_net"], device="lo", kind="local")

    def _attach_by_plugins(self) -> None:
        by_plugins = [pod for pod in PODS if self.wiring.of(pod).attach == "cni"]
        if not by_plugins:
            return
        directory = self._owned.enter_context(tempfile.TemporaryDirectory(prefix=f"{own_name('cni')}-"))
        plugins = Cni(self["node"], Path(directory))
        for pod in by_plugins:
            places = [Place(*(resolve(symbol, family) for symbol in (pod, "local_pod_net", "node_pods")))
                      for family in self.families]
            plugins.add(self[pod], places, self.wiring.of(pod).plugins)

    def _set_up(self) -> None:
        for family in self.families:
            for command in self.wiring.setup:
                if family in command.families:
                    text = Template(command.run).substitute({s: resolve(s, family) for s in _SYMBOLS})
                    try:
                        self[command.at].run("sh", "-ec", text)
                    except CommandFailed as error:
                        raise self._missing(str(error)) from error

    def _missing(self, reason: str) -> MissingRight:
        return MissingRight(f"the wiring {self.wiring.name}", reason)


_BEHIND_THE_NODE = ("cluster_net", "service_net", "lb_net", "ext_net")
_SYMBOLS = (
    "any_net", "client", "client_alt", "client_net2", "crowd_net", "gateway", "lan_net", "local_pod_net",
    "many_net", "node", "node2", "node2_overlay", "node2_pods", "node_alt", "node_net2", "node_overlay",
    "node_pods", "remote_pod_net", "second_net", *PODS, *_BEHIND_THE_NODE,
)  # fmt: skip
