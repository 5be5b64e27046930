"""Services whose endpoints all become unready: what they use, for how long, and who is told."""

import logging
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kproxy_conformance.builders import endpoint, endpoint_slice, service, service_name
from kproxy_core.contract.errors import SyncFailed
from kproxy_core.model.address import parse_address
from kproxy_core.model.events import Event, ServiceGone, ServiceSet, SliceGone, SliceSet
from kproxy_core.model.service import Endpoint, SliceName
from kproxy_core.sync.node_facts import NodeSettings
from tests.core.loop_rig import V4, V6, RecordingBackend, Rig

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
    assert len(rig.loop.plans[V4].last_resorts) == 1
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


def test_a_switch_of_modes_keeps_it_and_its_end() -> None:
    rig = rig_with(piece(*ready(A)))
    rig.say(piece(*down(A)))
    other = RecordingBackend(rig.clock)
    rig.serve_with(other, NodeSettings(name="node1"))
    assert [len(plan.cluster) for plan in other.held[V4].values()] == [1]
    at(rig, 30.0)
    assert [len(plan.cluster) for plan in other.held[V4].values()] == [0]


STATES = {
    "ready": endpoint(A), "down": endpoint(A, ready=False), "absent": None,
    "serving": endpoint(A, ready=False, serving=True, terminating=True),
    "terminating": endpoint(A, ready=False, terminating=True),
}
"""Of an endpoint, at any address."""


@given(st.lists(st.tuples(
    st.sampled_from("ab"),
    st.lists(st.sampled_from(["ready", "down", "down", *STATES]), min_size=3, max_size=3),
    st.sampled_from([0.0, 1.0, 10.0, 31.0]))))
def test_only_down_ones_are_added_and_only_for_a_time(steps: list[tuple[str, list[str], float]]) -> None:
    rig, plain = rig_with(), rig_with(last_resort=0)
    slices: dict[str, list[str]] = {}
    for name, states, pause in steps:
        slices[name] = states
        endpoints = [
            each._replace(address=parse_address(address))
            for address, each in zip((A, B, C), map(STATES.__getitem__, states), strict=True) if each]
        for one in (rig, plain):
            one.say(piece(*endpoints, name=name))
            at(one, one.clock.now + pause)
        states_of = [{of_slice[host] for of_slice in slices.values()} - {"absent"} for host in range(3)]
        added = set(used(rig)[""]) - set(used(plain)[""])
        if added:
            assert not any({"ready", "serving"} & found for found in states_of)
            assert added <= {address for address, found in zip((A, B, C), states_of, strict=True)
                             if found == {"down"}}
    rig.settle()
    assert used(rig) == used(plain)


# Who is told


def fields(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, object]]]:
    return [(record.getMessage(), record.__dict__["fields"]) for record in caplog.records]


def test_the_beginning_and_the_end_are_told(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("kproxy").propagate = True
    rig = rig_with(piece(*ready(A, B)))
    assert rig.value('kproxy_last_resort_services{ip_family="IPv4"}') == 0
    told = {"ip_family": "IPv4", "services": 1, "names": ["default/web"]}

    with caplog.at_level(logging.WARNING, "kproxy.run"):
        rig.say(piece(*down(A, B)))
        at(rig, 30.0)
    assert fields(caplog) == [
        ("no endpoint is ready, using those that were ready last", told),
        ("last resort is over, and no endpoint is ready", told),
    ]
    assert rig.reports == [
        (WEB, "no endpoint is ready; using the 2 that were ready last, for 30 s"),
        (WEB, "last resort is over, and no endpoint is ready"),
    ]


def test_a_return_of_readiness_is_told_in_the_log_only(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("kproxy").propagate = True
    rig = rig_with(piece(*ready(A)))
    rig.say(piece(*down(A)))
    assert rig.value('kproxy_last_resort_services{ip_family="IPv4"}') == 1
    rig.reports.clear()
    caplog.clear()
    with caplog.at_level(logging.INFO, "kproxy.run"):
        rig.say(piece(*ready(A)))
    assert [message for message, _ in fields(caplog)] == ["last resort has ended"]
    assert rig.reports == []
    assert rig.value('kproxy_last_resort_services{ip_family="IPv4"}') == 0
    rig.say(piece(*down(A)))
    assert rig.value('kproxy_last_resorts_total{ip_family="IPv4"}') == 2


def test_an_outage_of_everything_makes_one_line_and_few_events(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("kproxy").propagate = True
    names = [f"web{n}" for n in range(30)]
    rig = Rig(families=[V4])
    rig.start(
        *(ServiceSet(service(name, ip=f"10.96.0.{n + 1}", last_resort=30)) for n, name in enumerate(names)),
        *(SliceSet(endpoint_slice(name, A)) for name in names))
    with caplog.at_level(logging.WARNING, "kproxy.run"):
        rig.say(*(SliceSet(endpoint_slice(name, *down(A))) for name in names))
    ((_, told),) = fields(caplog)
    assert (told["services"], len(str(told["names"]).split()), len(rig.reports)) == (30, 20, 5)


def test_a_service_without_a_cluster_ip_in_the_family_has_none() -> None:
    rig = rig_with(piece(*ready(A)), ip="fd00:96::1")
    rig.say(piece(*down(A)))
    assert rig.reports == []
