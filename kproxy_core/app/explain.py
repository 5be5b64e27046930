"""Questions about packets and their answers: the fate by the plans, beside that in the kernel. Pure."""

import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, NamedTuple

from kproxy_core.app.errors import Misused, NoAnswer
from kproxy_core.contract.values import Caveat, KernelObject, KernelSide, Question, Translation
from kproxy_core.kube.forward import NAMESPACE as FORWARDS
from kproxy_core.model.address import (
    Address,
    Family,
    Protocol,
    family_of,
    format_address,
    format_socket,
    is_loopback,
    parse_address,
)
from kproxy_core.model.node import LocalSource, NodeView
from kproxy_core.model.service import Endpoint, EndpointSlice, ServiceName, ServicePortKey
from kproxy_core.plan.endpoints import Candidates
from kproxy_core.plan.fate import (
    EndpointShare,
    Fate,
    Origin,
    Outcome,
    Packet,
    Policy,
    decide,
    decide_unowned,
    kind_of,
    origin_of,
    stand_in,
)
from kproxy_core.plan.last_resort import LastResort
from kproxy_core.plan.service_plan import Frontend, ServicePlan

# The words of a request: a target, and a sender.


class ServiceTarget(NamedTuple):
    """All frontends of a Service, or of one of its ports."""

    namespace: str
    """"": any"""
    name: str
    port: str | None
    """Name or number of the port; None: every port."""
    protocol: Protocol | None = None
    """None: any."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name

    @property
    def words(self) -> str:
        """The target as `parse_target` reads it."""
        port = "" if self.port is None else f":{self.port}"
        return f"{self}{port}{f'/{self.protocol.name}' if self.protocol else ''}"

    def is_of(self, key: ServicePortKey) -> bool:
        return self.name == key.name and self.namespace in ("", key.namespace)

    def means(self, key: ServicePortKey, number: int) -> bool:
        """Return whether it means a service port, whose port has this *number*."""
        return (self.is_of(key) and self.port in (None, key.port_name, str(number))
                and self.protocol in (None, key.protocol))


class AddressTarget(NamedTuple):
    """All frontends at an address."""

    address: Address


Target = Frontend | ServiceTarget | AddressTarget


class Sender(NamedTuple):
    """The sender of the packets; with neither field, a typical one of each origin."""

    origin: Origin | None = None
    address: Address | None = None


_SOCKET = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:/\[\]]+)):(?P<port>\d{1,5})(?:/(?P<protocol>\w+))?")
_SERVICE = re.compile(
    r"(?:(?P<namespace>[A-Za-z0-9-]+)/)?(?P<name>[a-z0-9-]+)"
    r"(?::(?P<port>[a-z0-9.-]*)(?:/(?P<protocol>\w+))?)?")
FORMS = "ADDRESS[:PORT[/PROTOCOL]], node:PORT[/PROTOCOL] or [NAMESPACE/]SERVICE[:PORT[/PROTOCOL]]"
"""Of a target. The PORT of a Service is its name or its number."""


def parse_target(text: str) -> Target:
    """Return the target that *text* names. Raises Misused."""
    with suppress(ValueError):
        return AddressTarget(parse_address(text.strip("[]")))
    service = _SERVICE.fullmatch(text)
    if service and service["name"] != "node":
        port_name, protocol = service["port"], service["protocol"]
        return ServiceTarget(service["namespace"] or "", service["name"], port_name,
                             _protocol(text, protocol) if protocol else None)
    if found := _SOCKET.fullmatch(text):
        protocol = _protocol(text, found["protocol"] or "tcp")
        port = int(found["port"])
        if not 0 < port < 65536:
            raise Misused(f"{text!r}: {port} is not a port")
        host = found["v6"] or found["host"]
        try:
            address = None if host == "node" else parse_address(host)
        except ValueError as error:
            raise Misused(f"{error}; a target is {FORMS}") from error
        return Frontend(address, protocol, port)
    raise Misused(f"{text!r} is not a target: give {FORMS}")


def _protocol(text: str, name: str) -> Protocol:
    if name.upper() not in Protocol.__members__:
        raise Misused(f"{text!r}: protocol {name!r} is not tcp, udp or sctp")
    return Protocol[name.upper()]


def parse_sender(text: str, origin: str = "") -> Sender:
    """Return the sender that *text* names: ``pod``, ``node``, ``outside``, an address, or "" for all three.

    *origin* overrides what an address tells about its side. Raises Misused.
    """
    sides = {side.value: side for side in Origin}
    if origin and origin not in sides:
        raise Misused(f"{origin!r} is not one of {', '.join(sides)}")
    if not text or text in sides:
        if text and origin and text != origin:
            raise Misused(f"the sender can't be both {text} and {origin}")
        return Sender(sides.get(text or origin))
    try:
        return Sender(sides.get(origin), parse_address(text))
    except ValueError as error:
        raise Misused(f"{error}; a sender is an address, pod, node or outside") from error


# From a request to packets: the frontends that it means, and the senders.

class ReadablePlans(typing.Protocol):
    """The plans of one IP family."""

    @property
    def node(self) -> NodeView: ...

    @property
    def addresses(self) -> frozenset[Address]: ...

    @property
    def plans(self) -> Mapping[ServicePortKey, ServicePlan]: ...

    @property
    def unserved(self) -> Mapping[ServicePortKey, str]: ...

    @property
    def pending(self) -> Mapping[ServicePortKey, ServicePlan | None]: ...

    @property
    def now(self) -> float: ...

    def owner(self, frontend: Frontend) -> ServicePlan | None: ...

    def last_resort(self, service: ServiceName) -> LastResort | None: ...

    def candidates(self, key: ServicePortKey) -> Candidates: ...

    def slices(self, service: ServiceName) -> Sequence[EndpointSlice]: ...

    def origin(self, service: ServiceName) -> str: ...

    def relay_problem(self, key: ServicePortKey) -> str: ...


InterfaceTowards = Callable[[Address], str]
"""Returns the interface to which the route to an address leads. Its packets are taken to arrive there."""


class NodePortsOnLoopback(typing.Protocol):
    """The claims of a mode. See `Backend`."""

    def serves_on_loopback(self, node: NodeView, address: Address, protocol: Protocol) -> bool: ...

    def wants_relays(self, family: Family, protocol: Protocol) -> bool: ...


class Case(NamedTuple):
    """One packet with everything that decides its fate."""

    question: Question
    plans: ReadablePlans
    is_typical: bool
    """The sender's address stands for any sender of its origin."""
    near: str = ""
    """For a packet to no frontend: what is nearest."""
    has_cluster_ip: bool = False
    """The destination is some Service's ClusterIP."""
    origin: str = ""
    """The file or the resource version of the Service."""

    @classmethod
    def of(cls, plans: ReadablePlans, packet: Packet, frontend: Frontend, *, is_typical: bool) -> "Case":
        """Return the case of a *packet* to *frontend*, which may belong to no Service."""
        node = plans.node
        plan = plans.owner(frontend)
        if plan is None:
            near, has_cluster_ip = _near(plans, packet)
            question = Question(packet, node, None, None, plans.addresses)
            return cls(question, plans, is_typical, near, has_cluster_ip)
        question = Question(packet, node, frontend, plan, plans.addresses)
        return cls(question, plans, is_typical, origin=plans.origin(plan.key.service))

    @property
    def candidates(self) -> Candidates:
        """All endpoints of the service port, usable or not."""
        plan = self.question.plan
        return self.plans.candidates(plan.key) if plan is not None else ()

    @property
    def slices(self) -> Sequence[EndpointSlice]:
        """All EndpointSlices of the Service that are known here."""
        plan = self.question.plan
        return self.plans.slices(plan.key.service) if plan is not None else ()

    @property
    def last_resort(self) -> LastResort | None:
        plan = self.question.plan
        return self.plans.last_resort(plan.key.service) if plan is not None else None


