"""API objects as they are read for an explanation: times, frontends, pods, and policies by labels."""

import json
from datetime import datetime
from typing import Any

import msgspec
import pytest

from kproxy_core.fleet.objects import Metadata, NetworkPolicy, Pod, ServiceState, SliceState, selecting
from kproxy_core.model.address import Protocol, parse_address
from kproxy_core.model.service import ServiceName
from kproxy_core.plan.service_plan import Frontend

EARLY, LATE = "2026-01-01T00:00:00Z", "2026-01-02T10:00:00.5Z"

CHANGED = {
    "the newest of the managed fields": (
        {"managedFields": [{"time": LATE}, {"time": EARLY}, {}], "creationTimestamp": EARLY}, LATE),
    "the trigger of a slice without them": (
        {"annotations": {"endpoints.kubernetes.io/last-change-trigger-time": LATE}}, LATE),
    "unknown by the creation alone": ({"creationTimestamp": EARLY}, None),
    "unknown without a time": ({"managedFields": None}, None),
    "unknown by nonsense": ({"managedFields": [{"time": "yesterday"}, {"time": "2026-01-01"}]}, None),
}


@pytest.mark.parametrize("name", CHANGED)
def test_the_time_of_the_last_change_is_told_only_if_the_object_tells_it(name: str) -> None:
    meta, expected = CHANGED[name]
    found = msgspec.convert(meta, Metadata).changed
    assert found == (datetime.fromisoformat(expected).timestamp() if expected else None)


def service(**spec: Any) -> ServiceState:
    made = {"clusterIP": "10.96.0.1", "ports": [{"name": "http", "port": 80, "nodePort": 30080}],
            "type": "NodePort", "externalIPs": ["203.0.113.1"]} | spec
    meta = {"namespace": "shop", "name": "web", "resourceVersion": "7"}
    return ServiceState.read(json.dumps({"metadata": meta, "spec": made}).encode())


FRONTENDS = {
    "10.96.0.1 80": True, "203.0.113.1 80": True, "192.0.2.10 30080": True, "192.0.2.11 30080": False,
    "10.96.0.1 30080": False, "10.96.0.1 81": False, "192.0.2.10 80": False,
}  # fmt: skip


@pytest.mark.parametrize("where", FRONTENDS)
def test_a_service_has_its_frontends(where: str) -> None:
    address, port = where.split()
    frontend = Frontend(parse_address(address), Protocol.TCP, int(port))
    nodes = {parse_address("192.0.2.10")}
    assert service().has(frontend, nodes) is FRONTENDS[where]
    assert not service().has(frontend._replace(protocol=Protocol.UDP), nodes)
    assert not service(clusterIP="None").has(frontend, nodes)


def test_a_slice_names_the_pods_behind_its_addresses() -> None:
    pods = {"kind": "Pod", "name": "web-1"}
    found = SliceState.read(json.dumps({
        "metadata": {"namespace": "shop", "name": "web-a", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv6", "ports": [{"port": 80}],
        "endpoints": [{"addresses": ["fd00:0::1"], "targetRef": pods}, {"addresses": ["fd00::2"]},
                      {"addresses": ["fd00::3"], "targetRef": {"kind": "VM", "name": "x"}}],
    }).encode())
    assert found is not None
    assert found.pods == {"fd00::1": ServiceName("shop", "web-1")}
    assert len(found.slice.endpoints) == 3
    assert SliceState.read(b'{"metadata": {"name": "a"}, "addressType": "FQDN"}') is None


def test_a_pod_has_its_addresses_once() -> None:
    status = {"podIP": "10.1.1.1", "podIPs": [{"ip": "10.1.1.1"}, {"ip": "fd00::1"}], "phase": "Running"}
    pod = msgspec.convert({"spec": {"nodeName": "a"}, "status": status}, Pod)
    assert (pod.node, pod.addresses) == ("a", (parse_address("10.1.1.1"), parse_address("fd00::1")))
    assert (pod.has_ended, pod.is_on_host_network) == (False, False)
    assert msgspec.convert({}, Pod).addresses == ()


LABELS = {"app": "web", "tier": "front"}
SELECTORS = {
    "everything": ({}, True),
    "by labels": ({"matchLabels": {"app": "web", "tier": "front"}}, True),
    "one label differs": ({"matchLabels": {"app": "web", "tier": "back"}}, False),
    "In": ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["db", "web"]}]}, True),
    "In, another": ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["db"]}]}, False),
    "In, absent": ({"matchExpressions": [{"key": "x", "operator": "In", "values": ["db"]}]}, False),
    "NotIn": ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["web"]}]}, False),
    "NotIn, absent": ({"matchExpressions": [{"key": "x", "operator": "NotIn", "values": ["web"]}]}, True),
    "Exists": ({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, True),
    "Exists, absent": ({"matchExpressions": [{"key": "x", "operator": "Exists"}]}, False),
    "DoesNotExist": ({"matchExpressions": [{"key": "x", "operator": "DoesNotExist"}]}, True),
    "DoesNotExist, present": ({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, False),
    "labels and an expression": (
        {"matchLabels": {"app": "web"}, "matchExpressions": [{"key": "tier", "operator": "DoesNotExist"}]},
        False),
}  # fmt: skip


def policy(selector: Any, namespace: str = "shop", **spec: Any) -> NetworkPolicy:
    meta = {"namespace": namespace, "name": "p"}
    return msgspec.convert({"metadata": meta, "spec": {"podSelector": selector, **spec}}, NetworkPolicy)


POD = msgspec.convert({"metadata": {"namespace": "shop", "name": "web-1", "labels": LABELS}}, Pod)


@pytest.mark.parametrize("name", SELECTORS)
def test_policies_select_pods_by_labels(name: str) -> None:
    selector, is_selected = SELECTORS[name]
    assert selecting([policy(selector)], POD, "Ingress") == ["p"] * is_selected


DIRECTIONS: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "ingress by default": ({}, True, False),
    "egress by its rules": ({"egress": [{}]}, True, True),
    "no egress by an empty list": ({"egress": []}, True, False),
    "as it says": ({"policyTypes": ["Egress"]}, False, True),
    "both": ({"policyTypes": ["Ingress", "Egress"]}, True, True),
    "of another namespace": ({"namespace": "other"}, False, False),
}


@pytest.mark.parametrize("name", DIRECTIONS)
def test_policies_are_of_a_direction_and_a_namespace(name: str) -> None:
    spec, ingress, egress = DIRECTIONS[name]
    found = [policy({}, **spec)]
    assert selecting(found, POD, "Ingress") == ["p"] * ingress
    assert selecting(found, POD, "Egress") == ["p"] * egress
