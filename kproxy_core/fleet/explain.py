"""The way of a packet through a cluster: what the nodes answer, beside what the API server has. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kproxy_core.app.errors import NoAnswer
from kproxy_core.app.explain import DIFFERS, ServiceTarget, Target, slice_as_told
from kproxy_core.fleet.lags import (
    Answered,
    Json,
    Objects,
    Packet,
    Problem,
    ServiceObjects,
    condition,
    dialled,
    joined,
    key_of,
    lags,
)
from kproxy_core.fleet.objects import Metadata, NetworkPolicy, Pod, selecting
from kproxy_core.model.address import Address, Family, family_of, format_address
from kproxy_core.model.node import NodeObject
from kproxy_core.model.service import Destination, ServiceName, ServicePortKey
from kproxy_core.plan.fate import FrontendKind, Origin, Outcome, Policy
from kproxy_core.plan.quarantine import IN_QUARANTINE

# The sender and the nodes that decide.


class Sender(NamedTuple):
    """The sender of the packets, as FROM names it."""

    what: str
    """``pod``, ``node``, ``address`` or ``outside``."""
    name: str = ""
    node: str = ""
    """The node that it is on; "": outside of the cluster."""
    addresses: tuple[Address, ...] = ()
    """Those that its packets may have; (): any outside of the cluster."""
    is_node: bool = False
    """It is the node itself, or a pod in the node's network namespace."""
    pod: Pod | None = None

    @classmethod
    def of_pod(cls, pod: Pod) -> "Sender":
        return cls("pod", pod.metadata.full_name, pod.node, pod.addresses, pod.is_on_host_network, pod)

    @classmethod
    def of_node(cls, node: NodeObject) -> "Sender":
        return cls("node", node.name, node.name, node.addresses, is_node=True)

    def word(self, on: str, families: Collection[Family]) -> str:
        """Return FROM of ``kproxy explain`` on node *on*, for a target in one of *families*; (): in any.

        Raises NoAnswer.
        """
        if not self.addresses:
            return Origin.OUTSIDE.value
        if self.is_node and self.node == on:
            return Origin.NODE.value
        for address in self.addresses:
            if not families or family_of(address) in families:
                return format_address(address)
        raise NoAnswer(f"{self} has no {' or '.join(family.label for family in families)} address")

    def __str__(self) -> str:
        text = f"{self.what} {self.name}".rstrip()
        return f"{text} on node {self.node}" if self.node and self.what != "node" else text


def sender_at(address: Address, nodes: Sequence[NodeObject], pods: Iterable[Pod]) -> Sender:
    """Return the sender with *address*: a node, a pod, or something in the network of a node's pods.

    *pods* are those that may have it.
    """
    for node in nodes:
        if address in node.addresses:
            return Sender.of_node(node)._replace(addresses=(address,))
    for pod in pods:
        if address in pod.addresses and not (pod.has_ended or pod.is_on_host_network):
            return Sender.of_pod(pod)._replace(addresses=(address,))
    text = format_address(address)
    for node in nodes:
        if any(address in cidr for cidr in node.pod_cidrs):
            return Sender("address", text, node.name, (address,))
    return Sender("address", text, "", (address,))


def deciding(sender: Sender, target: Target, nodes: Iterable[NodeObject]) -> str:
    """Return the name of the node that decides about the packets; "": any node may be dialled.

    A node port is served by the node that has the address: the sender's does not touch its packets.
    """
    address = None if isinstance(target, ServiceTarget) else target.address
    return next((node.name for node in nodes if address in node.addresses), sender.node)


# The answers of nodes.


def meant(packets: Sequence[Packet], target: Target, sender: Sender) -> Sequence[Packet]:
    """Return those *packets* that a client of a Service named by *target* sends.

    From inside of the cluster, a Service's name stands for its ClusterIP; from outside, it stands for its
    other frontends. Without any of these, all are meant.
    """
    if not isinstance(target, ServiceTarget):
        return packets
    own = [packet for packet in packets if _is_cluster_ip(packet) is bool(sender.node)]
    return own or packets


def _is_cluster_ip(packet: Packet) -> bool:
    frontend = packet["frontend"]
    return frontend is not None and frontend["kind"] == FrontendKind.CLUSTER_IP.value


def _is_node_port(packet: Packet) -> bool:
    frontend = packet["frontend"]
    return frontend is not None and frontend["kind"] == FrontendKind.NODE_PORT.value


def on_any_node(packet: Packet) -> str:
    """Return the target of a packet to a Service as TO of ``kproxy explain``, the same on every node."""
    to = f"node:{dialled(packet).port}" if _is_node_port(packet) else packet["to"]
    return f"{to}/{packet['protocol']}"


def services_of(answers: Iterable[Answered]) -> list[ServiceName]:
    """Return the Services to whose frontends the packets are, each once."""
    found: dict[ServiceName, None] = {}
    for answered in answers:
        for packet in answered.packets:
            if packet["frontend"] is not None:
                namespace, _, name = packet["frontend"]["service"].partition("/")
                found[ServiceName(namespace, name)] = None
    return list(found)


