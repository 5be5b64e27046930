"""Forwards: what their text means, what is refused, and what changes when they do."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_conformance.builders import addresses, node_view, plans, service_name
from kproxy_core.kube.directory import FORWARDS, Inventory, read_manifest
from kproxy_core.kube.encode import encode_forward
from kproxy_core.kube.forward import Objects
from kproxy_core.model.address import Family, Protocol, parse_address
from kproxy_core.model.events import Event, ServiceSet, SliceSet
from kproxy_core.model.service import Check, Endpoint, EndpointSlice, PortSpec, Service, SlicePort
from kproxy_core.plan.service_plan import ServicePlan

Json = dict[str, Any]
TCP, UDP = Protocol.TCP, Protocol.UDP
LISTEN, TO = ["203.0.113.20:443"], ["10.0.0.11:8443"]


def forward(listen: Any = LISTEN, to: Any = TO, **more: Any) -> Json:
    named = {"apiVersion": "kproxy.dev/v1", "kind": "Forward", "name": "web"}
    return {**named, "listen": listen, "to": to, **more}


def read(made: Json) -> Objects:
    reading = FORWARDS.from_json(json.dumps(made).encode())
    assert reading.bad == ()
    assert reading.value is not None
    return reading.value


def service_of(objects: Objects) -> Service:
    (found,) = [event.service for event in objects if isinstance(event, ServiceSet)]
    return found


def slices_of(objects: Objects) -> list[EndpointSlice]:
    return [event.slice for event in objects if isinstance(event, SliceSet)]


def port(number: int, protocol: Protocol = TCP, at: str = "", *, node: bool = False) -> PortSpec:
    return PortSpec(str(number), protocol, number, number if node else 0, addresses(at))


@pytest.mark.parametrize(("listen", "ports"), [
    (["203.0.113.20:443"], [port(443, at="203.0.113.20")]),
    (["203.0.113.20:443/tcp"], [port(443, at="203.0.113.20")]),
    (["203.0.113.20:53/udp", "203.0.113.20:53"],
     [port(53, UDP, at="203.0.113.20"), port(53, at="203.0.113.20")]),
    (["node:8443"], [port(8443, node=True)]),
    (["node:80", "203.0.113.20:80", "203.0.113.21:80", "203.0.113.21:81"],
     [port(80, at="203.0.113.20 203.0.113.21", node=True), port(81, at="203.0.113.21")]),
    (["[2001:db8::20]:443", "203.0.113.20:443"], [port(443, at="2001:db8::20 203.0.113.20")]),
])  # fmt: skip
def test_listen(listen: list[str], ports: list[PortSpec]) -> None:
    to = [*TO, "[fd00::11]:8443"] if "[" in listen[0] else TO
    found = service_of(read(forward(listen, to)))
    assert found == Service(name=service_name("Forward/web"), ports=tuple(ports), cluster_ips=())


def test_an_endpoint_slice_for_each_family_port_and_weight() -> None:
    found = slices_of(read(forward(["node:53/udp", "node:53"], [
        "10.0.0.11:53", "10.0.0.12:53 weight=1", "10.0.0.13:5353", "[fd00::1]:53", "10.0.0.14:53 weight=100",
        "10.0.0.15:53 weight=0",
    ])))  # fmt: skip
    wanted = [
        (Family.IPV4, 53, 1, "10.0.0.11 10.0.0.12"), (Family.IPV4, 5353, 1, "10.0.0.13"),
        (Family.IPV6, 53, 1, "fd00::1"), (Family.IPV4, 53, 100, "10.0.0.14"),
        (Family.IPV4, 53, 0, "10.0.0.15"),
    ]  # fmt: skip
    assert [(piece.family, piece.ports, piece.weight, piece.endpoints) for piece in found] == [
        (family, (SlicePort("53", UDP, number), SlicePort("53", TCP, number)), weight,
         tuple(map(Endpoint, addresses(ips))))
        for family, number, weight, ips in wanted
    ]
    assert {str(piece.service) for piece in found} == {"Forward/web"}
    assert len({piece.name for piece in found}) == len(found)


def test_equal_weights_are_none() -> None:
    (piece,) = slices_of(read(forward(to=["10.0.0.11:80 weight=3", "10.0.0.12:80 weight=3"])))
    assert piece.weight is None


@pytest.mark.parametrize(("given", "check"), [
    (None, None),
    ({"tcp": "2s"}, Check(2)),
    ({"tcp": "250ms"}, Check(0.25)),
    ({"http": "/healthz"}, Check(2, "/healthz")),
    ({"http": "/a?b=c", "every": "1m"}, Check(60, "/a?b=c")),
])
def test_check(given: Json | None, check: Check | None) -> None:
    assert [event.check for event in read(forward(check=given)) if isinstance(event, SliceSet)] == [check]


ONE_OF = "check: is not one of {tcp: 2s} and {http: /PATH, every: 2s}"
TWICE = ["10.0.0.11:80", "10.0.0.11:80 weight=2"]


@pytest.mark.parametrize(("made", "problems"), [
    (forward(["203.0.113.20"]), ["listen[0]: '203.0.113.20' is not ADDRESS:PORT[/udp] or node:PORT[/udp]"]),
    (forward(["203.0.113.20:443/sctp", "::1:443"]), [
        "listen[0]: '203.0.113.20:443/sctp' is not ADDRESS:PORT[/udp] or node:PORT[/udp]",
        "listen[1]: '::1:443' is not ADDRESS:PORT[/udp] or node:PORT[/udp]"]),
    (forward(["web.example:443"]), ["listen[0]: 'web.example' is not an IP address"]),
    (forward(["[203.0.113.20]:443"]), ["listen[0]: '[203.0.113.20]:443': brackets are for IPv6 addresses"]),
    (forward(["0.0.0.0:443"]), [
        "listen[0]: 0.0.0.0 is an unspecified, loopback, multicast or broadcast address"]),
    (forward(["203.0.113.20:0"], ["10.0.0.11:65536"]), [
        "listen[0]: 0 is not a port (1 to 65535)", "to[0]: 65536 is not a port (1 to 65535)"]),
    (forward(LISTEN * 2), ["listen[1]: '203.0.113.20:443' is there twice"]),
    (forward([]), ["listen: is missing"]),
    (forward("203.0.113.20:443"), ["listen: expected array, got str"]),
    (forward(to=[]), ["to: is missing"]),
    (forward(to=["10.0.0.11:80 weight=101"]), ["to[0]: 101 is not a weight (0 to 100)"]),
    (forward(to=["10.0.0.11:80 wieght=1"]), [
        "to[0]: '10.0.0.11:80 wieght=1' is not ADDRESS:PORT or ADDRESS:PORT weight=NUMBER"]),
    (forward(to=["10.0.0.11:80 weight=0"]), ["to: every IPv4 endpoint has weight 0"]),
    (forward(to=TWICE), ["to[1]: 10.0.0.11:80 is there twice"]),
    (forward(to=["[fd00::1]:80"]), [
        "listen[0]: no endpoint in `to` is IPv4",
        "to[0]: nothing in `listen` is IPv6"]),
    (forward(check={}), [ONE_OF]),
    (forward(check={"tcp": "2s", "http": "/"}), [ONE_OF]),
    (forward(check={"tcp": "2s", "every": "2s"}), [
        "check.every: is only for http; the time between checks by tcp is its value"]),
    (forward(check={"tcp": "0s"}), ["check.tcp: '0s' is not a duration from 100ms to 1h0m0s"]),
    (forward(check={"tcp": 2}), ["check.tcp: expected str, got int"]),
    (forward(check={"http": "healthz"}), ["check.http: 'healthz' is not a path such as /healthz"]),
    (forward(check={"http": "/a b\r\nc"}), ["check.http: '/a b\\r\\nc' is not a path such as /healthz"]),
    (forward(check={"icmp": "2s"}), ["check: object contains unknown field icmp"]),
    (forward(protocol="udp"), ["object contains unknown field protocol"]),
])  # fmt: skip
def test_a_forward_with_a_mistake_is_refused_with_its_file_its_name_and_the_field(
    made: Json, problems: list[str]
) -> None:
    found = read_manifest("lb.yaml", json.dumps(made).encode())
    assert [str(bad) for bad in found.bad] == [f"Forward web in lb.yaml: {problem}" for problem in problems]
    assert found.objects == [(("Forward", ("", "web")), None)]


@pytest.mark.parametrize(("name", "problem"), [
    (None, "Forward lb.yaml: name: is missing"),
    ("a b", "Forward a b in lb.yaml: name: 'a b' is not a DNS label"),
    (7, "Forward lb.yaml: name: expected str, got int"),
])
def test_a_forward_without_a_valid_name(name: object, problem: str) -> None:
    found = read_manifest("lb.yaml", json.dumps(forward(name=name)).encode())
    assert [str(bad) for bad in found.bad] == [problem]
    assert found.objects == []


SOCKETS = st.sampled_from(["10.0.0.1:80", "10.0.0.2:80", "10.0.0.2:81", "[fd00::1]:80", "[fd00::2]:81"])
WEIGHTS = st.sampled_from(["", " weight=1", " weight=7"])


@given(
    listen=st.lists(st.sampled_from(
        ["203.0.113.1:80", "203.0.113.2:80", "203.0.113.1:53/udp", "[2001:db8::1]:80", "node:80"],
    ), min_size=1, unique=True),
    to=st.dictionaries(SOCKETS, WEIGHTS, min_size=1),
)  # fmt: skip
def test_a_forward_is_encoded_as_one_that_means_the_same(listen: list[str], to: dict[str, str]) -> None:
    reading = FORWARDS.from_json(json.dumps(forward(listen, [a + b for a, b in to.items()])).encode())
    if reading.value is None:
        assert reading.bad
        return
    again = read(encode_forward(service_of(reading.value), slices_of(reading.value)))
    assert again == reading.value


# --- Plans


def planned(family: Family, made: Json) -> dict[str, ServicePlan]:
    objects = read(made)
    pieces = [piece for piece in slices_of(objects) if piece.family is family]
    found = plans(node_view(family=family), service_of(objects), *pieces)
    return {f"{key}/{key.protocol.name}": plan for key, plan in found.items()}


def test_each_port_is_served_at_its_own_addresses() -> None:
    made = forward(["203.0.113.20:443", "203.0.113.21:80", "node:8443", "203.0.113.20:53/udp"])
    found = planned(Family.IPV4, made)
    assert {name: (plan.load_balancer_ips, plan.node_port) for name, plan in found.items()} == {
        "Forward/web:443/TCP": (addresses("203.0.113.20"), 0),
        "Forward/web:80/TCP": (addresses("203.0.113.21"), 0),
        "Forward/web:8443/TCP": ((), 8443),
        "Forward/web:53/UDP": (addresses("203.0.113.20"), 0),
    }
    for plan in found.values():
        assert (plan.cluster_ip, plan.external_ips, plan.source_ranges) == (None, (), ())
        assert plan.cluster == ((parse_address("10.0.0.11"), 8443),)


def test_a_family_is_served_at_its_addresses_and_at_node_ports_if_it_has_endpoints() -> None:
    made = forward(["203.0.113.20:443", "node:8443"])
    assert planned(Family.IPV6, made) == {}
    both = forward(["203.0.113.20:443", "node:8443"], [*TO, "[fd00::11]:8443"])
    assert list(planned(Family.IPV6, both)) == ["Forward/web:8443/TCP"]


# --- Changes


def events(inventory: Inventory, *made: Json) -> list[Event]:
    content = "---\n".join(f"{json.dumps(one)}\n" for one in made)
    return inventory.apply({"lb.yaml": read_manifest("lb.yaml", content.encode())})


def kinds(found: list[Event]) -> list[str]:
    return [type(event).__name__ for event in found]


def test_only_what_changes_is_told() -> None:
    inventory = Inventory("node1")
    first = events(inventory, forward(to=[*TO, "10.0.0.12:80"]))
    assert kinds(first) == ["ServiceSet", "SliceSet", "SliceSet"]
    assert {event.origin for event in first if isinstance(event, ServiceSet)} == {"file lb.yaml"}
    assert events(inventory, forward(to=[*TO, "10.0.0.12:80"])) == []
    assert kinds(events(inventory, forward(to=[*TO, "10.0.0.13:80"]))) == ["SliceSet"]
    assert kinds(events(inventory, forward())) == ["SliceGone"]
    assert kinds(events(inventory, forward(check={"tcp": "1s"}))) == ["SliceSet"]
    assert kinds(events(inventory, forward(["203.0.113.21:443"], check={"tcp": "1s"}))) == ["ServiceSet"]
    assert kinds(events(inventory, forward(["203.0.113.21"]))) == ["BadObject"]
    assert kinds(inventory.apply({"lb.yaml": None})) == ["ServiceGone", "SliceGone"]


def test_a_service_of_the_same_name_is_another_one() -> None:
    web = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"},
           "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}}
    found = events(Inventory("node1"), forward(), web)
    assert [str(event.service.name) for event in found if isinstance(event, ServiceSet)] == [
        "Forward/web", "default/web"]