def cases(
    plans: Mapping[Family, ReadablePlans], target: Target, sender: Sender,
    interface_towards: InterfaceTowards | None, mode: NodePortsOnLoopback,
) -> list[Case]:
    """Return the packets that *sender* may send to *target*. Raises NoAnswer.

    Without *interface_towards*, only endpoints are known to be pods of this node if an interface tells pods.
    """
    found: list[Case] = []
    for family, of_family in plans.items():
        if sender.address is not None and family_of(sender.address) is not family:
            continue
        for destination, frontend in _destinations(of_family, target, mode):
            for origin, source, is_typical in _senders(of_family, sender, destination, interface_towards):
                found.append(Case.of(
                    of_family, Packet(origin, source, destination, frontend.protocol, frontend.port),
                    frontend, is_typical=is_typical,
                ))  # fmt: skip
    if not found:
        raise NoAnswer(why_no_packet(plans, target, sender))
    return found


def _destinations(
    plans: ReadablePlans, target: Target, mode: NodePortsOnLoopback
) -> Iterator[tuple[Address, Frontend]]:
    dialled = None if isinstance(target, ServiceTarget) else target.address
    for frontend in _frontends(plans, target, mode):
        address = dialled or frontend.address or _node_address(plans.node)
        if address is not None:
            yield address, frontend


