"""Lists and watch events in protobuf, the frames of a watch, and that no bytes make decoding raise."""

import sys
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_conformance.apiserver.protobuf import (
    MAGIC,
    encode_event,
    encode_item,
    encode_list,
    encode_object,
    envelope,
    frame,
)
from kproxy_core.kube.decode import (
    ENDPOINT_SLICES,
    NODES,
    SERVICE_CIDRS,
    SERVICES,
    Malformed,
    Resource,
    Status,
    StatusDetails,
)
from kproxy_core.kube.protobuf import ProtobufDecoder, read_status
from kproxy_core.kube.requests import status_error
from kproxy_core.kube.transport import JSON, PROTOBUF_OR_JSON, Frames, accept_header, without_managed_fields
from kproxy_core.model.events import ServiceSet

DECODER = ProtobufDecoder(SERVICES)

Json = dict[str, Any]
RESOURCES: list[Resource[Any, Any]] = [SERVICES, ENDPOINT_SLICES, NODES, SERVICE_CIDRS]
CUT = b"\x12\x7f"
"""A message of 127 bytes that is not there."""
EXPIRED = {"code": 410, "reason": "Expired", "message": "too old", "details": {"retryAfterSeconds": 3}}


def web(name: str = "web") -> Json:
    return {"metadata": {"name": name, "namespace": "default", "resourceVersion": "7"},
            "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}}


def body(event: bytes) -> bytes:
    """The content of a frame."""
    return event[4:]


def test_a_page_of_a_list() -> None:
    items = [encode_item("Service", web(name)) for name in "ab"]
    page = DECODER.page(encode_list("Service", {"resourceVersion": "42", "continue": "abc"}, items))
    assert (page.resource_version, page.next_page) == ("42", "abc")
    assert [reading.name for reading in page.readings] == [("default", "a"), ("default", "b")]
    assert all(isinstance(reading.value, ServiceSet) for reading in page.readings)


def test_an_empty_page() -> None:
    assert DECODER.page(encode_list("Service", {}, [])) == ("", "", [])


def test_one_bad_object_does_not_affect_its_page() -> None:
    good, bad = encode_item("Service", web("a")), encode_item("Service", {"metadata": {"name": "b"}}) + CUT
    latin = encode_item("Service", web("c")) + b"\x12\x03\x1a\x01\xff"
    huge = encode_item("Service", web("d")) + b"\x7a\x81\x80\xc0\x01" + bytes((3 << 20) + 1)
    page = DECODER.page(encode_list("Service", {}, [good, bad, b"\xff", latin, huge, good]))
    assert [reading.value is not None for reading in page.readings] == [True, *[False] * 4, True]
    assert [str(bad) for reading in page.readings for bad in reading.bad] == [
        "Service : is not a valid protobuf message",
        "Service : is not a valid protobuf message",
        "Service default/c: is not a valid protobuf message",
        "Service default/d: is larger than 3 MiB"]


@pytest.mark.parametrize("data", [
    b"", MAGIC, b'{"items": []}', MAGIC + CUT, encode_list("Node", {}, []), encode_object("Service", web()),
    envelope("ServiceList", "v2", b""), envelope("ServiceList", "v1", CUT),
    envelope("ServiceList", "v1", b"\x0a\x03\x12\x01\xff"), envelope("ServiceList", "v1", b"")[:-1],
    envelope("ServiceList", "v1", b"") + b"\x1a\x04gzip",
], ids=["nothing", "magic", "json", "cut", "other kind", "no list", "other version", "cut list", "not utf-8",
        "cut envelope", "compressed"])
def test_data_that_is_no_page_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        DECODER.page(data)


@pytest.mark.parametrize(("data", "problem"), [
    (envelope("ServiceList", "v1", CUT), "a ServiceList that is not a valid protobuf message"),
    (b'{"items": []}', "a ServiceList that does not begin with the magic bytes of Kubernetes' protobuf"),
    (encode_list("Node", {}, []), "v1 NodeList instead of v1 ServiceList"),
    (envelope("ServiceList", "v1", b"") + b"\x1a\x04gzip",
     "a ServiceList in another encoding, which is not supported"),
], ids=["cut", "json", "other kind", "compressed"])
def test_a_refusal_names_the_kind(data: bytes, problem: str) -> None:
    with pytest.raises(Malformed, match=f"^{problem}$"):
        DECODER.page(data)


@pytest.mark.parametrize("kind", ["ADDED", "MODIFIED", "DELETED"])
def test_an_object_in_a_watch(kind: str) -> None:
    event = DECODER.watch_event(body(encode_event(kind, encode_object("Service", web()))))
    assert (event.type, event.resource_version, event.status) == (kind, "7", None)
    assert event.reading is not None
    assert event.reading.name == ("default", "web")


@pytest.mark.parametrize(("annotations", "end"), [
    ({}, False), ({"k8s.io/initial-events-end": "true"}, True), ({"k8s.io/initial-events-end": "no"}, False),
])
def test_a_bookmark(annotations: Json, end: bool) -> None:
    obj = encode_object("Service", {"metadata": {"resourceVersion": "9", "annotations": annotations}})
    event = DECODER.watch_event(body(encode_event("BOOKMARK", obj)))
    assert (event.type, event.resource_version, event.reading, event.initial_events_end) == (
        "BOOKMARK", "9", None, end)


def test_an_error_in_a_watch() -> None:
    event = DECODER.watch_event(body(encode_event("ERROR", encode_object("Status", EXPIRED))))
    assert event.status == Status(410, "Expired", "too old", StatusDetails(3))
    assert "too old" in str(status_error(event.status))


@pytest.mark.parametrize("data", [
    b"", CUT, b"\x0a\x01\xff", body(encode_event("ADDED", b"")), body(encode_event("ERROR", b"")),
    body(encode_event("ADDED", encode_object("Node", {"metadata": {"name": "n"}}))),
    body(encode_event("ADDED", envelope("Service", "v1", CUT))),
], ids=["nothing", "cut", "not utf-8", "no object", "no status", "other kind", "cut object"])
def test_data_that_is_no_watch_event_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        DECODER.watch_event(data)


def test_a_status_of_another_kind_is_refused() -> None:
    with pytest.raises(Malformed):
        read_status(encode_object("Service", web()))


def test_a_field_of_another_type_is_skipped_as_an_unknown_one() -> None:
    item = encode_item("Service", web()) + b"\x0a\x02\x08\x05" + b"\xfa\x7f\x01x"
    reading, = DECODER.page(encode_list("Service", {}, [item])).readings
    assert reading == DECODER.page(
        encode_list("Service", {}, [encode_item("Service", web())])).readings[0]


@pytest.mark.parametrize("seconds", [1 << 40, -(1 << 40), (1 << 63) - 1])
def test_an_impossible_time_is_reported(seconds: int) -> None:
    size = (seconds & (1 << 64) - 1)
    varint = b""
    while size > 127:
        varint, size = varint + bytes([size & 127 | 128]), size >> 7
    stamp = b"\x08" + varint + bytes([size])
    meta = b"\x42" + bytes([len(stamp)]) + stamp
    item = encode_item("Service", web()) + b"\x0a" + bytes([len(meta)]) + meta
    reading, = DECODER.page(encode_list("Service", {}, [item])).readings
    assert isinstance(reading.value, ServiceSet)
    assert [bad.field for bad in reading.bad] == ["metadata.creationTimestamp"]


@given(data=st.binary(max_size=80), resource=st.sampled_from(RESOURCES))
def test_no_bytes_make_decoding_raise(data: bytes, resource: Resource[Any, Any]) -> None:
    decoder = ProtobufDecoder(resource)
    reading, = decoder.page(encode_list(resource.kind, {}, [data])).readings
    assert reading.value is not None or reading.bad
    for hostile in (data, MAGIC + data, envelope(f"{resource.kind}List", resource.api_version, data),
                    body(encode_event("ADDED", envelope(resource.kind, resource.api_version, data)))):
        for read in (decoder.page, decoder.watch_event):
            with suppress(Malformed):
                read(hostile)


@given(data=st.data())
def test_no_changed_byte_makes_decoding_raise(data: st.DataObject) -> None:
    endpoint = {"addresses": ["10.1.0.1"], "conditions": {"ready": True}, "nodeName": "n",
                "hints": {"forZones": [{"name": "z"}]}}
    whole = bytearray(encode_list("EndpointSlice", {"resourceVersion": "1"}, [encode_item("EndpointSlice", {
        "metadata": {"name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4", "ports": [{"name": "a", "port": 80}], "endpoints": [endpoint]})]))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with suppress(Malformed):
        page = ProtobufDecoder(ENDPOINT_SLICES).page(bytes(whole[:data.draw(st.integers(0, len(whole)))]))
        for reading in page.readings:
            assert reading.value is not None or reading.bad


# -- frames

@given(bodies=st.lists(st.binary(max_size=30), max_size=8), cuts=st.lists(st.integers(0, 300), max_size=12))
def test_frames_are_found_however_the_stream_is_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(frame, bodies))
    places = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    frames = Frames(limit=20)
    found = [found for start, end in pairwise(places) for found in frames.feed(stream[start:end])]
    assert found == [content if len(content) <= 20 else None for content in bodies if content]


def test_a_frame_of_a_huge_length_holds_nothing() -> None:
    frames = Frames(limit=20)
    assert frames.feed(b"\xff\xff\xff\xff" + bytes(1000)) == [None]
    assert frames.feed(bytes(1000) + frame(b"a")) == []
    assert not frames._held


# -- negotiation

@pytest.mark.parametrize(("configured", "accept"), [
    ("application/vnd.kubernetes.protobuf", PROTOBUF_OR_JSON), ("application/json", JSON),
    ("application/vnd.kubernetes.protobuf,application/json", PROTOBUF_OR_JSON),
    ("application/json, application/vnd.kubernetes.protobuf", JSON),
    ("application/cbor, application/vnd.kubernetes.protobuf", PROTOBUF_OR_JSON), ("application/cbor", None),
])
def test_the_first_type_that_is_known_is_asked_for(configured: str, accept: str | None) -> None:
    assert accept_header(configured) == accept


def test_json_is_asked_for_where_the_package_for_protobuf_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    assert accept_header("application/vnd.kubernetes.protobuf") is None
    assert accept_header("application/vnd.kubernetes.protobuf, application/json") == JSON


def test_each_type_is_asked_for_without_managed_fields_first() -> None:
    assert without_managed_fields(JSON) == (
        "application/json;drop=metadata.managedFields,application/json")
    assert without_managed_fields(PROTOBUF_OR_JSON) == (
        "application/vnd.kubernetes.protobuf;drop=metadata.managedFields,application/vnd.kubernetes.protobuf,"
        "application/json;drop=metadata.managedFields,application/json")
