"""The plans of one IP family, kept up to date with the store.

Each Service is planned in steps, each of which is a module of `plan`: what of it fits (`budget`), its
last resort, the endpoints in quarantine, its plans (`service_plan`), and who has a contested frontend
(`claims`). `difference` compares the plans with those that the backend has acknowledged.
"""

import logging
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Generic, NamedTuple, TypeVar

from kproxy_core.contract.errors import one_line
from kproxy_core.contract.values import Scope, Update
from kproxy_core.kube.store import Store
from kproxy_core.model.address import Address, Family, Protocol, family_of, is_link_local, is_loopback
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import (
    Destination,
    EndpointSlice,
    PortSpec,
    Service,
    ServiceName,
    ServicePortKey,
)
from kproxy_core.model.timing import Agenda
from kproxy_core.plan.budget import NodeBudget
from kproxy_core.plan.claims import Claims, Conflict
from kproxy_core.plan.endpoints import Candidates, endpoints_of, within_limit
from kproxy_core.plan.health_checks import HealthCheck, HealthChecks
from kproxy_core.plan.last_resort import LastResort, LastResorts, LastResortStep, find_last_resort
from kproxy_core.plan.quarantine import Quarantined
from kproxy_core.plan.removed_endpoints import kept_destinations
from kproxy_core.plan.service_plan import Frontend, ServicePlan, plan_service
from kproxy_core.sync.difference import Difference, Step

log = logging.getLogger("kproxy.run")

_K = TypeVar("_K")

_UNPLANNED_AGAIN = 60.0
"""Seconds after which a Service that could not be planned is planned again."""


class _Touched(Generic[_K]):
    """Whose plans were made or tried again since a success, even if they are equal."""

    def __init__(self) -> None:
        self.keys: set[_K] = set()

    def take(self, postponed: Set[_K]) -> frozenset[_K]:
        """Return all but those *postponed*, which are kept."""
        taken = self.keys - postponed
        self.keys -= taken
        return frozenset(taken)


class FollowUps(NamedTuple):
    """What may have changed since the last success, for those who act after syncs."""

    udp_ports: frozenset[ServicePortKey] = frozenset()
    """UDP service ports planned or tried again. Their serving endpoints or relays may differ even where their
    plans do not."""
    reset_ports: frozenset[ServicePortKey] = frozenset()
    """See `FamilyPlans.reset_ports`."""
    health_checks: Mapping[ServiceName, HealthCheck | None] = {}
    """Health check node ports planned or tried again; None: removed. The number of ready endpoints may differ
    even where no plan does."""
    last_resorts: Sequence[LastResortStep] = ()
    """Services whose last resort began, changed or ended."""


class _Unplanned:
    """The service ports of Services that a bug keeps from being planned."""

    def __init__(self) -> None:
        self.problems: dict[ServicePortKey, str] = {}
        self._of: dict[ServiceName, tuple[ServicePortKey, ...]] = {}

    def forget(self, name: ServiceName) -> None:
        for key in self._of.pop(name, ()):
            del self.problems[key]

    def put(self, name: ServiceName, keys: tuple[ServicePortKey, ...], problem: str) -> bool:
        """Record the *problem* of a Service. Return whether it is another one than before."""
        is_new = any(self.problems.get(key) != problem for key in keys)
        self.forget(name)
        self._of[name] = keys
        self.problems |= dict.fromkeys(keys, problem)
        return is_new


