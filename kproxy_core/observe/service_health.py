"""Health check node ports: they tell load balancers how many local endpoints a Service has.

kube-proxy 1.36, pkg/proxy/healthcheck/service_health.go; KEP-1669.
"""

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kproxy_core.model.address import Address
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServiceName
from kproxy_core.observe.http.messages import Answer
from kproxy_core.observe.http.server import HttpServer, Listener


class LocalEndpoints(NamedTuple):
    """What one Service's health check node port tells."""

    port: int
    ready: int
    """Distinct addresses of ready endpoints on this node."""


class ServiceHealth:
    """The health check node ports of one family. Called from one thread; the server's thread reads."""

    def __init__(
        self, server: HttpServer, healthy: Callable[[], bool],
        failed: Callable[[ServiceName, str], None] = lambda service, problem: None,
    ) -> None:
        """*healthy*: the proxy's own health (`ProxyHealth.healthy`).

        *failed* is told when a Service's port can't be opened, on the server's thread; it is tried again.
        """
        self._server = server
        self._healthy = healthy
        self._failed = failed
        self._addresses: tuple[Address, ...] = ()
        self._services: dict[ServiceName, LocalEndpoints] = {}
        self._listeners: dict[ServiceName, Listener] = {}

    def place(self, node: NodeView) -> None:
        """Listen where *node* (of this family) serves node ports. Cheap when that has not changed."""
        anywhere = (node.family.unspecified,)
        addresses = anywhere if node.node_ports_anywhere else node.node_port_addresses
        if node.node_ports_on_loopback and not node.node_ports_anywhere:
            addresses = (*addresses, node.family.loopback)
        if addresses == self._addresses:
            return
        self._addresses = addresses
        services = list(self._services)
        for service in services:
            self._close(service)
        for service in services:
            self._open(service)

    def apply(self, changes: Mapping[ServiceName, LocalEndpoints | None]) -> None:
        """Take over what changed; None: the Service has no such port (any more)."""
        opening = []
        for service, told in changes.items():
            before = self._services.get(service)
            if before is not None and (told is None or told.port != before.port):
                self._close(service)
            if told is None:
                self._services.pop(service, None)
                continue
            self._services[service] = told
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
            failed=lambda error: self._failed(service, f"port {port} can't be opened: {error}"),
        )

    def _close(self, service: ServiceName) -> None:
        self._listeners.pop(service).close()

    def _answer(self, service: ServiceName) -> Answer:
        told = self._services.get(service)
        if told is None:
            return Answer(200, b"")  # removed a moment ago
        healthy = self._healthy()
        document = {
            "service": {"namespace": service.namespace, "name": service.name},
            "localEndpoints": told.ready,
            "serviceProxyHealthy": healthy,
        }
        return Answer(
            200 if told.ready and healthy else 503,
            json.dumps(document, indent="\t").encode(),
            "application/json",
            (("X-Load-Balancing-Endpoint-Weight", str(told.ready)),),
        )