def _frontends(
    plans: ReadablePlans, target: Target, mode: NodePortsOnLoopback
) -> Sequence[Frontend]:
    if isinstance(target, ServiceTarget):
        return [frontend for key in meant_by(target, plans) for frontend in plans.plans[key].frontends()]
    if target.address is not None and family_of(target.address) is not plans.node.family:
        return []
    if isinstance(target, AddressTarget):
        return [frontend for _, frontend in _frontends_at(plans, target.address)]
    node_port = target._replace(address=None)
    on_node = target.address in plans.node.node_port_addresses or (
        target.address is not None and is_loopback(target.address)
        and _is_served_on_loopback(plans.node, target.address, target.protocol, mode))
    return [node_port if on_node and plans.owner(node_port) and not plans.owner(target) else target]


def meant_by(target: ServiceTarget, plans: ReadablePlans) -> list[ServicePortKey]:
    """Return the service ports that *target* means, in order."""
    return sorted(key for key, plan in plans.plans.items() if target.means(key, plan.port))


def _is_served_on_loopback(
    node: NodeView, address: Address, protocol: Protocol, mode: NodePortsOnLoopback
) -> bool:
    """Return whether node ports are served at *address*, by the mode's objects or by relays."""
    is_relayed = node.relays_node_ports and address == node.family.loopback and (
        mode.wants_relays(node.family, protocol))
    return is_relayed or (node.node_ports_on_loopback and mode.serves_on_loopback(node, address, protocol))


def _frontends_at(plans: ReadablePlans, address: Address) -> list[tuple[ServicePortKey, Frontend]]:
    """Return the frontends that an address serves, with their service ports, in order."""
    of_node = address in plans.node.node_port_addresses
    found = [
        (key, frontend) for key, plan in plans.plans.items() for frontend in plan.frontends()
        if frontend.address == address or (of_node and frontend.address is None)
    ]  # fmt: skip
    return sorted(found, key=lambda each: each[0])


def _node_address(node: NodeView) -> Address | None:
    if node.node_ip in node.node_port_addresses:
        return node.node_ip
    return next(iter(node.node_port_addresses), None)


def _senders(
    plans: ReadablePlans, sender: Sender, destination: Address, interface_towards: InterfaceTowards | None
) -> Iterator[tuple[Origin, Address, bool]]:
    node, address = plans.node, sender.address
    may_send = [Origin.NODE] if is_loopback(destination) else list(Origin)
    if address is not None:
        # Only the node sends from the address that it dials, such as a ClusterIP that an interface has.
        of_itself = Origin.NODE if address == destination else None
        origin = sender.origin or of_itself or _origin_of(address, plans, interface_towards)
        if origin in may_send:
            yield origin, address, False
        return
    for origin in may_send:
        if sender.origin in (None, origin):
            own = node.family.loopback if is_loopback(destination) else stand_in(origin, node)
            yield origin, own, True


def _origin_of(source: Address, plans: ReadablePlans, interface_towards: InterfaceTowards | None) -> Origin:
    def is_behind_pod_interface(local: LocalSource) -> bool:
        if interface_towards is None:
            return any(source in plan.hairpins for plan in plans.plans.values())
        return local.has_interface(interface_towards(source))

    return origin_of(source, plans.node, plans.addresses, is_behind_pod_interface)


