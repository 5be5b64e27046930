"""What one Service, and all Services of a node, may take of the kernel."""

from collections.abc import Iterator
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy_conformance.builders import cidrs, node_view, service
from kproxy_core.contract.caveats import of_limits
from kproxy_core.contract.values import Scope, Update
from kproxy_core.model.address import Address, Cidr, Family, Protocol
from kproxy_core.model.service import (
    Endpoint,
    EndpointSlice,
    PortSpec,
    Service,
    ServiceName,
    SliceName,
    SlicePort,
)
from kproxy_core.plan import budget
from kproxy_core.plan.budget import ORDINARY, WHOLE, NodeBudget, fit
from kproxy_core.plan.endpoints import MOST_DESTINATIONS, count_destinations, within_limit
from kproxy_core.plan.service_plan import ServicePlan, plan_service

NODE = node_view()


def numbered(number: int, first: int) -> tuple[Address, ...]:
    return tuple(Address(bytes((first, at >> 16, at >> 8 & 255, at & 255))) for at in range(number))


def large(
    ports: int = 1, *, external: int = 0, balancers: int = 0, ranges: int = 0, hash_by: str = "",
    name: str = "web", external_local: bool = False,
) -> Service:
    """Return a Service with so many ports, addresses and source ranges."""
    return Service(
        name=ServiceName("default", name), cluster_ips=(Address(b"\x0a\x60\0\1"),),
        ports=tuple(PortSpec(f"p{at}", Protocol.TCP, at + 1) for at in range(ports)),
        external_ips=numbered(external, 198), load_balancer_ips=numbered(balancers, 199),
        source_ranges=tuple(Cidr(address, 32) for address in numbered(ranges, 20)),
        hash_by="client" if hash_by == "client" else "", external_policy_local=external_local,
    )  # fmt: skip


def piece(
    endpoints: int = 2, ports: int = 1, name: str = "a", weight: int | None = None, first: int = 10
) -> EndpointSlice:
    return EndpointSlice(
        SliceName("default", name), ServiceName("default", "web"), Family.IPV4,
        tuple(SlicePort(f"p{at}", Protocol.TCP, 8080) for at in range(ports)),
        tuple(map(Endpoint, numbered(endpoints, first))), weight)


def planned(wanted: Service, *pieces: EndpointSlice) -> tuple[ServicePlan, ...]:
    return plan_service(wanted, {piece.name.name: piece for piece in pieces}, NODE)


def weighted(ports: int, first: int = 65535, second: int = 1) -> tuple[EndpointSlice, EndpointSlice]:
    return piece(1, ports, "a", first), piece(1, ports, "b", second, first=11)


@pytest.mark.parametrize(("ports", "addresses", "is_hashed"), [
    (1, 0, True), (1, 63, True), (1, 64, False), (64, 0, True), (65, 0, False), (1000, 4, False),
])
def test_a_hash_is_left_out_where_its_tables_are_too_large(
    ports: int, addresses: int, is_hashed: bool
) -> None:
    """64 tables of 1,021 slots fit into the budget."""
    found = planned(large(ports, external=addresses, hash_by="client"), piece(2, ports))
    assert {plan.hash_by for plan in found} == {"client" if is_hashed else ""}
    assert {plan.left_out for plan in found} == {() if is_hashed else ("hash",)}
    update = Update(Family.IPV4, Scope.RESYNC, NODE, {}, {plan.key: plan for plan in found})
    assert [caveat.service_port for caveat in of_limits(update)] == (
        [] if is_hashed else sorted(plan.key for plan in found))


@pytest.mark.parametrize(("endpoints", "is_hashed"), [
    (1021, True), (1022, True), (16_381, True), (16_382, False),
])
def test_a_hash_of_very_many_endpoints_is_left_out(endpoints: int, is_hashed: bool) -> None:
    (found,) = planned(large(hash_by="client"), piece(endpoints))
    assert found.hash_by == ("client" if is_hashed else "")


