"""Services, EndpointSlices, this Node and the ServiceCIDRs of a Kubernetes API server."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

from kproxy_core.apiclient.access import CurrentAccess
from kproxy_core.apiclient.content import JSON
from kproxy_core.apiclient.requests import ApiRequests, Observe
from kproxy_core.objects.decode import ENDPOINT_SLICES, NODES, SERVICE_CIDRS, SERVICES, Resource
from kproxy_core.sources.apiserver.reflector import Reflector
from kproxy_core.sources.apiserver.trouble import Trouble
from kproxy_core.store.events import Emit
from kproxy_core.timing.token_bucket import TokenBucket

STOP_SECONDS = 2.0
"""Timeout for ending all threads. One that still resolves a name or loads credentials is left behind, and
emits nothing."""


class KubernetesSource:
    """Follows an API server, each kind in a thread and on a connection of its own.

    A `kproxy_core.store.events.Source`. It asks for the same objects as kube-proxy 1.36
    (cmd/kube-proxy/app/server.go).

    *accept*: the Accept header of its requests. *qps* and *burst* limit requests as clientConnection's do; a
    *qps* of 0 or less sets no limit. *observe* is called for each request. *chance*: uniform in [0, 1).

    Unchanged objects are not asked for again: kube-proxy's configSyncPeriod only replays its memory.

    Raises AccessError.
    """

    kinds = tuple(resource.plural for resource in (SERVICES, ENDPOINT_SLICES, NODES, SERVICE_CIDRS))

    def __init__(
        self, access: CurrentAccess, node_name: str, *,
        accept: str = JSON, qps: float = 5.0, burst: int = 10, observe: Observe = lambda request: None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        access.keep_up()
        self._access = access
        self._rate = TokenBucket(1 / qps if qps > 0 else 0.0, burst)
        self._observe = observe
        self._accept = accept
        self._trouble = Trouble()
        self._node_name = node_name
        self._chance = chance
        self._reflectors: list[Reflector] = []
        self._threads: list[threading.Thread] = []

    def start(self, emit: Emit) -> None:
        for resource, selectors in _selectors(self._node_name):
            requests = ApiRequests(self._access, self._rate, self._observe, self._accept)
            reflector = Reflector(resource, selectors, requests, emit, self._trouble, self._chance)
            thread = threading.Thread(target=reflector.run, name=f"watch {resource.plural}", daemon=True)
            self._reflectors.append(reflector)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Close the connections and stop delivering. No event follows once this returns."""
        for reflector in self._reflectors:
            reflector.stop()
        deadline = time.monotonic() + STOP_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _selectors(node_name: str) -> tuple[tuple[Resource[Any, Any], dict[str, str]], ...]:
    """Return the resources to follow, each with its labelSelector and fieldSelector."""
    return (
        # The largest first: the server works on it while we start the others.
        (ENDPOINT_SLICES, {"labelSelector": "!service.kubernetes.io/headless"}),
        (SERVICES, {"labelSelector": "!service.kubernetes.io/service-proxy-name",
                    "fieldSelector": "spec.clusterIP!=None"}),
        (NODES, {"fieldSelector": f"metadata.name={node_name}"}),
        (SERVICE_CIDRS, {}),
    )