def _near(plans: ReadablePlans, packet: Packet) -> tuple[str, bool]:
    """Return the nearest match for a packet to no frontend, and whether it is for a Service's ClusterIP."""
    where, protocol = packet.destination, packet.protocol
    has_cluster_ip = any(plan.cluster_ip == where for plan in plans.plans.values())
    frontends = _frontends_at(plans, where)
    same = [f"{frontend.port}/{frontend.protocol.name} of {key}" for key, frontend in frontends]
    if same:
        more = f", and {len(same) - 5} more" if len(same) > 5 else ""
        return f"{format_address(where)} serves {', '.join(same[:5])}{more}", has_cluster_ip
    if is_loopback(where) and (plan := plans.owner(Frontend(None, protocol, packet.port))):
        problem = plans.relay_problem(plan.key)
        return problem or f"node port {packet.port} is served on loopback in some modes only", False
    for cidr in plans.node.service_cidrs:
        if where in cidr:
            return f"it is in the ServiceCIDR {cidr}, and no Service has it", False
    return "", False


def why_no_packet(plans: Mapping[Family, ReadablePlans], target: Target, sender: Sender) -> str:
    """Return the reason why no packet of *sender* to *target* can be meant, with near names."""
    if isinstance(target, ServiceTarget):
        ports = {key: plan.port for of_family in plans.values() for key, plan in of_family.plans.items()}
        return _no_service(ports, target)
    if isinstance(target, AddressTarget) and family_of(target.address) in plans:
        return f"no Service has a frontend at {format_address(target.address)}; ask about one of its ports"
    if target.address is None:
        return "no address of this node serves node ports"
    if sender.address is not None and family_of(sender.address) is not family_of(target.address):
        return (f"sender {format_address(sender.address)} and target {format_address(target.address)} "
                "are of different IP families")
    if family_of(target.address) in plans and is_loopback(target.address):
        return (f"packets to {format_address(target.address)} do not leave the sender's network namespace: "
                "only the node can send them here")
    return f"{family_of(target.address).label} is not served on this node"


def _no_service(ports: Mapping[ServicePortKey, int], target: ServiceTarget) -> str:
    """Return why none of *ports*, which are all with their numbers, is meant by *target*."""
    own = [key for key in ports if target.is_of(key)]
    if own and not any(target.means(key, ports[key]) for key in own):
        found = ", ".join(sorted({_described(key, ports[key]) for key in own}))
        return f"Service {target} has no port {target.words.partition(':')[2]!r}, but {found}"
    if own:
        return f"Service {target} has no frontend that this sender could dial in its IP family"
    known = {str(key.service): key for key in ports}
    similar = get_close_matches(target.name, {key.name for key in ports}, n=5, cutoff=0.5)
    near = [name for text in similar for name in sorted(
        (name for name, key in known.items() if key.name == text),
        key=lambda name: (known[name].namespace != target.namespace, name))]
    hint = f"; near names: {', '.join(near[:5])}" if near else ""
    return f"no Service {target} with a ClusterIP is known here ({len(known)} are){hint}"


def _described(key: ServicePortKey, number: int) -> str:
    port = f"{number}/{key.protocol.name}"
    return f"{key.port_name!r} ({port})" if key.port_name else port


# Node ports on loopback, which relays serve and no rule.

def with_relay(case: Case, side: KernelSide, wants_relays: Callable[[Family, Protocol], bool]) -> KernelSide:
    """Return *side*, or what a relay of this process does with the packet. See `Backend.wants_relays`.

    A relay that fails to listen does nothing; without endpoints none listens, and the kernel refuses.
    """
    packet, node = case.question.packet, case.question.node
    is_left = side.fate is not None and side.fate.outcome is Outcome.UNTOUCHED
    if not is_left or (packet.origin, packet.destination) != (Origin.NODE, node.family.loopback):
        return side
    plan = case.plans.owner(Frontend(None, packet.protocol, packet.port))
    if plan is None or not (node.relays_node_ports and wants_relays(node.family, packet.protocol)):
        return side
    where = format_socket(packet.destination, packet.port)
    if problem := case.plans.relay_problem(plan.key):
        return KernelSide((*side.objects, KernelObject("relay", problem)), side.fate)
    endpoints = plan.relayed_to
    if not endpoints:
        fate = Fate(Outcome.REFUSED, "no relay listens for a node port without endpoints")
        return KernelSide(side.objects, fate, deviation="kproxy relays node ports on loopback")
    objects = [KernelObject("relay", f"{where} -> {format_socket(*endpoint)}") for endpoint in endpoints]
    choices = tuple(EndpointShare(each, 1 / len(endpoints), masqueraded=True) for each in endpoints)
    fate = Fate(Outcome.FORWARDED, "a relay serves node ports on loopback", choices)
    return KernelSide(tuple(objects), fate, deviation="kproxy relays node ports on loopback",
                      translation=Translation.RELAY)


