"""Objects written as Kubernetes JSON are read back as they were."""

import json

import pytest

from kproxy_conformance.builders import addresses, endpoint, endpoint_slice, service
from kproxy_core.kube.decode import ENDPOINT_SLICES, NODES, SERVICE_CIDRS, SERVICES
from kproxy_core.kube.encode import (
    encode_forward,
    encode_node,
    encode_objects,
    encode_service,
    encode_service_cidr,
    encode_slice,
)
from kproxy_core.model.address import Family, parse_cidr
from kproxy_core.model.events import NodeSet, ServiceCidrSet, ServiceSet, SliceSet
from kproxy_core.model.service import EndpointSlice, Service

SERVICES_OF_ANY_KIND = {
    "plain": service("shop/web", "http:80", "dns:53/UDP"),
    "two families": service("shop/web", "80", ip="10.96.0.1 fd00::1"),
    "node port": service("shop/web", "http:80@30080", created="2026-01-02T03:04:05Z"),
    "external": service(
        "shop/web", "http:80@30080", external_ips="203.0.113.1 2001:db8::1", load_balancer_ips="203.0.113.2",
        source_ranges="192.0.2.0/24", external_local=True, affinity=60),
    "internal": service("shop/web", "80", internal_local=True),
    "annotated": service("shop/web", removed_endpoints="reset", endpoint_health="passive", last_resort=90,
                         hash_by="flow"),
    "annotated off": service("shop/web", removed_endpoints="keep", endpoint_health="off", last_resort=0),
}  # fmt: skip


@pytest.mark.parametrize("made", SERVICES_OF_ANY_KIND.values(), ids=SERVICES_OF_ANY_KIND)
def test_a_service(made: Service) -> None:
    reading = SERVICES.from_json(json.dumps(encode_service(made)).encode())
    assert reading.bad == ()
    assert reading.value == ServiceSet(made)


SLICES = {
    "plain": endpoint_slice("shop/web", "10.1.1.1", "10.1.2.1", ports=["http:8080", "dns:53/UDP"]),
    "conditions": endpoint_slice(
        "shop/web", endpoint("10.1.1.1", "node1", ready=False, serving=True, terminating=True),
        endpoint("10.1.2.1", "node2", ready=False, serving=False), ports=["http:8080"]),
    "hints": endpoint_slice(
        "shop/web", endpoint("10.1.1.1", "node1", zones="a b", nodes="node1"), ports=["http:8080"]),
    "IPv6": endpoint_slice("shop/web", "fd00::1", ports=["8080"]),
    "weight": endpoint_slice("shop/web", "10.1.1.1", weight=65535),
    "no weight left": endpoint_slice("shop/web", "10.1.1.1", weight=0),
}  # fmt: skip


@pytest.mark.parametrize("made", SLICES.values(), ids=SLICES)
def test_a_slice(made: EndpointSlice) -> None:
    reading = ENDPOINT_SLICES.from_json(json.dumps(encode_slice(made)).encode())
    assert reading.bad == ()
    assert reading.value == SliceSet(made)


def test_all_objects_are_encoded_in_one_pass_over_the_slices() -> None:
    web, one, other = (service(name, "80", ip=ip) for name, ip in (
        ("shop/web", "10.96.0.1"), ("Forward/one", ""), ("Forward/other", "")))
    of_web, *of_one = (endpoint_slice(name, address) for name, address in (
        ("shop/web", "10.1.1.1"), ("Forward/one", "10.1.1.2"), ("Forward/one", "10.1.1.3")))
    services = {each.name: each for each in (web, other, one)}
    assert encode_objects(services, iter([of_one[0], of_web, of_one[1]])) == [
        encode_forward(one, of_one), encode_forward(other, []), encode_service(web), encode_slice(of_web)]


def test_a_resource_version_is_the_origin_of_a_service() -> None:
    made = encode_service(service("shop/web", "80"))
    made["metadata"]["resourceVersion"] = "1234"
    reading = SERVICES.from_json(json.dumps(made).encode())
    assert isinstance(reading.value, ServiceSet)
    assert reading.value.origin == "resource version 1234"


def test_the_node_and_the_networks_of_cluster_ips() -> None:
    own = addresses("192.0.2.1 2001:db8::1")
    node = NODES.from_json(json.dumps(encode_node("node1", "a", own, [parse_cidr("10.1.0.0/24")])).encode())
    assert isinstance(node.value, NodeSet)
    assert (node.value.node.name, node.value.node.zone, node.value.node.addresses) == ("node1", "a", own)
    assert node.value.node.pod_cidrs == (parse_cidr("10.1.0.0/24"),)
    networks = (parse_cidr("10.96.0.0/16"), parse_cidr("fd00::/112"))
    found = SERVICE_CIDRS.from_json(json.dumps(encode_service_cidr(networks)).encode())
    assert isinstance(found.value, ServiceCidrSet)
    assert found.value.cidrs == networks
    assert {cidr.family for cidr in found.value.cidrs} == set(Family)
