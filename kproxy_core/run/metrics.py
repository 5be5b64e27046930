"""What is counted, under kube-proxy's names (kube-proxy 1.36, pkg/proxy/metrics/metrics.go).

Recording is a few dictionary operations. prometheus_client is imported at the first scrape: it
costs more memory and start-up time than everything that is counted here.
"""

from collections.abc import Iterable, Mapping

from kproxy_core.backend.api import Scope
from kproxy_core.model.address import Family


class Metrics:
    """Every metric of one process. Any thread may record and scrape.

    Times of events (`*_timestamp_seconds`) are wall clock seconds since the epoch.
    """

    def __init__(self, mode: str, version: str) -> None: ...

    # from the sync loop -------------------------------------------------------------------

    def service_events(self, count: int, pending: int) -> None:
        """*count* Service events were folded in (per family: two for dual stack); *pending* Services
        now wait for the next sync."""

    def endpoint_events(self, count: int, pending: int) -> None:
        """*count* EndpointSlice events were folded in; *pending* of those that changed something wait."""

    def changes_taken(self) -> None:
        """The pending changes went into a sync: both pending gauges return to 0."""

    def sync_requested(self, family: Family, at: float) -> None:
        """A sync was requested, or the loop began, at wall clock time *at*."""

    def sync_ended(self, family: Family, scope: Scope, seconds: float, at: float, operations: int | None) -> None:
        """A sync of *scope* took *seconds*; *operations*: kernel objects written, None: it failed."""

    def sync_retried(self, family: Family) -> None:
        """A failed sync is tried again."""

    def programmed(self, family: Family, delays: Iterable[float]) -> None:
        """Seconds from each trigger time that a successful sync covered to its end."""

    def no_local_endpoints(self, family: Family, internal: int, external: int) -> None:
        """Service ports with a Local policy, endpoints, and none of them local, after a success."""

    def foreign_change(self, family: Family) -> None:
        """Somebody else changed what this proxy programmed."""

    def bad_object(self, kind: str) -> None:
        """An object of *kind*, or a part of it, could not be used."""

    def stale_flows(self, family: Family, seconds: float, deleted: int) -> None:
        """A conntrack clean-up took *seconds* and deleted *deleted* entries."""

    # from the HTTP server -----------------------------------------------------------------

    def health_answered(self, check: str, status: int) -> None:
        """*check* (``healthz`` or ``livez``) was answered with *status*."""

    def exposition(self) -> bytes:
        """Everything, in Prometheus' text format 0.0.4."""
        raise NotImplementedError

    def values(self) -> Mapping[str, float]:
        """All samples by their name and labels, as `exposition` spells them; no buckets, no process metrics."""
        raise NotImplementedError
