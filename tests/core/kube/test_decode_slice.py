"""EndpointSlices, and Endpoints as slices: every rule of the API, one row each."""

from typing import Any

import msgspec
import pytest

from kproxy_conformance.builders import endpoint, endpoint_slice, port_spec
from kproxy_core.kube.decode import ENDPOINT_SLICES, ENDPOINTS
from kproxy_core.kube.reading import Reading
from kproxy_core.model.address import Family
from kproxy_core.model.events import SliceGone, SliceSet
from kproxy_core.model.service import EndpointSlice, SliceName
from tests.core.kube.both_wires import read_alike

Json = dict[str, Any]
SERVICE = {"kubernetes.io/service-name": "web"}
TRIGGER = "endpoints.kubernetes.io/last-change-trigger-time"


def read(piece: Json, **meta: object) -> Reading[SliceSet | SliceGone]:
    plain = {"addressType": "IPv4", "ports": [{"port": 8080}], "endpoints": [{"addresses": ["10.1.0.1"]}]}
    metadata = {"name": "web-1", "namespace": "shop", "labels": SERVICE} | meta
    return read_alike(ENDPOINT_SLICES, {"metadata": metadata} | plain | piece)


def taken(piece: Json | None = None, **meta: object) -> tuple[EndpointSlice, list[str]]:
    """The slice with *piece* on top of the plainest one there is, and the fields in it that are bad."""
    reading = read(piece or {}, **meta)
    assert isinstance(reading.value, SliceSet), reading
    return reading.value.slice, [bad.field for bad in reading.bad]


def test_the_plainest_slice_gets_the_defaults_of_an_api_server() -> None:
    assert taken() == (endpoint_slice("shop/web", "10.1.0.1", ports=["8080/TCP"]), [])


def test_every_field_at_once() -> None:
    piece = {
        "addressType": "IPv6",
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP", "appProtocol": "h2c"},
                  {"name": "dns", "port": 53, "protocol": "UDP"}],
        "endpoints": [
            {"addresses": ["fd00::1", "fd00::99"], "nodeName": "node1", "zone": "z9",
             "conditions": {"ready": False, "serving": True, "terminating": True},
             "hints": {"forZones": [{"name": "z1"}, {"name": "z2"}], "forNodes": [{"name": "node1"}]}},
            {"addresses": ["fd00::2"], "conditions": {"ready": True}},
        ],
    }
    assert taken(piece, namespace=None, annotations={TRIGGER: "1970-01-01T00:00:10.5Z"}) == (
        endpoint_slice(
            "default/web",
            endpoint("fd00::1", "node1", ready=False, serving=True, terminating=True,
                     zones="z1 z2", nodes="node1"),
            "fd00::2",
            ports=["http:8080", "dns:53/UDP"],
        ), [])


@pytest.mark.parametrize(("conditions", "ready", "serving", "terminating"), [
    (None, True, True, False),
    ({}, True, True, False),
    ({"ready": None, "serving": None, "terminating": None}, True, True, False),
    ({"ready": False}, False, True, False),
    ({"ready": True, "serving": False}, True, False, False),
    ({"terminating": True}, True, True, True),
], ids=str)
def test_absent_conditions(conditions: object, ready: bool, serving: bool, terminating: bool) -> None:
    (found,) = taken({"endpoints": [{"addresses": ["10.1.0.1"], "conditions": conditions}]})[0].endpoints
    assert (found.ready, found.serving, found.terminating) == (ready, serving, terminating)


@pytest.mark.parametrize(("piece", "meta"), [
    ({}, {"labels": None}),
    ({}, {"labels": {}}),
    ({}, {"labels": {"kubernetes.io/service-name": ""}}),
    ({}, {"labels": SERVICE | {"service.kubernetes.io/headless": ""}}),
    ({"addressType": "FQDN", "endpoints": [{"addresses": ["web.example"]}]}, {}),
], ids=str)
def test_slices_that_belong_to_no_served_service(piece: Json, meta: Json) -> None:
    assert read(piece, **meta) == Reading(("shop", "web-1"), SliceGone(SliceName("shop", "web-1")))


