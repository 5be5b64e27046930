"""What this proxy says about its own health: kube-proxy 1.36, pkg/proxy/healthcheck/proxy_health.go.

One lock, no I/O: the sync loop reports, the HTTP server asks.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kproxy_core.model.address import Family


class HealthAnswer(NamedTuple):
    """The answer to one health request."""

    ok: bool
    body: bytes
    """One line of JSON."""


class ProxyHealth:
    """Health per IP family, and whether load balancers should use this node."""

    def __init__(
        self,
        families: Sequence[Family],
        *,
        timeout: float,
        node_required: bool,
        wall_ns: Callable[[], int] = ...,  # type: ignore[assignment]
        monotonic: Callable[[], float] = ...,  # type: ignore[assignment]
    ) -> None:
        """*timeout*: seconds that a requested sync may stay undone (2 x syncPeriod).

        *node_required*: until a Node object is seen the node is not eligible (with an API
        server). Otherwise a missing Node object does no harm (manifests).
        """
        raise NotImplementedError

    def queued(self, family: Family) -> None:
        """A sync is requested; call it for each request once the sources are complete."""
        raise NotImplementedError

    def synced(self, family: Family) -> None:
        """A sync succeeded: nothing is pending, no problem is left."""
        raise NotImplementedError

    def failed(self, family: Family, problem: str) -> None:
        """A sync failed: *problem* is shown until one succeeds. What is pending stays so."""
        raise NotImplementedError

    def node_seen(self, eligible: bool) -> None:
        """The Node object was added or changed. (Its deletion changes nothing.)"""
        raise NotImplementedError

    def healthy(self) -> bool:
        """Every family has synced at least once and none is overdue (node eligibility not counted)."""
        raise NotImplementedError

    def healthz(self) -> HealthAnswer:
        """Ready: healthy, and the node is eligible."""
        raise NotImplementedError

    def livez(self) -> HealthAnswer:
        """Alive: no family is overdue. Waiting for the first sync is no reason to be restarted."""
        raise NotImplementedError
