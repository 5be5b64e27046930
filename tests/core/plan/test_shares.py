"""Weights of slices become shares of new connections: every rule, one row each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_conformance.builders import (
    addresses,
    destinations,
    endpoint,
    endpoint_slice,
    node_view,
    plans,
    service,
)
from kproxy_core.model.address import Protocol
from kproxy_core.model.service import EndpointSlice
from kproxy_core.plan.fate import Origin, Packet, decide
from kproxy_core.plan.service_plan import Frontend, ServicePlan, count_ready_local
from kproxy_core.plan.shares import MOST_SLOTS, reduce_weights, repeated
from kproxy_core.plan.stale_flows import StaleFlowTracker


@pytest.mark.parametrize(("weights", "reduced"), [
    ([], ()),
    ([7], ()),
    ([5, 5, 5], ()),
    ([3, 1], (3, 1)),
    ([75, 25], (3, 1)),
    ([100, 100, 50], (2, 2, 1)),
    ([100, 1], (100, 1)),
    ([99, 100], (99, 100)),
    ([65535, 1], (1023, 1)),
    ([65535, 65534], ()),
    ([65535, 1, 1, 1], (1021, 1, 1, 1)),
    ([1] * 1023 + [2], ()),
    ([1, 2] * 5000, ()),
], ids=lambda value: str(value)[:40])
def test_weights_in_lowest_terms(weights: list[int], reduced: tuple[int, ...]) -> None:
    assert reduce_weights(weights) == reduced


@given(st.lists(st.integers(1, 65535), min_size=2, max_size=60))
def test_slots_are_bounded_and_each_share_is_right_to_a_slot(weights: list[int]) -> None:
    numbers = reduce_weights(weights) or (1,) * len(weights)
    assert sum(numbers) <= MOST_SLOTS
    assert min(numbers) >= 1
    for number, weight in zip(numbers, weights, strict=True):
        wanted = weight / sum(weights)
        lifted = len(weights) / MOST_SLOTS  # by those whose share is less than a slot
        assert abs(number / sum(numbers) - wanted) <= 1.5 / MOST_SLOTS + lifted * wanted


def test_slots_repeat_an_endpoint() -> None:
    one, two = destinations("10.1.1.1:80 10.1.1.2:80")
    assert repeated((one, two), (3, 1)) == (one, one, one, two)


ONE, TWO, THREE = "10.1.1.1:8080", "10.1.1.2:8080", "10.1.1.3:8080"


def planned(*slices: EndpointSlice, internal_local: bool = False, zone: str = "") -> ServicePlan:
    node = node_view("node1", zone=zone)
    (plan,) = plans(node, service("web", "80", internal_local=internal_local), *slices).values()
    return plan


def piece(number: int, weight: int | None, *, node: str = "", ready: bool = True, serving: bool | None = None,
          terminating: bool = False, zones: str = "", address: str = "") -> EndpointSlice:
    one = endpoint(address or f"10.1.1.{number}", node, ready=ready, serving=serving, terminating=terminating,
                   zones=zones)
    return endpoint_slice("web", one, name=f"web-{number}", weight=weight)


@pytest.mark.parametrize(("slices", "cluster", "weights", "resting"), [
    ([piece(1, None), piece(2, None)], [ONE, TWO], (), []),
    ([piece(1, 100), piece(2, 100)], [ONE, TWO], (), []),
    ([piece(1, 100), piece(2, None)], [ONE, TWO], (), []),
    ([piece(1, 75), piece(2, 25)], [ONE, TWO], (3, 1), []),
    ([piece(1, 10), piece(2, None)], [ONE, TWO], (1, 10), []),
    ([piece(1, 0), piece(2, None)], [TWO], (), [ONE]),
    ([piece(1, 0), piece(2, 50), piece(3, 100)], [TWO, THREE], (1, 2), [ONE]),
    ([piece(1, 0), piece(2, 0)], [], (), [ONE, TWO]),
    # As if those of weight 0 did not exist: terminating endpoints replace them, hints of others decide.
    ([piece(1, 0), piece(2, None, ready=False, serving=True, terminating=True)], [TWO], (), [ONE]),
    ([piece(1, 0, zones="a"), piece(2, 1, zones="b"), piece(3, 3, zones="b")], [TWO, THREE], (1, 3), [ONE]),
    ([piece(1, 0), piece(2, 5, zones="a"), piece(3, 6, zones="b")], [TWO], (), [ONE]),
    ([piece(1, 1, ready=False), piece(2, 2), piece(3, 3)], [TWO, THREE], (2, 3), []),
    ([piece(1, 0, ready=False, serving=False), piece(2, None)], [TWO], (), []),
    ([piece(1, 0, ready=False, serving=True, terminating=True), piece(2, None)], [TWO], (), [ONE]),
    # Of two slices with one address, the later one decides, unless its endpoint terminates.
    ([piece(1, 1), piece(2, 2), piece(3, 6, address="10.1.1.1")], [ONE, TWO], (3, 1), []),
    ([piece(1, 1), piece(2, 2), piece(3, 6, address="10.1.1.1", terminating=True)], [ONE, TWO], (1, 2), []),
], ids=range(16))
def test_endpoints_by_weight(
    slices: list[EndpointSlice], cluster: list[str], weights: tuple[int, ...], resting: list[str]
) -> None:
    plan = planned(*slices, zone="a")
    assert plan.cluster == destinations(" ".join(cluster))
    assert plan.cluster_weights == weights
    assert plan.resting == destinations(" ".join(resting))
    assert plan.has_endpoints == bool(cluster)


def test_policy_local_chooses_by_weight_among_the_endpoints_of_the_node() -> None:
    plan = planned(piece(1, 10, node="node1"), piece(2, 30, node="node1"), piece(3, 99, node="node2"),
                   internal_local=True)
    assert (plan.local, plan.local_weights) == (destinations(f"{ONE} {TWO}"), (1, 3))
    resting = planned(piece(1, 0, node="node1"), piece(2, 5, node="node2"), internal_local=True)
    assert (resting.local, resting.has_endpoints, resting.has_internal_endpoints) == ((), True, False)


def test_a_service_without_weights_has_its_endpoints_as_slots() -> None:
    plan = planned(piece(1, None), piece(2, None))
    assert plan.cluster_slots is plan.cluster
    assert plan.has_plain_choice


@pytest.mark.parametrize(("slices", "shares", "because"), [
    ([piece(1, 75), piece(2, 25)], {ONE: 0.75, TWO: 0.25}, "internal traffic policy Cluster"),
    ([piece(1, 0), piece(2, 25)], {TWO: 1.0}, "internal traffic policy Cluster"),
    ([piece(1, 0)], {}, "no endpoint is usable on any node: those that were have weight 0"),
])
def test_the_fate_of_a_packet(slices: list[EndpointSlice], shares: dict[str, float], because: str) -> None:
    plan, (source, vip) = planned(*slices), addresses("10.1.1.9 10.96.0.1")
    packet = Packet(Origin.POD, source, vip, Protocol.TCP, 80)
    fate = decide(packet, Frontend(vip, Protocol.TCP, 80), plan, node_view("node1"))
    assert {choice.where: choice.share for choice in fate.choices} == {
        destinations(where)[0]: share for where, share in shares.items()}
    assert fate.because == because


def test_a_node_whose_endpoints_rest_fails_its_health_check() -> None:
    """Load balancers must not send it clients, which it would drop."""
    node = node_view("node1")
    slices = {"a": piece(1, 0, node="node1"), "b": piece(2, None, node="node1")}
    assert count_ready_local(slices, node) == 1
    assert count_ready_local({"a": slices["a"]}, node) == 0


def test_udp_flows_to_an_endpoint_of_weight_zero_are_not_stale() -> None:
    def dns(weight: int | None, *, gone: bool = False) -> ServicePlan:
        first = endpoint_slice("dns", endpoint("10.1.1.1", serving=False), ports=["53/UDP"], name="a",
                               weight=weight)
        second = endpoint_slice("dns", "10.1.1.2", ports=["53/UDP"], name="b")
        of = [second] if gone else [first, second]
        (plan,) = plans(node_view("node1"), service("dns", "53/UDP"), *of).values()
        return plan

    tracker, (vip,) = StaleFlowTracker(), addresses("10.96.0.1")
    (one,) = destinations("10.1.1.1:53")
    plan = dns(None)
    tracker.put(plan.key, plan, frozenset())
    tracker.take(frozenset())
    plan = dns(0)
    assert (plan.cluster, plan.resting) == (destinations("10.1.1.2:53"), (one,))
    tracker.put(plan.key, plan, frozenset())
    assert not tracker.take(frozenset())
    plan = dns(0, gone=True)
    tracker.put(plan.key, plan, frozenset())
    assert tracker.take(frozenset()).is_stale((vip, 53), one)
