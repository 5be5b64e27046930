"""The objects in a manifest file, and the complaints about others."""

import json
from typing import Any

import pytest

from kproxy_core.kube.decode import Malformed
from kproxy_core.kube.directory import read_manifest
from tests.core.directory_rig import endpoint_slice, endpoints, node, service, service_cidr, text

Json = dict[str, Any]
WEB = service("web")


def names(name: str, data: str | bytes) -> list[str]:
    """The objects in a file as ``kind/name``."""
    manifest = read_manifest(name, data if isinstance(data, bytes) else data.encode())
    assert manifest.bad == []
    return [f"{kind}/{object_name}" for (kind, (_, object_name)), _ in manifest.objects]


def complaints(data: str, name: str = "web.yaml") -> list[str]:
    return [str(bad) for bad in read_manifest(name, data.encode()).bad]


ALL = [WEB, endpoint_slice("web"), endpoints("web"), node("node1"), service_cidr("kubernetes")]
ALL_NAMES = ["Service/web", "EndpointSlice/web-1", "Endpoints/web", "Node/node1", "ServiceCIDR/kubernetes"]


def a_list(*items: object, kind: str = "List", version: str = "v1") -> Json:
    return {"apiVersion": version, "kind": kind, "items": list(items)}


@pytest.mark.parametrize(("name", "data"), [
    ("a.yaml", text(*ALL)),
    ("a.yaml", "# all\n" + text(*ALL) + "---\n"),
    ("a.yml", json.dumps(a_list(*ALL))),
    ("a.yaml", "\n  " + json.dumps(a_list(*ALL), indent=2)),
    ("a.json", json.dumps(a_list(*ALL))),
    ("a.json", "\ufeff" + json.dumps(a_list(*ALL))),
    ("a.json", json.dumps(a_list(a_list(*ALL[:2]), a_list(*ALL[2:])))),
])
def test_documents_and_lists(name: str, data: str) -> None:
    assert names(name, data) == ALL_NAMES


def test_block_style_yaml_as_people_write_it() -> None:
    assert names("a.yaml", """
# the shop
apiVersion: v1
kind: Service
metadata:
  name: on          # no boolean
  namespace: 'shop'
  creationTimestamp: 2026-01-01T00:00:00Z
spec:
  clusterIP: 10.96.0.1
  selector: {app: yes}
  ports:
  - name: http
    port: 80
---
apiVersion: v1
kind: ConfigMap
data: {a: b}
""") == ["Service/on"]


def test_yaml_that_starts_with_a_brace() -> None:
    assert names("a.yaml", "{apiVersion: v1, kind: Service, metadata: {name: web}}") == ["Service/web"]


def test_two_json_documents_in_a_yaml_file() -> None:
    assert names("a.yaml", f"{json.dumps(WEB)}\n---\n{json.dumps(WEB)}") == ["Service/web"] * 2


@pytest.mark.parametrize(("kind", "version", "item"), [
    ("ServiceList", "v1", WEB), ("EndpointSliceList", "discovery.k8s.io/v1", endpoint_slice("web")),
    ("NodeList", "v1", node()),
])
def test_items_of_a_typed_list_need_no_kind(kind: str, version: str, item: Json) -> None:
    bare = {key: value for key, value in item.items() if key not in ("kind", "apiVersion")}
    assert len(names("a.json", json.dumps(a_list(bare, bare, kind=kind, version=version)))) == 2


@pytest.mark.parametrize("data", [
    {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}},
    {"apiVersion": "serving.knative.dev/v1", "kind": "Service", "metadata": {"name": "web"}},
    {"apiVersion": "v1", "kind": "PodList", "items": "none of our business"},
    {"apiVersion": "v1", "kind": "List", "items": None},
    {"apiVersion": "v1", "kind": "List"},
])
def test_other_kinds_are_ignored(data: Json) -> None:
    assert names("a.json", json.dumps(data)) == []


@pytest.mark.parametrize(("data", "complaint"), [
    ("a: 1", "object web.yaml: kind: is missing"),
    ("kind: 5", "object web.yaml: kind: is missing"),
    ("kind: Service", "Service web.yaml: apiVersion: is missing"),
    ("kind: Service\napiVersion: v2", "Service web.yaml: apiVersion: 'v2' is not v1"),
    ("kind: EndpointSlice\napiVersion: discovery.k8s.io/v1beta1",
     "EndpointSlice web.yaml: apiVersion: 'discovery.k8s.io/v1beta1' is not discovery.k8s.io/v1"),
    ("hello", "object web.yaml: expected object, got str"),
    ("- a\n- b", "object web.yaml: expected object, got array"),
    ("apiVersion: v1\nkind: List\nitems: 5", "List web.yaml: items: is not a list"),
    ("apiVersion: v1\nkind: List\nitems: [5]", "object web.yaml items[0]: expected object, got int"),
    ("apiVersion: v1\nkind: ServiceList\nitems: [5]", "Service web.yaml items[0]: expected object, got int"),
    ("# one\n---\n---\napiVersion: v1\nkind: Service\n---\n---\nx: y",
     "Service web.yaml document 2: metadata.name: is missing"),
])
def test_complaints_name_place_and_problem(data: str, complaint: str) -> None:
    assert complaints(data)[0] == complaint


def test_the_nesting_of_lists_is_limited() -> None:
    nested: Json = WEB
    for _ in range(50):
        nested = a_list(nested)
    (complaint,) = complaints(json.dumps(nested))
    assert complaint.endswith("lists are nested too deeply")


@pytest.mark.parametrize(("name", "data", "problem"), [
    ("a.yaml", b"", "is empty"),
    ("a.yaml", b"---\n" * 1002, "more than 1000 documents or items"),
    ("a.json", b" \n", "is empty"),
    ("a.json", b"{", "is not a JSON object"),
    ("a.json", b"[]", "is not a JSON object"),
    ("a.json", b"apiVersion: v1", "is not a JSON object"),
    ("a.json", b'{"kind": NaN}', "is not a JSON object"),
    ("a.json", b'{"kind": "Service"} trailing', "is not a JSON object"),
    ("a.json", b'{"a": ' + b"[" * 100_000, "nested too deeply"),
    ("a.yaml", b"{" * 100_000, "nested too deeply"),
    ("a.yaml", b"a: [", "is not YAML"),
    ("a.yaml", bytes(range(256)), "is not YAML"),
])
def test_files_that_are_no_manifests_are_refused(name: str, data: bytes, problem: str) -> None:
    with pytest.raises(Malformed, match=problem):
        read_manifest(name, data)
