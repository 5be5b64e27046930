"""Answers of ``kproxy explain`` for tests, made as a node makes them from the objects that it knows."""

from collections.abc import Iterable, Mapping

from kproxy_conformance.builders import node_view
from kproxy_core.app.explain import answer, cases, decide_case, parse_sender, parse_target
from kproxy_core.contract.values import KernelSide
from kproxy_core.fleet.lags import Answered, Objects, ServiceObjects
from kproxy_core.fleet.objects import Metadata, ServiceState, SliceState
from kproxy_core.model.address import Family, format_address, parse_address
from kproxy_core.model.service import EndpointSlice, Service, ServiceName
from tests.core.app.test_explain import Known

ADDRESSES = {"a": "192.0.2.1", "b": "192.0.2.2", "c": "192.0.2.3"}
"""Of the nodes."""
NODE_ADDRESSES = frozenset(map(parse_address, ADDRESSES.values()))


class _Told(Known):
    """What a node has been told by an API server."""

    version: str

    def origin(self, service: ServiceName) -> str:
        return f"resource version {self.version}"


def says(
    node: str, to: str, sender: str, service: Service | None, *slices: EndpointSlice, version: str = "7",
    filters: Iterable[str] = (),
) -> Answered:
    """Return the answer of *node*, which knows *service* with *slices*, and whose kernel agrees."""
    told = _Told(node=node_view(
        node, pods=f"10.1.{1 + 'abc'.index(node)}.0/24", node_port_addresses=ADDRESSES[node],
        ip=ADDRESSES[node], service_cidrs="10.96.0.0/16"))
    told.version = version
    if service is not None:
        told.serve(service, *slices)
    packets = []
    for case in cases({Family.IPV4: told}, parse_target(to), parse_sender(sender), None, told):
        packets.append(answer(case, KernelSide((), decide_case(case)), mode="test", live=True))
        packets[-1]["kernel"]["filters"] = list(filters)
    return Answered(node, packets)


def held(
    service: Service, *slices: EndpointSlice, version: str = "7", changed: str = "",
    pods: Mapping[str, str] | None = None,
) -> Objects:
    """Return what the API server has, all of it changed at the time *changed* (RFC 3339; "": unknown).

    *pods*: names of the pods behind addresses.
    """
    namespace = service.name.namespace
    names = {address: ServiceName(namespace, name) for address, name in (pods or {}).items()}

    def meta(name: str) -> Metadata:
        annotations = {"endpoints.kubernetes.io/last-change-trigger-time": changed}
        return Metadata(name, namespace, version, "2026-01-01T00:00:00Z", {}, annotations)

    states = [
        SliceState(meta(piece.name.name), piece, {
            address: names[address] for endpoint in piece.endpoints
            if (address := format_address(endpoint.address)) in names})
        for piece in slices
    ]
    return {service.name: ServiceObjects(ServiceState(meta(service.name.name), service), states)}