@pytest.mark.parametrize(("ports", "slots"), [(1, 1024), (64, 1024), (128, 512), (1000, 65), (65_536, 0)])
def test_weights_are_rounded_to_fewer_slots_before_they_are_left_out(ports: int, slots: int) -> None:
    found = planned(large(ports), *weighted(1))[0]
    assert sum(found.cluster_weights) == slots
    assert found.left_out == (("exact weights",) if slots < 1024 else ())


def test_weights_that_fit_are_exact() -> None:
    """75 to 25 need four slots, however many ports there are."""
    for plan in planned(large(1000), *weighted(1000, 75, 25)):
        assert (plan.cluster_weights, plan.left_out) == ((3, 1), ())


@pytest.mark.parametrize(("ports", "addresses", "served"), [
    (1, 1000, 1000), (1000, 30, 30), (1000, 31, 30), (1000, 1000, 30), (10_000, 1, 1), (30_000, 1, 0),
])
def test_external_addresses_beyond_the_limit_are_not_served(ports: int, addresses: int, served: int) -> None:
    found = planned(large(ports, external=addresses), piece(1))
    assert {len(plan.external_ips) for plan in found} == {served}
    assert all(plan.cluster_ip for plan in found)
    assert {plan.left_out for plan in found} == {("addresses",) if served < addresses else ()}


def test_load_balancer_ips_are_served_before_external_ips() -> None:
    found = planned(large(1000, external=29, balancers=2), piece(1))
    assert {(len(plan.load_balancer_ips), len(plan.external_ips)) for plan in found} == {(2, 28)}


@pytest.mark.parametrize(("ports", "balancers", "ranges", "admitted"), [
    (1, 1, 10_000, 10_000), (1, 1, 20_000, 16_384), (50, 1, 300, 300), (100, 1, 1000, 163),
    (1000, 1, 1000, 16), (100, 4, 1000, 40), (20_000, 1, 5, 1),
])
def test_source_ranges_beyond_the_limit_admit_nobody(
    ports: int, balancers: int, ranges: int, admitted: int
) -> None:
    found = planned(large(ports, balancers=balancers, ranges=ranges), piece(1))
    assert {len(plan.source_ranges) for plan in found if plan.load_balancer_ips} <= {admitted}
    assert {plan.left_out for plan in found} == {
        ("source ranges",) if admitted < ranges and found[0].load_balancer_ips else found[0].left_out}


def test_source_ranges_that_others_contain_do_not_count() -> None:
    web = service("web", load_balancer_ips="192.0.2.1", source_ranges=" ".join(
        ("10.0.0.0/8", *(f"10.{at >> 8}.{at & 255}.0/24" for at in range(20_000)))))
    (found,) = planned(web)
    assert (found.source_ranges, found.left_out) == (cidrs("10.0.0.0/8"), ())


def test_an_external_ip_that_is_a_load_balancer_ip_beyond_the_limit_is_not_served_without_source_ranges(
) -> None:
    both = numbered(1000, 199)
    web = Service(
        name=ServiceName("", "web"), ports=(PortSpec("", Protocol.TCP, 80),), external_ips=both,
        cluster_ips=(Address(b"\x0a\x60\0\1"),), load_balancer_ips=both, source_ranges=cidrs("192.0.2.0/24"))
    (found,) = planned(web)
    assert len(found.load_balancer_ips) == 128
    assert found.external_ips == ()


@pytest.mark.parametrize(("most", "kept"), [
    (0, {"a": 1}), (1, {"a": 1}), (3, {"a": 1}), (4, {"a": 1, "b": 1}), (6, {"a": 1, "b": 1, "c": 1}),
    (10, {"a": 2, "b": 2, "c": 1}), (13, {"a": 2, "b": 2, "c": 1}), (14, {"a": 3, "b": 3, "c": 1}),
    (17, {"a": 3, "b": 3, "c": 1}), (18, {"a": 4, "b": 4, "c": 1}),
])
def test_each_slice_keeps_as_many_endpoints_as_the_others(most: int, kept: dict[str, int]) -> None:
    pieces = {"c": piece(1, 2, "c"), "b": piece(4, 2, "b"), "a": piece(4, 2)}
    found = within_limit(pieces, most)
    assert {name: len(each.endpoints) for name, each in found.items() if each.endpoints} == kept


