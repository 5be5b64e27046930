"""Observers of the sync loop that keep the proxy's health and its health check node ports up to date."""

from collections.abc import Callable, Sequence

from kproxy_core.model.address import Family
from kproxy_core.model.node import NodeObject, NodeView
from kproxy_core.observe.health import ProxyHealth
from kproxy_core.observe.service_health import ServiceHealth
from kproxy_core.sync.observer import Synced, SyncFailure, SyncObserver


class HealthObserver(SyncObserver):
    def __init__(self, health: ProxyHealth) -> None:
        self._health = health

    def node_seen(self, node: NodeObject) -> None:
        self._health.set_node_eligible(node.eligible)

    def sync_requested(self, family: Family) -> None:
        self._health.record_request(family)

    def damage_found(self, family: Family) -> None:
        self._health.record_request(family)

    def sync_succeeded(self, synced: Synced) -> None:
        self._health.record_success(synced.family, synced.problem)

    def sync_failed(self, failure: SyncFailure) -> None:
        self._health.record_failure(failure.family, str(failure.error))


class HealthCheckObserver(SyncObserver):
    """Brings the health check node ports to the acknowledged plans."""

    def __init__(self, families: Sequence[Family], make: Callable[[], ServiceHealth]) -> None:
        """*make* is called for each of *families*."""
        self._ports = {family: make() for family in families}

    def node_changed(self, node: NodeView) -> None:
        self._ports[node.family].set_node(node)

    def sync_succeeded(self, synced: Synced) -> None:
        if synced.health_checks:
            self._ports[synced.family].apply(synced.health_checks)