# The whole answer.


class Policies(NamedTuple):
    """The NetworkPolicies of some namespaces."""

    found: Sequence[NetworkPolicy] = ()
    problem: str = ""
    """Why they could not be read."""


def explained(
    sender: Sender, to: str, deciders: Sequence[Answered], others: Mapping[str, Answered], objects: Objects,
    pods: Mapping[ServiceName, Pod], policies: Policies, node_addresses: Collection[Address], now: float,
    probed: Answered | None = None,
) -> Json:
    """Return the answer to ``kubectl kproxy explain``.

    *deciders*: the nodes that decide about the packets. *others*: the nodes of endpoints, by their names.
    *pods*: those of the endpoints, by their names. *now*: seconds since the epoch. *probed*: the sender's
    node, if it has sent packets.
    """
    asked = {answered.node: answered for answered in (*others.values(), *deciders)}
    problems = [*_faults(deciders)]
    settling: list[Problem] = []
    for answered in asked.values():
        for problem in lags(answered, objects, node_addresses):
            (settling if problem.is_under_way(now) else problems).append(problem)
    ways = [_way(group, objects, asked, pods, policies) for group in _groups(deciders)]
    problems += _contradictions(ways)
    problems += [Problem(answered.problem, answered.node) for answered in asked.values() if answered.problem]
    problems += [*_probe_problems(probed)] if probed is not None else []
    return {
        "from": str(sender), "node": sender.node, "to": to,
        "problems": [problem.as_json(now) for problem in problems],
        "settling": [problem.as_json(now) for problem in settling],
        "ways": ways,
        "probes": [*_probes(probed)] if probed is not None else [],
        "egress_policies": selecting(policies.found, sender.pod, "Egress") if sender.pod else [],
        "policies_problem": policies.problem,
        "objects": [_object(name, found, now) for name, found in objects.items()],
    }


def _probe_problems(probed: Answered) -> Iterator[Problem]:
    """Yield what the packets have found that the sender's node sent."""
    if probed.problem:
        yield Problem(f"probe: {probed.problem}", probed.node)
    found = (what for packet in probed.packets if (probe := packet.get("probe"))
             for what in (*probe["findings"], *probe["unclear"]))
    yield from (Problem(f"probe: {what}", probed.node) for what in dict.fromkeys(found))


def _probes(probed: Answered) -> Iterator[Json]:
    for packet in probed.packets:
        if probe := packet.get("probe"):
            yield {"node": probed.node, "to": packet["to"], "protocol": packet["protocol"], **probe}


def _object(name: ServiceName, found: ServiceObjects, now: float) -> Json:
    return {"service": str(name), **_version(found.state.meta, now),
            "slices": [{"name": each.meta.name, **_version(each.meta, now)} for each in found.slices]}


def _version(meta: Metadata, now: float) -> Json:
    changed = meta.changed
    return {"resource_version": meta.resource_version,
            "seconds": None if changed is None else round(max(0.0, now - changed), 1)}


# Problems of the packets themselves.

_NOT_LOCAL = Policy.EXTERNAL_LOCAL.value


def _is_left_to_others(packet: Packet) -> bool:
    """Return whether load balancers avoid this node by design: it drops, for want of a local endpoint."""
    return (packet["outcome"], packet["policy"]) == (Outcome.DROPPED.value, _NOT_LOCAL)


def _arrives(packet: Packet) -> bool:
    return str(packet["outcome"]) == Outcome.FORWARDED.value


def _faults(deciders: Sequence[Answered]) -> Iterator[Problem]:
    """Yield the reasons why packets do not arrive."""
    is_served = any(_arrives(packet) for answered in deciders for packet in answered.packets)
    for answered in deciders:
        for packet in answered.packets:
            to, kernel = f"packets to {_dialled(packet)}/{packet['protocol']}", packet["kernel"]
            if not _arrives(packet) and not (is_served and _is_left_to_others(packet)):
                ends = "end in several ways" if packet["outcome"] == "depends" else f"are {packet['outcome']}"
                yield Problem(f"{to} {ends}: {packet['because']}", answered.node)
            if kernel["verdict"] == DIFFERS:
                yield Problem(f"{to}: the kernel differs: {joined(kernel['differences'])}", answered.node)
            yield from (Problem(f"{to}: {place}", answered.node) for place in kernel.get("filters", ()))


def _dialled(packet: Packet) -> str:
    """Return what packets dial, in the same words for all nodes."""
    return f"node port {dialled(packet).port}" if _is_node_port(packet) else str(packet["to"])


def _contradictions(ways: Iterable[Json]) -> Iterator[Problem]:
    """Yield the endpoints that get packets and are in quarantine on their own node."""
    found: dict[Problem, None] = {}
    for way in ways:
        for row in way["endpoints"]:
            if row["there"].startswith(IN_QUARANTINE):
                found[Problem(f"endpoint {row['endpoint']} is {row['there']}", row["node"])] = None
    yield from found