def test_endpoints_of_this_node_and_ready_ones_are_kept_first() -> None:
    hosts = [Endpoint(address, "other", ready=at != 1) for at, address in enumerate(numbered(5, 10))]
    hosts[4] = hosts[4]._replace(node="here", ready=False)
    whole = piece(1)
    found = within_limit({"a": EndpointSlice(
        whole.name, whole.service, whole.family, whole.ports, tuple(hosts))}, 3, "here")
    assert found["a"].endpoints == (hosts[4], hosts[0], hosts[2])


def test_a_cut_slice_is_the_same_until_it_changes() -> None:
    """So its sorted endpoints are remembered."""
    pieces = {name: piece(4, 1, name) for name in "abc"}
    first = within_limit(pieces, 6)
    second = within_limit(pieces | {"a": piece(3, 1, "a")}, 6)
    assert [first[name] is second[name] for name in "abc"] == [False, True, True]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=6), st.integers(1, 60))
def test_no_slice_loses_endpoints_that_there_is_room_for(sizes: list[tuple[int, int]], most: int) -> None:
    pieces = {str(at): piece(endpoints, ports, str(at)) for at, (endpoints, ports) in enumerate(sizes)}
    found = within_limit(pieces, most)
    used = count_destinations(found)
    assert used <= max([most, *(len(each.ports) for each in pieces.values())])
    cut = [name for name in pieces if len(found[name].endpoints) < len(pieces[name].endpoints)]
    if cut:
        assert used + sum(len(each.ports) for each in pieces.values()) > most
        least = min(len(found[name].endpoints) for name in cut)
        assert max(len(found[name].endpoints) for name in cut) <= least + 1


def test_endpoints_count_once_for_each_frontend() -> None:
    four = {"": piece(4)}
    web = service("web", "p0:80@30080", external_ips="198.18.0.1 198.18.0.2 2001:db8::1",
                  load_balancer_ips="192.0.2.1")
    found = fit(web, four, Family.IPV4)
    assert (found.external_addresses, found.load_balancer_ips) == (3, 1)
    assert found.elements == budget.OF_PORT + 5 * (1 + 4)
    assert fit(service("web"), four, Family.IPV4).destinations == MOST_DESTINATIONS
    assert fit(large(external=15), four, Family.IPV4).destinations == WHOLE.elements // 16


SHAPES = st.builds(
    large, st.sampled_from((1, 2, 300, 1000)), external=st.sampled_from((0, 1, 2000)),
    balancers=st.sampled_from((0, 1, 500)), ranges=st.sampled_from((0, 3, 2000)),
    hash_by=st.sampled_from(("", "client")), external_local=st.booleans())


@st.composite
def pieces_of(draw: st.DrawFn) -> dict[str, EndpointSlice]:
    weights = draw(st.lists(st.sampled_from((None, 1, 7, 65535)), max_size=3))
    ports, endpoints = draw(st.sampled_from(((1, 1000), (1, 2), (300, 3), (1000, 2))))
    return {str(at): piece(endpoints, ports, str(at), weight, first=10 + at)
            for at, weight in enumerate(weights)}


@settings(max_examples=40, deadline=None)
@given(SHAPES, pieces_of(), st.sampled_from((WHOLE, budget._SMALLEST)))
def test_a_plan_takes_no_more_than_was_counted_before_and_that_is_limited(
    web: Service, pieces: dict[str, EndpointSlice], limits: budget.Budget
) -> None:
    fitting = fit(web, pieces, Family.IPV4, limits)
    used = within_limit(pieces, fitting.destinations)
    plans = plan_service(web, used, NODE, None, fitting)
    frontends = sum(1 for plan in plans for _ in plan.frontends())
    endpoints = sum(len(plan.cluster) for plan in plans)
    assert frontends <= max(limits.frontends, 2 * len(plans))
    assert sum(len(tuple(plan.frontends())) * (1 + len(plan.cluster_slots)) for plan in plans
               ) <= fitting.elements
    assert endpoints <= max(fitting.destinations, len(plans))
    assert sum(len(plan.source_ranges) * len(plan.load_balancer_ips) for plan in plans) <= max(
        2 * limits.ranges, 2 * len(plans))
    assert sum(plan.elements for plan in plans) <= fitting.elements


