"""Nodes and ServiceCIDRs."""

from typing import Any

import pytest

from kproxy_conformance.builders import addresses, cidrs
from kproxy_core.kube.decode import NODES, SERVICE_CIDRS
from kproxy_core.model.events import NodeSet, ServiceCidrSet
from kproxy_core.model.node import NodeObject
from tests.core.kube.both_wires import read_alike

Json = dict[str, Any]


def read(spec: object = None, status: object = None, **meta: object) -> tuple[NodeObject, list[str]]:
    reading = read_alike(NODES, {"metadata": {"name": "node1"} | meta, "spec": spec, "status": status})
    assert isinstance(reading.value, NodeSet), reading
    assert reading.name == ("", "node1")
    return reading.value.node, [bad.field for bad in reading.bad]


def test_the_fields_of_a_node() -> None:
    spec = {"podCIDR": "10.1.0.0/24", "podCIDRs": ["10.1.0.0/24", "fd00:1::/64"]}
    status = {"addresses": [
        {"type": "ExternalIP", "address": "203.0.113.1"},
        {"type": "Hostname", "address": "node1"},
        {"type": "InternalIP", "address": "192.0.2.1"},
        {"type": "InternalIP", "address": "2001:db8::1"},
        {"type": "InternalDNS", "address": "node1.example"},
    ]}
    labels = {"topology.kubernetes.io/zone": "z1", "other": "x"}
    assert read(spec, status, labels=labels) == (
        NodeObject("node1", "z1", addresses("192.0.2.1 2001:db8::1 203.0.113.1"),
                   cidrs("10.1.0.0/24 fd00:1::/64"), labels=labels), [])


def test_labels_that_are_not_text_are_told_and_left_out() -> None:
    node, bad = read(labels={"topology.kubernetes.io/zone": 1, "gpu": True, "none": None, "other": "x"})
    assert node == NodeObject("node1", labels={"other": "x"})
    assert bad == ["metadata.labels[topology.kubernetes.io/zone]", "metadata.labels[gpu]"]


def test_the_old_field_for_one_pod_network() -> None:
    assert read({"podCIDR": "10.1.0.0/24"})[0].pod_cidrs == cidrs("10.1.0.0/24")


def test_an_empty_node() -> None:
    assert read() == (NodeObject("node1"), [])


@pytest.mark.parametrize(("spec", "meta", "eligible"), [
    ({}, {}, True),
    ({"taints": [{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]}, {}, True),
    ({"taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]}, {}, False),
    ({}, {"deletionTimestamp": "2026-01-01T00:00:00Z"}, False),
])
def test_eligible_for_load_balancers(spec: Json, meta: Json, eligible: bool) -> None:
    assert read(spec, **meta)[0].eligible is eligible


def test_bad_parts_of_a_node_do_not_affect_the_rest() -> None:
    spec = {"podCIDRs": ["junk", "10.1.0.0/24"]}
    status = {"addresses": [{"type": "InternalIP", "address": "x"}, {"type": "InternalIP"},
                            {"type": "InternalIP", "address": "192.0.2.1"}]}
    node, bad = read(spec, status)
    assert (node.addresses, node.pod_cidrs) == (addresses("192.0.2.1"), cidrs("10.1.0.0/24"))
    assert bad == ["status.addresses[0].address", "status.addresses[1].address", "spec.podCIDRs[0]"]


@pytest.mark.parametrize("value", [
    {"metadata": {"name": "node 1"}}, {"metadata": {}}, {}, {"metadata": {"name": 1}},
    {"metadata": {"name": "node1"}, "spec": []},
    {"metadata": {"name": "node1"}, "status": {"addresses": {}}},
])
def test_nodes_refused_as_a_whole(value: Json) -> None:
    reading = read_alike(NODES, value)
    assert (reading.value, len(reading.bad)) == (None, 1)


def test_the_networks_of_a_service_cidr() -> None:
    reading = read_alike(
        SERVICE_CIDRS,
        {"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/12", "junk", "fd00::/108"]}})
    assert (reading.name, reading.value) == (
        ("", "kubernetes"), ServiceCidrSet("kubernetes", cidrs("10.96.0.0/12 fd00::/108")))
    assert [bad.field for bad in reading.bad] == ["spec.cidrs[1]"]


@pytest.mark.parametrize("value", [{"metadata": {"name": "a/b"}}, {"metadata": {"name": "a"}, "spec": 1}])
def test_service_cidrs_refused_as_a_whole(value: Json) -> None:
    reading = read_alike(SERVICE_CIDRS, value)
    assert (reading.value, len(reading.bad)) == (None, 1)