# The decision beside the kernel's: the same, or the differences in words.

AGREES, DIFFERS, DEVIATES, UNKNOWN = "agrees", "differs", "deviates by design", "cannot be told"

_TOLERANCE = 0.001
"""Of shares: the kernel keeps probabilities in 31 bits."""


def judge(packet: Packet, decided: Fate, side: KernelSide) -> tuple[str, list[str]]:
    """Return the verdict about *packet*, and the differences that explain it."""
    if side.fate is None:
        return UNKNOWN, ["not every rule on the way is understood"]
    if (decided.outcome, side.fate.outcome) == (Outcome.REFUSED, Outcome.UNTOUCHED) and (
            is_loopback(packet.destination)):
        return AGREES, []  # Nothing listens there, so the node itself refuses.
    found = list(_differences(decided, side.fate, ignore_source=packet.origin is Origin.NODE))
    remembered = side.remembered
    if remembered is not None and remembered not in {choice.where for choice in decided.choices}:
        found.append(f"the sender is pinned to {format_socket(*remembered)}, which may not be chosen")
    if not found:
        return AGREES, []
    return (DEVIATES, [side.deviation, *found]) if side.deviation else (DIFFERS, found)


def _differences(decided: Fate, kernel: Fate, *, ignore_source: bool) -> Iterator[str]:
    """Yield the differences. *ignore_source*: masqueraded or not, endpoints see an address of the node."""
    if decided.outcome is not kernel.outcome:
        yield f"the packet is {kernel.outcome.value}, and should be {decided.outcome.value}"
        return
    if decided.outcome is not Outcome.FORWARDED:
        return
    wanted = {choice.where: choice for choice in decided.choices}
    held = {choice.where: choice for choice in kernel.choices}
    for where, choice in wanted.items():
        if where not in held:
            yield f"endpoint {format_socket(*where)} is missing"
        else:
            yield from _difference(choice, held[where], ignore_source=ignore_source)
    for where in held:
        if where not in wanted:
            yield f"endpoint {format_socket(*where)} may be chosen, and should not"
    lost = 1 - sum(choice.share for choice in kernel.choices)
    if lost > _TOLERANCE:
        yield f"{lost:.0%} of new connections find no endpoint"


def _difference(wanted: EndpointShare, held: EndpointShare, *, ignore_source: bool) -> Iterator[str]:
    text = format_socket(*wanted.where)
    if abs(wanted.share - held.share) > _TOLERANCE:
        yield f"endpoint {text} gets {held.share:.1%} of new connections, and should get {wanted.share:.1%}"
    if wanted.masqueraded is not held.masqueraded and not ignore_source:
        yield (f"endpoint {text} sees an address of the node, and should see the sender's" if held.masqueraded
               else f"endpoint {text} sees the sender's address, and should see one of the node")


# The answer for one packet.

Json = dict[str, Any]
"""Values that JSON can hold."""


def decide_case(case: Case) -> Fate:
    """Return the fate that the plans give the packet of *case*."""
    question = case.question
    if question.plan is None or question.frontend is None:
        return decide_unowned(question.packet, case.has_cluster_ip, question.node)
    return decide(question.packet, question.frontend, question.plan, question.node, question.addresses)


