"""Whatever an object says, JSON and protobuf are read alike."""

from itertools import chain
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kproxy_conformance.apiserver.objects import Options, generate
from kproxy_conformance.apiserver.protobuf import encode_item
from kproxy_conformance.network.addresses import FAMILIES
from kproxy_conformance.suite.objects import base_objects, build
from kproxy_conformance.suite.scenario import Scenario, find
from kproxy_core.kube.decode import ENDPOINT_SLICES, NODES, SERVICE_CIDRS, SERVICES, Resource
from kproxy_core.kube.encode import encode_service, encode_slice
from kproxy_core.kube.protobuf import any_endpoint, parser, read_endpoint
from kproxy_core.kube.reading import read_endpoints
from tests.core.kube.both_wires import read_alike
from tests.core.kube.test_encode import SERVICES_OF_ANY_KIND, SLICES

Json = dict[str, Any]
RESOURCES: dict[str, Resource[Any, Any]] = {
    resource.kind: resource for resource in (SERVICES, ENDPOINT_SLICES, NODES, SERVICE_CIDRS)}


@pytest.mark.parametrize("scenario", find(), ids=lambda scenario: scenario.name)
def test_objects_of_scenarios(scenario: Scenario) -> None:
    applied = chain.from_iterable(step.get("apply", ()) for step in scenario.steps)
    for entry in (*scenario.objects, *applied):
        for family in FAMILIES if scenario.families == FAMILIES else scenario.families:
            obj = build(entry, family)
            if obj["kind"] in RESOURCES:
                assert read_alike(RESOURCES[obj["kind"]], obj).name


def test_objects_of_every_scenario() -> None:
    for obj in base_objects():
        assert not read_alike(RESOURCES[obj["kind"]], obj).bad


def test_objects_of_the_bench() -> None:
    made = generate(Options(
        services=200, nodeport=0.3, loadbalancer=0.2, affinity=0.3, udp=0.3, local_policy=0.5, empty=0.1,
        managed_fields=True))
    for number, obj in enumerate(chain.from_iterable(made.values())):
        obj["metadata"]["resourceVersion"] = str(number)
        assert read_alike(RESOURCES[obj["kind"]], obj).value


def test_objects_that_kproxy_writes() -> None:
    for service in SERVICES_OF_ANY_KIND.values():
        assert not read_alike(SERVICES, encode_service(service)).bad
    for piece in SLICES.values():
        assert not read_alike(ENDPOINT_SLICES, encode_slice(piece)).bad


# -- any objects

NAMES = st.sampled_from(["web", "a", "a-0", "x" * 63, "x" * 64, "shop.web", "A", "", "é", "\n\x12"])
ADDRESSES = st.sampled_from([
    "10.1.0.1", "10.1.0.2", "172.30.0.041", "2001:db8::1", "::ffff:10.1.0.3", "127.0.0.1", "0.0.0.0",
    "ff02::1", "255.255.255.255", "10.1.0", "", "fe80::1%eth0", "10.1.0.1/32"])
BOOLS = st.booleans()
NUMBERS = st.sampled_from([0, 1, 80, 127, 128, 8080, 16384, 65535, 65536, -1, (1 << 31) - 1, -1 << 31])
STAMPS = st.sampled_from(["2026-01-02T03:04:05Z", "1970-01-01T00:00:01Z", "2199-12-31T23:59:59+02:00"])


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    """An object with any of *fields*."""
    return st.fixed_dictionaries({}, optional=fields)