# The ways of packets: nodes that do the same with them.


class _Case(NamedTuple):
    node: str
    packet: Packet


def _groups(deciders: Sequence[Answered]) -> list[list[_Case]]:
    """Return the packets with equal fates, those that do not arrive first, then the rarest."""
    found: dict[tuple[Any, ...], list[_Case]] = {}
    for answered in deciders:
        for packet in answered.packets:
            frontend, kernel = packet["frontend"] or {}, packet["kernel"]
            fate = (_dialled(packet), packet["protocol"], frontend.get("service_port"), packet["outcome"],
                    packet["because"], kernel["verdict"], tuple(kernel["differences"]),
                    tuple(kernel.get("filters", ())))
            found.setdefault(fate, []).append(_Case(answered.node, packet))
    return sorted(found.values(), key=lambda cases: (_arrives(cases[0].packet), len(cases)))


def _way(
    cases: Sequence[_Case], objects: Objects, asked: Mapping[str, Answered], pods: Mapping[ServiceName, Pod],
    policies: Policies,
) -> Json:
    first = cases[0].packet
    endpoints: dict[str, Json] = {}
    not_chosen: dict[str, Json] = {}
    listed = Counter(each["endpoint"] for case in cases for each in case.packet["endpoints"])
    for case in cases:
        for each in case.packet["endpoints"]:
            row = endpoints.setdefault(each["endpoint"], dict(each))
            if row["share"] != each["share"] or listed[each["endpoint"]] < len(cases):
                row["share"] = None
            row["masqueraded"] = row["masqueraded"] or each["masqueraded"]
        for each in case.packet["not_chosen"]:
            not_chosen.setdefault(each["endpoint"], dict(each))
    rows = [*endpoints.values(), *(row for name, row in not_chosen.items() if name not in endpoints)]
    _complete(rows, first, objects, asked, pods, policies)
    kernel = first["kernel"]
    return {
        "nodes": [case.node for case in cases],
        "to": first["to"], "protocol": first["protocol"], "frontend": first["frontend"],
        "outcome": first["outcome"], "because": first["because"], "policy": first["policy"],
        "near": first["near"], "source": first["source"] if len(cases) == 1 else "",
        "last_resort": first["last_resort"],
        "kernel": {"modes": sorted({case.packet["kernel"]["mode"] for case in cases}),
                   "verdict": kernel["verdict"], "differences": kernel["differences"],
                   "filters": kernel.get("filters", [])},
        "endpoints": rows[:len(endpoints)], "not_chosen": rows[len(endpoints):],
    }  # fmt: skip


def _complete(
    rows: Sequence[Json], packet: Packet, objects: Objects, asked: Mapping[str, Answered],
    pods: Mapping[ServiceName, Pod], policies: Policies,
) -> None:
    """Add pod and node to each endpoint, what its node says of it, and the policies that select it."""
    if packet["frontend"] is None:
        return
    key = key_of(packet)
    known = objects.get(key.service)
    names = {address: name for state in (known.slices if known is not None else ())
             for address, name in state.pods.items()}
    nodes = nodes_of(packet, known)
    told = {node: _told(key, asked[node].packets) for node in {*nodes.values()} & asked.keys()}
    selected = {name: selecting(policies.found, pod, "Ingress") for name, pod in pods.items()}
    for row in rows:
        endpoint = row["endpoint"]
        name = names.get(format_address(Destination.parse(endpoint).address))
        node = nodes.get(endpoint, "")
        there = told.get(node)
        row |= {
            "pod": str(name) if name is not None else "", "node": node,
            "there": there.get(endpoint, "not known") if there is not None else "",
            "policies": selected.get(name, []) if name is not None else [],
        }


def nodes_of(packet: Packet, known: ServiceObjects | None) -> dict[str, str]:
    """Return the node of each endpoint by the API server's objects, else by what a proxy knows."""
    told = [slice_as_told(state.slice, key_of(packet)) for state in known.slices] if known is not None else []
    return {each["endpoint"]: each["node"] for piece in (*packet.get("slices", ()), *told)
            for each in piece["endpoints"] if each["node"]}  # fmt: skip


def _told(key: ServicePortKey, packets: Iterable[Packet]) -> dict[str, str] | None:
    """Return what the proxy of a node says of each endpoint of a service port; None: nothing."""
    packet = next((each for each in packets if each["frontend"] is not None and key_of(each) == key), None)
    if packet is None:
        return None
    known = {each["endpoint"]: condition(each) for piece in packet.get("slices", ())
             for each in piece["endpoints"]}  # fmt: skip
    found = {each["endpoint"]: str(each["because"]) for each in packet["not_chosen"]}
    for each in packet["endpoints"]:
        ready = known.get(each["endpoint"], "chosen")
        is_last_resort = packet["last_resort"] is not None and ready == "not ready"
        found[each["endpoint"]] = f"{ready}, and used as the last resort" if is_last_resort else ready
    return found
