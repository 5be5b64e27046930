"""Everything that an explanation needs, asked of the nodes and read from the API server."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Literal, TypeVar

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, to_builtins

from kproxy_core.app.errors import Misused, NoAnswer
from kproxy_core.app.explain import ServiceTarget, Target, parse_target
from kproxy_core.fleet.answers import decode
from kproxy_core.fleet.cluster import Cluster, Node
from kproxy_core.fleet.errors import Forbidden, Unreached
from kproxy_core.fleet.explain import (
    Policies,
    Sender,
    deciding,
    explained,
    meant,
    nodes_of,
    on_any_node,
    sender_at,
    services_of,
)
from kproxy_core.fleet.lags import Answered, Json, ServiceObjects, dialled, key_of
from kproxy_core.fleet.objects import NetworkPolicy, Pod, ServiceState, SliceState
from kproxy_core.kube.decode import NODES
from kproxy_core.model.address import Family, family_of, format_address, format_socket, parse_address
from kproxy_core.model.events import NodeSet
from kproxy_core.model.node import NodeObject
from kproxy_core.model.service import Destination, ServiceName
from kproxy_core.plan.fate import Origin

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Is called with the numbers of nodes that have been asked and of all."""

_POD = re.compile(r"(?:(?P<namespace>[a-z0-9-]+)/)?(?P<name>[a-z0-9.-]+)")
_MOST_SERVICES = 10
"""Services of one question: an address of a node may have the node ports of all."""


_Text = Annotated[str, Meta(max_length=100_000)]
"""A node may answer anything; a reason may list all source ranges of a Service."""
_LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_Service = Annotated[str, Meta(pattern=f"^{_LABEL}/{_LABEL}$")]
"""Namespace and name, which are put into the paths of requests."""


class _Frontend(Struct, frozen=True):
    kind: _Text
    service: _Service
    port: _Text
    service_port: _Text
    origin: _Text = ""


class _HasEndpoint(Struct, frozen=True):
    endpoint: _Text

    def __post_init__(self) -> None:
        Destination.parse(self.endpoint)


class _Share(_HasEndpoint, frozen=True):
    share: float
    masqueraded: bool


class _NotChosen(_HasEndpoint, frozen=True):
    because: _Text


class _Endpoint(_HasEndpoint, frozen=True):
    node: _Text
    ready: bool
    serving: bool
    terminating: bool
    for_zones: list[_Text]
    for_nodes: list[_Text]


class _Slice(Struct, frozen=True):
    name: _Text
    weight: int | None
    endpoints: list[_Endpoint]


class _LastResort(Struct, frozen=True):
    seconds: float
    left: float


class _Kernel(Struct, frozen=True):
    mode: _Text
    verdict: Literal["agrees", "differs", "deviates by design", "cannot be told"]
    differences: list[_Text]
    filters: list[_Text] = []


class _Probe(Struct, frozen=True):
    findings: list[_Text]
    unclear: list[_Text]
    source: _Text = ""


class _Packet(Struct, frozen=True):
    to: _Text
    protocol: Literal["TCP", "UDP", "SCTP"]
    frontend: _Frontend | None
    outcome: Literal["forwarded", "refused", "dropped", "not touched", "depends"]
    because: _Text
    policy: _Text
    endpoints: list[_Share]
    not_chosen: list[_NotChosen]
    kernel: _Kernel
    source: _Text = ""
    near: _Text = ""
    last_resort: _LastResort | None = None
    slices: list[_Slice] | UnsetType = UNSET
    """UNSET: the release is older than this field."""
    probe: _Probe | UnsetType | None = UNSET
    """Of an answer to a question with ``--probe``; None: such packets were not sent."""

    def __post_init__(self) -> None:
        Destination.parse(self.to)


class Explanation(Struct, frozen=True):
    """The answer of ``kproxy explain -o json``."""

    packets: list[_Packet]


