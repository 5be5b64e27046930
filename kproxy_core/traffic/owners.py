"""The service port that owns each frontend, remembered a while longer than the frontend exists."""

from collections.abc import Callable, Sequence

from kproxy_core.model.address import Family
from kproxy_core.model.endpoint import Destination
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import Frontend, ServicePlan
from kproxy_core.sync.observer import Synced, SyncObserver

_REMEMBERED = 600.0
"""Seconds for which the owner of a removed frontend is remembered: counts are read after rules change."""


class _OfFamily:
    def __init__(self) -> None:
        self.plans: dict[ServicePortKey, ServicePlan] = {}
        self.owners: dict[Frontend, ServicePortKey] = {}
        self.removed: dict[Frontend, float] = {}
        """Time until which the owner of a frontend that no plan has is remembered."""


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
        if of.owners and any(
            self.owner(synced.family, frontend) not in (None, step.key)
            for step in synced.steps if step.after is not None for frontend in step.after.frontends()
        ):
            self.before_move()
        for step in synced.steps:
            for frontend in step.before.frontends() if step.before else ():
                if of.owners.get(frontend) == step.key:
                    of.removed[frontend] = now + _REMEMBERED
        for step in synced.steps:
            if step.after is None:
                of.plans.pop(step.key, None)
                continue
            of.plans[step.key] = step.after
            for frontend in step.after.frontends():
                of.owners[frontend] = step.key
                of.removed.pop(frontend, None)
        for frontend in [frontend for frontend, until in of.removed.items() if until < now]:
            del of.removed[frontend], of.owners[frontend]

    def owner(self, family: Family, frontend: Frontend) -> ServicePortKey | None:
        """Return the service port that owns *frontend*, or did until recently.

        An address that belongs to no service port is the node's, dialled at a node port.
        """
        owners = self._of[family].owners
        return owners.get(frontend) or owners.get(frontend._replace(address=None))

    def exists(self, key: ServicePortKey) -> bool:
        return any(key in of.plans for of in self._of.values())

    def uses(self, key: ServicePortKey, where: Destination) -> bool:
        """Return whether *where* is a usable endpoint of *key*."""
        return any(key in of.plans and where in of.plans[key].reachable for of in self._of.values())