class CountedPorts(tuple[SlicePort, ...]):
    """Ports of a slice that count how often they are looked at."""

    __slots__ = ()
    looks: ClassVar[int] = 0

    def __iter__(self) -> Iterator[SlicePort]:
        CountedPorts.looks += 1
        return super().__iter__()


def test_planning_does_not_look_at_all_ports_for_each_port() -> None:
    many = piece(1, 500)
    counted = EndpointSlice(many.name, many.service, many.family, CountedPorts(many.ports), many.endpoints)
    CountedPorts.looks = 0
    assert all(plan.cluster for plan in planned(large(500), counted))
    assert CountedPorts.looks <= 3


def test_planning_does_not_look_at_all_slices_for_each_port() -> None:
    """Those without endpoints, or without the port, have nothing to remember for it."""
    pieces = [
        EndpointSlice(SliceName("", str(at)), ServiceName("", "web"), Family.IPV4,
                      (SlicePort(f"p{at}", Protocol.TCP, 8080),), piece(1).endpoints) for at in range(20)]
    empty = piece(0, 20, "empty")
    assert all(plan.cluster for plan in planned(large(20), *pieces, empty))
    assert [len(each.rows) for each in (*pieces, empty)] == [0] * 21


# The node.

@pytest.fixture
def small_node(monkeypatch: pytest.MonkeyPatch) -> NodeBudget:
    """Return the budget of a node that has room for three hashes, and two in a namespace."""
    monkeypatch.setattr(budget, "ORDINARY", 20)
    monkeypatch.setattr(budget, "MOST_OF_NODE", 3 * 1100)
    monkeypatch.setattr(budget, "MOST_OF_NAMESPACE", 2 * 1100)
    return NodeBudget(Family.IPV4)


def is_hashed(node: NodeBudget, name: str) -> bool:
    """Return whether a Service with a hash is served in full."""
    return node.fit(service(name, hash_by="client"), {"": piece(2)}).slots > 0


def test_the_first_services_are_served_in_full(small_node: NodeBudget) -> None:
    assert [is_hashed(small_node, f"{at}/{at}") for at in range(5)] == [True] * 3 + [False] * 2
    assert is_hashed(small_node, "1/1")
    assert small_node.is_limited(ServiceName("3", "3"))
    assert not small_node.is_limited(ServiceName("1", "1"))


def test_one_namespace_leaves_room_for_others(small_node: NodeBudget) -> None:
    assert [is_hashed(small_node, str(at)) for at in range(4)] == [True, True, False, False]
    assert is_hashed(small_node, "other/other")


def test_only_those_that_have_room_again_are_tried_again(small_node: NodeBudget) -> None:
    for at in range(50):
        is_hashed(small_node, f"{at}/{at}")
    assert small_node.take_fitting() == []
    small_node.release(ServiceName("1", "1"))
    assert small_node.take_fitting() == [ServiceName("3", "3")]
    assert is_hashed(small_node, "3/3")
    assert small_node.take_fitting() == []
    small_node.fit(service("0/0"), None)
    assert small_node.take_fitting() == [ServiceName("4", "4")]


def test_services_of_ordinary_size_do_not_count() -> None:
    node = NodeBudget(Family.IPV4)
    for at in range(3000):
        web, slices = service(f"s{at}"), {"": piece(ORDINARY - budget.OF_PORT - 1)}
        assert node.fit(web, slices).left_out == ()
    assert node._total == 0


def test_a_service_without_room_has_its_first_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MOST_OF_NODE", 0)
    found = NodeBudget(Family.IPV4).fit(large(external=3), {"": piece(1000)})
    assert (found.destinations, found.external_addresses, found.left_out) == (100, 3, ("endpoints",))


def test_limits_are_those_of_the_pages() -> None:
    assert (*WHOLE, budget.MOST_OF_NODE, budget.MOST_OF_NAMESPACE, ORDINARY) == (
        32_768, 400_000, 16_384, 65_536, 1_000_000, 500_000, 1_000)
