"""The plans of one IP family, and how they differ from the state that the backend has acknowledged."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

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
from kproxy_core.plan.budget import GIANT, NodeBudget, describe, fit
from kproxy_core.plan.claims import Claims, Conflict
from kproxy_core.plan.endpoints import Candidates, endpoints_of, within_limit
from kproxy_core.plan.last_resort import LastResort, LastResortStep, as_ready, find_last_resort
from kproxy_core.plan.quarantine import Quarantined
from kproxy_core.plan.removed_endpoints import kept_destinations
from kproxy_core.plan.service_plan import Frontend, ServicePlan, count_ready_local, plan_service

log = logging.getLogger("kproxy.run")

_TCP, _UDP = Protocol.TCP, Protocol.UDP

_UNPLANNED_AGAIN = 60.0
"""Seconds after which a Service that could not be planned is planned again."""


class Step(NamedTuple):
    """The change of one service port between two acknowledged states; None: absent."""

    key: ServicePortKey
    before: ServicePlan | None
    after: ServicePlan | None


class HealthCheck(NamedTuple):
    port: int
    ready: int
    """Distinct addresses of endpoints on this node that are ready, or the last resort."""


class Programmed(Mapping[ServicePortKey, ServicePlan]):
    """All plans, but those of some service ports as they were. Costs what these are, not what all are."""

    def __init__(
        self, plans: Mapping[ServicePortKey, ServicePlan], others: Mapping[ServicePortKey, ServicePlan | None]
    ) -> None:
        """*others* replace *plans*; None: absent."""
        self._plans = plans
        self._others = others
        self._length = len(plans) + sum(
            (plan is not None) - (key in plans) for key, plan in others.items())

    def __getitem__(self, key: ServicePortKey) -> ServicePlan:
        if key not in self._others:
            return self._plans[key]
        plan = self._others[key]
        if plan is None:
            raise KeyError(key)
        return plan

    def __iter__(self) -> Iterator[ServicePortKey]:
        yield from (key for key in self._plans if key not in self._others)
        yield from (key for key, plan in self._others.items() if plan is not None)

    def __len__(self) -> int:
        return self._length


class FamilyPlans:
    """Plans changes and remembers them until `acknowledge`. One thread, no I/O.

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
        self.plans: dict[ServicePortKey, ServicePlan] = {}
        """Plans of all service ports."""
        self.node_changed = True
        self.unserved: Mapping[ServicePortKey, str] = {}
        """Acknowledged service ports that the backend could not serve, with the reason."""
        self._store = store
        self._objects = store.families[family]
        self._claims = Claims()
        self._before: dict[ServicePortKey, ServicePlan | None] = {}
        """The acknowledged plans of all service ports that differ now."""
        self.unplanned: dict[ServicePortKey, str] = {}
        """Service ports that a bug keeps from being planned, with the reason. Their last plans are kept."""
        self._unplanned_services: dict[ServiceName, tuple[ServicePortKey, ...]] = {}
        self._withheld: dict[ServicePortKey, ServicePlan | None] = {}
        """Service ports whose changes are left out of updates, with the plans that they keep instead."""
        self._reconsidered: set[ServicePortKey] = set()
        self._dirty: set[ServiceName] = set()
        self._again: Agenda[ServiceName] = Agenda()
        self._quarantined: Quarantined = {}
        self._giants: set[ServiceName] = set()
        """Giants among the planned Services."""
        self._budget = NodeBudget()
        self._waiting: dict[ServiceName, None] = {}
        """Changed giants that are not planned yet, in that order."""
        self._postponed: dict[ServicePortKey, int] = {}
        """See `postponed`; with the elements of each."""
        self._resized: set[ServicePortKey] = set()
        """Those of `_postponed` that have been planned since."""
        self._slices_used: dict[ServiceName, Mapping[str, EndpointSlice]] = {}
        """Those of Services with more endpoints than fit."""
        self.left_out: dict[ServiceName, tuple[str, ...]] = {}
        """`ServicePlan.left_out` of Services that are not served in full."""
        self._new_left_out: dict[ServiceName, tuple[str, ...]] = {}
        self._ports: tuple[Service | None, dict[tuple[str, Protocol], PortSpec]] = (None, {})
        """The Service whose endpoints were asked for last, and its ports."""
        self._last_resorts: dict[ServiceName, LastResort] = {}
        self._last_resorts_before: dict[ServiceName, LastResort | None] = {}
        """The acknowledged ones of the Services whose last resorts may differ now."""
        self._udp_ports: set[ServicePortKey] = set()
        self._reset_ports: set[ServicePortKey] = set()
        self._health_checked: set[ServiceName] = set()
        self._ready: dict[ServiceName, int] = {}
        """The counts of ready endpoints that the health check node ports show."""

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

    def plan(self, most_giants: int | None = None) -> list[Conflict]:
        """Bring the plans up to date with the store. Return new frontend conflicts.

        Of changed giants, those beyond *most_giants* wait for another call; None: all are planned.
        """
        waiting, self._waiting = self._waiting, {}
        names = waiting | self._objects.take_changed()
        if self._dirty:
            names |= dict.fromkeys(self._dirty)
            self._dirty = set()
        if most_giants is not None:
            changed_giants = [name for name in names if self._is_giant(name)]
            self._waiting = dict.fromkeys(changed_giants[most_giants:])
            for name in self._waiting:
                del names[name]
        touched: set[ServiceName] = set()
        for name in names:
            self._again.discard(name)
            try:
                wanted = self._plans_of(name)
            except Exception as error:  # noqa: BLE001 - the other Services must not wait for it
                self._note_unplanned(name, error)
                continue
            for key in self._unplanned_services.pop(name, ()):
                del self.unplanned[key]
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
        for name in self._budget.take_fitting():
            self.plan_again(name, self.now)
        return self._claims.take_conflicts()

    def _plans_of(self, name: ServiceName) -> tuple[ServicePlan, ...]:
        """Plan a Service, as far as it fits; () if it does not exist."""
        service, slices = self._store.services.get(name), self._objects.slices.get(name)
        self._slices_used.pop(name, None)
        if service is None:
            self._budget.release(name)
            self._giants.discard(name)
            self._note_left_out(name, ())
            self._note_last_resort(name, None)
            return ()
        fitting = self._budget.fit(service, slices, self.family)
        if slices and "endpoints" in fitting.left_out:
            self._slices_used[name] = within_limit(slices, fitting.destinations, self.node.name)
        (self._giants.add if fitting.elements > GIANT else self._giants.discard)(name)
        self._note_last_resort(name, service)
        quarantined = self._quarantined if self._store.avoids_silent(service) else None
        used = self._as_planned(name, self._usable_slices(name))
        wanted = plan_service(service, used, self.node, quarantined, fitting)
        self._note_left_out(name, tuple(dict.fromkeys(what for plan in wanted for what in plan.left_out)))
        return wanted

    def _note_left_out(self, name: ServiceName, left_out: tuple[str, ...]) -> None:
        if left_out != self.left_out.get(name, ()):
            self._new_left_out[name] = left_out
            self.left_out.pop(name, None)
            if left_out:
                self.left_out[name] = left_out

    def _note_unplanned(self, name: ServiceName, error: Exception) -> None:
        """Note that planning a Service has failed. It is planned again when it changes, and later."""
        problem = f"it cannot be planned: {type(error).__name__}: {one_line(error)}"
        service = self._store.services.get(name)
        planned = [plan.key for plan in self._claims.wanted(name)]
        ports = service.ports if service is not None else ()
        wanted = [ServicePortKey(*name, port.name, port.protocol) for port in ports]
        keys = tuple(dict.fromkeys(planned + wanted))
        if any(self.unplanned.get(key) != problem for key in keys):
            log.error("bug: a Service cannot be planned", exc_info=error, extra={
                "fields": {"service": str(name), "ip_family": self.family.label}})
        for key in self._unplanned_services.pop(name, ()):
            del self.unplanned[key]
        self._unplanned_services[name] = keys
        self.unplanned |= dict.fromkeys(keys, problem)
        self.plan_again(name, self.now + _UNPLANNED_AGAIN)

    @property
    def waiting(self) -> Mapping[ServiceName, None]:
        """Changed giants that are not planned yet."""
        return self._waiting

    @property
    def delayed(self) -> Mapping[ServiceName, None]:
        """The Services that are not wholly part of the next update: giants, and those postponed."""
        return self._waiting | dict.fromkeys(key.service for key in self._postponed)

    def take_left_out(self) -> dict[ServiceName, tuple[str, ...]]:
        """Return `left_out` where it changed since the last call; (): nothing any more."""
        taken, self._new_left_out = self._new_left_out, {}
        return taken

    def describe_left_out(self, name: ServiceName) -> str:
        """Return what a Service asks for beyond its limits, and these, for people; "" if nothing."""
        left_out = self.left_out.get(name, ())
        return describe(left_out, because_of_others=self._budget.is_limited(name))

    def last_resort(self, name: ServiceName) -> LastResort | None:
        """Return the last resort with which a Service was planned. From any thread."""
        return self._last_resorts.get(name)

    @property
    def last_resorts(self) -> int:
        """The number of Services that use their last resort."""
        return len(self._last_resorts)

    def take_last_resorts(self) -> list[LastResortStep]:
        """Return the last resorts that differ since the last call."""
        taken, self._last_resorts_before = self._last_resorts_before, {}
        return [
            LastResortStep(name, before, after, is_over=self._is_over(name, before, after))
            for name, before in taken.items() if before != (after := self.last_resort(name))
        ]

    def _is_over(self, name: ServiceName, before: LastResort | None, after: LastResort | None) -> bool:
        lost = self._objects.lost.get(name)
        return (
            after is None and before is not None and before.until <= self.now
            and lost is not None and lost.none_since is not None)

    @property
    def differs(self) -> bool:
        """A plan is not acknowledged, or could not be served."""
        return self.node_changed or not all(
            key in self._withheld for keys in (self._before, self._retried) for key in keys)

    @property
    def differing(self) -> Set[ServicePortKey]:
        """The service ports whose plans are not acknowledged."""
        return self._before.keys()

    def withhold(self, keys: Set[ServicePortKey]) -> None:
        """Leave the changes of *keys* out of updates from now on: the backend keeps their acknowledged plans.

        Those that do not differ are left out altogether: the acknowledged plan is the one that fails. What is
        postponed is left out, too.
        """
        left_out = keys | self._postponed.keys() if self._postponed else keys
        self._withheld = {key: self._plan_to_keep(key, left_out) for key in left_out}

    def postpone_unfinished(self, keys: Set[ServicePortKey]) -> None:
        """Have *keys*, of which the backend has written a part, in a later update, too.

        After a full sync some may be as before. Call it before `acknowledge`.
        """
        for key in keys:
            self._withheld[key] = self._before.setdefault(key, self.plans.get(key))
            self._postponed[key] = self._size(key)

    @property
    def postponed(self) -> Set[ServicePortKey]:
        """The service ports whose changes are left for a later update, because the next is large enough."""
        return self._postponed.keys()

    @property
    def pending(self) -> dict[ServicePortKey, ServicePlan | None]:
        """The acknowledged plans of what is postponed; None: absent."""
        return {key: self._before[key] for key in self._postponed if key in self._before}

    def postpone(self, most: int | None, withheld: Set[ServicePortKey], *, again: bool) -> int:
        """Leave the largest changes, beyond *most* elements, out of the next update; None: none.

        So the change of a small Service does not wait until many others, or a Service of many ports, are in
        the kernel. *withheld* are left out anyway. *again*: the update may contain what was postponed before;
        otherwise only what has changed since. Return the elements that it has, 0 for those of None.
        """
        earlier = {key: size for key, size in self._postponed.items()
                   if key in self._before and key not in withheld}
        self._postponed, resized, self._resized = {}, self._resized, set()
        if most is None:
            return 0
        sizes = {
            key: self._size(key) for key in self._before.keys() - withheld
            if key not in earlier or key in resized}
        everything = earlier | sizes
        fresh = sizes.keys() - earlier.keys()
        total = sum(everything[key] for key in (everything if again else fresh))
        if total <= most and (again or not earlier):
            return total
        partners = self._partners(everything, most)
        chosen: set[ServicePortKey] = set()
        total = 0
        for key in sorted(everything if again else fresh, key=everything.__getitem__):
            if key not in chosen:
                together = partners.get(key, {key})
                size = sum(everything[each] for each in together)
                if total and total + size > most:
                    break
                chosen |= together
                total += size
        self._postponed = {key: size for key, size in everything.items() if key not in chosen}
        return total

    def _size(self, key: ServicePortKey) -> int:
        """Return about how many elements the change of a service port may write or delete."""
        plans = self._before[key], self.plans.get(key)
        return max((plan.elements for plan in plans if plan is not None), default=0)

    def _partners(
        self, sizes: Mapping[ServicePortKey, int], most: int
    ) -> dict[ServicePortKey, set[ServicePortKey]]:
        """Return service ports that frontends move between, which one update should contain together.

        Without groups of more than *most* elements: when one of their service ports takes a frontend, the
        one that had it and is postponed is not served until its turn.
        """
        found: dict[ServicePortKey, set[ServicePortKey]] = {}
        for key in sizes:
            before = self._before[key]
            for frontend in before.frontends() if before is not None else ():
                holder = self._claims.holder(frontend)
                if holder is None or holder == key or holder not in sizes:
                    continue
                small, large = sorted((found.get(key, {key}), found.get(holder, {holder})), key=len)
                if small is not large:
                    large |= small
                    found |= dict.fromkeys((*small, key, holder), large)
        groups = {id(group): group for group in found.values()}
        fitting = {at for at, group in groups.items() if sum(sizes[key] for key in group) <= most}
        return {key: group for key, group in found.items() if id(group) in fitting}

    def take_reconsidered(self) -> Set[ServicePortKey]:
        """Return the withheld service ports whose plans have changed since the last call."""
        taken, self._reconsidered = self._reconsidered, set()
        return taken

    def update(self, scope: Scope) -> Update:
        changed = {key: self.plans.get(key) for key in (*self._before, *self._retried)
                   if key not in self._withheld}
        changed |= dict.fromkeys(self._lost)
        return Update(
            self.family, scope, self.node, changed, self.programmed, self.node_changed, self.addresses)

    @property
    def programmed(self) -> Mapping[ServicePortKey, ServicePlan]:
        """All plans, but those of withheld service ports as they were."""
        return Programmed(self.plans, self._withheld) if self._withheld else self.plans

    @property
    def _lost(self) -> dict[ServicePortKey, ServicePlan]:
        """The acknowledged plans of withheld service ports that do not keep them."""
        return {key: before for key, kept in self._withheld.items()
                if kept is None and (before := self._acknowledged(key)) is not None}

    @property
    def _retried(self) -> list[ServicePortKey]:
        """The service ports that the backend could not serve."""
        return [key for key in self.unserved if key not in self.unplanned]

    def _plan_to_keep(self, key: ServicePortKey, withheld: Set[ServicePortKey]) -> ServicePlan | None:
        """Return the acknowledged plan of a withheld service port that differs.

        None, too, if another service port that is not *withheld* has its frontends now.
        """
        plan = self._before.get(key)
        if plan is None:
            return None
        for frontend in plan.frontends():
            holder = self._claims.holder(frontend)
            if holder is not None and holder != key and holder not in withheld:
                return None
        return plan

    def _acknowledged(self, key: ServicePortKey) -> ServicePlan | None:
        return self._before[key] if key in self._before else self.plans.get(key)

    def acknowledge(self, unserved: Mapping[ServicePortKey, str]) -> list[Step]:
        """Record that the last update is done, except for *unserved*, which is part of the next one.

        Return the changes since the last acknowledgement.
        """
        self._udp_ports.update(key for key in self.unserved if key.protocol is Protocol.UDP)
        steps = [Step(key, before, self.plans.get(key)) for key, before in self._before.items()
                 if key not in self._withheld]
        steps += [Step(key, before, None) for key, before in self._lost.items()]
        self._health_checked.update(key.service for key in self.unserved.keys() | unserved.keys())
        self._before = dict(self._withheld)
        self.unserved = dict(unserved)
        self.node_changed = False
        return steps

    def pending_udp_frontends(self) -> frozenset[Frontend]:
        """Return the frontends, before and after, of the service ports in `take_udp_ports`."""
        return frozenset(
            frontend for key in self._udp_ports
            for plan in (self._before.get(key), self.plans.get(key)) if plan is not None
            for frontend in plan.frontends())

    def take_udp_ports(self) -> frozenset[ServicePortKey]:
        """Return the UDP service ports planned or tried again since the last call.

        Their serving endpoints or relays may differ even where their plans do not.
        """
        taken = self._udp_ports - self._postponed.keys()
        self._udp_ports -= taken
        return frozenset(taken)

    @property
    def reset_ports(self) -> Set[ServicePortKey]:
        """TCP service ports planned since the last `take_reset_ports` whose connections may be reset.

        The endpoints that they have lost may differ even where their plans do not.
        """
        return self._reset_ports

    def take_reset_ports(self) -> frozenset[ServicePortKey]:
        taken = self._reset_ports - self._postponed.keys()
        self._reset_ports -= taken
        return frozenset(taken)

    def kept(self, key: ServicePortKey) -> frozenset[Destination] | None:
        """Return the endpoints of a service port that are not removed; None: its connections are not reset.

        None, too, for a Service above the limit, not all of whose endpoints are known.
        """
        plan = self.plans.get(key)
        if plan is None or not plan.resets_removed or key.service in self._slices_used:
            return None
        return kept_destinations(plan, self.candidates(key))

    def take_health_checks(self) -> dict[ServiceName, HealthCheck | None]:
        """Return the health check node ports planned or tried again since the last call; None: removed.

        The number of ready endpoints may differ even where no plan does. While a service port is not served,
        endpoints that it had not before do not count.
        """
        taken = self._health_checked - {key.service for key in self._postponed}
        self._health_checked -= taken
        return {name: self._health_check(name) for name in taken}

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

    def relay_problem(self, key: ServicePortKey) -> str:
        """Return "": without a running proxy, no relay fails."""
        return ""

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
        """Return whether a Service is a giant now, or was one when it was planned."""
        service = self._store.services.get(name)
        if name in self._giants or service is None:
            return name in self._giants
        return fit(service, self._objects.slices.get(name), self.family).elements > GIANT

    def _usable_slices(self, name: ServiceName) -> Mapping[str, EndpointSlice] | None:
        return self._slices_used.get(name) or self._objects.slices.get(name)

    def _as_planned(
        self, name: ServiceName, slices: Mapping[str, EndpointSlice] | None
    ) -> Mapping[str, EndpointSlice] | None:
        """Return the *slices* of a Service with its last resort as if it were ready."""
        resort = self._last_resorts.get(name)
        return as_ready(slices, resort.endpoints) if slices and resort else slices

    def _note_last_resort(self, name: ServiceName, service: Service | None) -> None:
        """Bring the last resort of a Service that is being planned up to date. Its end is planned, too."""
        before = self._last_resorts.get(name)
        lost = self._objects.lost.get(name)
        if lost is None and before is None:
            return
        found = None
        if service is not None and service.cluster_ip(self.family) is not None:
            seconds = self._store.last_resort(name)
            found = find_last_resort(self._usable_slices(name), lost, seconds, self.now)
        self._last_resorts_before.setdefault(name, before)
        if found is None:
            self._last_resorts.pop(name, None)
        else:
            self._last_resorts[name] = found
            self.plan_again(name, found.until)

    def _health_check(self, name: ServiceName) -> HealthCheck | None:
        granted = self._claims.granted(name)
        port = granted[0].health_check_node_port if granted else 0
        if not port:
            self._ready.pop(name, None)
            return None
        ready = count_ready_local(self._as_planned(name, self._objects.slices.get(name)), self.node)
        if any(key.service == name for key in self.unserved):
            ready = min(ready, self._ready.get(name, 0))
        self._ready[name] = ready
        return HealthCheck(port, ready)

    def _put_granted(self, name: ServiceName) -> None:
        for plan in self._claims.granted(name):
            self._put(plan.key, plan)

    def _put(self, key: ServicePortKey, plan: ServicePlan | None) -> None:
        known = self.plans.get(key)
        if key.protocol is _UDP:
            self._udp_ports.add(key)
        elif key.protocol is _TCP and ((known and known.resets_removed) or (plan and plan.resets_removed)):
            self._reset_ports.add(key)
        if (known and known.health_check_node_port) or (plan and plan.health_check_node_port):
            self._health_checked.add(key.service)
        if known == plan:
            return
        if key in self._withheld:
            self._reconsidered.add(key)
        if key in self._postponed:
            self._resized.add(key)
        if plan is None:
            del self.plans[key]
        else:
            self.plans[key] = plan
        if self._before.setdefault(key, known) == plan and key not in self._withheld:
            del self._before[key]
