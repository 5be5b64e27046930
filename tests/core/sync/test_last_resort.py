"""Services whose endpoints all become unready: what they use, and for how long."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from kproxy_core.contract.errors import SyncFailed
from kproxy_core.model.events import Event, ServiceGone, ServiceSet, SliceGone, SliceSet
from kproxy_core.model.service import Endpoint, SliceName
from kproxy_core.testing.builders import endpoint, endpoint_slice, service, service_name
from tests.core.loop_rig import V4, V6, Rig

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"
A6 = "fd00::1"
WEB = service_name("web")


def ready(*addresses: str) -> list[Endpoint]:
    return [endpoint(address, "node1") for address in addresses]


def down(*addresses: str) -> list[Endpoint]:
    """Endpoints that are listed, neither ready nor terminating."""
    return [endpoint(address, "node1", ready=False) for address in addresses]


def piece(*endpoints: Endpoint, name: str = "", ports: Sequence[str] = ("8080",)) -> SliceSet:
    return SliceSet(endpoint_slice("web", *endpoints, name=name, ports=ports))


def rig_with(*events: Event, **options: object) -> Rig:
    """A rig with the Service ``web``, whose last resort lasts 30 s."""
    rig = Rig(families=[V4])
    made = service("web", **{"last_resort": 30, **options})  # type: ignore[arg-type]
    rig.start(ServiceSet(made), *events)
    return rig


def used(rig: Rig) -> dict[str, list[str]]:
    """The endpoints of each service port in the backend, by the name of the port."""
    return {
        key.port_name: [".".join(map(str, where.address)) for where in plan.cluster]
        for key, plan in rig.backend.held[V4].items()
    }


def at(rig: Rig, now: float) -> Rig:
    rig.clock.now = now
    rig.turn()
    return rig


# What is used, and until when


def test_endpoints_that_all_become_unready_are_used_for_their_time_and_no_event_ends_it() -> None:
    rig = rig_with(piece(*ready(A, B, C)))
    rig.clock.now = 100.0
    assert rig.say(piece(*down(A, B, C))) == [], "the kernel has nothing to learn"
    assert rig.loop.next_wakeup() == 130.0
    assert used(at(rig, 129.9)) == {"": [A, B, C]}
    assert used(at(rig, 130.0)) == {"": []}
    assert rig.loop.next_wakeup() == 3600.0


def test_without_a_last_resort_they_are_refused_at_once() -> None:
    for seconds in (None, 0):
        rig = rig_with(piece(*ready(A)), last_resort=seconds)
        rig.say(piece(*down(A)))
        assert used(rig) == {"": []}


def test_one_of_three_that_becomes_unready_is_not_used() -> None:
    rig = rig_with(piece(*ready(A, B, C)))
    rig.say(piece(*down(A), *ready(B, C)))
    assert used(rig) == {"": [B, C]}
    assert rig.loop.next_wakeup() == 3600.0
    rig.clock.now = 100.0
    rig.say(piece(*down(A, B, C)))
    assert used(rig) == {"": [B, C]}, "A was not ready last"


def test_they_may_become_unready_one_after_the_other() -> None:
    rig = rig_with(piece(*ready(A, B, C)))
    for now, gone in enumerate((down(A), down(A, B), down(A, B, C)), start=100):
        rig.clock.now = now
        rig.say(piece(*gone, *ready(*[A, B, C][len(gone):])))
    assert used(rig) == {"": [A, B, C]}
    assert rig.loop.next_wakeup() == 132.0, "from the last one on"


STEPS: dict[str, tuple[list[list[Event]], list[str]]] = {
    # batches of events after A, B and C became unready at once: what is used then
    "one is ready again": ([[piece(*ready(A), *down(B, C))]], [A]),
    "another is ready": ([[piece(*down(A, B, C), *ready("10.0.0.4"))]], ["10.0.0.4"]),
    "another is not": ([[piece(*down(A, B, C, "10.0.0.4"))]], [A, B, C]),
    "one left": ([[piece(*down(B, C))]], [B, C]),
    "one left and returned": ([[piece(*down(B, C))], [piece(*down(A, B, C))]], [B, C]),
    "one left and returned, in one batch": ([[piece(*down(B, C)), piece(*down(A, B, C))]], [B, C]),
    "one terminates": ([[piece(*down(A, B), endpoint(C, ready=False, terminating=True))]], [A, B]),
    "one terminates and serves": (
        [[piece(*down(A, B), endpoint(C, ready=False, serving=True, terminating=True))]], [C]),
    "it terminated and left": (
        [[piece(*down(A, B), endpoint(C, ready=False, serving=True, terminating=True))],
         [piece(*down(A, B))]], [A, B]),
    "scaled to zero": ([[piece()]], []),
    "scaled to zero and back": ([[piece()], [piece(*down(A, B, C))]], []),
    "slice deleted": ([[SliceGone(SliceName("default", "web-1"))]], []),
    "slice deleted and created again": (
        [[SliceGone(SliceName("default", "web-1")), piece(*down(A, B, C))]], []),
    "slice deleted and created again with a ready one": (
        [[SliceGone(SliceName("default", "web-1")), piece(*ready(A), *down(B, C))]], [A]),
    "moved to another slice": (
        [[piece(*down(A, B, C), name="web-2"), SliceGone(SliceName("default", "web-1"))]], [A, B, C]),
    "switched off": ([[ServiceSet(service("web", last_resort=0))]], []),
    "switched off and on": (
        [[ServiceSet(service("web", last_resort=0))], [ServiceSet(service("web", last_resort=30))]], []),
    "Service deleted and created again": (
        [[ServiceGone(WEB)], [ServiceSet(service("web", last_resort=30))]], []),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_ends_it(name: str) -> None:
    batches, expected = STEPS[name]
    rig = rig_with(piece(*ready(A, B, C)))
    rig.say(piece(*down(A, B, C)))
    for events in batches:
        rig.say(*events)
    assert used(rig) == {"": expected}


def test_readiness_that_returned_starts_it_anew() -> None:
    rig = rig_with(piece(*ready(A, B)))
    rig.say(piece(*down(A, B)))
    at(rig, 20.0).say(piece(*ready(A, B)))
    assert rig.loop.next_wakeup() == 3600.0
    at(rig, 25.0).say(piece(*down(A, B)))
    assert used(at(rig, 54.9)) == {"": [A, B]}
    assert used(at(rig, 55.0)) == {"": []}


def test_nothing_is_used_of_what_was_never_seen_ready() -> None:
    assert used(rig_with(piece(*down(A, B)))) == {"": []}, "as after a restart"


def test_several_slices_and_ports() -> None:
    ports = ("http:8080", "metrics:9090")
    first, second = ready(A, B), ready(C)
    rig = Rig(families=[V4])
    rig.start(
        ServiceSet(service("web", "http:80", "metrics:90", last_resort=30)),
        piece(*first, name="a", ports=ports), piece(*second, name="b", ports=ports[:1]))
    rig.say(piece(*down(A, B), name="a", ports=ports))
    assert used(rig) == {"http": [C], "metrics": []}, "the Service has a ready endpoint"
    rig.say(piece(*down(C), name="b", ports=ports[:1]))
    assert used(rig) == {"http": [A, B, C], "metrics": [A, B]}


def test_each_family_decides_for_itself() -> None:
    rig = Rig()
    rig.start(ServiceSet(service("web", ip="10.96.0.1 fd00:96::1", last_resort=30)),
              piece(*ready(A)), piece(*ready(A6), name="six"))
    rig.say(piece(*down(A)))
    assert rig.loop.plans[V4].last_resorts == 1
    rig.clock.now = 10.0
    rig.say(piece(*down(A6), name="six"))
    assert [[len(plan.cluster) for plan in rig.backend.held[of].values()] for of in (V4, V6)] == [[1], [1]]
    at(rig, 30.0)
    assert [[len(plan.cluster) for plan in rig.backend.held[of].values()] for of in (V4, V6)] == [[0], [1]]
    at(rig, 40.0)
    assert [len(plan.cluster) for plan in rig.backend.held[V6].values()] == [0]


def test_a_local_list_that_becomes_empty_is_no_reason() -> None:
    there = endpoint(C, "node2")
    rig = rig_with(piece(*ready(A), there), internal_local=True)
    rig.say(piece(*down(A), there))
    (plan,) = rig.backend.held[V4].values()
    assert (plan.local, plan.has_endpoints) == ((), True)


def test_with_a_local_policy_the_local_ones_are_used() -> None:
    rig = rig_with(piece(*ready(A), endpoint(C, "node2")), internal_local=True)
    rig.say(piece(*down(A), endpoint(C, "node2", ready=False)))
    (plan,) = rig.backend.held[V4].values()
    assert [where.address[3] for where in plan.local] == [1]


def test_a_health_check_node_port_counts_those_that_are_used() -> None:
    rig = rig_with(
        piece(*ready(A, B), endpoint(C, "node2")), load_balancer_ips="192.0.2.1", external_local=True,
        health_check_node_port=31000)
    told = rig.service_health[0].told
    rig.say(piece(*down(A, B), endpoint(C, "node2", ready=False)))
    assert told[WEB].ready == 2, "otherwise load balancers would turn away from every node"
    at(rig, 30.0)
    assert told[WEB].ready == 0


def test_flows_of_udp_to_those_that_are_used_are_not_stale() -> None:
    rig = Rig(families=[V4])
    udp = replace(endpoint_slice("web", *ready(A), ports=["53/UDP"]))
    rig.start(ServiceSet(service("web", "53/UDP", last_resort=30)), SliceSet(udp))
    rig.flows_deleted()
    rig.say(SliceSet(replace(udp, endpoints=tuple(down(A)))))
    assert rig.cleaner.under_way == []
    at(rig, 30.0)
    assert len(rig.cleaner.under_way) == 1


def test_a_failed_sync_does_not_prolong_it() -> None:
    rig = rig_with(piece(*ready(A)))
    rig.say(piece(*down(A)))
    rig.backend.problems = [SyncFailed("no")] * 3
    at(rig, 30.0)
    rig.settle()
    assert used(rig) == {"": []}