@pytest.mark.parametrize(("ports", "kept", "bad"), [
    ([{"name": "", "port": 80}], ["80"], []),
    ([{"port": 80}], ["80"], []),
    ([{"name": "a", "port": 80}, {"name": "b", "port": 81, "protocol": None}], ["a:80", "b:81"], []),
    ([{"name": None, "port": 80}, {"name": "b", "port": 81}], ["b:81"], ["ports[0].name"]),
    ([{"name": "a"}, {"name": "b", "port": 0}, {"name": "c", "port": 1}], ["c:1"],
     ["ports[0].port", "ports[1].port"]),
    ([{"name": "a", "port": 70000}, {"name": "b", "port": -1}, {"name": "c", "port": 65535}], ["c:65535"],
     ["ports[0].port", "ports[1].port"]),
    ([{"name": "a", "port": 80, "protocol": "QUIC"}, {"name": "b", "port": 80}], ["b:80"],
     ["ports[0].protocol"]),
    ([{"name": "a b", "port": 80}], [], ["ports[0].name"]),
    ([{"name": "a", "port": 80}, {"name": "a", "port": 80, "protocol": "UDP"}], ["a:80", "a:80/UDP"], []),
    ([], [], []),
    (None, [], []),
], ids=str)
def test_ports(ports: object, kept: list[str], bad: list[str]) -> None:
    found, complaints = taken({"ports": ports})
    wanted = [port_spec(text) for text in kept]
    assert found.ports == tuple((port.name, port.protocol, port.port) for port in wanted)
    assert complaints == bad


@pytest.mark.parametrize(("family", "addresses", "kept", "bad"), [
    ("IPv4", ["10.1.0.1", "10.1.0.2"], ["10.1.0.1", "10.1.0.2"], []),
    ("IPv4", ["010.001.000.007"], ["10.1.0.7"], []),
    ("IPv4", ["10.1.0.1", "not-an-address", "10.1.0.256", ""], ["10.1.0.1"], [1, 2, 3]),
    ("IPv4", ["fd00::1", "10.1.0.1"], ["10.1.0.1"], [0]),
    ("IPv6", ["10.1.0.1", "::ffff:10.1.0.1", "fd00::1"], ["fd00::1"], [0, 1]),
    ("IPv4", ["0.0.0.0", "127.0.0.1", "224.0.0.1", "255.255.255.255"], [], [0, 1, 2, 3]),
    ("IPv6", ["::", "::1", "ff02::1", "fe80::1%eth0"], [], [0, 1, 2, 3]),
])
def test_addresses(family: str, addresses: list[str], kept: list[str], bad: list[int]) -> None:
    entries = [{"addresses": [address]} for address in addresses]
    found, complaints = taken({"addressType": family, "endpoints": entries})
    assert (found.endpoints, found.family) == (tuple(map(endpoint, kept)), Family(family))
    assert complaints == [f"endpoints[{i}].addresses[0]" for i in bad]


@pytest.mark.parametrize("entries", [
    None, [], [{}], [{"addresses": None}], [{"addresses": []}],
])
def test_no_address_is_no_endpoint(entries: object) -> None:
    found, complaints = taken({"endpoints": entries})
    assert (found.endpoints, complaints) == ((), [])


@pytest.mark.parametrize(("piece", "meta", "field"), [
    ({"addressType": "IPv5"}, {}, "addressType"),
    ({"addressType": None}, {}, "addressType"),
    ({"addressType": 4}, {}, "addressType"),
    ({}, {"labels": {"kubernetes.io/service-name": 'web" }'}},
     "metadata.labels[kubernetes.io/service-name]"),
    ({"endpoints": [{"addresses": ["10.1.0.1"]}] * 1001}, {}, "endpoints"),
    ({"ports": [{"port": 80}] * 20001}, {}, "ports"),
    ({"ports": [{"port": 80}] * 101, "endpoints": [{"addresses": ["10.1.0.1"]}] * 1000}, {}, "ports"),
    ({"endpoints": [{"addresses": "10.1.0.1"}]}, {}, "endpoints[0].addresses"),
    ({"endpoints": [{"addresses": [10]}]}, {}, "endpoints[0].addresses[0]"),
    ({"endpoints": [{"addresses": ["10.1.0.1"], "conditions": {"ready": "yes"}}]}, {},
     "endpoints[0].conditions.ready"),
    ({"endpoints": {"addresses": ["10.1.0.1"]}}, {}, "endpoints"),
    ({"ports": [{"port": "http"}]}, {}, "ports[0].port"),
    ({"endpoints": [{"addresses": ["10.1.0.1"], "hints": {"forZones": ["z1"]}}]}, {},
     "endpoints[0].hints.forZones[0]"),
], ids=lambda value: str(value)[:60])
def test_refused_as_a_whole(piece: Json, meta: Json, field: str) -> None:
    reading = read(piece, **meta)
    assert (reading.name, reading.value) == (("shop", "web-1"), None)
    assert [(bad.kind, bad.name, bad.field) for bad in reading.bad] == [
        ("EndpointSlice", "shop/web-1", field)]


