"""The plans of one IP family, and how they differ from what the backend has acknowledged."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from kproxy_core.backend.api import Scope, Update
from kproxy_core.model.address import Family, Protocol
from kproxy_core.model.endpoint import Destination
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServiceName, ServicePortKey
from kproxy_core.observe.service_health import LocalEndpoints
from kproxy_core.plan.claims import Claims, Conflict
from kproxy_core.plan.service_plan import (
    ServicePlan,
    count_ready_local,
    plan_service,
    serving_destinations,
)
from kproxy_core.store.store import Store


class Step(NamedTuple):
    """How one service port changed between two acknowledged states; None: not there."""

    key: ServicePortKey
    before: ServicePlan | None
    after: ServicePlan | None


class FamilyPlans:
    """Plans what changed, remembers it until `acknowledged`. One thread, no I/O.

    A change costs what its Services cost. Only a node whose name, zone or address differs makes
    it look at all of them.
    """

    def __init__(self, family: Family, store: Store) -> None:
        self.family = family
        self.node = NodeView(family=family, name="")
        """As last told by `node_is`."""
        self.plans: dict[ServicePortKey, ServicePlan] = {}
        """Every service port there is."""
        self.node_changed = True
        self._store = store
        self._claims = Claims()
        self._before: dict[ServicePortKey, ServicePlan | None] = {}
        """The acknowledged plans of all service ports that differ now."""
        self._unserved: frozenset[ServicePortKey] = frozenset()
        """Those that the backend has acknowledged and could not serve."""
        self._dirty: set[ServiceName] = set()
        self._flows: set[ServicePortKey] = set()
        """UDP service ports planned anew: their serving endpoints may differ even if their plans don't."""

    def node_is(self, node: NodeView) -> bool:
        """Plan for *node* from now on. True if that makes a difference."""
        known = self.node
        if node == known:
            return False
        self.node = node
        self.node_changed = True
        if (node.name, node.zone, node.node_ip) != (known.name, known.zone, known.node_ip):
            self._dirty.update(self._store.services)
        return True

    def plan(self) -> list[Conflict]:
        """Bring the plans up to date with the store; returns new conflicts over frontends."""
        names = self._store.take_changed(self.family)
        if self._dirty:
            names |= self._dirty
            self._dirty = set()
        touched: set[ServiceName] = set()
        for name in names:
            service = self._store.services.get(name)
            wanted: tuple[ServicePlan, ...] = ()
            if service is not None:
                wanted = plan_service(service, self._store.slices(self.family, name), self.node)
            before = self._claims.wanted(name)
            if before:
                self._forget(before, wanted)
            if before or wanted:
                touched |= self._claims.want(name, wanted)
        for granted in map(self._claims.granted, (*names, *(touched - names))):
            for plan in granted:
                self._put(plan.key, plan)
                if plan.key.protocol is Protocol.UDP:
                    self._flows.add(plan.key)
        return self._claims.take_conflicts()

    def take_trigger_times(self) -> list[float]:
        """When the endpoint changes that were planned since the last call happened (wall clock)."""
        return self._store.take_trigger_times(self.family)

    @property
    def differs(self) -> bool:
        """There is something that the backend has not acknowledged, or could not serve."""
        return bool(self._before) or bool(self._unserved) or self.node_changed

    def update(self, scope: Scope) -> Update:
        """What the backend has to do."""
        changed = {key: self.plans.get(key) for key in (*self._before, *self._unserved)}
        return Update(self.family, scope, self.node, changed, self.plans, self.node_changed)

    def acknowledged(self, unserved: Collection[ServicePortKey] = ()) -> list[Step]:
        """The backend has done it, and will be asked again for what is *unserved*.

        Returns what changed by that.
        """
        steps = [Step(key, before, self.plans.get(key)) for key, before in self._before.items()]
        self._before = {}
        self._unserved = frozenset(unserved)
        self.node_changed = False
        return steps

    def take_flows(self) -> set[ServicePortKey]:
        """The UDP service ports whose flows may have become stale since the last call."""
        taken, self._flows = self._flows, set()
        return taken

    def serving(self, key: ServicePortKey) -> frozenset[Destination]:
        """Every serving endpoint of one service port."""
        service = self._store.services.get(key.service)
        for port in service.ports if service is not None else ():
            if (port.name, port.protocol) == (key.port_name, key.protocol):
                return serving_destinations(port, self._store.slices(self.family, key.service))
        return frozenset()

    def health_checked(self, steps: Iterable[Step]) -> dict[ServiceName, LocalEndpoints | None]:
        """What the health check node ports of the Services in *steps* have to tell from now on."""
        names = {
            step.key.service
            for step in steps
            for plan in (step.before, step.after)
            if plan is not None and plan.health_check_node_port
        }
        return {name: self._local_endpoints(name) for name in names}

    def _local_endpoints(self, name: ServiceName) -> LocalEndpoints | None:
        granted = self._claims.granted(name)
        port = granted[0].health_check_node_port if granted else 0
        if not port:
            return None
        slices = self._store.slices(self.family, name)
        return LocalEndpoints(port, count_ready_local(self._store.services[name], slices, self.node))

    def _forget(self, before: Iterable[ServicePlan], wanted: Iterable[ServicePlan]) -> None:
        """Take out what was wanted *before* and is not *wanted* any more."""
        keys = {plan.key for plan in wanted}
        for plan in before:
            if plan.key not in keys:
                self._put(plan.key, None)
                if plan.key.protocol is Protocol.UDP:
                    self._flows.add(plan.key)

    def _put(self, key: ServicePortKey, plan: ServicePlan | None) -> None:
        known = self.plans.get(key)
        if known == plan:
            return
        if plan is None:
            del self.plans[key]
        else:
            self.plans[key] = plan
        if self._before.setdefault(key, known) == plan:
            del self._before[key]


class NoLocalEndpoints:
    """Counts service ports that a Local policy leaves without endpoints on this node, though others exist."""

    def __init__(self) -> None:
        self.internal = 0
        self.external = 0

    def follow(self, steps: Iterable[Step]) -> None:
        """Take over what changed."""
        for step in steps:
            for plan, sign in ((step.before, -1), (step.after, 1)):
                if plan is not None and plan.has_endpoints and not plan.local:
                    self.internal += sign * plan.internal_policy_local
                    self.external += sign * plan.external_policy_local
