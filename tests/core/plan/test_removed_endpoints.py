"""Removed endpoints, and the time until which their connections are reset."""

from hypothesis import given
from hypothesis import strategies as st

from kproxy_conformance.builders import addresses, destinations, endpoint, endpoint_slice, node_view, service
from kproxy_core.model.address import Address, Protocol, parse_address
from kproxy_core.model.service import Destination, ServicePortKey
from kproxy_core.plan.endpoints import endpoints_of
from kproxy_core.plan.quarantine import Quarantined, Sentence
from kproxy_core.plan.removed_endpoints import (
    SECOND_LOOK,
    RemovedEndpoints,
    dialled_service_port,
    kept_destinations,
)
from kproxy_core.plan.service_plan import Frontend, ServicePlan, plan_service

NODE = node_view()
A, B, C = destinations("10.244.0.1:8080 10.244.0.2:8080 10.244.0.3:8080")
OF_NODE = Destination(parse_address("172.18.0.2"), 40001)
OWN = frozenset([OF_NODE.address])
WEB = ServicePortKey("default", "web", "", Protocol.TCP)
OTHER = ServicePortKey("default", "other", "", Protocol.TCP)


def of(*endpoints: Destination) -> frozenset[Destination]:
    return frozenset(endpoints)


def tracker(*kept: Destination) -> RemovedEndpoints:
    """A tracker of a process that has settled with these endpoints of `WEB`."""
    made = RemovedEndpoints()
    made.expect(WEB, of(*kept), is_first=True)
    made.put(WEB, of(*kept), 0)
    made.settle(made.search(0, OWN), ())
    return made


def kept(
    *conditions: tuple[bool, bool, bool], quarantined: Quarantined | None = None
) -> frozenset[Destination]:
    """What is kept of endpoints A, B, C with these conditions: ready, serving, terminating."""
    listed = endpoint_slice("web", *(
        endpoint(f"10.244.0.{number}", ready=ready, serving=serving, terminating=terminating)
        for number, (ready, serving, terminating) in enumerate(conditions, 1)))
    web = service("web", removed_endpoints="reset")
    (plan,) = plan_service(web, {"": listed}, NODE, quarantined)
    assert plan.resets_removed
    return kept_destinations(plan, endpoints_of(web.ports[0], {"": listed}))


def test_only_an_endpoint_that_terminates_and_serves_no_longer_is_removed() -> None:
    ready, draining, ended = (True, True, False), (False, True, True), (False, False, True)
    failing = (False, False, False)
    assert kept(ready, draining, ended) == of(A, B)
    assert kept(ready, failing, ended) == of(A, B), "its probe fails"
    assert kept(ready, draining, (True, False, True)) == of(A, B, C), "publishNotReadyAddresses"
    silent = {C: Sentence(1.0, 3)}
    assert kept(ready, draining, (True, False, True), quarantined=silent) == of(A, B, C), "in quarantine"


def test_the_annotation_wins_over_the_configuration() -> None:
    for annotation, configured, resets in (
        ("", "keep", False), ("", "reset", True), ("keep", "reset", False), ("reset", "keep", True),
    ):  # fmt: skip
        web = service("web", removed_endpoints=annotation)  # type: ignore[arg-type]
        (plan,) = plan_service(web, {}, node_view(removed_endpoints=configured))
        assert plan.resets_removed is resets, (annotation, configured)


def test_an_endpoint_is_removed_until_no_connection_to_it_is_left() -> None:
    tracked = tracker(A, B)
    assert tracked.put(WEB, of(B), 10)
    search = tracked.search(10, OWN)
    assert search.is_removed(WEB, A)
    assert search.endpoints == of(A)
    assert not search.is_removed(WEB, B)
    assert not search.is_removed(OTHER, A), "another Service still has it"
    tracked.settle(search, [(WEB, A)])
    assert tracked.is_removed(WEB, A)
    tracked.settle(tracked.search(30, OWN), ())
    assert not tracked.is_removed(WEB, A)
    assert tracked.newest is None


