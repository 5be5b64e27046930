"""Endpoints that Services have lost, and whose TCP connections are to be reset.

An endpoint is removed if it left every EndpointSlice of its Service, or terminates and serves no longer. One
that is only not ready keeps its connections: a failing probe must not cut them. Connections to a frontend
that no Service has any more are kept, too.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from itertools import chain

from msgspec import Struct

from kproxy_core.model.address import Address, is_loopback
from kproxy_core.model.service import Destination, ServicePortKey
from kproxy_core.plan.endpoints import Candidates
from kproxy_core.plan.service_plan import Frontend, ServicePlan

Owner = Callable[[Frontend], ServicePlan | None]
"""Returns the plan to which a frontend belongs."""
Lost = tuple[ServicePortKey, Destination]
"""An endpoint, and the service port that lost it."""

SECOND_LOOK = 1.0
"""Seconds for which an endpoint counts as removed at least: the first packet of a connection may have been on
its way to it when connections were searched for."""
_NOTHING: frozenset[Destination] = frozenset()


def kept_destinations(plan: ServicePlan, endpoints: Candidates) -> frozenset[Destination]:
    """Return those of all *endpoints* of a service port that are not removed.

    A *plan* may use endpoints that do not serve (publishNotReadyAddresses), or have them in quarantine.
    """
    kept = (where for where, each in endpoints if each.serving or not each.terminating)
    return frozenset(kept).union(plan.reachable, plan.resting)


def dialled_service_port(
    dialled: Frontend, owner: Owner, node_port_addresses: Set[Address]
) -> ServicePortKey | None:
    """Return the service port that is *dialled*, for a node port also by an address; None: no Service's."""
    plan, address = owner(dialled), dialled.address
    if plan is None and address is not None and (address in node_port_addresses or is_loopback(address)):
        plan = owner(dialled._replace(address=None))
    return None if plan is None else plan.key


class Search(Struct, frozen=True):
    """The removed endpoints of one family whose connections are searched for."""

    began: float
    removed: Mapping[ServicePortKey, Set[Destination]]
    kept: Mapping[ServicePortKey, Set[Destination]]
    """By service port whose earlier endpoints are unknown: all others are removed, except at `own` addresses,
    where relays may answer."""
    own: Set[Address]

    def is_removed(self, key: ServicePortKey, endpoint: Destination) -> bool:
        if endpoint in self.removed.get(key, ()):
            return True
        kept = self.kept.get(key)
        return kept is not None and endpoint not in kept and endpoint.address not in self.own

    @property
    def endpoints(self) -> frozenset[Destination] | None:
        """All removed endpoints; None: some are unknown."""
        return None if self.kept else frozenset(chain.from_iterable(self.removed.values()))


class RemovedEndpoints:
    """Tracks the removed endpoints of one family until no connection to them is left. Not thread-safe.

    Times are seconds of any one clock.
    """

    def __init__(self) -> None:
        self._kept: dict[ServicePortKey, frozenset[Destination]] = {}
        """Endpoints that are not removed, of the service ports whose connections may be reset."""
        self._removed: dict[ServicePortKey, dict[Destination, float]] = {}
        """Removed endpoints, with the time of the removal."""
        self._unknown: set[ServicePortKey] = set()
        """Service ports that may have lost endpoints before this process began."""

    def expect(
        self, key: ServicePortKey, kept: frozenset[Destination] | None, *, is_first: bool = False
    ) -> None:
        """Record that the kernel will hold *kept* for a service port; None: its connections are kept.

        *is_first*: an earlier process may have had other endpoints.
        """
        if kept is None:
            self._forget(key)
            return
        self._kept[key] = self._kept.get(key, _NOTHING) | kept
        self._spare(key, kept)
        if is_first:
            self._unknown.add(key)

    def put(self, key: ServicePortKey, kept: frozenset[Destination] | None, now: float) -> bool:
        """Record that the kernel holds *kept* for a service port. Return whether it may have lost endpoints.

        None: its connections are kept.
        """
        if kept is None:
            self._forget(key)
            return False
        gone = self._kept.get(key, _NOTHING) - kept
        self._kept[key] = kept
        self._spare(key, kept)
        if gone:
            self._removed.setdefault(key, {}).update(dict.fromkeys(gone, now))
        return bool(gone) or key in self._unknown

    def is_removed(self, key: ServicePortKey, endpoint: Destination) -> bool:
        """Return whether connections of a service port to *endpoint* may be reset now. From any thread."""
        if endpoint in self._removed.get(key, ()):
            return True
        return key in self._unknown and endpoint not in self._kept[key]

    def search(self, now: float, own: Set[Address]) -> Search:
        """Return the endpoints to whom connections are to be searched for. *own*: the node's addresses."""
        return Search(
            now, {key: frozenset(endpoints) for key, endpoints in self._removed.items()},
            {key: self._kept[key] for key in self._unknown}, own)

    def settle(self, search: Search, connected: Iterable[Lost]) -> None:
        """Record that *search* found connections to these endpoints, and to no others."""
        found: dict[ServicePortKey, dict[Destination, float]] = {}
        for key, endpoint in connected:
            found.setdefault(key, {})[endpoint] = search.began
        for key in search.kept.keys() & self._unknown:
            self._unknown.remove(key)
            for endpoint in found.get(key, {}).keys() - self._kept[key]:
                self._removed.setdefault(key, {}).setdefault(endpoint, search.began)
        for key, endpoints in list(self._removed.items()):
            self._removed[key] = {
                endpoint: removed for endpoint, removed in endpoints.items()
                if removed + SECOND_LOOK > search.began or endpoint in found.get(key, ())}
            if not self._removed[key]:
                del self._removed[key]

    @property
    def newest(self) -> float | None:
        """The time of the last removal; None: no endpoint is removed."""
        return max(chain.from_iterable(each.values() for each in self._removed.values()), default=None)

    def _spare(self, key: ServicePortKey, kept: frozenset[Destination]) -> None:
        removed = self._removed.get(key)
        if removed is not None:
            for endpoint in removed.keys() & kept:
                del removed[endpoint]
            if not removed:
                del self._removed[key]

    def _forget(self, key: ServicePortKey) -> None:
        self._kept.pop(key, None)
        self._removed.pop(key, None)
        self._unknown.discard(key)
