"""The difference of the plans of one IP family to those that the backend has acknowledged, and what of it the
next update has.

Changes are left out of an update, and the backend keeps what it has, for two reasons: service ports that it
fails to program are withheld, and the largest changes are postponed, so that small ones do not wait.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from typing import NamedTuple

from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import Frontend, ServicePlan


class Step(NamedTuple):
    """The change of one service port between two acknowledged states; None: absent."""

    key: ServicePortKey
    before: ServicePlan | None
    after: ServicePlan | None


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


class Difference:
    """All plans, and how they differ from the acknowledged ones. One thread, no I/O."""

    def __init__(
        self, holder: Callable[[Frontend], ServicePortKey | None], unplanned: Mapping[ServicePortKey, str]
    ) -> None:
        """*holder* returns the service port that has a frontend now. *unplanned* cannot be tried again."""
        self._holder = holder
        self._unplanned = unplanned
        self.plans: dict[ServicePortKey, ServicePlan] = {}
        """Plans of all service ports."""
        self.unserved: Mapping[ServicePortKey, str] = {}
        """Acknowledged service ports that the backend could not serve, with the reason."""
        self._before: dict[ServicePortKey, ServicePlan | None] = {}
        """The acknowledged plans of all service ports that differ now."""
        self._withheld: dict[ServicePortKey, ServicePlan | None] = {}
        """Service ports whose changes are left out of updates, with the plans that they keep instead."""
        self._reconsidered: set[ServicePortKey] = set()
        self._postponed: dict[ServicePortKey, int] = {}
        """See `postponed`; with the elements of each."""
        self._resized: set[ServicePortKey] = set()
        """Those of `_postponed` that have been planned since."""

    def put(self, key: ServicePortKey, plan: ServicePlan | None) -> None:
        """Replace the plan of a service port; None: there is none."""
        known = self.plans.get(key)
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

    def before(self, key: ServicePortKey) -> ServicePlan | None:
        """Return the acknowledged plan of a service port that differs; None: absent, or equal."""
        return self._before.get(key)

    @property
    def is_outstanding(self) -> bool:
        """A plan is not acknowledged, or could not be served, and is part of the next update."""
        return not all(key in self._withheld for keys in (self._before, self._retried) for key in keys)

    @property
    def keys(self) -> Set[ServicePortKey]:
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
                holder = self._holder(frontend)
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

    @property
    def changed(self) -> dict[ServicePortKey, ServicePlan | None]:
        """The plans that the next update has; None: deleted."""
        changed = {key: self.plans.get(key) for key in (*self._before, *self._retried)
                   if key not in self._withheld}
        return changed | dict.fromkeys(self._lost)

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
        return [key for key in self.unserved if key not in self._unplanned]

    def _plan_to_keep(self, key: ServicePortKey, withheld: Set[ServicePortKey]) -> ServicePlan | None:
        """Return the acknowledged plan of a withheld service port that differs.

        None, too, if another service port that is not *withheld* has its frontends now.
        """
        plan = self._before.get(key)
        if plan is None:
            return None
        for frontend in plan.frontends():
            holder = self._holder(frontend)
            if holder is not None and holder != key and holder not in withheld:
                return None
        return plan

    def _acknowledged(self, key: ServicePortKey) -> ServicePlan | None:
        return self._before[key] if key in self._before else self.plans.get(key)

    def acknowledge(self, unserved: Mapping[ServicePortKey, str]) -> list[Step]:
        """Record that the last update is done, except for *unserved*, which is part of the next one.

        Return the changes since the last acknowledgement.
        """
        steps = [Step(key, before, self.plans.get(key)) for key, before in self._before.items()
                 if key not in self._withheld]
        steps += [Step(key, before, None) for key, before in self._lost.items()]
        self._before = dict(self._withheld)
        self.unserved = dict(unserved)
        return steps
