"""Services: every field, every default and every refusal of the API, one row each."""

from typing import Any

import pytest
from msgspec.structs import replace

from kproxy_conformance.builders import addresses, cidrs, node_view, plans, port_spec, service, service_name
from kproxy_core.kube.decode import SERVICES
from kproxy_core.kube.reading import Reading
from kproxy_core.model.events import ServiceGone, ServiceSet
from kproxy_core.model.service import Service
from tests.core.kube.both_wires import read_alike

Json = dict[str, Any]


def read(spec: object, status: object = None, **meta: object) -> Reading[ServiceSet | ServiceGone]:
    metadata = {"name": "web", "namespace": "shop"} | meta
    return read_alike(SERVICES, {"metadata": metadata, "spec": spec, "status": status})


def served(spec: Json | None = None, status: object = None, **meta: object) -> tuple[Service, list[str]]:
    """The Service with *spec* on top of the plainest one there is, and the fields in it that are bad."""
    plain = {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}
    reading = read(plain | (spec or {}), status, **meta)
    assert isinstance(reading.value, ServiceSet), reading
    return reading.value.service, [bad.field for bad in reading.bad]


def refusal(spec: object, **meta: object) -> str:
    """Why the Service as a whole is of no use."""
    reading = read(spec, **meta)
    assert reading.value is None
    return str(reading.bad[-1])


def test_the_plainest_service_gets_the_defaults_of_an_api_server() -> None:
    assert served() == (service("shop/web", "80/TCP", ip="10.96.0.1", created=""), [])


def test_without_a_namespace_it_is_in_default() -> None:
    assert served(namespace=None)[0].name == service_name("default/web")


def test_every_field_at_once() -> None:
    spec = {
        "type": "LoadBalancer",
        "clusterIP": "10.96.0.1",
        "clusterIPs": ["10.96.0.1", "fd00::1"],
        "ipFamilies": ["IPv4", "IPv6"],
        "ports": [
            {"name": "http", "protocol": "TCP", "port": 80, "nodePort": 30080, "targetPort": "web"},
            {"name": "dns", "protocol": "UDP", "port": 53, "nodePort": 30053},
            {"name": "sig", "protocol": "SCTP", "port": 3868},
        ],
        "externalIPs": ["198.51.100.1", "fd00:198::1"],
        "loadBalancerSourceRanges": ["192.0.2.0/24", "2001:db8::/32"],
        "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}},
        "externalTrafficPolicy": "Local",
        "internalTrafficPolicy": "Local",
        "healthCheckNodePort": 31000,
        "selector": {"app": "web"},
    }
    status = {"loadBalancer": {"ingress": [{"ip": "203.0.113.1"}, {"ip": "fd00:203::1", "ipMode": "VIP"}]}}
    assert served(spec, status, creationTimestamp="2026-01-02T03:04:05Z") == (
        service(
            "shop/web", "http:80/TCP@30080", "dns:53/UDP@30053", "sig:3868/SCTP",
            ip="10.96.0.1 fd00::1", created="2026-01-02T03:04:05Z",
            external_ips="198.51.100.1 fd00:198::1", load_balancer_ips="203.0.113.1 fd00:203::1",
            source_ranges="192.0.2.0/24 2001:db8::/32", affinity=60,
            internal_local=True, external_local=True, health_check_node_port=31000,
        ), [])


@pytest.mark.parametrize(("spec", "meta"), [
    ({}, {}),
    (None, {}),
    ({"clusterIP": "None", "ports": [{"port": 80}]}, {}),
    ({"clusterIP": "None", "clusterIPs": ["None"]}, {}),
    ({"clusterIP": "", "ports": [{"port": 80}]}, {}),
    ({"clusterIP": "10.96.0.1"}, {}),
    ({"clusterIP": "10.96.0.1", "ports": []}, {}),
    ({"type": "ExternalName", "externalName": "example.invalid"}, {}),
    ({"type": "ExternalName", "clusterIP": "10.96.0.1", "ports": [{"port": 80}]}, {}),
    ({"clusterIP": "10.96.0.1", "ports": [{"port": 80}]},
     {"labels": {"service.kubernetes.io/service-proxy-name": "other"}}),
    ({"clusterIP": "10.96.0.1", "ports": [{"port": 80}]},
     {"labels": {"service.kubernetes.io/service-proxy-name": ""}}),
    ({"clusterIP": "junk", "ports": [{"port": 0}]},
     {"labels": {"service.kubernetes.io/service-proxy-name": "other"}}),
], ids=str)
def test_services_that_this_proxy_does_not_serve(spec: object, meta: Json) -> None:
    assert read(spec, **meta) == Reading(("shop", "web"), ServiceGone(service_name("shop/web")))


