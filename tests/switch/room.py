"""A node that switches modes, with a client outside, one pod on the node and one elsewhere."""

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from kproxy_conformance.network.addresses import ADDRESSES, NETWORKS
from kproxy_conformance.network.cgroup import NodeCgroup
from kproxy_conformance.network.topology import Topology
from kproxy_ebpf.kernel import bpf
from kproxy_ebpf.kernel.programs import Compilation
from kproxy_ebpf.names import ATTACH_TYPES
from tests.core.bpf_places import inside, new_bpf_file_system, new_cgroup
from tests.core.namespaces import Namespace
from tests.switch import traffic
from tests.switch.traffic import Target

KPROXY = str(Path(sys.executable).with_name("kproxy"))
PATIENCE = float(os.environ.get("SWITCH_PATIENCE", "60"))
"""Timeout of every wait in seconds; a guest kernel under emulation needs more."""

NODE, NODE6 = ADDRESSES["node"]
CLIENT, CLIENT6 = ADDRESSES["client"]
HOSTS = {"here": "pod1", "elsewhere": "pod3"}
"""Endpoints, and their hosts of the topology."""
PODS = {name: ADDRESSES[host] for name, host in HOSTS.items()}
PORT = 8080

UDP_IDLE_TIMEOUT = "5s"
"""On a busy machine an answer may take longer than a relay's default of 250 ms."""

UDP_TIMEOUT = "20s"
"""Of IPVS: shorter than conntrack's, and than the time until clients reuse a port."""

HINT = "KUBE-IPTABLES-HINT"

EBPF = "ebpf"
"""Trace of programs at the room's cgroup, or of their pins."""

TRACES = {
    "nftables": r"table ip6? kproxy\n",
    "iptables": r"KUBE-(SVC|SEP)-",
    "ipvs": r"KUBE-IPVS-FILTER",
    "kube-ipvs0": r" kube-ipvs0:",
    "userspace": r"KUBE-PORTALS-|table ip6? kproxy-userspace\n",
}
"""Patterns of each mode's traces in the output of nft, iptables-save and ip."""

MANIFEST = f"""
apiVersion: v1
kind: Node
metadata: {{name: here}}
status: {{addresses: [{{type: InternalIP, address: {NODE}}}, {{type: InternalIP, address: "{NODE6}"}}]}}
---
apiVersion: v1
kind: Service
metadata: {{name: web, namespace: shop}}
spec:
  type: NodePort
  clusterIP: 10.96.0.10
  clusterIPs: [10.96.0.10, "fd00:96::10"]
  externalIPs: [198.51.100.10]
  ports: [{{name: http, port: 80, nodePort: 30080}}]
---
apiVersion: v1
kind: Service
metadata: {{name: dns, namespace: shop}}
spec:
  type: NodePort
  clusterIP: 10.96.0.53
  ports: [{{name: dns, port: 53, protocol: UDP, nodePort: 30053}}, {{name: dns-tcp, port: 53}}]
---
apiVersion: v1
kind: Service
metadata: {{name: cart, namespace: shop}}
spec:
  clusterIP: 10.96.0.20
  sessionAffinity: ClientIP
  ports: [{{name: http, port: 80}}]
---
apiVersion: v1
kind: Service
metadata: {{name: edge, namespace: shop}}
spec:
  type: LoadBalancer
  clusterIP: 10.96.0.30
  externalTrafficPolicy: Local
  healthCheckNodePort: 30082
  ports: [{{name: http, port: 80, nodePort: 30081}}]
status: {{loadBalancer: {{ingress: [{{ip: 198.51.100.30}}]}}}}
"""

SLICE = """
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: {service}-{at}, namespace: shop, labels: {{kubernetes.io/service-name: {service}}}}}
addressType: {family}
endpoints: [{{addresses: ["{here}"], nodeName: here}}, {{addresses: ["{elsewhere}"], nodeName: elsewhere}}]
ports: {ports}
"""

SERVICES = {
    "web": "[{name: http, port: 8080}]",
    "dns": "[{name: dns, port: 8080, protocol: UDP}, {name: dns-tcp, port: 8080}]",
    "cart": "[{name: http, port: 8080}]",
    "edge": "[{name: http, port: 8080}]",
}

SPARING = 3
"""Limit of new connections in a round (see `traffic.EACH_TICK`) where their number is not what is tested."""
SLACK = 1.0
"""Seconds between a lost segment and its retransmission."""

