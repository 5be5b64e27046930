"""Health check node ports (kube-proxy 1.36, pkg/proxy/healthcheck/service_health.go; KEP-1669)."""

import json
from collections.abc import Callable, Mapping

from kproxy_core.model.address import Address, Family
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServiceName
from kproxy_core.observe.http.messages import Answer
from kproxy_core.observe.http.server import HttpServer, Listener
from kproxy_core.sync.family_plans import HealthCheck
from kproxy_core.sync.observer import Synced, SyncObserver


class ServiceHealth(SyncObserver):
    """The health check node ports of one family, which follow the acknowledged plans.

    Called from one thread; the server's thread answers.
    """

    def __init__(
        self, family: Family, server: HttpServer, healthy: Callable[[], bool],
        failed: Callable[[ServiceName, str], None] = lambda service, problem: None,
    ) -> None:
        """*healthy*: see `ProxyHealth.healthy`.

        *failed* is called on the server's thread when a Service's port cannot be opened. That is retried.
        """
        self._family = family
        self._server = server
        self._healthy = healthy
        self._failed = failed
        self._addresses: tuple[Address, ...] = ()
        self._services: dict[ServiceName, HealthCheck] = {}
        self._listeners: dict[ServiceName, Listener] = {}

    def sync_succeeded(self, synced: Synced) -> None:
        if synced.family is self._family:
            self.apply(synced.health_checks)

    def node_changed(self, node: NodeView) -> None:
        """Listen on the addresses of *node* that serve node ports. Ignores the other family's."""
        if node.family is not self._family:
            return
        anywhere = (node.family.unspecified,)
        addresses = anywhere if node.node_ports_anywhere else node.node_port_addresses
        if node.node_ports_on_loopback and not node.node_ports_anywhere:
            addresses = (*addresses, node.family.loopback)
        if addresses == self._addresses:
            return
        self._addresses = addresses
        for service in self._services:
            self._close(service)
        for service in self._services:
            self._open(service)

    def apply(self, changes: Mapping[ServiceName, HealthCheck | None]) -> None:
        """Open, update and close ports. None: the Service has none."""
        opening = []
        for service, check in changes.items():
            before = self._services.get(service)
            if before is not None and (check is None or check.port != before.port):
                self._close(service)
            if check is None:
                self._services.pop(service, None)
                continue
            self._services[service] = check
            if service not in self._listeners:
                opening.append(service)
        for service in opening:  # after all are closed: a port may move from one Service to another
            self._open(service)

    def _open(self, service: ServiceName) -> None:
        port = self._services[service].port
        self._listeners[service] = self._server.listen(
            f"health check node port of {service}",
            [(address, port) for address in self._addresses],
            lambda _: self._answer(service),
            failed=lambda error: self._failed(service, f"port {port} cannot be opened: {error}"),
        )

    def _close(self, service: ServiceName) -> None:
        self._listeners.pop(service).close()

    def _answer(self, service: ServiceName) -> Answer:
        check = self._services.get(service)
        if check is None:
            return Answer(200, b"")  # as kube-proxy, for a port removed while the client connected
        healthy = self._healthy()
        document = {
            "service": {"namespace": service.namespace, "name": service.name},
            "localEndpoints": check.ready,
            "serviceProxyHealthy": healthy,
        }
        return Answer(
            200 if check.ready and healthy else 503,
            json.dumps(document, indent="\t").encode(),
            "application/json",
            (("X-Load-Balancing-Endpoint-Weight", str(check.ready)),),
        )
