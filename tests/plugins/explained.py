"""Packets to every frontend of every feature, and a node whose kernel holds a mode's rules for them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from msgspec.structs import replace

from kproxy_conformance.checks.bench import lonely_node
from kproxy_conformance.checks.features import ADDRESSES, everything
from kproxy_conformance.checks.subject import Subject, Wanted, full
from kproxy_core.app.explain import AGREES, Json, differences, judge, packet_to, packets_to, stale
from kproxy_core.contract.values import KernelSide, Question, Update
from kproxy_core.model.address import Family, parse_address
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import EndpointSlice, ServiceName, ServicePortKey
from kproxy_core.plan.endpoints import Candidates
from kproxy_core.plan.fate import Fate, Origin, Packet, decide, stand_in
from kproxy_core.plan.last_resort import LastResort
from kproxy_core.plan.service_plan import Frontend, ServicePlan


@contextmanager
def serving(mode: str, family: Family) -> Iterator[None]:
    """The calling thread is on a node where *mode* serves every feature."""
    with lonely_node():
        subject = Subject(Wanted(mode), (family,))
        full(subject.start(), family, everything(family))
        yield
        subject.end_all()


def questions(family: Family) -> list[Question]:
    """Return packets to every frontend, by senders of each origin, by an endpoint and by a client."""
    at, found = ADDRESSES[family], []
    view = at.view()
    senders = [(origin, stand_in(origin, view)) for origin in Origin]
    senders += [(Origin.POD, parse_address(at.near[0])), (Origin.OUTSIDE, parse_address(at.clients[0]))]
    for plan in everything(family).values():
        for frontend in plan.frontends():
            to = frontend.address or view.node_port_addresses[0]
            for origin, source in senders:
                packet = Packet(origin, source, to, frontend.protocol, frontend.port)
                found.append(Question(packet, view, frontend, plan))
    return found


def questions_about(plans: Mapping[ServicePortKey, ServicePlan], view: NodeView) -> list[Question]:
    """Return packets to every frontend of *plans*, by a typical sender of each origin."""
    return [
        Question(packet, view, frontend, plan)
        for plan in plans.values() for frontend in plan.frontends() for origin in Origin
        if (packet := packet_to(frontend, origin, view)) is not None
    ]  # fmt: skip


class KnownPlans:
    """The plans of one update."""

    def __init__(self, update: Update) -> None:
        self._update = update
        self.node: NodeView = update.node
        self.plans = update.plans
        self.unserved: Mapping[ServicePortKey, str] = {}
        self.pending: Mapping[ServicePortKey, ServicePlan | None] = {}
        self.now = 0.0
        self.addresses = frozenset(update.node.node_port_addresses)
        self._owners = {frontend: plan for plan in self.plans.values() for frontend in plan.frontends()}

    def without_services(self) -> "KnownPlans":
        """Return what is planned once all Services are deleted."""
        return KnownPlans(replace(self._update, plans={}))

    def owner(self, frontend: Frontend) -> ServicePlan | None:
        return self._owners.get(frontend)

    def last_resort(self, _service: ServiceName) -> LastResort | None:
        return None

    def origin(self, _service: ServiceName) -> str:
        return ""

    def candidates(self, _key: ServicePortKey) -> Candidates:
        return ()

    def slices(self, _service: ServiceName) -> Sequence[EndpointSlice]:
        return ()

    def relay_problem(self, _key: ServicePortKey) -> str:
        return ""


def differences_of(
    plans: KnownPlans, explain: Callable[[list[Question]], Sequence[KernelSide]],
    frontends: Callable[[Family], Iterable[Frontend]],
) -> list[Json]:
    """Return what ``kproxy diff`` finds in the kernel."""
    cases = packets_to(plans, plans.plans)
    sides = explain([case.question for case in cases]) if cases else []
    return [*differences(cases, sides), *stale(frontends(plans.node.family), plans)]


def decided(question: Question) -> Fate:
    """Return the fate that follows from the plan."""
    assert question.frontend is not None
    assert question.plan is not None
    return decide(question.packet, question.frontend, question.plan, question.node)


def agrees(question: Question, side: KernelSide) -> bool:
    """Return whether the kernel's objects decide as the plan does."""
    return judge(question.packet, decided(question), side)[0] == AGREES


def essence(fate: Fate | None) -> object:
    """Return what two fates have in common if they are the same."""
    assert fate is not None
    return fate.outcome, {(c.where, round(c.share, 4), c.masqueraded) for c in fate.choices}