def answer(
    case: Case, side: KernelSide | None, *, mode: str, live: bool, caveats: Sequence[Caveat] = ()
) -> Json:
    """Return the whole answer for the packet of *case*. *side* None: the mode cannot show its objects."""
    question, fate = case.question, decide_case(case)
    packet, node, frontend, plan = question.packet, question.node, question.frontend, question.plan
    found: Json = {
        "from": format_address(packet.source),
        "origin": packet.origin.value,
        "typical_sender": case.is_typical,
        "to": format_socket(packet.destination, packet.port),
        "protocol": packet.protocol.name,
        "frontend": None,
        "outcome": fate.outcome.value,
        "planned": fate.outcome.value,
        "because": fate.because,
        "ways": [],
        "remedy": "",
        "policy": fate.policy.value if fate.policy else "",
        "endpoints": _endpoints(fate),
        "not_chosen": [],
        "slices": [],
        "source": "",
        "near": case.near,
        "affinity": None,
        "last_resort": None,
        "removed_endpoints": "keep",
        "caveats": [caveat.what for caveat in caveats],
    }  # fmt: skip
    if plan is not None and frontend is not None:
        found["frontend"] = {
            "kind": kind_of(frontend, plan).value, "service": str(plan.key.service),
            "port": plan.key.port_name, "service_port": str(plan.key), "created": plan.created,
            "origin": case.origin,
        }
        found["slices"] = [slice_as_told(piece, plan.key) for piece in case.slices]
        chosen = {choice.where for choice in fate.choices}
        candidates = case.candidates
        if resort := case.last_resort:
            candidates = [
                (where, endpoint._replace(ready=endpoint.ready or where.address in resort.endpoints))
                for where, endpoint in candidates
            ]
            found["last_resort"] = {
                "seconds": round(case.plans.now - resort.since, 3),
                "left": round(resort.until - case.plans.now, 3),
            }  # fmt: skip
        quarantine = {where: sentence.reason(case.plans.now) for where, sentence in plan.quarantined}
        reasons = dict.fromkeys(plan.resting, _RESTING) | quarantine
        any_ready = any(endpoint.ready for where, endpoint in candidates if where not in reasons)
        if plan.key.namespace == FORWARDS:
            reasons |= {where: "its check fails" for where, endpoint in candidates if not endpoint.ready}
        found["not_chosen"] = [
            {"endpoint": format_socket(*where),
             "because": reasons.get(where) or _reason(endpoint, fate, node, any_ready=any_ready)}
            for where, endpoint in candidates if where not in chosen
        ]  # fmt: skip
        if plan.resets_removed and packet.protocol is Protocol.TCP:
            found["removed_endpoints"] = "reset"
        found["source"] = _source(packet, fate, node)
        if plan.affinity_seconds:
            remembered = side.remembered if side else None
            pinned = format_socket(*remembered) if remembered else ""
            found["affinity"] = {"seconds": plan.affinity_seconds, "remembered": pinned}
    found["kernel"] = _kernel(packet, fate, side, mode, live=live)
    return found


def _kernel(packet: Packet, fate: Fate, side: KernelSide | None, mode: str, *, live: bool) -> Json:
    verdict, differences = judge(packet, fate, side) if side else (
        UNKNOWN, [f"mode {mode} cannot explain its rules"])
    found = side.fate if side else None
    return {
        "mode": mode, "live": live, "verdict": verdict, "differences": differences,
        "outcome": found.outcome.value if found else "",
        "endpoints": _endpoints(found) if found else [],
        "translation": side.translation.name if side else "",
        "objects": [item._asdict() for item in side.objects] if side else [],
    }  # fmt: skip


def _endpoints(fate: Fate) -> list[Json]:
    return [
        {"endpoint": format_socket(*choice.where), "share": round(choice.share, 6),
         "masqueraded": choice.masqueraded}
        for choice in fate.choices
    ]


def slice_as_told(piece: EndpointSlice, key: ServicePortKey) -> Json:
    """Return the endpoints of *piece* for a service port, as the API server has told of them."""
    ports = [port.port for port in piece.ports if (port.name, port.protocol) == (key.port_name, key.protocol)]
    return {
        "name": piece.name.name,
        "weight": piece.weight,
        "endpoints": [
            {"endpoint": format_socket(endpoint.address, port), "node": endpoint.node,
             "ready": endpoint.ready, "serving": endpoint.serving, "terminating": endpoint.terminating,
             "for_zones": sorted(endpoint.zone_hints), "for_nodes": sorted(endpoint.node_hints)}
            for port in ports for endpoint in piece.endpoints
        ],
    }  # fmt: skip


def _source(packet: Packet, fate: Fate, node: NodeView) -> str:
    """Return a sentence about the source address that endpoints see; "" if none sees the packet."""
    if fate.outcome is not Outcome.FORWARDED:
        return ""
    source = format_address(packet.source)
    hidden = [choice.where for choice in fate.choices if choice.masqueraded]
    seeing = [choice.where for choice in fate.choices if not choice.masqueraded]
    if not hidden:
        return f"kept: endpoints see {source}"
    if all(where.address == packet.source for where in hidden):
        return (f"kept, except by {format_socket(*hidden[0])}, which is the sender itself (hairpin): "
                "it sees an address of the node")
    if node.masquerade_all:
        why = "masquerade-all is set"
    elif fate.policy in (Policy.INTERNAL, Policy.INTERNAL_LOCAL):
        why = "the sender is not in the network of local pods"
    else:
        why = "traffic to external frontends is masqueraded" if fate.policy is Policy.EXTERNAL else (
            "the sender is the node")
    kept = f"; kept by {format_socket(*seeing[0])}, which is on the node's own network" if seeing else ""
    return f"masqueraded to the node's address on the way to the endpoint: {why}{kept}"