@pytest.mark.parametrize(("spec", "ips"), [
    ({"clusterIP": "10.96.0.1"}, "10.96.0.1"),
    ({"clusterIP": "fd00::1"}, "fd00::1"),
    ({"clusterIP": "010.096.000.001"}, "10.96.0.1"),
    ({"clusterIP": "::ffff:10.96.0.1"}, "10.96.0.1"),
    ({"clusterIP": None, "clusterIPs": ["10.96.0.1", "fd00::1"]}, "10.96.0.1 fd00::1"),
    ({"clusterIP": "", "clusterIPs": ["10.96.0.1", "fd00::1"]}, "10.96.0.1 fd00::1"),
    ({"clusterIP": "fd00::1", "clusterIPs": ["fd00::1", "10.96.0.1"]}, "fd00::1 10.96.0.1"),
    ({"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1", "10.96.0.2"]}, "10.96.0.1"),
    ({"clusterIP": "10.96.0.1", "ipFamilies": ["IPv4"]}, "10.96.0.1"),
    ({"clusterIP": "10.96.0.1", "ipFamilies": ["IPv4", "IPv6"]}, "10.96.0.1"),
    ({"clusterIPs": ["10.96.0.1", "fd00::1"], "clusterIP": "10.96.0.1", "ipFamilies": ["IPv4"]},
     "10.96.0.1"),
    ({"clusterIP": "fd00::1", "clusterIPs": ["fd00::1", "10.96.0.1"], "ipFamilies": ["IPv6", "IPv4"]},
     "fd00::1 10.96.0.1"),
    ({"clusterIP": "10.96.0.1", "ipFamilies": ["IPv4", "IPv4"]}, "10.96.0.1"),
], ids=str)
def test_cluster_ips_pair_with_families(spec: Json, ips: str) -> None:
    assert served(spec)[0].cluster_ips == addresses(ips)


