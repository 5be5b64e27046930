"""The service port that owns each frontend, remembered a while longer than the frontend exists."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kproxy_core.model.address import Family
from kproxy_core.model.endpoint import Destination
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import Frontend, ServicePlan
from kproxy_core.sync.observer import Synced, SyncObserver

_REMEMBERED = 600.0
"""Seconds for which the owner of a removed frontend is remembered: counts are read after rules change."""


class _Former(NamedTuple):
    key: ServicePortKey
    until: float


class _OfFamily:
    def __init__(self) -> None:
        self.frontends: dict[Frontend, ServicePortKey] = {}
        self.plans: dict[ServicePortKey, ServicePlan] = {}
        self.former: dict[Frontend, _Former] = {}

    def owner(self, frontend: Frontend) -> ServicePortKey | None:
        key = self.frontends.get(frontend)
        if key is None and (former := self.former.get(frontend)) is not None:
            return former.key
        return key


class FrontendOwners(SyncObserver):
    """Follows the acknowledged plans. Any thread may look up."""

    def __init__(self, families: Sequence[Family], clock: Callable[[], float]) -> None:
        """*clock*: monotonic seconds."""
        self._clock = clock
        self._of = {family: _OfFamily() for family in families}
        self.before_move: Callable[[], object] = lambda: None
        """Called before frontends get another owner: connections until now are those of the former one."""

    def sync_succeeded(self, synced: Synced) -> None:
        if not synced.steps:
            return
        of, now = self._of[synced.family], self._clock()
        if (of.frontends or of.former) and any(
            self.owner(synced.family, frontend) not in (None, step.key)
            for step in synced.steps if step.after is not None for frontend in step.after.frontends()
        ):
            self.before_move()
        for step in synced.steps:
            for frontend in step.before.frontends() if step.before else ():
                if of.frontends.get(frontend) == step.key:
                    del of.frontends[frontend]
                    of.former[frontend] = _Former(step.key, now + _REMEMBERED)
        for step in synced.steps:
            if step.after is None:
                of.plans.pop(step.key, None)
                continue
            of.plans[step.key] = step.after
            for frontend in step.after.frontends():
                of.frontends[frontend] = step.key
                of.former.pop(frontend, None)
        for frontend in [frontend for frontend, former in of.former.items() if former.until < now]:
            del of.former[frontend]

    def owner(self, family: Family, frontend: Frontend) -> ServicePortKey | None:
        """Return the service port that owns *frontend*, or did until recently.

        An address that belongs to no service port is the node's, dialled at a node port.
        """
        of = self._of[family]
        return of.owner(frontend) or of.owner(frontend._replace(address=None))

    def plans_of(self, key: ServicePortKey) -> list[ServicePlan]:
        return [of.plans[key] for of in self._of.values() if key in of.plans]

    def exists(self, key: ServicePortKey) -> bool:
        return any(key in of.plans for of in self._of.values())

    def uses(self, key: ServicePortKey, where: Destination) -> bool:
        """Return whether *where* is a usable endpoint of *key*."""
        return any(where in plan.reachable for plan in self.plans_of(key))