FROM_CLIENT = (
    Target("tcp", "10.96.0.10", 80),
    Target("tcp", "fd00:96::10", 80),
    Target("tcp", "198.51.100.10", 80),
    Target("tcp", NODE, 30080),
    Target("udp", "10.96.0.53", 53),
    Target("udp", NODE, 30053),
    Target("tcp", "10.96.0.20", 80),
    Target("tcp", "198.51.100.30", 80),
    Target("tcp", NODE, 30081),
)
FROM_NODE = (
    Target("tcp", "10.96.0.10", 80),
    Target("tcp", "fd00:96::10", 80),
    Target("tcp", NODE, 30080),
    Target("udp", "10.96.0.53", 53),
    Target("sendto", "10.96.0.53", 53),
    Target("tcp", "10.96.0.20", 80),
    Target("tcp", "10.96.0.30", 80),
)
ON_LOOPBACK = (Target("tcp", "127.0.0.1", 30080), Target("tcp", "::1", 30080))
"""Served while kproxy runs, where `nodePortAddresses` names localhost.

The number of targets of a load is coprime to `traffic.ORDERLY`.
"""
CONTROL = [Target("tcp", address, PORT) for address, _ in PODS.values()]
"""The endpoints themselves. A failure there is the machine's fault."""


class Failure(NamedTuple):
    """A failure reported by `traffic`."""

    since: float
    until: float
    sent_again: bool
    what: str
    silence: bool = False
    port: int = 0
    """The client's; 0: not bound."""

    def overlaps(self, since: float, until: float) -> bool:
        """Return whether the failure may belong to this interval."""
        return self.since <= until + SLACK and since - SLACK <= self.until


class Load:
    """A running `traffic` client."""

    def __init__(
        self, command: Sequence[str], targets: Sequence[Target], *, counted: bool, sparing: bool = False
    ) -> None:
        """*command* is the prefix that enters the client's namespace. *counted*: add to `Loads.made`.

        *sparing*: open `SPARING` connections at most in a round.
        """
        self.is_counted = counted
        self._process = subprocess.Popen(
            [*command, sys.executable, "-B", traffic.__file__, "client",
             json.dumps(targets), json.dumps(CONTROL)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **({"SWITCH_EACH_TICK": str(SPARING)} if sparing else {})},
        )  # fmt: skip
        self.answered: dict[str, int] = {}
        """Answered new connections and flows, by target."""
        self.failures: list[Failure] = []
        self.stalls: list[tuple[float, float]] = []
        """Intervals in which the machine was too busy to answer."""
        self.exchanged = 0
        """Answers on long-lived connections."""
        self._renewals = 0
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def made(self) -> int:
        return sum(self.answered.values())

    def renew(self) -> None:
        """Replace all long-lived connections and flows, and wait for pending exchanges."""
        assert self._process.stdin is not None
        wanted = self._renewals + 1
        self._process.stdin.write("renew\n")
        self._process.stdin.flush()
        self._wait(lambda: self._renewals >= wanted, "lasting connections renewed")

    def wait_for(self, number: int) -> None:
        """Wait for this many new connections."""
        self._wait(lambda: self.made >= number, f"{number} connections")

    def end(self) -> None:
        """Finish pending exchanges and end the program."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE)
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = json.loads(line)
            with self._changed:
                self.answered = found["answered"]
                self.exchanged = found["exchanged"]
                self._renewals = found["renewals"]
                self.failures += [Failure(**failure) for failure in found["failures"]]
                self.stalls += [(since, until) for since, until in found["stalls"]]
                self._changed.notify_all()

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        with self._changed:
            deadline = time.monotonic() + PATIENCE * 5
            while not done():
                assert self._process.poll() is None, "the load generator has ended"
                assert time.monotonic() < deadline, f"not {what}: {self.answered}, {self.failures[:5]}"
                self._changed.wait(1.0)


class Loads:
    """Loads from the client and from the node, at the same time."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self.all = loads

    @property
    def made(self) -> int:
        return sum(load.made for load in self.all if load.is_counted)

    def failures(self, since: float = 0) -> list[str]:
        """Return the failures since *since* (monotonic clock) that are not the machine's fault."""
        stalls = [stall for load in self.all for stall in load.stalls]
        return [
            f"{failure.until:.3f} {failure.what}"
            for load in self.all
            for failure in load.failures
            if failure.until >= since
            and not (failure.sent_again and any(failure.overlaps(*stall) for stall in stalls))
        ]

    @property
    def exchanged(self) -> int:
        return sum(load.exchanged for load in self.all)

    def renew(self) -> None:
        for load in self.all:
            load.renew()

    def more(self, number: int) -> None:
        """Wait for this many more connections."""
        wanted = self.made + number
        deadline = time.monotonic() + PATIENCE * 5
        while self.made < wanted:
            assert time.monotonic() < deadline, f"{self.made} of {wanted}: {self.failures()[:5]}"
            time.sleep(0.05)