_RESTING = "weight 0: no new connections"


def _reason(endpoint: Endpoint, fate: Fate, node: NodeView, *, any_ready: bool) -> str:
    """Return the reason why *endpoint* is not chosen."""
    if not endpoint.ready:
        if not endpoint.terminating:
            return "not ready"
        if not endpoint.serving:
            return "terminating, and not serving any more"
        if any_ready:
            return "terminating; a ready endpoint exists"
    here = bool(node.name) and endpoint.node == node.name
    if fate.policy in (Policy.INTERNAL_LOCAL, Policy.EXTERNAL_LOCAL) and not here:
        return f"on node {endpoint.node or 'unknown'}, and the policy is Local"
    if fate.policy is None:
        return f"the packet is {fate.outcome.value} before an endpoint is chosen"
    if endpoint.node_hints and node.name not in endpoint.node_hints:
        return f"its hints assign it to node {', '.join(sorted(endpoint.node_hints))}"
    if endpoint.zone_hints and node.zone not in endpoint.zone_hints:
        zones = ", ".join(sorted(endpoint.zone_hints))
        return f"its hints assign it to zone {zones}; this node is in {node.zone or 'none'}"
    return "the hints of other endpoints name this node"


# The differences between the kernel's treatment of packets and that of the plans, by frontend.

def differences(cases: Sequence[Case], sides: Sequence[KernelSide]) -> Iterator[Json]:
    """Yield each difference once, with the senders that it concerns."""
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for case, side in zip(cases, sides, strict=True):
        packet = case.question.packet
        verdict, texts = judge(packet, decide_case(case), side)
        if verdict in (DIFFERS, UNKNOWN):
            plan = case.question.plan
            where = format_socket(packet.destination, packet.port)
            for text in texts:
                key = (verdict, f"{where}/{packet.protocol.name}", str(plan.key) if plan else "", text)
                found.setdefault(key, []).append(packet.origin.value)
    for (verdict, frontend, service_port, text), origins in found.items():
        yield {
            "kind": "unclear" if verdict == UNKNOWN else "frontend", "frontend": frontend,
            "service_port": service_port, "difference": text, "senders": list(dict.fromkeys(origins)),
        }  # fmt: skip


def stale(frontends: Iterable[Frontend], plans: ReadablePlans) -> Iterator[Json]:
    """Yield the *frontends* in the kernel that no Service wants."""
    pending = {frontend for plan in plans.pending.values() if plan for frontend in plan.frontends()}
    for frontend in sorted(set(frontends), key=str):
        address, protocol, port = frontend
        # A frontend with an address may stand for a node port there.
        meant = frontend, Frontend(None, protocol, port)
        if not any(plans.owner(each) or each in pending for each in meant):
            where = f"node port {port}" if address is None else format_socket(address, port)
            yield {
                "kind": "stale", "frontend": f"{where}/{protocol.name}", "service_port": "",
                "difference": "the kernel serves it, and no Service wants it", "senders": [],
            }  # fmt: skip


def packets_to(plans: ReadablePlans, keys: Iterable[ServicePortKey]) -> list[Case]:
    """Return a packet of each origin to every frontend of the service ports *keys* that still exist."""
    found: list[Case] = []
    for plan in filter(None, map(plans.plans.get, keys)):
        for frontend in plan.frontends():
            packets = (packet_to(frontend, origin, plans.node) for origin in Origin)
            found += [Case.of(plans, packet, frontend, is_typical=True) for packet in packets if packet]
    return found


def packet_to(frontend: Frontend, origin: Origin, node: NodeView) -> Packet | None:
    """Return a packet of a typical sender; None if no address of the node serves node ports."""
    to = frontend.address or next(iter(node.node_port_addresses), None)
    if to is None:
        return None
    return Packet(origin, stand_in(origin, node), to, frontend.protocol, frontend.port)