@pytest.mark.parametrize("meta", [
    {"name": None}, {"name": "web 1"}, {"name": 'web"\n'}, {"name": "x" * 254}, {"name": "a..b"}, {"name": 1},
    {"namespace": "Shop"}, {"namespace": "a.b"},
], ids=str)
def test_invalid_names_are_refused(meta: Json) -> None:
    reading = read({}, **meta)
    assert (reading.name, reading.value, len(reading.bad)) == (None, None, 1)


@pytest.mark.parametrize("name", ["web.shop-1", "x" * 253, f"{'x' * 64}.{'y' * 64}"])
def test_a_slice_name_may_have_dots_and_parts_of_more_than_63_characters(name: str) -> None:
    assert taken(name=name)[0].name == ("shop", name)


def test_equal_parts_of_slices_are_shared() -> None:
    entry = {"addresses": ["10.1.0.1"], "nodeName": "node1", "hints": {"forZones": [{"name": "z1"}]}}
    one, _ = taken({"endpoints": [entry]}, name="one")
    two, _ = taken({"endpoints": [entry]}, name="two")
    assert one.ports is two.ports
    assert one.endpoints[0].node is two.endpoints[0].node
    assert one.endpoints[0].zone_hints is two.endpoints[0].zone_hints


@pytest.mark.parametrize(("stamp", "moment", "bad"), [
    ("1970-01-01T00:00:10Z", 10.0, []),
    ("1970-01-01T00:00:10.123456789Z", 10.123456, []),
    ("1970-01-01T01:00:10+01:00", 10.0, []),
    ("", None, []),
    ("soon", None, [f"metadata.annotations[{TRIGGER}]"]),
    ("1970-01-01T00:00:10", None, [f"metadata.annotations[{TRIGGER}]"]),
])
def test_trigger_time(stamp: str, moment: float | None, bad: list[str]) -> None:
    reading = read({}, annotations={TRIGGER: stamp})
    assert isinstance(reading.value, SliceSet)
    assert (reading.value.trigger_time, [bad.field for bad in reading.bad]) == (moment, bad)


OURS, CILIUMS = "kproxy.dev/weight", "service.cilium.io/weight"


@pytest.mark.parametrize(("annotations", "weight", "bad"), [
    ({}, None, []),
    ({OURS: "0"}, 0, []),
    ({OURS: "100"}, 100, []),
    ({OURS: "101"}, None, [OURS]),
    ({OURS: "-1"}, None, [OURS]),
    ({OURS: ""}, None, [OURS]),
    ({OURS: "1.5"}, None, [OURS]),
    ({OURS: " 1"}, None, [OURS]),
    ({OURS: "\u0663"}, None, [OURS]),
    ({OURS: "9" * 5000}, None, [OURS]),
    ({OURS: 3}, None, [OURS]),
    ({OURS: {"a": [1]}}, None, [OURS]),
    ({OURS: None}, None, []),
    ({CILIUMS: "0"}, 0, []),
    ({CILIUMS: "65535"}, 65535, []),
    ({CILIUMS: "65536"}, None, [CILIUMS]),
    ({CILIUMS: "heavy"}, None, [CILIUMS]),
    ({OURS: "5", CILIUMS: "7"}, 5, []),
    ({OURS: "heavy", CILIUMS: "7"}, 7, [OURS]),
    ({OURS: "5", "kubectl.kubernetes.io/last-applied-configuration": '{"kproxy.dev/weight": "7"}'}, 5, []),
], ids=lambda value: str(value)[:60])
def test_weight(annotations: Json, weight: int | None, bad: list[str]) -> None:
    found, complaints = taken(annotations=annotations)
    assert found == endpoint_slice("shop/web", "10.1.0.1", weight=weight)
    assert complaints == [f"metadata.annotations[{name}]" for name in bad]