class Proxy:
    """A running kproxy."""

    def __init__(self, node: Namespace, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self._node = node
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def healthy(self) -> bool:
        return self.health[0] == 200

    @property
    def health(self) -> tuple[int, str]:
        """Status and body of /healthz."""
        return self._get(10256, "/healthz")

    @property
    def mode(self) -> str:
        return self._get(10249, "/proxyMode")[1]

    def _get(self, port: int, path: str) -> tuple[int, str]:
        """Return status and body; status 0 if the connection is refused."""
        connection = http.client.HTTPConnection("127.0.0.1", port)
        try:
            connection.sock = self._node.inside(lambda: socket.create_connection(("127.0.0.1", port), 5))
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError:
            return 0, ""
        finally:
            connection.close()


class Room:
    """The namespaces, and the processes in them."""

    def __init__(self, stack: ExitStack, directory: Path, *, sockets: bool) -> None:
        """*sockets*: put the node's processes into a cgroup and count only their connections."""
        self._stack = stack
        self.directory = directory
        self._cgroup: Path | None = None
        if sockets:
            self._cgroup = stack.enter_context(new_cgroup())
            self._pins = stack.enter_context(new_bpf_file_system(directory / "bpf")) / "kproxy"
            Compilation().result()  # Under load this would take half a minute in a guest.
        hosts: dict[str, Namespace] = {}

        def make(name: str, cgroup: NodeCgroup | None) -> Namespace:
            hosts[name] = Namespace(name, cgroup)
            return hosts[name]

        stack.callback(Topology(make=make).close)
        self.client, self.node = hosts["client"], hosts["node"]
        self.pods = [hosts[name] for name in HOSTS.values()]
        for name, addresses in PODS.items():
            self._endpoint(hosts[HOSTS[name]], addresses)
        self.manifests = directory / "manifests"
        self.manifests.mkdir()
        slices = [
            SLICE.format(service=service, at=at, ports=ports, family=family, here=PODS["here"][at],
                         elsewhere=PODS["elsewhere"][at])
            for service, ports in SERVICES.items()
            for at, family in enumerate(("IPv4", "IPv6") if service == "web" else ("IPv4",))
        ]  # fmt: skip
        (self.manifests / "all.yaml").write_text(MANIFEST + "".join(slices))
        self._starts = 0

    def _endpoint(self, pod: Namespace, addresses: Sequence[str]) -> None:
        process = subprocess.Popen(
            ["ip", "netns", "exec", pod.name, sys.executable, "-B", traffic.__file__, "endpoint", str(PORT),
             *addresses],
            stdout=subprocess.PIPE,
        )  # fmt: skip
        self._stack.callback(_end, process)
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline() == b"listening\n"

    @contextmanager
    def proxy(
        self, mode: str, options: Mapping[str, object] = {}, *, environment: Mapping[str, str] = {},
        api_server: str = "",
    ) -> Iterator[Proxy]:
        """Start a kproxy, and wait until it is ready and other modes' leftovers are removed.

        *api_server*: the URL of one that has the objects; "": they are read from files.
        """
        config = self.directory / "config.conf"
        backends: dict[str, object] = {"userspace": {"udpIdleTimeout": UDP_IDLE_TIMEOUT}}
        if self._cgroup is not None:
            backends["ebpf"] = {"cgroup": str(self._cgroup), "pinDirectory": str(self._pins)}
        config.write_text(json.dumps({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": mode,
            "clusterCIDR": ",".join(NETWORKS["cluster_net"]), "conntrack": {"maxPerCore": 0},
            "nodePortAddresses": ["primary", "localhost"],
            "ipvs": {"udpTimeout": UDP_TIMEOUT},
            "kproxy": {
                "stateDirectory": str(self.directory / "state"), "backendOptions": backends, **options,
            },
        }))  # fmt: skip
        self._starts += 1
        path = self.directory / f"kproxy-{self._starts}.log"
        with path.open("wb") as log:
            process = subprocess.Popen([
                *self._on_node(), KPROXY, "--config", str(config), "--hostname-override", "here",
                *(["--master", api_server] if api_server else ["--manifests", str(self.manifests)]),
            ], stderr=log, env={**os.environ, **environment})  # fmt: skip
        proxy = Proxy(self.node, process, path)
        try:
            deadline = time.monotonic() + PATIENCE
            while not proxy.healthy:
                assert process.poll() is None, proxy.log
                assert time.monotonic() < deadline, proxy.log
                time.sleep(0.05)
            yield proxy
        finally:
            _end(process)

    def log_tail(self) -> str:
        """Return the end of the log of the proxy that was started last."""
        return (self.directory / f"kproxy-{self._starts}.log").read_text(errors="replace")[-8000:]

    def kproxy(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run a kproxy command on the node."""
        return subprocess.run(
            ["ip", "netns", "exec", self.node.name, KPROXY, *arguments],
            capture_output=True, text=True, check=False, timeout=PATIENCE,
        )  # fmt: skip

    @contextmanager
    def used(self, *, sparing: bool = False, on_loopback: bool = False) -> Iterator[Loads]:
        """Use all Services continuously."""
        client, counted = ["ip", "netns", "exec", self.client.name], self._cgroup is None
        on_node = (*FROM_NODE, *(ON_LOOPBACK if on_loopback else ()))
        loads = [
            Load(client, FROM_CLIENT, counted=counted, sparing=sparing or not counted),
            Load(self._on_node(), on_node, counted=True, sparing=sparing),
        ]
        try:
            for load, targets in zip(loads, (FROM_CLIENT, on_node), strict=True):
                load.wait_for(2 * len(targets))
            yield Loads(loads)
        finally:
            for load in loads:
                load.end()

    def choose_iptables(self, variant: str) -> None:
        """Have the node use iptables for the kernel's ``nft`` or ``legacy`` interface, as kubelet would.

        Asserts that the hint is in that interface only.
        """
        said = []
        for other in ("nft", "legacy"):
            program = (f"iptables-{other}", "-w", "-t", "mangle")
            done = self.node.attempt(*program, "-N" if other == variant else "-X", HINT)
            seen = self.node.attempt(*program, "-S", HINT)
            said.append(f"{other}: {done.stdout.strip()}; then: {seen.stdout.strip()}")
            assert (seen.returncode == 0) is (other == variant), f"no choice of {variant}: {' | '.join(said)}"

    def traces(self) -> set[str]:
        """Return the keys of `TRACES` found on the node; those in legacy iptables are marked."""
        dumps = [["nft", "list", "tables"], ["ip", "-o", "link"]]
        dumps += [[f"{base}-{of}-save"] for of in ("nft", "legacy") for base in ("iptables", "ip6tables")]
        found = set()
        for dump in dumps:
            done = self.node.attempt(*dump)  # and not `run`, which starts two programs for each
            interface = " (legacy)" if "legacy" in dump[0] else ""
            found |= {f"{of}{interface}" for of, pattern in TRACES.items() if re.search(pattern, done.stdout)}
        if self._cgroup is not None and (self._is_attached(self._cgroup) or any(self._pins.rglob("*"))):
            found.add(EBPF)
        return found

    def tables(self) -> set[str]:
        """Return the tables of nf_tables on the node with the handles that the kernel gave them."""
        return set(self.node.run("nft", "-a", "list", "tables").splitlines())

    def _on_node(self) -> list[str]:
        """Return the prefix of commands on the node."""
        command = ["ip", "netns", "exec", self.node.name]
        return command if self._cgroup is None else inside(self._cgroup, command)

    @staticmethod
    def _is_attached(cgroup: Path) -> bool:
        descriptor = os.open(cgroup, os.O_RDONLY)
        try:
            return any(bpf.attached(descriptor, kind) for kind in ATTACH_TYPES.values())
        finally:
            os.close(descriptor)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def room(directory: Path, *, sockets: bool = False) -> Iterator[Room]:
    with ExitStack() as stack:
        yield Room(stack, directory, sockets=sockets)
