"""Services, EndpointSlices, this Node and the ServiceCIDRs of a Kubernetes API server."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

from kproxy_core.apiclient.access import CurrentAccess
from kproxy_core.apiclient.requests import ApiRequest, ApiRequests, Observe
from kproxy_core.model.endpoint import SliceName
from kproxy_core.model.service import ServiceName
from kproxy_core.objects.decode import ENDPOINT_SLICES, NODES, SERVICE_CIDRS, SERVICES
from kproxy_core.objects.node import ServiceCidrs
from kproxy_core.sources.apiserver.reflector import Kind, Reflector
from kproxy_core.sources.apiserver.trouble import Trouble
from kproxy_core.store.events import Emit, NodeGone, ServiceGone, SliceGone
from kproxy_core.timing.token_bucket import TokenBucket

STOP_SECONDS = 2.0
"""A thread that is still looking up a name after this long is left behind; it emits nothing."""


def _unobserved(_: ApiRequest) -> None:
    pass


class KubernetesSource:
    """Follows an API server, each kind in a thread and on a connection of its own.

    A `kproxy_core.store.events.Source`. What is asked for is what kube-proxy
    1.36 asks for (cmd/kube-proxy/app/server.go). Server, credentials and what
    happens without *master* and *kubeconfig*: see `load_access`.

    *qps* and *burst* limit requests as clientConnection's do (a *qps* below 0: no limit);
    *observe* is told of each. *clock*: monotonic seconds; *chance*: uniform in [0, 1).

    What does not change is not asked for again: kube-proxy's configSyncPeriod
    replays what it has in memory, for which there is no need here.

    Raises AccessError.
    """

    kinds = tuple(resource.plural for resource in (SERVICES, ENDPOINT_SLICES, NODES, SERVICE_CIDRS))

    def __init__(
        self, master: str | None, kubeconfig: str | None, node_name: str, *,
        qps: float = 5.0, burst: int = 10, observe: Observe = _unobserved,
        clock: Callable[[], float] = time.monotonic, chance: Callable[[], float] = random.random,
    ) -> None:
        self._access = CurrentAccess(master, kubeconfig)
        self._rate = TokenBucket(1 / qps if qps > 0 else 0.0, burst)
        self._observe = observe
        self._trouble = Trouble()
        self._node_name = node_name
        self._clock = clock
        self._chance = chance
        self._reflectors: list[Reflector[Any, Any]] = []
        self._threads: list[threading.Thread] = []

    def start(self, emit: Emit) -> None:
        """Begin delivering to *emit*; returns at once."""
        for kind in _kinds(self._node_name):
            requests = ApiRequests(self._access, self._rate, self._observe, self._clock)
            reflector = Reflector(kind, requests, emit, self._trouble, self._clock, self._chance)
            thread = threading.Thread(target=reflector.run, name=f"watch {kind.resource.plural}", daemon=True)
            self._reflectors.append(reflector)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Close the connections and stop delivering; returns when no further event will come."""
        for reflector in self._reflectors:
            reflector.stop()
        for thread in self._threads:
            thread.join(STOP_SECONDS)


def _kinds(node_name: str) -> tuple[Kind[Any, Any], ...]:
    cidrs = ServiceCidrs()
    return (
        # The largest first: the server works on it while we are still starting the others.
        Kind(ENDPOINT_SLICES, {"labelSelector": "!service.kubernetes.io/headless"},
             present=lambda _, event: event, gone=lambda name: SliceGone(SliceName(*name))),
        Kind(SERVICES, {"labelSelector": "!service.kubernetes.io/service-proxy-name",
                        "fieldSelector": "spec.clusterIP!=None"},
             present=lambda _, event: event, gone=lambda name: ServiceGone(ServiceName(*name))),
        Kind(NODES, {"fieldSelector": f"metadata.name={node_name}"},
             present=lambda _, event: event, gone=lambda _: NodeGone()),
        Kind(SERVICE_CIDRS, {}, present=cidrs.set, gone=cidrs.remove, optional=True),
    )
