"""Metrics of the sync loop, under kube-proxy's names."""

from collections.abc import Callable, Iterable, Sequence

from kproxy_core.model.address import Family
from kproxy_core.observe.metrics import Metrics
from kproxy_core.sync.family_plans import Step
from kproxy_core.sync.observer import Folded, Synced, SyncFailure, SyncObserver


class SyncMetrics(SyncObserver):
    """Records syncs in `Metrics`. *wall*: seconds since the epoch."""

    def __init__(self, metrics: Metrics, families: Sequence[Family], wall: Callable[[], float]) -> None:
        self._metrics = metrics
        self._wall = wall
        self._no_local = {family: NoLocalEndpoints() for family in families}

    def events_folded(self, folded: Folded) -> None:
        if folded.service_changes:
            self._metrics.service_events(folded.service_changes, folded.services_pending)
        if folded.endpoint_changes:
            self._metrics.endpoint_events(folded.endpoint_changes, folded.endpoints_pending)
        for bad in folded.bad_objects:
            self._metrics.bad_object(bad.kind)

    def sync_requested(self, family: Family) -> None:
        self._metrics.sync_requested(family, self._wall())

    def damage_found(self, family: Family) -> None:
        self._metrics.foreign_change(family)

    def sync_started(self, family: Family, *, retry: bool) -> None:
        if retry:
            self._metrics.sync_retried(family)
        self._metrics.changes_taken()

    def sync_succeeded(self, synced: Synced) -> None:
        family, now = synced.family, self._wall()
        if synced.report is not None:
            self._metrics.sync_ended(family, synced.scope, synced.seconds, now, synced.report.operations)
        no_local = self._no_local[family]
        no_local.follow(synced.steps)
        self._metrics.no_local_endpoints(family, no_local.internal, no_local.external)
        if synced.trigger_times:
            self._metrics.programmed(family, [now - then for then in synced.trigger_times])

    def sync_failed(self, failure: SyncFailure) -> None:
        self._metrics.sync_ended(failure.family, failure.scope, failure.seconds, self._wall(), None)


class NoLocalEndpoints:
    """Counts service ports that a Local policy leaves without endpoints on this node, though others exist."""

    def __init__(self) -> None:
        self.internal = 0
        self.external = 0

    def follow(self, steps: Iterable[Step]) -> None:
        """Apply *steps*."""
        for step in steps:
            for plan, sign in ((step.before, -1), (step.after, 1)):
                if plan is not None and plan.has_endpoints and not plan.local:
                    self.internal += sign * plan.internal_policy_local
                    self.external += sign * plan.external_policy_local
