"""Events of the sync loop, as its observers are told them."""

from typing import Any

from kproxy_core.contract.errors import SyncFailed
from kproxy_core.contract.values import Scope
from kproxy_core.kube.store import Store
from kproxy_core.model.address import Family
from kproxy_core.sync.observer import Synced, SyncFailure
from kproxy_core.sync.plans import FamilyPlans

NO_INSTANCE: Any = None


def synced(family: Family) -> Synced:
    plans = FamilyPlans(family, Store((family,), (), 0.0))
    return Synced(plans=plans, instance=NO_INSTANCE, scope=Scope.CHANGED, seconds=0.1)


def failed(family: Family, problem: str) -> SyncFailure:
    return SyncFailure(family=family, scope=Scope.CHANGED, seconds=0.1, error=SyncFailed(problem))
