"""From a request to packets: the frontends that it means, and the senders."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple, Protocol

from kproxy_core.backend.api import Question
from kproxy_core.explain.errors import NoAnswer
from kproxy_core.explain.request import AddressTarget, Sender, ServiceTarget, Target
from kproxy_core.model.address import Address, Family, family_of, format_address, is_loopback
from kproxy_core.model.node import LocalSource, NodeView
from kproxy_core.model.service import ServiceName, ServicePortKey
from kproxy_core.plan.candidates import Candidates
from kproxy_core.plan.fate import Origin, Packet, origin_of, stand_in
from kproxy_core.plan.service_plan import Frontend, ServicePlan


class Plans(Protocol):
    @property
    def node(self) -> NodeView: ...

    @property
    def addresses(self) -> frozenset[Address]: ...

    @property
    def plans(self) -> Mapping[ServicePortKey, ServicePlan]: ...

    def owner(self, frontend: Frontend) -> ServicePlan | None: ...

    def candidates(self, key: ServicePortKey) -> Candidates: ...

    def origin(self, service: ServiceName) -> str: ...


InterfaceTowards = Callable[[Address], str]
"""Returns the interface to which the route to an address leads. Its packets are taken to arrive there."""


class Case(NamedTuple):
    """One packet with everything that decides its fate."""

    question: Question
    plans: Plans
    is_typical: bool
    """The sender's address stands for any sender of its origin."""
    near: str = ""
    """For a packet to no frontend: what is nearest."""
    has_cluster_ip: bool = False
    """The destination is some Service's ClusterIP."""
    origin: str = ""
    """The file or the resource version of the Service."""

    @classmethod
    def of(cls, plans: Plans, packet: Packet, frontend: Frontend, *, is_typical: bool) -> "Case":
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


def cases(
    plans: Mapping[Family, Plans], target: Target, sender: Sender, interface_towards: InterfaceTowards | None
) -> list[Case]:
    """Return the packets that *sender* may send to *target*. Raises NoAnswer.

    Without *interface_towards*, only endpoints are known to be pods of this node if an interface tells pods.
    """
    found: list[Case] = []
    for family, of_family in plans.items():
        if sender.address is not None and family_of(sender.address) is not family:
            continue
        for destination, frontend in _destinations(of_family, target):
            for origin, source, is_typical in _senders(of_family, sender, destination, interface_towards):
                found.append(Case.of(
                    of_family, Packet(origin, source, destination, frontend.protocol, frontend.port),
                    frontend, is_typical=is_typical,
                ))  # fmt: skip
    if not found:
        raise NoAnswer(nothing(plans, target, sender))
    return found


def _destinations(plans: Plans, target: Target) -> Iterator[tuple[Address, Frontend]]:
    dialled = None if isinstance(target, ServiceTarget) else target.address
    for frontend in _frontends(plans, target):
        address = dialled or frontend.address or _node_address(plans.node)
        if address is not None:
            yield address, frontend


def _frontends(plans: Plans, target: Target) -> Sequence[Frontend]:
    if isinstance(target, ServiceTarget):
        keys = sorted(filter(target.means, plans.plans))
        return [frontend for key in keys for frontend in plans.plans[key].frontends()]
    if target.address is not None and family_of(target.address) is not plans.node.family:
        return []
    if isinstance(target, AddressTarget):
        return [frontend for _, frontend in _frontends_at(plans, target.address)]
    node_port = target._replace(address=None)
    on_node = target.address in plans.node.node_port_addresses
    return [node_port if on_node and plans.owner(node_port) and not plans.owner(target) else target]


def _frontends_at(plans: Plans, address: Address) -> list[tuple[ServicePortKey, Frontend]]:
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
    plans: Plans, sender: Sender, destination: Address, interface_towards: InterfaceTowards | None
) -> Iterator[tuple[Origin, Address, bool]]:
    node, address = plans.node, sender.address
    if address is not None:
        # Only the node sends from the address that it dials, such as a ClusterIP that an interface has.
        of_itself = Origin.NODE if address == destination else None
        yield sender.origin or of_itself or _origin_of(address, plans, interface_towards), address, False
        return
    for origin in [sender.origin] if sender.origin else Origin:
        yield origin, stand_in(origin, node), True


def _origin_of(source: Address, plans: Plans, interface_towards: InterfaceTowards | None) -> Origin:
    def is_behind_pod_interface(local: LocalSource) -> bool:
        if interface_towards is None:
            return any(source in plan.hairpins for plan in plans.plans.values())
        return local.has_interface(interface_towards(source))

    return origin_of(source, plans.node, plans.addresses, is_behind_pod_interface)


def _near(plans: Plans, packet: Packet) -> tuple[str, bool]:
    """Return the nearest match for a packet to no frontend, and whether it is for a Service's ClusterIP."""
    where, protocol = packet.destination, packet.protocol
    has_cluster_ip = any(plan.cluster_ip == where for plan in plans.plans.values())
    frontends = _frontends_at(plans, where)
    same = [f"{frontend.port}/{frontend.protocol.name} of {key}" for key, frontend in frontends]
    if same:
        more = f", and {len(same) - 5} more" if len(same) > 5 else ""
        return f"{format_address(where)} serves {', '.join(same[:5])}{more}", has_cluster_ip
    if is_loopback(where) and plans.owner(Frontend(None, protocol, packet.port)):
        return f"node port {packet.port} is served on loopback in some modes only", False
    for cidr in plans.node.service_cidrs:
        if where in cidr:
            return f"it is in the ServiceCIDR {cidr}, and no Service has it", False
    return "", False


def nothing(plans: Mapping[Family, Plans], target: Target, sender: Sender) -> str:
    """Return the reason why no packet of *sender* to *target* can be meant, with near names."""
    if isinstance(target, ServiceTarget):
        return _no_service({key for of_family in plans.values() for key in of_family.plans}, target)
    if isinstance(target, AddressTarget) and family_of(target.address) in plans:
        return f"no Service has a frontend at {format_address(target.address)}; ask about one of its ports"
    if target.address is None:
        return "no address of this node serves node ports"
    if sender.address is not None and family_of(sender.address) is not family_of(target.address):
        return (f"sender {format_address(sender.address)} and target {format_address(target.address)} "
                "are of different IP families")
    return f"{family_of(target.address).label} is not served on this node"


def _no_service(keys: Collection[ServicePortKey], target: ServiceTarget) -> str:
    own = [key for key in keys if target.is_of(key)]
    if own and not any(map(target.means, own)):
        ports = ", ".join(sorted({repr(key.port_name) for key in own}))
        return f"Service {target} has no port {target.port!r}, but {ports}"
    if own:
        return f"Service {target} has no frontend that this sender could dial in its IP family"
    known = {str(key.service): key for key in keys}
    similar = get_close_matches(target.name, {key.name for key in keys}, n=5, cutoff=0.5)
    near = [name for text in similar for name in sorted(
        (name for name, key in known.items() if key.name == text),
        key=lambda name: (known[name].namespace != target.namespace, name))]
    hint = f"; near names: {', '.join(near[:5])}" if near else ""
    return f"no Service {target} with a ClusterIP is known here ({len(known)} are){hint}"
