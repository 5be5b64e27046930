"""Following the bench's API server: all existing objects, and every change of them."""

from collections.abc import Iterator
from typing import Any

import pytest

from kproxy_core.kube.access import CurrentAccess
from kproxy_core.kube.reflector import KubernetesSource
from kproxy_core.kube.requests import ApiRequest
from kproxy_core.kube.transport import JSON, PROTOBUF_OR_JSON, Transport, without_managed_fields
from kproxy_core.model.address import format_address, parse_address
from kproxy_core.model.service import EndpointSlice, ServiceName, SliceName
from tests.core.api_servers import BenchServer
from tests.core.kube.observed_events import Observed, following
from tests.core.namespaces import own_network

__all__ = ["own_network"]

pytestmark = pytest.mark.usefixtures("own_network")

NODE = "kb-node-0"
EVERYTHING = {"services", "endpointslices", "nodes", "servicecidrs"}
SERVICE = ServiceName("bench-0000", "svc-000001")
SLICE = SliceName("bench-0000", "svc-000001-000")


@pytest.fixture(params=[("on", PROTOBUF_OR_JSON), ("off", JSON)], ids=["watch-list-protobuf", "list-json"])
def wire(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Watch-lists on or off, and the Accept header: test_kubernetes_source_trouble.py combines them."""
    found: tuple[str, str] = request.param
    return found


@pytest.fixture
def server(own_network: None, wire: tuple[str, str]) -> Iterator[BenchServer]:
    """30 Services with 3 endpoints each; a bookmark as soon as nothing happens for a moment."""
    server = BenchServer("--gen", "services=30,endpoints=3", "--watch-list", wire[0],
                         "--bookmark-interval", "0.2")
    yield server
    server.stop()


@pytest.fixture
def observed(server: BenchServer, wire: tuple[str, str]) -> Iterator[Observed]:
    """A source that follows the server and has delivered everything that existed."""
    source = KubernetesSource(
        CurrentAccess(server.url, None), NODE, accept=wire[1], qps=0, chance=lambda: 0.0)
    with following(source) as observed:
        observed.wait_for(lambda o: len(o.complete) == len(EVERYTHING))
        yield observed


def addresses(observed: Observed, name: SliceName) -> list[str]:
    return addresses_of(observed.slices[name])


def addresses_of(piece: EndpointSlice) -> list[str]:
    return [format_address(endpoint.address) for endpoint in piece.endpoints]


def a_service(name: str, **fields: Any) -> dict[str, Any]:
    return {"kind": "Service", "metadata": {"namespace": "default", "name": name, **fields},
            "spec": {"type": "ClusterIP", "clusterIP": "10.96.9.9", "clusterIPs": ["10.96.9.9"],
                     "ipFamilies": ["IPv4"], "ports": [{"port": 80, "protocol": "TCP"}]}}


def a_slice(service: str, address: str, port: int) -> dict[str, Any]:
    return {"kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"namespace": "default", "name": f"{service}-1",
                         "labels": {"kubernetes.io/service-name": service}},
            "endpoints": [{"addresses": [address]}], "ports": [{"name": "", "port": port, "protocol": "TCP"}]}


def test_everything_that_exists_is_delivered_then_announced(observed: Observed) -> None:
    assert sorted(observed.complete) == sorted(EVERYTHING)
    assert len(observed.services) == len(observed.slices) == 30
    assert observed.node is not None
    assert observed.node.name == NODE
    assert [str(cidr) for cidr in observed.cidrs] == ["10.96.0.0/12"]
    assert not observed.bad


def test_a_changed_slice_is_delivered(server: BenchServer, observed: Observed) -> None:
    server.post("set", ops=[{"slice": str(SLICE), "index": 1, "address": "10.192.0.7"}])
    observed.wait_for(lambda o: "10.192.0.7" in addresses(o, SLICE))
    assert len(observed.slices) == 30


def test_services_are_added_and_deleted(server: BenchServer, observed: Observed) -> None:
    server.post("apply", **a_service("new"))
    observed.wait_for(lambda o: "new" in o.names)
    server.post("delete", resource="services", namespace="default", name="new")
    server.post("delete", resource="services", namespace=SERVICE.namespace, name=SERVICE.name)
    observed.wait_for(lambda o: not {"new", SERVICE.name} & o.names)
    assert len(observed.services) == 29


def test_a_service_given_to_another_proxy_is_gone(server: BenchServer, observed: Observed) -> None:
    server.post("apply", **a_service("moved"))
    observed.wait_for(lambda o: "moved" in o.names)
    server.post("apply", **a_service("moved", labels={"service.kubernetes.io/service-proxy-name": "other"}))
    observed.wait_for(lambda o: "moved" not in o.names)


def test_the_node_and_the_service_networks_are_followed(server: BenchServer, observed: Observed) -> None:
    server.post("apply", kind="Node", metadata={"name": NODE}, spec={},
                status={"addresses": [{"type": "InternalIP", "address": "192.0.2.200"}]})
    server.post("apply", kind="Node", metadata={"name": "another"}, spec={}, status={})
    server.post("apply", kind="ServiceCIDR", metadata={"name": "more"}, spec={"cidrs": ["10.112.0.0/16"]})
    observed.wait_for(lambda o: len(o.cidrs) == 2 and o.node
                      and o.node.addresses == (parse_address("192.0.2.200"),))
    server.post("delete", resource="servicecidrs", name="more")
    server.post("delete", resource="nodes", name=NODE)
    observed.wait_for(lambda o: len(o.cidrs) == 1 and o.node is None)


def test_everything_is_listed_again_after_an_expiry(server: BenchServer, observed: Observed) -> None:
    def lose_history(left: int) -> None:
        server.post("expire")
        server.post("delete", resource="services", namespace="bench-0000", name=f"svc-{left:06d}")
        server.post("set", ops=[{"slice": str(SLICE), "index": 0, "address": f"10.192.1.{left}"}])
        observed.wait_for(lambda o: len(o.services) == left and f"10.192.1.{left}" in addresses(o, SLICE))

    for left in (29, 28, 27):
        lose_history(left)
    assert sorted(observed.complete) == sorted(EVERYTHING), "said once"


@pytest.mark.parametrize("count", [3, 40], ids=["less", "more"])
def test_state_is_kept_while_the_server_is_away_and_updated_when_it_returns(
    server: BenchServer, observed: Observed, count: int,
) -> None:
    # With fewer objects the new server's resource versions are behind what the proxy has seen.
    before = dict(observed.services)
    server.stop()
    with following(KubernetesSource(CurrentAccess(server.url, None), NODE)) as late:
        assert observed.services == before
        server.start("--gen", f"services={count},endpoints=2", "--bookmark-interval", "0.2")
        late.wait_for(lambda o: len(o.complete) == len(EVERYTHING))
        for source in (observed, late):
            source.wait_for(lambda o: len(o.services) == len(o.slices) == count
                            and len(addresses(o, SLICE)) == 2)


def test_a_frozen_server_removes_nothing(server: BenchServer, observed: Observed) -> None:
    server.freeze()
    with following(KubernetesSource(CurrentAccess(server.url, None), NODE)) as late:
        server.thaw()
        server.post("delete", resource="services", namespace=SERVICE.namespace, name=SERVICE.name)
        for source in (observed, late):
            source.wait_for(lambda o: len(o.complete) == len(EVERYTHING) and len(o.services) == 29)
    assert [name for name in observed.gone if name != SERVICE] == []


def test_a_server_that_is_killed_again_and_again_is_followed_to_the_end(
    server: BenchServer, observed: Observed,
) -> None:
    for count in (25, 35, 20, 30, 10):
        server.stop()
        server.start("--gen", f"services={count},endpoints=1", "--bookmark-interval", "0.2")
        server.post("apply", **a_service(f"mark-{count}"))
    observed.wait_for(lambda o: "mark-10" in o.names and len(o.services) == 11 and len(o.slices) == 10)


@pytest.mark.parametrize("watch_list", ["on", "off"])
def test_a_huge_state_arrives_whole(watch_list: str) -> None:
    # 60,000 endpoints, 16 MB: many pages, and objects of 27 kB.
    server = BenchServer("--gen", "services=60,endpoints=1000", "--watch-list", watch_list)
    try:
        with following(KubernetesSource(CurrentAccess(server.url, None), NODE)) as observed:
            observed.wait_for(lambda o: len(o.complete) == len(EVERYTHING))
            assert sum(len(piece.endpoints) for piece in observed.slices.values()) == 60_000
            assert not observed.bad
    finally:
        server.stop()


def test_a_first_list_of_thousands_wakes_the_loop_once() -> None:
    server = BenchServer("--gen", "services=3000,endpoints=5")
    try:
        with following(KubernetesSource(CurrentAccess(server.url, None), NODE)) as observed:
            observed.wait_for(lambda o: len(o.complete) == len(EVERYTHING))
            assert len(observed.services) == len(observed.slices) == 3000
            assert observed.batches == len(EVERYTHING)
    finally:
        server.stop()


def test_an_invalid_endpoint_port_affects_only_its_own_slice(
    server: BenchServer, observed: Observed,
) -> None:
    # A real API server takes this, too.
    server.post("apply", **a_slice("bad", "10.128.9.9", 70000))
    server.post("set", ops=[{"slice": str(SLICE), "index": 1, "address": "10.192.0.7"}])
    observed.wait_for(lambda o: "10.192.0.7" in addresses(o, SLICE))
    assert len(observed.slices) >= 30
    bad, = observed.bad
    assert (bad.kind, bad.name, bad.field) == ("EndpointSlice", "default/bad-1", "ports[0].port")


@pytest.mark.parametrize("accept", [JSON, PROTOBUF_OR_JSON], ids=["json", "protobuf"])
def test_managed_fields_are_left_out_by_a_server_that_can_and_change_nothing(accept: str) -> None:
    received, delivered = {}, {}
    for able in ("on", "off"):
        requests: list[ApiRequest] = []
        server = BenchServer("--gen", "services=30,endpoints=3,managed_fields=true", "--watch-list", "off",
                             "--drop-managed-fields", able)  # fmt: skip
        source = KubernetesSource(
            CurrentAccess(server.url, None), NODE, accept=accept, qps=0, observe=requests.append)
        with following(source) as observed:
            observed.wait_for(lambda o: len(o.complete) == len(EVERYTHING))
            received[able] = sum(request.received or 0 for request in requests)
            server.post("set", ops=[{"slice": str(SLICE), "index": 1, "address": "10.192.0.7"}])
            observed.wait_for(lambda o: "10.192.0.7" in addresses(o, SLICE))
            delivered[able] = (observed.services, observed.slices, observed.node, observed.bad)
        server.stop()
    assert {**delivered["on"][0]} == delivered["off"][0]
    assert delivered["on"][2:] == delivered["off"][2:]
    assert [addresses_of(piece) for piece in delivered["on"][1].values()] == [
        addresses_of(piece) for piece in delivered["off"][1].values()]
    assert received["on"] < 0.8 * received["off"]


@pytest.mark.parametrize("able", ["on", "off"])
@pytest.mark.parametrize("accept", [JSON, PROTOBUF_OR_JSON], ids=["json", "protobuf"])
def test_a_watch_has_no_managed_fields_where_the_server_can_leave_them_out(accept: str, able: str) -> None:
    server = BenchServer("--gen", "services=3,managed_fields=true", "--drop-managed-fields", able)
    try:
        transport = Transport(CurrentAccess(server.url, None).now)
        watch = transport.get("/api/v1/services?watch=1&timeoutSeconds=0", 30.0,
                              accept=without_managed_fields(accept))  # fmt: skip
        data = watch.read_all(1 << 20)
        transport.close()
    finally:
        server.stop()
    assert data.count(b"svc-00000") >= 3
    assert (b"kube-controller-manager" in data) == (able == "off")