@pytest.mark.parametrize(("spec", "field"), [
    ({"clusterIP": "10.96.300.1"}, "spec.clusterIP"),
    ({"clusterIP": "10.96.0.1/32"}, "spec.clusterIP"),
    ({"clusterIP": "fe80::1%eth0"}, "spec.clusterIP"),
    ({"clusterIP": " 10.96.0.1"}, "spec.clusterIP"),
    ({"clusterIP": "none"}, "spec.clusterIP"),
    ({"clusterIP": "0.0.0.0"}, "spec.clusterIP"),
    ({"clusterIP": "127.0.0.1"}, "spec.clusterIP"),
    ({"clusterIP": "224.0.0.1"}, "spec.clusterIP"),
    ({"clusterIP": "255.255.255.255"}, "spec.clusterIP"),
    ({"clusterIP": "::"}, "spec.clusterIP"),
    ({"clusterIP": "::1"}, "spec.clusterIP"),
    ({"clusterIP": "ff02::1"}, "spec.clusterIP"),
    ({"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1", "junk"]}, "spec.clusterIPs[1]"),
    ({"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.2"]}, "spec.clusterIPs[0]"),
    ({"clusterIP": "10.96.0.1", "ipFamilies": ["IPv6"]}, "spec.clusterIP"),
    ({"clusterIP": "10.96.0.1", "ipFamilies": ["IPv5"]}, "spec.ipFamilies[0]"),
    ({"clusterIP": "10.96.0.1", "ipFamilies": ["IPv4", None]}, "spec.ipFamilies[1]"),
    ({"clusterIP": 10}, "spec.clusterIP"),
    ({"clusterIPs": ["10.96.0.1", 5]}, "spec.clusterIPs[1]"),
    ({"clusterIPs": "10.96.0.1"}, "spec.clusterIPs"),
    ({"type": "Banana"}, "spec.type"),
    ({"ports": [{"port": 0}]}, "spec.ports[0].port"),
    ({"ports": [{"port": -1}]}, "spec.ports[0].port"),
    ({"ports": [{"port": 65536}]}, "spec.ports[0].port"),
    ({"ports": [{}]}, "spec.ports[0].port"),
    ({"ports": [{"port": "80"}]}, "spec.ports[0].port"),
    ({"ports": [{"port": 80.5}]}, "spec.ports[0].port"),
    ({"ports": [{"port": True}]}, "spec.ports[0].port"),
    ({"ports": [{"port": 10**30}]}, "spec.ports[0].port"),
    ({"ports": {"port": 80}}, "spec.ports"),
    ({"ports": [80]}, "spec.ports[0]"),
    ({"ports": [{"port": 80, "protocol": "SMTP"}]}, "spec.ports[0].protocol"),
    ({"ports": [{"port": 80, "protocol": "tcp"}]}, "spec.ports[0].protocol"),
    ({"ports": [{"port": 80, "nodePort": 70000}]}, "spec.ports[0].nodePort"),
    ({"ports": [{"port": 80, "nodePort": -5}]}, "spec.ports[0].nodePort"),
    ({"ports": [{"port": 80, "name": "a b"}]}, "spec.ports[0].name"),
    ({"ports": [{"port": 80, "name": "x" * 64}]}, "spec.ports[0].name"),
    ({"ports": [{"port": 80, "name": "a\n"}]}, "spec.ports[0].name"),
], ids=str)
def test_refused_as_a_whole(spec: Json, field: str) -> None:
    plain = {"ports": [{"port": 80}]} | ({} if "clusterIPs" in spec else {"clusterIP": "10.96.0.1"})
    reading = read(plain | spec)
    assert (reading.name, reading.value) == (("shop", "web"), None)
    assert [(bad.kind, bad.name, bad.field) for bad in reading.bad] == [("Service", "shop/web", field)]


