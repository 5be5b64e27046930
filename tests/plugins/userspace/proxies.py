"""Backends of the mode, and their Services."""

from collections.abc import Callable

from kproxy_conformance.builders import changed_update, endpoint_slice, full_update, node_view, plans
from kproxy_core.contract.values import BackendSettings, SyncReport
from kproxy_core.linux.relay.pool import Worker
from kproxy_core.model.address import Family
from kproxy_core.model.service import EndpointSlice, Service
from kproxy_userspace.backend import UserspaceBackend

VIP = "10.96.0.1"
NODE = {Family.IPV4: node_view(anywhere=True), Family.IPV6: node_view(family=Family.IPV6, anywhere=True)}
ONE, TWO = ("127.0.0.1", 9001), ("127.0.0.2", 9001)
A, B = "127.0.0.1:9001", "127.0.0.2:9001"


class Proxy:
    """A backend with one Service."""

    def __init__(self, **options: object) -> None:
        self.backend = UserspaceBackend(BackendSettings(tuple(Family), options={"workers": 2, **options}))
        self.damages: list[str] = []

    def workers(self) -> list[Worker]:
        """Return the relay workers that were started last."""
        return self.backend._workers.running()

    def serve(
        self, of: Service, *hosts: str, ports: str = "9001", family: Family = Family.IPV4
    ) -> SyncReport:
        """Sync the only Service with these endpoints."""
        slices: list[EndpointSlice] = [endpoint_slice(of.name.name, *hosts, ports=[ports])] if hosts else []
        found = plans(NODE[family], of, *slices)
        if self.damages or family not in self.backend._families:
            return self.backend.sync(full_update(NODE[family], found))
        return self.backend.sync(changed_update(NODE[family], found, found))


Start = Callable[..., Proxy]