def lists(of: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[list[Any]]:
    return st.lists(of, max_size=most)


def maps(*keys: str) -> st.SearchStrategy[Json]:
    return st.dictionaries(st.sampled_from([*keys, "app", "x" * 70 + "/y"]), NAMES, max_size=4)


METADATA = some(
    name=NAMES, namespace=NAMES, resourceVersion=NAMES, generateName=NAMES, uid=NAMES,
    creationTimestamp=STAMPS, deletionTimestamp=STAMPS,
    labels=maps("kubernetes.io/service-name", "service.kubernetes.io/headless", "topology.kubernetes.io/zone",
                "service.kubernetes.io/service-proxy-name"),
    annotations=maps("endpoints.kubernetes.io/last-change-trigger-time", "kproxy.dev/weight",
                     "kproxy.dev/hash", "k8s.io/initial-events-end"))
ENDPOINT = some(
    addresses=lists(ADDRESSES, 2), conditions=some(ready=BOOLS, serving=BOOLS, terminating=BOOLS),
    targetRef=some(kind=NAMES, namespace=NAMES, name=st.text(max_size=150)), nodeName=NAMES, zone=NAMES,
    hints=some(forZones=lists(some(name=NAMES)), forNodes=lists(some(name=NAMES))))
SERVICE = some(
    metadata=METADATA,
    spec=some(
        type=st.sampled_from(["", "ClusterIP", "NodePort", "LoadBalancer", "ExternalName", "Other"]),
        clusterIP=ADDRESSES, clusterIPs=lists(ADDRESSES, 2), selector=maps(), externalName=NAMES,
        ipFamilies=lists(st.sampled_from(["IPv4", "IPv6", "IPv5"]), 2), externalIPs=lists(ADDRESSES),
        ports=lists(some(
            name=NAMES, protocol=st.sampled_from(["TCP", "UDP", "SCTP", "tcp", ""]), port=NUMBERS,
            nodePort=NUMBERS, appProtocol=NAMES)),
        sessionAffinity=st.sampled_from(["None", "ClientIP", ""]), loadBalancerSourceRanges=lists(ADDRESSES),
        sessionAffinityConfig=some(clientIP=some(timeoutSeconds=NUMBERS)), healthCheckNodePort=NUMBERS,
        externalTrafficPolicy=st.sampled_from(["Local", "Cluster"]),
        internalTrafficPolicy=st.sampled_from(["Local", "Cluster"])),
    status=some(loadBalancer=some(ingress=lists(some(ip=ADDRESSES, ipMode=NAMES, hostname=NAMES)))))
SLICE = some(
    metadata=METADATA, addressType=st.sampled_from(["IPv4", "IPv6", "FQDN", "", "IPv5"]),
    endpoints=lists(ENDPOINT, 4),
    ports=lists(some(name=NAMES, protocol=st.sampled_from(["TCP", "UDP", "x"]), port=NUMBERS)))
NODE = some(
    metadata=METADATA, spec=some(podCIDR=ADDRESSES, podCIDRs=lists(ADDRESSES), taints=lists(some(key=NAMES))),
    status=some(addresses=lists(some(type=st.sampled_from(["InternalIP", "ExternalIP"]), address=ADDRESSES))))
CIDR = some(metadata=METADATA, spec=some(cidrs=lists(ADDRESSES)))


@pytest.mark.parametrize(("resource", "objects"), [
    (SERVICES, SERVICE), (ENDPOINT_SLICES, SLICE), (NODES, NODE), (SERVICE_CIDRS, CIDR),
], ids=["services", "slices", "nodes", "service CIDRs"])
@given(draw=st.data())
def test_any_object(
    resource: Resource[Any, Any], objects: st.SearchStrategy[Json], draw: st.DataObject
) -> None:
    reading = read_alike(resource, draw.draw(objects))
    assert reading.value or reading.bad


@given(endpoint=ENDPOINT, draw=st.data())
def test_an_endpoint_is_read_alike_in_both_ways(endpoint: Json, draw: st.DataObject) -> None:
    piece = parser("EndpointSlice")(encode_item("EndpointSlice", {"endpoints": [endpoint]}))
    raw = bytearray(piece.endpoints[0])
    for at in draw.draw(st.lists(st.integers(0, max(len(raw) - 1, 0)), max_size=2)):
        raw[at:at + 1] = draw.draw(st.binary(max_size=2))
    data = bytes(raw)
    try:
        expected = any_endpoint(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            read_endpoint(data)
    else:
        assert read_endpoints([read_endpoint(data)]) == read_endpoints([expected])