@pytest.mark.parametrize(("meta", "field"), [
    ({"name": None}, "metadata.name"),
    ({"name": ""}, "metadata.name"),
    ({"name": "Web"}, "metadata.name"),
    ({"name": "-web"}, "metadata.name"),
    ({"name": "web-"}, "metadata.name"),
    ({"name": "web.shop"}, "metadata.name"),
    ({"name": 'web"; drop'}, "metadata.name"),
    ({"name": "web\n"}, "metadata.name"),
    ({"name": "wéb"}, "metadata.name"),
    ({"name": "w" * 64}, "metadata.name"),
    ({"name": 5}, "metadata.name"),
    ({"name": ["web"]}, "metadata.name"),
    ({"namespace": "a/b"}, "metadata.namespace"),
    ({"namespace": "kube system"}, "metadata.namespace"),
    ({"namespace": 7}, "metadata.namespace"),
], ids=str)
def test_invalid_names_are_refused(meta: Json, field: str) -> None:
    reading = read({"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}, **meta)
    assert (reading.name, reading.value) == (None, None)
    (bad,) = reading.bad
    assert bad.field == field
    assert str(bad).isascii()
    assert str(bad).isprintable()


def test_a_bad_port_does_not_affect_the_others() -> None:
    ports = [
        {"name": "a", "port": 80}, {"name": "b", "port": 0}, {"name": "c", "port": 81, "nodePort": 70000}]
    found, bad = served({"ports": ports})
    assert found.ports == (port_spec("a:80"),)
    assert bad == ["spec.ports[1].port", "spec.ports[2].nodePort"]


@pytest.mark.parametrize("number", [1, 16, 17, 40])
def test_each_bad_port_is_reported_once(number: int) -> None:
    ports = [{"name": f"p{at}", "port": 70000} for at in range(number)]
    reading = read({"clusterIP": "10.96.0.1", "ports": ports})
    assert reading.value is None
    assert [bad.field for bad in reading.bad] == [f"spec.ports[{at}].port" for at in range(number)]


def test_of_two_ports_with_one_name_and_protocol_the_first_is_used() -> None:
    ports = [{"port": 80}, {"port": 81}, {"port": 53, "protocol": "UDP"}]
    found, bad = served({"ports": ports})
    assert found.ports == (port_spec("80"), port_spec("53/UDP"))
    assert bad == ["spec.ports[1].name"]


@pytest.mark.parametrize(("texts", "kept", "bad"), [
    (["198.51.100.1", "fd00::1"], "198.51.100.1 fd00::1", []),
    (["198.51.100.1", "198.51.100.1"], "198.51.100.1", []),
    (["", " ", None, "198.51.100.1 "], "198.51.100.1", []),
    (["junk", "198.51.100.010"], "198.51.100.10", ["spec.externalIPs[0]"]),
    (["127.0.0.1", "0.0.0.0"], "", ["spec.externalIPs[0]", "spec.externalIPs[1]"]),
])
def test_external_ips(texts: list[str], kept: str, bad: list[str]) -> None:
    found, complaints = served({"externalIPs": texts})
    assert (found.external_ips, complaints) == (addresses(kept), bad)


@pytest.mark.parametrize(("ingress", "kept", "bad"), [
    ([{"ip": "203.0.113.1"}], "203.0.113.1", []),
    ([{"ip": "203.0.113.1", "ipMode": "VIP"}, {"ip": "fd00::1"}], "203.0.113.1 fd00::1", []),
    ([{"ip": "203.0.113.1", "ipMode": "Proxy"}], "", []),
    ([{"ip": "203.0.113.1", "ipMode": "Unheard"}], "", []),
    ([{"hostname": "lb.example"}, {"ip": ""}], "", []),
    ([{"ip": "lb.example"}, {"ip": "203.0.113.1"}], "203.0.113.1", ["status.loadBalancer.ingress[0].ip"]),
    ([{"ip": "junk", "ipMode": "Proxy"}], "", []),
    (None, "", []),
])
def test_load_balancer_addresses(ingress: object, kept: str, bad: list[str]) -> None:
    found, complaints = served({}, {"loadBalancer": {"ingress": ingress}})
    assert (found.load_balancer_ips, complaints) == (addresses(kept), bad)


@pytest.mark.parametrize("kind", ["ClusterIP", "NodePort", "LoadBalancer"])
@pytest.mark.parametrize("policy", ["Cluster", "Local"])
def test_the_load_balancer_addresses_of_other_types_are_served(kind: str, policy: str) -> None:
    """As in kube-proxy; an API server keeps them only if it is told to (AllowServiceLBStatusOnNonLB)."""
    status = {"loadBalancer": {"ingress": [{"ip": "203.0.113.1"}, {"ip": "203.0.113.2", "ipMode": "Proxy"}]}}
    found, complaints = served(
        {"type": kind, "externalTrafficPolicy": policy, "healthCheckNodePort": 31000}, status)
    assert (found.load_balancer_ips, complaints) == (addresses("203.0.113.1"), [])
    (plan,) = plans(node_view("node1"), found).values()
    assert plan.external_addresses == addresses("203.0.113.1")
    assert plan.external_policy_local == (policy == "Local" and kind != "ClusterIP")


@pytest.mark.parametrize("name", ["1", "10", "0web", "9-web", "1e3", "0x10", "1" * 63])
def test_names_may_begin_with_a_digit(name: str) -> None:
    found, complaints = served(name=name)
    assert (str(found.name), complaints) == (f"shop/{name}", [])


NOBODY_4, NOBODY_6 = "255.255.255.255/32", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff/128"
NOBODY = f"{NOBODY_4} {NOBODY_6}"


@pytest.mark.parametrize(("texts", "kept", "bad"), [
    (["192.0.2.0/24", " 198.51.100.0/24 "], "192.0.2.0/24 198.51.100.0/24", []),
    (["192.0.2.77/24", "192.0.2.0/24"], "192.0.2.0/24", []),
    (["192.0.2.0/024"], "192.0.2.0/24", []),
    ([], "", []),
    (["", "  ", None], NOBODY, [0, 1, 2]),
    (["192.0.2.0", "10.0.0.0/33", "x/8", "192.0.2.0/24"], f"192.0.2.0/24 {NOBODY_6}", [0, 1, 2]),
    (["junk", "0.0.0.0/0"], NOBODY_6, [0]),
    (["junk", "0.0.0.0/0", "::/0"], "", [0]),
    (["junk", "2001:db8::/32"], f"2001:db8::/32 {NOBODY_4}", [0]),
    (["192.0.2.0/24", "0.0.0.0/0"], "", []),
    (["0.0.0.0/0", "2001:db8::/32"], "2001:db8::/32", []),
    (["192.0.2.0/24", "::/0"], "192.0.2.0/24", []),
    (["junk"], NOBODY, [0]),
])
def test_source_ranges(texts: list[str], kept: str, bad: list[int]) -> None:
    found, complaints = served({"loadBalancerSourceRanges": texts})
    assert found.source_ranges == cidrs(kept)
    assert complaints == [f"spec.loadBalancerSourceRanges[{i}]" for i in bad]


def sticky(seconds: object) -> Json:
    return {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": seconds}}}


@pytest.mark.parametrize(("spec", "seconds", "bad"), [
    ({}, 0, []),
    ({"sessionAffinity": "None"}, 0, []),
    (sticky(5) | {"sessionAffinity": "None"}, 0, []),
    ({"sessionAffinity": "ClientIP"}, 10800, []),
    ({"sessionAffinity": "ClientIP", "sessionAffinityConfig": None}, 10800, []),
    ({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {}}}, 10800, []),
    (sticky(1), 1, []),
    (sticky(86400), 86400, []),
    (sticky(0), 10800, ["spec.sessionAffinityConfig.clientIP.timeoutSeconds"]),
    (sticky(86401), 10800, ["spec.sessionAffinityConfig.clientIP.timeoutSeconds"]),
    ({"sessionAffinity": "Cookie"}, 0, ["spec.sessionAffinity"]),
])
def test_affinity(spec: Json, seconds: int, bad: list[str]) -> None:
    found, complaints = served(spec)
    assert (found.affinity_seconds, complaints) == (seconds, bad)


@pytest.mark.parametrize(("spec", "internal", "external", "bad"), [
    ({}, False, False, []),
    ({"internalTrafficPolicy": "Local"}, True, False, []),
    ({"internalTrafficPolicy": "Cluster", "externalTrafficPolicy": "Cluster"}, False, False, []),
    ({"externalTrafficPolicy": "Local"}, False, False, []),
    ({"externalTrafficPolicy": "Local", "externalIPs": ["198.51.100.1"]}, False, True, []),
    ({"externalTrafficPolicy": "Local", "externalIPs": [""]}, False, True, []),
    ({"externalTrafficPolicy": "Local", "type": "NodePort"}, False, True, []),
    ({"externalTrafficPolicy": "local", "type": "NodePort"}, False, False, ["spec.externalTrafficPolicy"]),
    ({"internalTrafficPolicy": "Nearby"}, False, False, ["spec.internalTrafficPolicy"]),
])
def test_traffic_policies(spec: Json, internal: bool, external: bool, bad: list[str]) -> None:
    found, complaints = served(spec)
    assert (found.internal_policy_local, found.external_policy_local) == (internal, external)
    assert complaints == bad


@pytest.mark.parametrize(("kind", "policy", "port", "used", "bad"), [
    ("LoadBalancer", "Local", 31000, 31000, []),
    ("LoadBalancer", "Cluster", 31000, 0, []),
    ("NodePort", "Local", 31000, 0, []),
    ("LoadBalancer", "Local", 0, 0, ["spec.healthCheckNodePort"]),
    ("LoadBalancer", "Local", None, 0, ["spec.healthCheckNodePort"]),
    ("LoadBalancer", "Local", 65536, 0, ["spec.healthCheckNodePort"]),
    ("LoadBalancer", "Cluster", 0, 0, []),
])
def test_health_check_node_port(kind: str, policy: str, port: int | None, used: int, bad: list[str]) -> None:
    found, complaints = served({"type": kind, "externalTrafficPolicy": policy, "healthCheckNodePort": port})
    assert (found.health_check_node_port, complaints) == (used, bad)


@pytest.mark.parametrize(("stamp", "created", "bad"), [
    ("2026-01-02T03:04:05Z", "2026-01-02T03:04:05Z", []),
    ("2026-01-02T05:04:05.75+02:00", "2026-01-02T03:04:05Z", []),
    ("0001-01-01T00:00:00Z", "0001-01-01T00:00:00Z", []),
    (None, "", []),
    ("", "", []),
    ("yesterday", "", ["metadata.creationTimestamp"]),
    ("2026-01-02T03:04:05", "", ["metadata.creationTimestamp"]),
    ("0001-01-01T00:00:00+10:00", "", ["metadata.creationTimestamp"]),
    ("9" * 5000, "", ["metadata.creationTimestamp"]),
])
def test_creation_time(stamp: str | None, created: str, bad: list[str]) -> None:
    found, complaints = served(creationTimestamp=stamp)
    assert (found.created, complaints) == (created, bad)


def test_a_refusal_is_one_readable_line() -> None:
    assert refusal({"clusterIP": "10.96.0.1", "ports": [{"port": "80"}]}) == (
        "Service shop/web: spec.ports[0].port: expected int, got str")
    assert refusal({"clusterIP": "10.96.300.1", "ports": [{"port": 80}]}) == (
        "Service shop/web: spec.clusterIP: '10.96.300.1' is not an IP address")
    assert refusal({"clusterIP": "10.96.0.1", "ports": [{"port": 0}]}) == (
        "Service shop/web: spec.ports[0].port: 0 is not a port (1 to 65535)")


@pytest.mark.parametrize(("published", "annotations", "seconds"), [
    (True, {}, 0),
    (True, {"kproxy.dev/last-resort": "30s"}, 0),
    (False, {"kproxy.dev/last-resort": "30s"}, 30),
    (None, {}, None),
])
def test_with_not_ready_addresses_there_is_no_last_resort(
    published: bool | None, annotations: dict[str, str], seconds: float | None
) -> None:
    found, complaints = served({"publishNotReadyAddresses": published}, annotations=annotations)
    assert (found.last_resort, complaints) == (seconds, [])


@pytest.mark.parametrize(("name", "text", "field", "value"), [
    ("removed-endpoints", "keep", "removed_endpoints", "keep"),
    ("removed-endpoints", "reset", "removed_endpoints", "reset"),
    ("endpoint-health", "off", "endpoint_health", "off"),
    ("endpoint-health", "passive", "endpoint_health", "passive"),
    ("last-resort", "off", "last_resort", 0),
    ("last-resort", "1s", "last_resort", 1),
    ("last-resort", "1m30s", "last_resort", 90),
    ("last-resort", "1h", "last_resort", 3600),
    ("hash", "client", "hash_by", "client"),
    ("hash", "flow", "hash_by", "flow"),
])
def test_annotations(name: str, text: str, field: str, value: object) -> None:
    found, complaints = served(annotations={f"kproxy.dev/{name}": text, "else": "any"})
    assert found == replace(service("web", created=""), name=service_name("shop/web"), **{field: value})
    assert complaints == []


@pytest.mark.parametrize(("name", "value", "problem"), [
    ("removed-endpoints", "drop", "'drop' is ignored: it must be keep or reset"),
    ("removed-endpoints", "", "'' is ignored: it must be keep or reset"),
    ("endpoint-health", "Passive", "'Passive' is ignored: it must be off or passive"),
    ("endpoint-health", False, "'False' is ignored: it must be a string, in quotes"),
    ("last-resort", "30", "'30' is ignored: it must be off, or a duration from 1s to 1h0m0s"),
    ("last-resort", "999ms", "'999ms' is ignored: it must be off, or a duration from 1s to 1h0m0s"),
    ("last-resort", "61m", "'61m' is ignored: it must be off, or a duration from 1s to 1h0m0s"),
    ("last-resort", "-30s", "'-30s' is ignored: it must be off, or a duration from 1s to 1h0m0s"),
    ("last-resort", 30, "'30' is ignored: it must be a string, in quotes"),
    ("hash", "url", "'url' is ignored: it must be client or flow"),
    ("hash", ["client"], "\"['client']\" is ignored: it must be a string, in quotes"),
])
def test_a_wrong_annotation_does_not_affect_the_service(name: str, value: object, problem: str) -> None:
    plain = {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}
    reading = read(plain, annotations={f"kproxy.dev/{name}": value})
    assert isinstance(reading.value, ServiceSet)
    assert reading.value.service == service("shop/web", created="")
    assert [str(bad) for bad in reading.bad] == [
        f"Service shop/web: metadata.annotations[kproxy.dev/{name}]: {problem}"]