class Inquiry:
    """One question about packets in a cluster."""

    def __init__(self, cluster: Cluster, namespace: str, progress: Progress | None = None) -> None:
        """*namespace*: of pods and Services that are named without."""
        self._cluster = cluster
        self._namespace = namespace
        self._progress = progress
        self._nodes: Sequence[NodeObject] = ()
        self._proxies: Mapping[str, Node] = {}
        self._objects: dict[ServiceName, ServiceObjects] = {}
        self._unreached: set[str] = set()

    def explain(self, sender: str, to: str, *, probe: bool = False) -> Json:
        """Return the answer to ``kubectl kproxy explain`` *sender* *to*.

        With *probe*, the sender's node sends packets. Raises NoAnswer, NoCluster and Forbidden.
        """
        target = parse_target(to)
        if isinstance(target, ServiceTarget):
            target = target._replace(namespace=target.namespace or self._namespace)
            to = target.words
        self._nodes = [
            reading.value.node for data in self._cluster.objects("/api/v1/nodes", Raw)
            if isinstance((reading := NODES.from_json(data)).value, NodeSet)
        ]
        self._proxies = {node.name: node for node in self._cluster.nodes()}
        found = self._sender(sender)
        if probe and not found.node:
            raise Misused(f"--probe sends from a node, or from a pod on it: {found} is neither")
        if isinstance(target, ServiceTarget):
            self._read_service(ServiceName(target.namespace, target.name), is_named=True)
        deciders = self._ask_deciders(found, target, to)
        self._read_services(deciders)
        others = self._ask_others(deciders)
        probed = self._probe(found, target, to) if probe else None
        self._read_again()
        addresses = frozenset(address for node in self._nodes for address in node.addresses)
        pods, policies = self._read_policies(found)
        return explained(found, to, deciders, others, self._objects, pods, policies, addresses,
                         self._cluster.now(), probed)

    def _sender(self, text: str) -> Sender:
        if text == Origin.OUTSIDE.value:
            return Sender(text)
        with suppress(ValueError):
            address = parse_address(text)
            selector = f"status.podIP={format_address(address)}"
            return sender_at(
                address, self._nodes, self._cluster.objects("/api/v1/pods", Pod, field_selector=selector))
        named = _POD.fullmatch(text)
        if named is None:
            raise Misused(f"{text!r} is no sender: give [NAMESPACE/]POD, NODE, ADDRESS or outside")
        namespace = named["namespace"] or self._namespace
        for pod in self._named(f"/api/v1/namespaces/{namespace}/pods", named["name"], Pod):
            if pod.has_ended:
                raise NoAnswer(f"pod {pod.metadata.full_name} has ended")
            if not pod.node or not pod.addresses:
                raise NoAnswer(f"pod {pod.metadata.full_name} has no address yet")
            return Sender.of_pod(pod)
        for node in self._nodes:
            if node.name == text:
                return Sender.of_node(node)
        raise NoAnswer(f"{text!r} is neither a pod in namespace {namespace} nor a node")

    # Nodes

    def _ask_deciders(self, sender: Sender, target: Target, to: str) -> list[Answered]:
        name = deciding(sender, target, self._nodes)
        asked = [name] if name else [node.name for node in self._nodes]
        word = sender.word(name, self._families(target))
        found = self._ask(asked, word, to)
        served = [known.state.service for known in self._objects.values() if known.state.service is not None]
        if isinstance(target, ServiceTarget) and served:
            # A node that does not know the Service says what it does with packets to its ClusterIP.
            first = served[0].ports[0]
            socket = format_socket(served[0].cluster_ips[0], first.port)
            silent = [node for node, answered in found.items()
                      if not answered.packets and node not in self._unreached]
            again = self._ask(silent, word, f"{socket}/{first.protocol.name}")
            found |= {node: answered for node, answered in again.items() if answered.packets}
        return [
            answered._replace(packets=meant(answered.packets, target, sender))
            for _, answered in sorted(found.items())
        ]

    def _families(self, target: Target) -> list[Family]:
        """Return the IP families that a target may have; []: any."""
        if not isinstance(target, ServiceTarget):
            return [] if target.address is None else [family_of(target.address)]
        return [family_of(address) for known in self._objects.values()
                if known.state.service is not None for address in known.state.service.cluster_ips]

    def _ask_others(self, deciders: Sequence[Answered]) -> dict[str, Answered]:
        """Ask the nodes of endpoints about the same frontends."""
        asked = {answered.node for answered in deciders}
        nodes: dict[str, dict[str, None]] = {}
        for packet in (packet for answered in deciders for packet in answered.packets):
            if packet["frontend"] is not None:
                on = nodes_of(packet, self._objects.get(key_of(packet).service))
                names = (on.get(each["endpoint"], "") for each in (
                    *packet["endpoints"], *packet["not_chosen"]))
                nodes.setdefault(on_any_node(packet), {}).update(
                    dict.fromkeys(name for name in names if name and name not in asked))
        found: dict[str, Answered] = {}
        for to, of_frontend in nodes.items():
            for name, answered in self._ask(list(of_frontend), Origin.POD.value, to).items():
                before = found.get(name, Answered(name))
                found[name] = Answered(
                    name, [*before.packets, *answered.packets], before.problem or answered.problem)
        return found

    def _probe(self, sender: Sender, target: Target, to: str) -> Answered:
        """Return the answers of the sender's node, which sends the packets."""
        word = sender.word(sender.node, self._families(target))
        answered = self._ask([sender.node], word, to, "--probe")[sender.node]
        return answered._replace(packets=meant(answered.packets, target, sender))

    def _ask(self, names: Sequence[str], sender: str, to: str, *options: str) -> dict[str, Answered]:
        command = ("kproxy", "explain", sender, to, *options, "-o", "json")
        nodes = [self._proxies.get(name, Node(name=name, ready=False, problem="there is no such node"))
                 for name in names]
        found = {}
        for node, reply in self._cluster.ask_all(nodes, command, progress=self._progress):
            if isinstance(reply, Unreached):
                self._unreached.add(node.name)
                found[node.name] = Answered(node.name, problem=reply.why)
                continue
            try:
                packets = decode(node, reply, Explanation).packets
                found[node.name] = Answered(node.name, [to_builtins(packet) for packet in packets])
            except Unreached as error:
                found[node.name] = Answered(node.name, problem=error.why)
        return found

    # Objects

    def _read_service(self, name: ServiceName, *, is_named: bool = False) -> None:
        """Remember a Service and its slices, unless there is none. Raises NoAnswer if no proxy serves it."""
        for data in self._named(f"/api/v1/namespaces/{name.namespace}/services", name.name, Raw):
            state = ServiceState.read(data)
            if state.service is None and is_named:
                raise NoAnswer(f"Service {name} has no ClusterIP, or belongs to another service proxy: "
                               "kproxy does not touch its packets")
            self._remember(name, state)

    def _remember(self, name: ServiceName, state: ServiceState) -> None:
        if name not in self._objects and len(self._objects) == _MOST_SERVICES:
            raise NoAnswer(f"more than {_MOST_SERVICES} Services have frontends there; name a port")
        path = f"/apis/discovery.k8s.io/v1/namespaces/{name.namespace}/endpointslices"
        selector = f"kubernetes.io/service-name={name.name}"
        slices = map(SliceState.read, self._cluster.objects(path, Raw, label_selector=selector))
        self._objects[name] = ServiceObjects(state, [each for each in slices if each is not None])

    def _read_services(self, deciders: Sequence[Answered]) -> None:
        """Read the Services to which the packets are, by what the nodes know and by the API server."""
        named = services_of(deciders)
        for name in named:
            if name not in self._objects:
                self._read_service(name)
        packets = [packet for answered in deciders for packet in answered.packets]
        is_unknown = any(packet["frontend"] is None for packet in packets)
        if self._objects.keys() >= set(named) and not (is_unknown and not self._objects):
            return
        addresses = frozenset(address for node in self._nodes for address in node.addresses)
        for data in self._cluster.objects("/api/v1/services", Raw):
            state = ServiceState.read(data)
            if state.service is not None and state.service.name not in self._objects and any(
                    state.has(dialled(packet), addresses) for packet in packets):
                self._remember(state.service.name, state)

    def _read_again(self) -> None:
        """Read the Services again: nodes may have answered with changes that followed the first reading."""
        for name, before in list(self._objects.items()):
            self._read_service(name)
            now = self._objects[name]
            deleted = {each.meta.name for each in before.slices} - {each.meta.name for each in now.slices}
            self._objects[name] = now._replace(deleted=frozenset(deleted))

    def _read_policies(self, sender: Sender) -> tuple[dict[ServiceName, Pod], Policies]:
        """Return the pods of endpoints, and the NetworkPolicies that may select these or the sender.

        What RBAC refuses is only said.
        """
        pods: dict[ServiceName, Pod] = {}
        policies: list[NetworkPolicy] = []
        refused: dict[str, None] = {}
        namespaces = {name.namespace for name in self._objects}
        if sender.pod is not None:
            namespaces.add(sender.pod.metadata.namespace or "")
        for name, known in self._objects.items():
            if known.state.selector:
                path = f"/api/v1/namespaces/{name.namespace}/pods"
                found = self._allowed(path, Pod, refused, known.state.selector)
                pods |= {ServiceName(name.namespace, pod.metadata.name): pod for pod in found}
        for namespace in sorted(namespaces):
            path = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
            policies += self._allowed(path, NetworkPolicy, refused)
        return pods, Policies(policies, "; ".join(refused))

    def _allowed(self, path: str, kind: type[T], refused: dict[str, None], selector: str = "") -> list[T]:
        """Return objects; none, with the reason in *refused*, if RBAC does not allow to read them."""
        try:
            return self._cluster.objects(path, kind, label_selector=selector)
        except Forbidden as error:
            refused[str(error)] = None
            return []

    def _named(self, path: str, name: str, kind: type[T]) -> list[T]:
        return self._cluster.objects(path, kind, field_selector=f"metadata.name={name}")
