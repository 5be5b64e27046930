"""Health check node ports: how many ready endpoints of a Service this node has (KEP-1669)."""

from collections.abc import Mapping
from typing import NamedTuple

from kproxy_core.model.node import NodeView
from kproxy_core.model.service import EndpointSlice, ServiceName
from kproxy_core.plan.service_plan import count_ready_local


class HealthCheck(NamedTuple):
    port: int
    ready: int
    """Distinct addresses of endpoints on this node that are ready, or the last resort."""


class HealthChecks:
    """The health checks of one family as they were answered last. Not thread-safe."""

    def __init__(self) -> None:
        self._ready: dict[ServiceName, int] = {}

    def check(
        self, name: ServiceName, port: int, slices: Mapping[str, EndpointSlice] | None, node: NodeView, *,
        is_served: bool,
    ) -> HealthCheck | None:
        """Return the health check of a Service with *slices*; None for *port* 0: it has none.

        While a service port is not served, endpoints that it had not before do not count.
        """
        if not port:
            self._ready.pop(name, None)
            return None
        ready = count_ready_local(slices, node)
        if not is_served:
            ready = min(ready, self._ready.get(name, 0))
        self._ready[name] = ready
        return HealthCheck(port, ready)
