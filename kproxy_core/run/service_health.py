"""Health check node ports: they tell load balancers how many local endpoints a Service has.

kube-proxy 1.36, pkg/proxy/healthcheck/service_health.go; KEP-1669.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServiceName
from kproxy_core.run.http import HttpServer


class LocalEndpoints(NamedTuple):
    """What one Service's health check node port tells."""

    port: int
    count: int
    """Distinct addresses of ready endpoints on this node."""


class ServiceHealth:
    """The health check node ports of one family."""

    def __init__(self, server: HttpServer, healthy: Callable[[], bool]) -> None:
        """*healthy*: the proxy's own health (`ProxyHealth.healthy`)."""

    def place(self, node: NodeView) -> None:
        """Listen where *node* (of this family) serves node ports. Cheap when that has not changed."""

    def apply(self, changes: Mapping[ServiceName, LocalEndpoints | None]) -> None:
        """Take over what changed; None: the Service has no such port (any more)."""
