"""The changes that other objects or another mode would make on this node."""

from collections.abc import Mapping, Sequence
from typing import Any

from kproxy_core.backend.api import Update
from kproxy_core.backend.instance import BackendInstance
from kproxy_core.explain.change import changes_in_kernel
from kproxy_core.explain.difference import packets_to, stale
from kproxy_core.model.address import Family
from kproxy_core.process.inspection.explaining import compare, frontends_of, reading
from kproxy_core.sync.family_plans import FamilyPlans

Json = dict[str, Any]


def operations(instance: BackendInstance, updates: Sequence[Update]) -> list[Json]:
    """Return the number of operations that each of *updates* needs, and their text.

    [] if the mode does not tell. Raises NoAnswer.
    """
    found = []
    for update in updates:
        with reading(update.family):
            preview = instance.preview(update)
        if preview is not None:
            found.append({"family": update.family.label, **preview._asdict()})
    return found


def changes_from_kernel(plans: Mapping[Family, FamilyPlans], instance: BackendInstance) -> list[Json]:
    """Return the changes from the kernel's objects of *instance*'s mode to *plans*. Raises NoAnswer."""
    found: list[Json] = []
    for family, of_family in plans.items():
        held = frontends_of(instance, family)
        served = [plan.key for plan in of_family.plans.values() if not set(held).isdisjoint(plan.frontends())]
        differences = compare(instance, packets_to(of_family, served)) if served else []
        found += changes_in_kernel(of_family.plans.values(), held, differences, stale(held, of_family))
    return found
