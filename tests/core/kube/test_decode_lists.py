"""List pages and watch lines; and that nothing from outside can make decoding raise."""

from contextlib import suppress
from copy import deepcopy
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kproxy_core.kube import decode, wire
from kproxy_core.kube.decode import (
    ENDPOINT_SLICES,
    ENDPOINTS,
    NODES,
    SERVICE_CIDRS,
    SERVICES,
    Malformed,
    Resource,
    Status,
)
from kproxy_core.kube.reading import Reading, read_service
from kproxy_core.model.events import ServiceGone, ServiceSet, SliceSet

Json = dict[str, Any]
RESOURCES: list[Resource[Any, Any]] = [SERVICES, ENDPOINT_SLICES, ENDPOINTS, NODES, SERVICE_CIDRS]


def web(name: str = "web", ip: object = "10.96.0.1") -> Json:
    return {"metadata": {"name": name, "resourceVersion": "7"},
            "spec": {"clusterIP": ip, "ports": [{"port": 80}]}}


def encoded(value: object) -> bytes:
    return msgspec.json.encode(value)


def test_a_page_of_a_list() -> None:
    page = SERVICES.page(encoded({
        "kind": "ServiceList",
        "metadata": {"resourceVersion": "42", "continue": "abc", "remainingItemCount": 1},
        "items": [web("a"), web("b")]}))
    assert (page.resource_version, page.next_page) == ("42", "abc")
    assert [reading.name for reading in page.readings] == [("default", "a"), ("default", "b")]
    assert all(isinstance(reading.value, ServiceSet) for reading in page.readings)


def test_an_object_that_a_bug_keeps_from_being_read_does_not_affect_its_page(
    caplog: pytest.LogCaptureFixture
) -> None:
    def read(obj: wire.Service) -> Reading[ServiceSet | ServiceGone]:
        assert obj.metadata is not None
        if obj.metadata.name == "b":
            raise KeyError("a bug")
        return read_service(obj)

    page = structs.replace(SERVICES, reader=read).page(encoded({"items": [web("a"), web("b"), web("c")]}))
    assert [(reading.name, reading.value is not None) for reading in page.readings] == [
        (("default", "a"), True), (("default", "b"), False), (("default", "c"), True)]
    assert str(page.readings[1].bad[0]) == "Service default/b: cannot be read: KeyError('a bug')"
    caplog.clear()


@pytest.mark.parametrize("page", [{}, {"metadata": None, "items": None}, {"metadata": {}, "items": []}])
def test_an_empty_page(page: Json) -> None:
    assert SERVICES.page(encoded(page)) == ("", "", [])


def test_one_bad_object_does_not_affect_its_page() -> None:
    page = SERVICES.page(encoded({
        "metadata": {"resourceVersion": "42"},
        "items": [web("a"), web("b", ip=5), {"metadata": 3}, None, "junk", web("c")]}))
    assert page.resource_version == "42"
    assert [(reading.name, reading.value is not None) for reading in page.readings] == [
        (("default", "a"), True), (("default", "b"), False), (None, False), (None, False), (None, False),
        (("default", "c"), True)]
    assert [str(bad) for reading in page.readings for bad in reading.bad] == [
        "Service default/b: spec.clusterIP: expected str, got int",
        "Service : metadata: expected object, got int",
        "Service : expected object, got null",
        "Service : expected object, got str"]


@pytest.mark.parametrize("data", [
    b"", b"[]", b"null", b'{"items": 5}', b'{"items": [', b'{"metadata": [], "items": []}',
    b'{"metadata": {"resourceVersion": 5}, "items": []}', b"\xff", b'{"items": ' + b"[" * 100_000,
])
def test_data_that_is_no_page_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        SERVICES.page(data)


def test_an_endpoint_slice_keeps_its_resource_version() -> None:
    line = ENDPOINT_SLICES.watch_event(encoded({"type": "ADDED", "object": {
        "metadata": {"name": "web-1", "resourceVersion": "7",
                     "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4"}}))
    assert line.reading is not None
    assert isinstance(line.reading.value, SliceSet)
    assert line.reading.value.origin == "resource version 7"


@pytest.mark.parametrize("kind", ["ADDED", "MODIFIED", "DELETED"])
def test_an_object_in_a_watch(kind: str) -> None:
    line = SERVICES.watch_event(encoded({"type": kind, "object": web()}))
    assert (line.type, line.resource_version, line.status) == (kind, "7", None)
    assert line.reading is not None
    assert line.reading.name == ("default", "web")


def test_a_good_line_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_decode_raw_line", None)
    assert SERVICES.watch_event(encoded({"type": "ADDED", "object": web()})).reading is not None
    with pytest.raises(TypeError):
        SERVICES.watch_event(encoded({"type": "ADDED", "object": web(ip=[])}))


def test_a_bad_object_in_a_watch() -> None:
    line = SERVICES.watch_event(encoded({"type": "ADDED", "object": web(ip=[])}))
    assert line.reading is not None
    assert (line.reading.name, line.reading.value) == (("default", "web"), None)


@pytest.mark.parametrize(("annotations", "end"), [
    (None, False), ({}, False), ({"k8s.io/initial-events-end": "true"}, True),
    ({"k8s.io/initial-events-end": "false"}, False),
])
def test_a_bookmark(annotations: object, end: bool) -> None:
    line = SERVICES.watch_event(encoded({
        "type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9", "annotations": annotations}}}))
    assert (line.type, line.resource_version, line.reading, line.initial_events_end) == (
        "BOOKMARK", "9", None, end)