def test_a_connection_on_its_way_is_found_by_a_second_look() -> None:
    tracked = tracker(A, B)
    tracked.put(WEB, of(B), 10)
    tracked.settle(tracked.search(10.2, OWN), ())
    assert tracked.is_removed(WEB, A)
    tracked.settle(tracked.search(10 + SECOND_LOOK, OWN), ())
    assert not tracked.is_removed(WEB, A)


def test_an_endpoint_that_is_about_to_return_is_spared_before_the_rules_know_it() -> None:
    tracked = tracker(A, B)
    tracked.put(WEB, of(B), 10)
    search = tracked.search(11, OWN)
    tracked.expect(WEB, of(A, B))
    assert not tracked.is_removed(WEB, A)
    tracked.settle(search, [(WEB, A)])
    assert not tracked.is_removed(WEB, A), "by a search that began before"
    tracked.put(WEB, of(B), 12)
    assert tracked.is_removed(WEB, A), "the sync that was to add it failed"


def test_an_endpoint_that_leaves_while_syncs_fail_is_removed_after_the_first_success() -> None:
    tracked = tracker(A, B)
    tracked.expect(WEB, of(B))
    assert not tracked.is_removed(WEB, A), "the rules may still choose it"
    tracked.put(WEB, of(B), 10)
    assert tracked.is_removed(WEB, A)


def test_nothing_is_removed_from_a_service_that_is_deleted_or_keeps_connections() -> None:
    tracked = tracker(A, B)
    tracked.put(WEB, of(B), 10)
    assert not tracked.put(WEB, None, 11)
    assert not tracked.is_removed(WEB, A)
    tracked.put(WEB, of(B), 12)
    assert not tracked.is_removed(WEB, A)


def test_at_the_start_all_other_endpoints_are_removed_but_relays() -> None:
    tracked = RemovedEndpoints()
    tracked.expect(WEB, of(B), is_first=True)
    assert tracked.put(WEB, of(B), 0)
    search = tracked.search(0, OWN)
    assert search.endpoints is None
    assert search.is_removed(WEB, A)
    assert not search.is_removed(WEB, B)
    assert not search.is_removed(WEB, OF_NODE)
    assert not search.is_removed(OTHER, A)
    tracked.settle(search, [(WEB, A)])
    later = tracked.search(10, OWN)
    assert later.endpoints == of(A)
    assert not later.is_removed(WEB, C), "a Service that this process knows never had it"


def test_a_node_port_is_dialled_at_addresses_of_the_node_only() -> None:
    node, elsewhere, loopback = addresses("172.18.0.2 192.0.2.9 127.0.0.1")
    web = service("web", "80@30080")
    (plan,) = plan_service(web, {}, NODE)
    owned: dict[Frontend, ServicePlan] = dict.fromkeys(plan.frontends(), plan)

    def key_at(address: Address | None, port: int) -> ServicePortKey | None:
        frontend = Frontend(address, Protocol.TCP, port)
        return dialled_service_port(frontend, owned.get, {node})

    for address in (node, loopback, None):
        assert key_at(address, 30080) == plan.key
    assert key_at(elsewhere, 30080) is None
    assert key_at(plan.cluster_ip, 80) == plan.key
    assert key_at(plan.cluster_ip, 30080) is None


@given(st.lists(st.one_of(
    st.tuples(st.just("put"), st.frozensets(st.sampled_from([A, B, C]))),
    st.tuples(st.just("expect"), st.frozensets(st.sampled_from([A, B, C]))),
    st.tuples(st.just("search"), st.frozensets(st.sampled_from([A, B, C]))),
)))
def test_an_endpoint_that_a_service_has_is_never_removed(
    steps: list[tuple[str, frozenset[Destination]]]
) -> None:
    tracked = tracker(A)
    has = of(A)
    for now, (step, endpoints) in enumerate(steps, 1):
        if step == "put":
            tracked.put(WEB, endpoints, now)
            has = endpoints
        elif step == "expect":
            tracked.expect(WEB, endpoints)
            has |= endpoints
        else:
            tracked.settle(tracked.search(now, OWN), [(WEB, each) for each in endpoints])
        assert not any(tracked.is_removed(WEB, each) for each in has)