class FamilyPlans:
    """Plans what has changed. One thread, no I/O.

    Only changed Services are planned, and those whose time has come (`plan_again`); all are after a change of
    the node's name, zone or address.
    """

    def __init__(self, family: Family, store: Store) -> None:
        self.family = family
        self.node = NodeView(family=family, name="")
        """Set by `set_node`."""
        self.addresses: frozenset[Address] = frozenset()
        """Addresses of the node's interfaces, set by `set_node`. No plan depends on them."""
        self.now = 0.0
        """Monotonic seconds, set by `set_time`."""
        self.node_changed = True
        self._store = store
        self._objects = store.families[family]
        self._dirty: set[ServiceName] = set()
        self._again: Agenda[ServiceName] = Agenda()
        self.waiting: dict[ServiceName, None] = {}
        """Changed giants that are not planned yet, in that order."""
        self.budget = NodeBudget(family)
        self._slices_used: dict[ServiceName, Mapping[str, EndpointSlice]] = {}
        """Those of Services with more endpoints than fit."""
        self.last_resorts = LastResorts()
        self._quarantined: Quarantined = {}
        self._unplanned = _Unplanned()
        self._claims = Claims()
        self.difference = Difference(self._claims.holder, self._unplanned.problems)
        self._health_checks = HealthChecks()
        self._udp_ports, self._reset_ports = _Touched[ServicePortKey](), _Touched[ServicePortKey]()
        self._health_checked = _Touched[ServiceName]()
        self._ports: tuple[Service | None, dict[tuple[str, Protocol], PortSpec]] = (None, {})
        """The Service whose endpoints were asked for last, and its ports."""

    # What plans depend on.

    def set_node(self, node: NodeView, addresses: frozenset[Address]) -> bool:
        """Plan for *node* from now on. Return True if it differs from the last one.

        *addresses* are those of all its interfaces. Each pod may add a link-local one, which no Service has.
        """
        known, changed, self.addresses = self.node, self.addresses ^ addresses, addresses
        if node == known and all(
            family_of(each) is not self.family or is_loopback(each) or is_link_local(each) for each in changed
        ):
            return False
        self.node = node
        self.node_changed = True
        if (node.name, node.zone, node.node_ip) != (known.name, known.zone, known.node_ip):
            self._dirty.update(self._store.services)
        return True

    def set_time(self, now: float) -> bool:
        """Plan for the time *now*. Return True if a Service must be planned again because of it."""
        self.now = now
        due = self._again.take_due(now)
        self._dirty.update(due)
        return bool(due)

    def plan_again(self, name: ServiceName, at: float) -> None:
        """Have a Service planned at *at*, even if nothing changes, unless it is planned before."""
        self._again.add(name, at)

    @property
    def next_time(self) -> float | None:
        """The next time for which `set_time` returns True; None: never."""
        return self._again.next_at

    def set_quarantined(self, endpoints: Quarantined, services: Collection[ServiceName]) -> None:
        """Plan with *endpoints* in quarantine from now on. *services*: those for which this may differ."""
        self._quarantined = endpoints
        self._dirty.update(services)

    # Planning.

    def plan(self, most_giants: int | None = None) -> list[Conflict]:
        """Bring the plans up to date with the store. Return new frontend conflicts.

        Of changed giants, those beyond *most_giants* wait for another call; None: all are planned.
        """
        waiting, self.waiting = self.waiting, {}
        names = waiting | self._objects.take_changed()
        if self._dirty:
            names |= dict.fromkeys(self._dirty)
            self._dirty = set()
        if most_giants is not None:
            changed_giants = [name for name in names if self._is_giant(name)]
            self.waiting = dict.fromkeys(changed_giants[most_giants:])
            for name in self.waiting:
                del names[name]
        touched: set[ServiceName] = set()
        for name in names:
            self._again.discard(name)
            try:
                wanted = self._plans_of(name)
            except Exception as error:  # noqa: BLE001 - the other Services must not wait for it
                self._note_unplanned(name, error)
                continue
            self._unplanned.forget(name)
            before = self._claims.wanted(name)
            if before:
                keys = {plan.key for plan in wanted}
                for plan in before:
                    if plan.key not in keys:
                        self._put(plan.key, None)
            if before or wanted:
                touched |= self._claims.want(name, wanted)
                self._put_granted(name)
        for name in touched:
            self._put_granted(name)
        for name in self.budget.take_fitting():
            self.plan_again(name, self.now)
        return self._claims.take_conflicts()

    def _plans_of(self, name: ServiceName) -> tuple[ServicePlan, ...]:
        """Plan a Service, as far as it fits; () if it does not exist."""
        service, slices = self._store.services.get(name), self._objects.slices.get(name)
        self._slices_used.pop(name, None)
        if service is None:
            self.budget.release(name)
            self._find_last_resort(name, None)
            return ()
        fitting = self.budget.fit(service, slices)
        if slices and "endpoints" in fitting.left_out:
            self._slices_used[name] = within_limit(slices, fitting.destinations, self.node.name)
        self._find_last_resort(name, service)
        used = self.last_resorts.as_planned(name, self._usable_slices(name))
        quarantined = self._quarantined if self._store.avoids_silent(service) else None
        wanted = plan_service(service, used, self.node, quarantined, fitting)
        left_out = dict.fromkeys(what for plan in wanted for what in plan.left_out)
        self.budget.note_left_out(name, tuple(left_out))
        return wanted

    def _find_last_resort(self, name: ServiceName, service: Service | None) -> None:
        """Bring the last resort of a Service that is being planned up to date. Its end is planned, too."""
        lost = self._objects.lost.get(name)
        if lost is None and self.last_resorts.of(name) is None:
            return
        found = None
        if service is not None and service.cluster_ip(self.family) is not None:
            seconds = self._store.last_resort(name)
            found = find_last_resort(self._usable_slices(name), lost, seconds, self.now)
        self.last_resorts.put(name, found)
        if found is not None:
            self.plan_again(name, found.until)

    def _note_unplanned(self, name: ServiceName, error: Exception) -> None:
        """Note that planning a Service has failed. It is planned again when it changes, and later."""
        service = self._store.services.get(name)
        planned = [plan.key for plan in self._claims.wanted(name)]
        ports = service.ports if service is not None else ()
        wanted = [ServicePortKey(*name, port.name, port.protocol) for port in ports]
        keys = tuple(dict.fromkeys(planned + wanted))
        problem = f"it cannot be planned: {type(error).__name__}: {one_line(error)}"
        if self._unplanned.put(name, keys, problem):
            log.error("bug: a Service cannot be planned", exc_info=error, extra={
                "fields": {"service": str(name), "ip_family": self.family.label}})
        self.plan_again(name, self.now + _UNPLANNED_AGAIN)

    def _put_granted(self, name: ServiceName) -> None:
        for plan in self._claims.granted(name):
            self._put(plan.key, plan)

    def _put(self, key: ServicePortKey, plan: ServicePlan | None) -> None:
        known = self.plans.get(key)
        if key.protocol is Protocol.UDP:
            self._udp_ports.keys.add(key)
        elif key.protocol is Protocol.TCP and (
            (known and known.resets_removed) or (plan and plan.resets_removed)
        ):
            self._reset_ports.keys.add(key)
        if (known and known.health_check_node_port) or (plan and plan.health_check_node_port):
            self._health_checked.keys.add(key.service)
        self.difference.put(key, plan)

    # Of all plans, and of the next update.

    @property
    def plans(self) -> Mapping[ServicePortKey, ServicePlan]:
        """Plans of all service ports."""
        return self.difference.plans

    @property
    def unplanned(self) -> Mapping[ServicePortKey, str]:
        """Service ports that a bug keeps from being planned, with the reason. Their last plans are kept."""
        return self._unplanned.problems

    @property
    def unserved(self) -> Mapping[ServicePortKey, str]:
        return self.difference.unserved

    @property
    def pending(self) -> Mapping[ServicePortKey, ServicePlan | None]:
        return self.difference.pending

    @property
    def delayed(self) -> Mapping[ServiceName, None]:
        """The Services that are not wholly part of the next update: giants, and those postponed."""
        return self.waiting | dict.fromkeys(key.service for key in self.difference.postponed)

    @property
    def differs(self) -> bool:
        """The node or a plan is not acknowledged, or a plan could not be served."""
        return self.node_changed or self.difference.is_outstanding

    def update(self, scope: Scope) -> Update:
        difference = self.difference
        return Update(self.family, scope, self.node, difference.changed, difference.programmed,
                      self.node_changed, self.addresses)

    # After an update.

    def acknowledge(self, unserved: Mapping[ServicePortKey, str]) -> list[Step]:
        """See `Difference.acknowledge`."""
        before = self.unserved.keys()
        self._udp_ports.keys.update(key for key in before if key.protocol is Protocol.UDP)
        self._health_checked.keys.update(key.service for key in before | unserved.keys())
        self.node_changed = False
        return self.difference.acknowledge(unserved)

    def pending_udp_frontends(self) -> frozenset[Frontend]:
        """Return the frontends, before and after, of UDP service ports that may have other plans."""
        return frozenset(
            frontend for key in self._udp_ports.keys
            for plan in (self.difference.before(key), self.plans.get(key)) if plan is not None
            for frontend in plan.frontends())

    @property
    def reset_ports(self) -> Set[ServicePortKey]:
        """TCP service ports planned since the last success whose connections may be reset.

        The endpoints that they have lost may differ even where their plans do not.
        """
        return self._reset_ports.keys

    def take_follow_ups(self) -> FollowUps:
        """Return what has changed since the last call, but for what is postponed."""
        postponed = self.difference.postponed
        services = self._health_checked.take({key.service for key in postponed})
        return FollowUps(
            self._udp_ports.take(postponed), self._reset_ports.take(postponed),
            {name: self._health_check(name) for name in services},
            self.last_resorts.take_steps(self._objects.lost, self.now))

    def _health_check(self, name: ServiceName) -> HealthCheck | None:
        granted = self._claims.granted(name)
        return self._health_checks.check(
            name, granted[0].health_check_node_port if granted else 0,
            self.last_resorts.as_planned(name, self._objects.slices.get(name)), self.node,
            is_served=all(key.service != name for key in self.unserved))

    # Looked up.

    def last_resort(self, name: ServiceName) -> LastResort | None:
        """Return the last resort with which a Service was planned. From any thread."""
        return self.last_resorts.of(name)

    def kept(self, key: ServicePortKey) -> frozenset[Destination] | None:
        """Return the endpoints of a service port that are not removed; None: its connections are not reset.

        None, too, for a Service above the limit, not all of whose endpoints are known.
        """
        plan = self.plans.get(key)
        if plan is None or not plan.resets_removed or key.service in self._slices_used:
            return None
        return kept_destinations(plan, self.candidates(key))

    def owner(self, frontend: Frontend) -> ServicePlan | None:
        """Return the plan to which *frontend* belongs. None: it is unclaimed, or a health check node port.

        From any thread.
        """
        key = self._claims.holder(frontend)
        plan = self.plans.get(key) if key is not None else None
        return plan if plan is not None and frontend in plan.frontends() else None

    def origin(self, service: ServiceName) -> str:
        """Return the file or the resource version of a Service; "" if unknown."""
        return self._store.origins.get(service, "")

    def candidates(self, key: ServicePortKey) -> Candidates:
        """Return all endpoints of one service port, usable or not."""
        service = self._store.services.get(key.service)
        if service is None:
            return ()
        known, ports = self._ports
        if known is not service:
            ports = {(port.name, port.protocol): port for port in service.ports}
            self._ports = service, ports
        port = ports.get((key.port_name, key.protocol))
        return endpoints_of(port, self._usable_slices(key.service)) if port is not None else ()

    def slices(self, service: ServiceName) -> Sequence[EndpointSlice]:
        """Return the EndpointSlices of a Service by name, used or not."""
        return [piece for _, piece in sorted(self._objects.slices.get(service, {}).items())]

    def _is_giant(self, name: ServiceName) -> bool:
        return self.budget.is_giant(name, self._store.services.get(name), self._objects.slices.get(name))

    def _usable_slices(self, name: ServiceName) -> Mapping[str, EndpointSlice] | None:
        return self._slices_used.get(name) or self._objects.slices.get(name)