def test_an_error_in_a_watch() -> None:
    line = SERVICES.watch_event(encoded({
        "type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}}))
    assert line.status == Status(410, "Expired", "too old")


@pytest.mark.parametrize("data", [
    b"", b"{}", b'{"type": "ADDED"}', b'{"type": 5, "object": {}}', b'{"type": "ADDED", "object": []}',
    b'{"type": "ADDED", "object": {"metadata": {"resourceVersion": 1}}}', b'{"type": "ADDED", "obj',
    b'{"type": "ADDED", "object": {"metadata": {"resourceVersion": "1"}, "x": ' + b"[" * 100_000,
])
def test_data_that_is_no_watch_event_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        SERVICES.watch_event(data)


# --- any input

FIELDS = sorted({
    field.encode_name
    for struct in vars(wire).values() if isinstance(struct, type) and issubclass(struct, msgspec.Struct)
    for field in msgspec.structs.fields(struct)
})
TEXTS = st.text(max_size=8) | st.sampled_from([
    "", "web", "None", "10.96.0.1", "fd00::1", "::ffff:1.2.3.4", "0.0.0.0/0", "10.0.0.0/8", "TCP", "Local",
    "ClientIP", "LoadBalancer", "NodePort", "IPv4", "IPv6", "FQDN", "InternalIP", "2026-01-01T00:00:00Z",
    "1.2.3.4.5", "999.1.1.1", "::1%lo", "\x00", "a\nb",
])
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 40), 1 << 40), st.sampled_from([0, 1, 80, 65535, 65536]),
    st.floats(allow_nan=False, allow_infinity=False), TEXTS)
ANYTHING: st.SearchStrategy[object] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=3), inner, max_size=4),
    max_leaves=20)
MOSTLY_GOOD: dict[str, Json] = {
    "Service": {"metadata": {"name": "web"}, "spec": {
        "type": "LoadBalancer", "clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1", "fd00::1"],
        "ipFamilies": ["IPv4", "IPv6"],
        "ports": [{"name": "a", "port": 80, "nodePort": 30000, "protocol": "TCP"}],
        "externalIPs": ["198.51.100.1"], "loadBalancerSourceRanges": ["10.0.0.0/8"],
        "sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 5}},
        "externalTrafficPolicy": "Local", "internalTrafficPolicy": "Local", "healthCheckNodePort": 31000,
    }, "status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.1", "ipMode": "VIP"}]}}},
    "EndpointSlice": {
        "metadata": {"name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4", "ports": [{"name": "a", "port": 80, "protocol": "TCP"}],
        "endpoints": [{"addresses": ["10.1.0.1"], "conditions": {"ready": True}, "nodeName": "n",
                       "hints": {"forZones": [{"name": "z"}]}}]},
}


@given(value=ANYTHING, resource=st.sampled_from(RESOURCES))
def test_no_json_makes_decoding_raise(value: object, resource: Resource[Any, Any]) -> None:
    reading = resource.from_json(encoded(value))
    assert reading.value is not None or reading.bad
    for bad in reading.bad:
        assert str(bad).isascii()
        assert str(bad).isprintable()


@given(data=st.data())
def test_no_replaced_field_makes_decoding_raise(data: st.DataObject) -> None:
    """Objects that are good but for one place, anywhere in them, get far into the conversion."""
    kind = data.draw(st.sampled_from(sorted(MOSTLY_GOOD)))
    value = deepcopy(MOSTLY_GOOD[kind])
    place: Any = value
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(ANYTHING)
    resource: Resource[Any, Any] = SERVICES if kind == "Service" else ENDPOINT_SLICES
    reading = resource.from_json(encoded(value))
    assert reading.value is not None or reading.bad


@given(data=st.binary(max_size=60), resource=st.sampled_from(RESOURCES))
def test_no_bytes_make_decoding_raise(data: bytes, resource: Resource[Any, Any]) -> None:
    reading = resource.from_json(data)
    assert reading.value is not None or reading.bad
    for read in (resource.page, resource.watch_event):
        with suppress(Malformed):
            read(data)
