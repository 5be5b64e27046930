"""The running proxy's plans as they were at one moment, so that the loop's thread need not answer."""

from collections.abc import Mapping
from functools import partial

from kproxy_core.model.address import Family
from kproxy_core.model.service import ServiceName, ServicePortKey
from kproxy_core.plan.candidates import Candidates
from kproxy_core.plan.service_plan import Frontend, ServicePlan
from kproxy_core.sync.family_plans import FamilyPlans
from kproxy_core.sync.loop import Loop


class Snapshot:
    """The plans of one family. For any thread but the loop's."""

    def __init__(self, loop: Loop, plans: FamilyPlans) -> None:
        """On the loop's thread, for as long as it takes to copy a dictionary."""
        self.node = plans.node
        self.addresses = plans.addresses
        self.plans: Mapping[ServicePortKey, ServicePlan] = dict(plans.plans)
        self._loop = loop
        self._live = plans
        self._candidates: dict[ServicePortKey, Candidates] = {}

    def owner(self, frontend: Frontend) -> ServicePlan | None:
        """Return the plan of the service port that holds *frontend* now."""
        plan = self._live.owner(frontend)  # Only looks up single keys, which any thread may do.
        return self.plans.get(plan.key) if plan is not None else None

    def candidates(self, key: ServicePortKey) -> Candidates:
        """Return all endpoints of one service port as they are now. Asks the loop's thread."""
        if key not in self._candidates:
            self._candidates[key] = self._loop.call(partial(self._live.candidates, key))
        return self._candidates[key]

    def origin(self, service: ServiceName) -> str:
        return self._live.origin(service)


def take(loop: Loop) -> dict[Family, Snapshot]:
    """Return the plans of all families at one moment. On the loop's thread."""
    return {family: Snapshot(loop, plans) for family, plans in loop.plans.items()}


def snapshots(loop: Loop) -> dict[Family, Snapshot]:
    """As `take`, on any other thread."""
    return loop.call(partial(take, loop))
