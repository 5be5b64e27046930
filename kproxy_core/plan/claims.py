"""Ownership of frontends that several service ports want: the oldest Service wins.

Kubernetes keeps ClusterIPs and node ports unique, but external IPs, load balancer IPs and objects from files
may collide. In kube-proxy the last one in the order of its maps wins, which can change at each sync. Here the
owner depends only on the current claims, never on their order.
"""

from bisect import bisect_left, insort
from collections.abc import Set

from msgspec import Struct
from msgspec.structs import replace

from kproxy_core.model.address import Address, Protocol, format_socket
from kproxy_core.model.service import ServiceName, ServicePortKey
from kproxy_core.plan.service_plan import Frontend, ServicePlan

Rank = tuple[str, ServicePortKey]
"""The smallest wins: the older Service, then namespace, name, port name and protocol."""

_AFTER_ANY_TIME = "~"


class Conflict(Struct, frozen=True):
    """A frontend that *loser* wants and *winner* holds."""

    frontend: Frontend
    winner: ServicePortKey
    loser: ServicePortKey

    def __str__(self) -> str:
        address, protocol, port = self.frontend
        where = f"port {port} of the node" if address is None else format_socket(address, port)
        return f"{self.loser} is not served on {where}/{protocol.name}: it belongs to {self.winner}"


class Claims:
    """The frontends of one family and their holders.

    The cost of a change is proportional to its own frontends and, where these are contested, to the logarithm
    of the number of rivals (apart from moving a list).
    """

    def __init__(self) -> None:
        self._wanted: dict[ServiceName, tuple[ServicePlan, ...]] = {}
        self._holder: dict[Frontend, ServicePortKey] = {}
        self._contested: dict[Frontend, list[Rank]] = {}
        """All rivals for a frontend, best first, for frontends with at least two."""
        self._lost: dict[ServicePortKey, set[Frontend]] = {}
        self._unreported: dict[tuple[ServicePortKey, Frontend], None] = {}

    def want(self, name: ServiceName, plans: tuple[ServicePlan, ...]) -> set[ServiceName]:
        """Replace the claims of the Service *name* by those of *plans*; empty: the Service was deleted.

        Return the other Services whose granted plans have changed.
        """
        before = self._wanted.get(name, ())
        if plans:
            self._wanted[name] = plans
        else:
            self._wanted.pop(name, None)
        touched: set[ServiceName] = set()
        if not before or _claims(before) != _claims(plans):
            for frontend, key in _frontends(before):
                self._release(frontend, (_age(before[0]), key), touched)
            for frontend, key in _frontends(plans):
                holder = self._holder.setdefault(frontend, key)
                if holder is not key:
                    self._contest(frontend, holder, (_age(plans[0]), key), touched)
            touched.discard(name)
        return touched

    def wanted(self, name: ServiceName) -> tuple[ServicePlan, ...]:
        return self._wanted.get(name, ())

    def granted(self, name: ServiceName) -> tuple[ServicePlan, ...]:
        """Return the plans of the Service *name* without the frontends that other Services hold."""
        plans = self._wanted.get(name, ())
        if not self._lost:
            return plans
        nothing: frozenset[Frontend] = frozenset()
        losses = [self._lost.get(plan.key, nothing) for plan in plans]
        if not any(losses):
            return plans
        unchecked = _health_check(plans[0]) in losses[0]
        return tuple(
            _without(plan, lost, unchecked) if lost or unchecked else plan
            for plan, lost in zip(plans, losses, strict=True)
        )

    def holder(self, frontend: Frontend) -> ServicePortKey | None:
        """Return the service port that holds *frontend*; None: no service port wants it."""
        return self._holder.get(frontend)

    def take_conflicts(self) -> list[Conflict]:
        """Return the conflicts that arose since the last call and still exist."""
        found = [Conflict(frontend, self._holder[frontend], loser) for loser, frontend in self._unreported]
        self._unreported.clear()
        return found

    def _contest(
        self, frontend: Frontend, holder: ServicePortKey, rank: Rank, touched: set[ServiceName]
    ) -> None:
        rivals = self._contested.get(frontend)
        if rivals is None:
            rivals = self._contested[frontend] = [(_age(self._wanted[holder.service][0]), holder)]
        insort(rivals, rank)
        if rivals[0] is rank:
            self._holder[frontend] = rank[1]
            self._lose(holder, frontend)
            touched.add(holder.service)
        else:
            self._lose(rank[1], frontend)

    def _release(self, frontend: Frontend, rank: Rank, touched: set[ServiceName]) -> None:
        rivals = self._contested.get(frontend)
        if rivals is None:
            del self._holder[frontend]
            return
        place = bisect_left(rivals, rank)
        del rivals[place]
        successor = rivals[0][1]
        if place == 0:
            self._holder[frontend] = successor
            self._win(successor, frontend)
            touched.add(successor.service)
        else:
            self._win(rank[1], frontend)
        if len(rivals) == 1:
            del self._contested[frontend]

    def _lose(self, key: ServicePortKey, frontend: Frontend) -> None:
        self._lost.setdefault(key, set()).add(frontend)
        self._unreported[key, frontend] = None

    def _win(self, key: ServicePortKey, frontend: Frontend) -> None:
        """Record that *key* holds *frontend*, or no longer wants it."""
        lost = self._lost[key]
        lost.discard(frontend)
        if not lost:
            del self._lost[key]
        self._unreported.pop((key, frontend), None)


def _age(plan: ServicePlan) -> str:
    return plan.created or _AFTER_ANY_TIME


def _claims(plans: tuple[ServicePlan, ...]) -> object:
    """Return the parts of *plans* that claims depend on, for comparison."""
    return [
        (p.key, p.created, p.cluster_ip, p.port, p.node_port, p.external_ips, p.load_balancer_ips,
         p.health_check_node_port)
        for p in plans
    ]


def _frontends(plans: tuple[ServicePlan, ...]) -> list[tuple[Frontend, ServicePortKey]]:
    """Return every frontend of a Service's *plans* once, with the service port that wants it.

    The health check node port is shared by all ports of a Service; the first claims it for them.
    """
    found = [(frontend, plan.key) for plan in plans for frontend in plan.frontends()]
    if plans and plans[0].health_check_node_port:
        first = _health_check(plans[0]), plans[0].key
        if first not in found:  # It may be the node port, too.
            found.append(first)
    return found


def _health_check(plan: ServicePlan) -> Frontend:
    return Frontend(None, Protocol.TCP, plan.health_check_node_port)


def _without(plan: ServicePlan, lost: Set[Frontend], unchecked: bool) -> ServicePlan:
    """Return *plan* without the frontends it *lost*, nor its health check node port if *unchecked*."""
    protocol, port = plan.key.protocol, plan.port

    def kept(addresses: tuple[Address, ...]) -> tuple[Address, ...]:
        return tuple(a for a in addresses if Frontend(a, protocol, port) not in lost)

    return replace(
        plan,
        cluster_ip=None if Frontend(plan.cluster_ip, protocol, port) in lost else plan.cluster_ip,
        external_ips=kept(plan.external_ips),
        load_balancer_ips=kept(plan.load_balancer_ips),
        node_port=0 if Frontend(None, protocol, plan.node_port) in lost else plan.node_port,
        health_check_node_port=0 if unchecked else plan.health_check_node_port,
    )