# --- Endpoints, mirrored


def mirrored(subsets: object, **meta: object) -> tuple[tuple[EndpointSlice, ...], list[str]]:
    metadata = {"name": "web", "namespace": "shop"} | meta
    reading = ENDPOINTS.from_json(msgspec.json.encode({"metadata": metadata, "subsets": subsets}))
    assert reading.value is not None, reading
    return reading.value, [bad.field for bad in reading.bad]


def test_one_slice_for_each_subset_and_family() -> None:
    subsets = [
        {"addresses": [{"ip": "10.1.0.1", "nodeName": "node1"}, {"ip": "fd00::1"}],
         "notReadyAddresses": [{"ip": "10.1.0.2"}], "ports": [{"port": 8080}]},
        {"addresses": [{"ip": "10.1.0.3"}], "ports": [{"name": "dns", "port": 53, "protocol": "UDP"}]},
    ]
    assert mirrored(subsets) == ((
        endpoint_slice("shop/web", endpoint("10.1.0.1", "node1"),
                       endpoint("10.1.0.2", ready=False, serving=True), name="endpoints:web:0:IPv4"),
        endpoint_slice("shop/web", "fd00::1", name="endpoints:web:0:IPv6"),
        endpoint_slice("shop/web", "10.1.0.3", ports=["dns:53/UDP"], name="endpoints:web:1:IPv4"),
    ), [])


@pytest.mark.parametrize("meta", [
    {"labels": {"endpointslice.kubernetes.io/skip-mirror": "true"}},
    {"labels": {"service.kubernetes.io/headless": ""}},
    {"annotations": {"control-plane.alpha.kubernetes.io/leader": "{}"}},
])
def test_endpoints_that_are_not_to_be_mirrored(meta: Json) -> None:
    assert mirrored([{"addresses": [{"ip": "10.1.0.1"}], "ports": [{"port": 80}]}], **meta) == ((), [])


def test_a_skip_mirror_label_other_than_true_is_ignored() -> None:
    meta = {"labels": {"endpointslice.kubernetes.io/skip-mirror": "false"}}
    assert len(mirrored([{"addresses": [{"ip": "10.1.0.1"}], "ports": [{"port": 80}]}], **meta)[0]) == 1


@pytest.mark.parametrize("subsets", [None, [], [{}], [{"addresses": None, "ports": None}]])
def test_empty_endpoints(subsets: object) -> None:
    assert mirrored(subsets) == ((), [])


def test_bad_parts_of_endpoints_do_not_affect_the_rest() -> None:
    subsets = [{"addresses": [{"ip": "junk"}, {"ip": "10.1.0.1"}, {}, {"ip": "127.0.0.1"}],
                "ports": [{"name": "a", "port": 0}, {"name": "b", "port": 80}]}]
    slices, bad = mirrored(subsets)
    assert slices == (endpoint_slice("shop/web", "10.1.0.1", ports=["b:80"], name="endpoints:web:0:IPv4"),)
    assert bad == ["subsets[0].ports[0].port", "subsets[0].addresses[0].ip", "subsets[0].addresses[2].ip",
                   "subsets[0].addresses[3].ip"]


@pytest.mark.parametrize(("subset", "field"), [
    ({"addresses": [{"ip": "10.1.0.1"}] * 1001}, "subsets[0]"),
    ({"addresses": [{"ip": "10.1.0.1"}] * 1000, "ports": [{"port": 80}] * 101}, "subsets[0]"),
    ({"addresses": [{"ip": 1}]}, "subsets[0].addresses[0].ip"),
], ids=["addresses", "destinations", "type"])
def test_endpoints_refused_as_a_whole(subset: Json, field: str) -> None:
    endpoints = {"metadata": {"name": "web", "namespace": "shop"}, "subsets": [subset]}
    reading = ENDPOINTS.from_json(msgspec.json.encode(endpoints))
    assert (reading.name, reading.value) == (("shop", "web"), None)
    assert [bad.field for bad in reading.bad] == [field]
