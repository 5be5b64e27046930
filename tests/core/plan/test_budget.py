"""What one Service, and all Services of a node, may take of the kernel."""

import pytest

from kproxy_conformance.builders import endpoint_slice, node_view, service, service_name
from kproxy_core.contract.caveats import of_budget
from kproxy_core.contract.values import Scope, Update
from kproxy_core.model.address import Family
from kproxy_core.model.events import ServiceGone, ServiceSet, SliceSet
from kproxy_core.model.service import EndpointSlice, Service
from kproxy_core.plan import budget
from kproxy_core.plan.budget import (
    MOST_ELEMENTS,
    MOST_SLOTS_OF_SERVICE,
    count_elements,
    frontends_of_port,
    most_destinations,
)
from kproxy_core.plan.endpoints import MOST_DESTINATIONS
from kproxy_core.plan.service_plan import ServicePlan, plan_service
from kproxy_core.sync import plans as sync_plans
from tests.core.loop_rig import V4, Rig

NODE = node_view()


def ports(number: int) -> tuple[str, ...]:
    return tuple(f"p{at}:{at}" for at in range(1, number + 1))


def external(number: int) -> str:
    return " ".join(f"198.18.{at // 250}.{at % 250 + 1}" for at in range(number))


def planned(wanted: Service, *pieces: EndpointSlice) -> tuple[ServicePlan, ...]:
    return plan_service(wanted, {piece.name.name: piece for piece in pieces}, NODE)


def weighted(number: int, first: int = 65535, second: int = 1) -> tuple[EndpointSlice, EndpointSlice]:
    names = tuple(f"p{at}:8080" for at in range(1, number + 1))
    return (endpoint_slice("web", "10.0.0.1", ports=names, name="a", weight=first),
            endpoint_slice("web", "10.0.0.2", ports=names, name="b", weight=second))


@pytest.mark.parametrize(("number", "addresses", "is_hashed"), [
    (1, 0, True), (1, 63, True), (1, 64, False), (64, 0, True), (65, 0, False), (1000, 4, False),
])
def test_a_hash_is_left_out_where_its_tables_are_too_large(
    number: int, addresses: int, is_hashed: bool
) -> None:
    """64 tables of 1,021 slots fit into the budget."""
    web = service("web", *ports(number), external_ips=external(addresses), hash_by="client")
    names = tuple(f"p{at}:8080" for at in range(1, number + 1))
    found = planned(web, endpoint_slice("web", "10.0.0.1", "10.0.0.2", ports=names))
    assert {plan.hash_by for plan in found} == {"client" if is_hashed else ""}
    assert {plan.is_over_budget for plan in found} == {not is_hashed}
    assert sum(plan.extra_slots for plan in found) <= MOST_SLOTS_OF_SERVICE
    update = Update(Family.IPV4, Scope.RESYNC, NODE, {}, {plan.key: plan for plan in found})
    assert [caveat.service_port for caveat in of_budget(update)] == (
        [] if is_hashed else sorted(plan.key for plan in found))


@pytest.mark.parametrize(("endpoints", "is_hashed"), [
    (1021, True), (1022, True), (16_381, True), (16_382, False),
])
def test_a_hash_of_very_many_endpoints_is_left_out(endpoints: int, is_hashed: bool) -> None:
    hosts = [f"10.{at >> 16}.{at >> 8 & 255}.{at & 255}" for at in range(endpoints)]
    (found,) = planned(service("web", hash_by="flow"), endpoint_slice("web", *hosts))
    assert found.hash_by == ("flow" if is_hashed else "")


@pytest.mark.parametrize(("number", "slots"), [(1, 1024), (64, 1024), (128, 512), (1000, 65), (65_536, 0)])
def test_weights_are_rounded_to_fewer_slots_before_they_are_left_out(number: int, slots: int) -> None:
    few = tuple(f"p{at}:8080" for at in range(1, min(number, 3) + 1))
    web = service("web", *ports(number))
    pieces = [endpoint_slice("web", f"10.0.0.{at}", ports=few, name=str(at), weight=weight)
              for at, weight in ((1, 65535), (2, 1))]
    found = planned(web, *pieces)[0]
    assert sum(found.cluster_weights) == slots
    assert found.is_over_budget == (slots < 1024)


def test_weights_that_fit_are_exact() -> None:
    """75 to 25 need four slots, however many ports there are."""
    for plan in planned(service("web", *ports(1000)), *weighted(1000, 75, 25)):
        assert (plan.cluster_weights, plan.is_over_budget) == ((3, 1), False)


def test_endpoints_count_once_for_each_frontend() -> None:
    plain = service("web", "80@30080", external_ips=external(2), load_balancer_ips="192.0.2.1")
    assert frontends_of_port(plain, Family.IPV4) == 5
    assert frontends_of_port(plain, Family.IPV6) == 1, "the node port"
    piece = {"a": endpoint_slice("web", "10.0.0.1", "10.0.0.2")}
    assert count_elements(plain, piece, Family.IPV4) == 10
    assert most_destinations(service("web"), Family.IPV4) == MOST_DESTINATIONS
    assert most_destinations(service("web", external_ips=external(15)), Family.IPV4) == MOST_ELEMENTS // 16


def test_services_that_find_no_room_on_the_node_are_hashed_once_there_is(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_plans, "MOST_SLOTS_OF_NODE", 3 * (1021 - 2))
    rig = Rig(families=[V4])
    for number in range(5):
        rig.say(ServiceSet(service(f"s{number}", ip=f"10.96.0.{number + 1}", hash_by="client")),
                SliceSet(endpoint_slice(f"s{number}", "10.0.0.1", "10.0.0.2")))
    rig.start()

    def hashed() -> list[str]:
        return sorted(key.name for key, plan in rig.backend.held[V4].items() if plan.hash_by)

    assert hashed() == ["s0", "s1", "s2"]
    rig.say(SliceSet(endpoint_slice("s1", "10.0.0.1", "10.0.0.3")))
    assert hashed() == ["s0", "s1", "s2"]
    rig.say(ServiceGone(service_name("s0")))
    rig.settle()
    assert len(hashed()) == 3
    assert {"s1", "s2"} < set(hashed())
    rig.say(ServiceSet(service("s1", ip="10.96.0.2")))
    rig.settle()
    assert hashed() == ["s2", "s3", "s4"]


def test_limits_are_those_of_the_page() -> None:
    assert (budget.MOST_ELEMENTS, budget.MOST_SLOTS_OF_SERVICE, budget.MOST_SLOTS_OF_NODE) == (
        400_000, 65_536, 524_288)
