"""The sync loop: its updates to the backend, their times, and its reports to observers."""

import logging
import threading
from typing import Any, Literal

import pytest

from kproxy_conformance.builders import (
    addresses,
    cidrs,
    destinations,
    endpoint,
    endpoint_slice,
    node_view,
    plans,
    service,
    service_name,
)
from kproxy_core.contract.errors import SyncFailed, TrustLost, Unsupported
from kproxy_core.contract.values import Scope, SyncReport, Update
from kproxy_core.kube.store import Store
from kproxy_core.model.address import Family, Protocol
from kproxy_core.model.events import (
    BadObject,
    Complete,
    Event,
    NodeSet,
    ServiceCidrSet,
    ServiceGone,
    ServiceSet,
    SliceGone,
    SliceSet,
)
from kproxy_core.model.node import NodeObject
from kproxy_core.model.service import Service, ServicePortKey, SliceName
from kproxy_core.plan.health_checks import HealthCheck
from kproxy_core.plan.quarantine import Sentence
from kproxy_core.plan.service_plan import ServicePlan, plan_service
from kproxy_core.sync.node_facts import NodeSettings
from kproxy_core.sync.observer import Folded, Synced, SyncObserver
from tests.core.loop_rig import V4, WALL, Clock, RecordingBackend, Rig

WEB = ServiceSet(service("web"))
WEB_SLICE = SliceSet(endpoint_slice("web", "10.0.0.1"))


def kinds(updates: list[Update]) -> list[tuple[str, str]]:
    return [(update.family.label, update.scope.value) for update in updates]


# The first sync


def test_nothing_is_programmed_before_every_source_is_complete() -> None:
    rig = Rig()
    assert rig.say(WEB, WEB_SLICE) == []
    assert rig.loop.next_wakeup() is None
    first = rig.say(Complete("test"))
    assert kinds(first) == [("IPv4", "full"), ("IPv6", "full")]
    assert [plan.cluster for plan in first[0].plans.values()] == [destinations("10.0.0.1:8080")]
    assert first[0].changed == first[0].plans
    assert first[0].node_changed


def test_a_node_without_ipv6_runs_ipv4_only() -> None:
    rig = Rig(families=[V4])
    assert kinds(rig.start(WEB, SliceSet(endpoint_slice("web", "fd00::1")))) == [("IPv4", "full")]


def test_an_empty_cluster_is_synced_too() -> None:
    rig = Rig()
    assert kinds(rig.start()) == [("IPv4", "full"), ("IPv6", "full")]
    assert rig.health.healthy()


def test_watching_begins_once_after_the_first_success() -> None:
    rig = Rig()
    rig.backend.problems = [SyncFailed("no"), SyncFailed("no")]
    rig.start()
    assert rig.backend.damaged is None
    rig.settle()
    assert rig.backend.damaged is not None


def test_the_first_sync_of_every_family_is_reported_once() -> None:
    told: list[str] = []
    rig = Rig(all_synced=lambda: told.append("synced"))
    rig.backend.problems = [None, SyncFailed("no")]
    rig.start()
    assert told == []
    rig.settle()
    rig.say(WEB)
    assert told == ["synced"]


# One change


def test_an_update_holds_only_the_change_in_its_family() -> None:
    rig = Rig()
    rig.start(WEB, WEB_SLICE, ServiceSet(service("other", ip="10.96.0.2")))
    (update,) = rig.say(SliceSet(endpoint_slice("web", "10.0.0.1", "10.0.0.2")))
    assert kinds([update]) == [("IPv4", "partial")]
    (plan,) = update.changed.values()
    assert plan is not None
    assert plan.cluster == destinations("10.0.0.1:8080 10.0.0.2:8080")
    assert len(update.plans) == 2
    assert not update.node_changed


def test_a_removed_port_or_service_is_part_of_the_update() -> None:
    rig = Rig(families=[V4])
    rig.start(ServiceSet(service("web", "a:80", "b:81")))
    (update,) = rig.say(ServiceSet(service("web", "a:80")))
    assert [(key.port_name, plan) for key, plan in update.changed.items()] == [("b", None)]
    (update,) = rig.say(ServiceGone(service_name("web")))
    assert [(key.port_name, plan) for key, plan in update.changed.items()] == [("a", None)]
    assert update.plans == {}


@pytest.mark.parametrize(
    "events",
    [
        [WEB],
        [SliceSet(endpoint_slice("web", "10.0.0.1"), trigger_time=WALL + 1)],
        [SliceSet(endpoint_slice("web", "10.0.0.2")), WEB_SLICE],
        [SliceSet(endpoint_slice("web", endpoint("10.0.0.1", node="elsewhere")))],
        [SliceSet(endpoint_slice("nobody", "10.0.0.1", name="stray"))],
        [ServiceGone(service_name("web")), WEB],
    ],
    ids=["same service", "same slice", "there and back", "irrelevant", "stray slice", "gone and back"],
)
def test_an_event_without_effect_never_reaches_the_backend(events: list[Event]) -> None:
    rig = Rig()
    rig.start(WEB, WEB_SLICE)
    assert rig.say(*events) == []
    assert rig.health.healthy()


def test_a_burst_waits_for_the_minimum_interval_and_becomes_one_update() -> None:
    rig = Rig(families=[V4], min_interval=1.0)
    rig.start(WEB, WEB_SLICE)
    rig.clock.now = 10.0
    for last in range(2, 9):
        rig.say(SliceSet(endpoint_slice("web", f"10.0.0.{last}")))
    rig.backend.take()
    assert rig.say(SliceSet(endpoint_slice("web", "10.0.0.99"))) == []
    at = rig.loop.next_wakeup()
    assert at == 11.0
    rig.clock.now = at
    (update,) = rig.turn()
    assert [plan.cluster for plan in update.changed.values() if plan] == [destinations("10.0.0.99:8080")]


def test_an_older_service_that_arrives_later_takes_its_frontend_from_the_younger() -> None:
    rig = Rig(families=[V4])
    rig.start(ServiceSet(service("young", created="2026-01-02T00:00:00Z")))
    (update,) = rig.say(ServiceSet(service("old", created="2026-01-01T00:00:00Z")))
    assert {key.name: plan and plan.cluster_ip for key, plan in update.changed.items()} == {
        "old": addresses("10.96.0.1")[0],
        "young": None,
    }
    (update,) = rig.say(ServiceGone(service_name("old")))
    assert {key.name: bool(plan and plan.cluster_ip) for key, plan in update.changed.items()} == {
        "old": False,
        "young": True,
    }


def test_everything_is_synced_again_after_the_period() -> None:
    rig = Rig(families=[V4])
    rig.start(WEB, WEB_SLICE)
    assert rig.loop.next_wakeup() == 3600.0
    rig.clock.now = 3600.0
    (update,) = rig.turn()
    assert (update.scope, update.changed, len(update.plans)) == (Scope.RESYNC, {}, 1)


def test_a_service_is_planned_again_at_its_time_without_an_event() -> None:
    rig = Rig(families=[V4])
    rig.start(WEB, WEB_SLICE)
    plans_of_family = rig.loop.plans[V4]
    for at in (30.0, 20.0):
        plans_of_family.plan_again(service_name("web"), at)
    rig.recorder.successes.clear()
    for now, wakeup, successes in [(19.9, 20.0, 0), (20.0, 3600.0, 1)]:
        rig.clock.now = now
        assert rig.turn() == [], "nothing differs"
        assert (rig.loop.next_wakeup(), len(rig.recorder.successes)) == (wakeup, successes)


def test_a_service_that_was_planned_meanwhile_is_not_planned_again() -> None:
    rig = Rig(families=[V4])
    rig.start(WEB, WEB_SLICE)
    rig.loop.plans[V4].plan_again(service_name("web"), 20.0)
    rig.say(SliceSet(endpoint_slice("web", "10.0.0.2")))
    assert rig.loop.next_wakeup() == 3600.0


def test_services_follow_the_quarantine_of_their_endpoints() -> None:
    rig = Rig(families=[V4])
    one, two = destinations("10.0.0.1:8080 10.0.0.2:8080")
    rig.start(ServiceSet(service("web", endpoint_health="passive")),
              SliceSet(endpoint_slice("web", "10.0.0.1", "10.0.0.2")),
              ServiceSet(service("other", ip="10.96.0.2")),
              SliceSet(endpoint_slice("other", "10.0.0.1", "10.0.0.2")))  # fmt: skip
    names = {service_name("web"), service_name("other")}
    for shut, cluster in [({one: Sentence(1.0, 3)}, (two,)), ({}, (one, two))]:
        rig.loop.set_quarantined(shut, names)
        (update,) = rig.turn()
        assert [(key.name, plan and plan.cluster) for key, plan in update.changed.items()] == [
            ("web", cluster)]


@pytest.mark.parametrize(("default", "own", "avoids"), [
    (False, "", False), (False, "passive", True), (True, "", True), (True, "off", False),
])  # fmt: skip
def test_a_service_may_say_itself_whether_silent_endpoints_are_avoided(
    default: bool, own: Literal["", "off", "passive"], avoids: bool
) -> None:
    store = Store([V4], ["test"], WALL, avoid_silent=default)
    assert store.avoids_silent(service("web", endpoint_health=own)) is avoids


def test_a_backend_that_does_not_watch_gets_frequent_full_syncs() -> None:
    rig = Rig()
    rig.backend.watches = False
    rig.start(WEB, WEB_SLICE)
    assert rig.loop.next_wakeup() == 30.0
    rig.clock.now = 30.0
    assert kinds(rig.turn()) == [("IPv4", "full"), ("IPv6", "full")]


# The node


def test_a_new_zone_replans_every_service() -> None:
    rig = Rig(families=[V4])
    hinted = endpoint_slice("web", endpoint("10.0.0.1", zones="a"), endpoint("10.0.0.2", zones="b"))
    rig.start(WEB, SliceSet(hinted), NodeSet(NodeObject("node1", zone="a")))
    (update,) = rig.say(NodeSet(NodeObject("node1", zone="b")))
    assert update.node_changed
    assert update.node.zone == "b"
    assert [plan.cluster for plan in update.changed.values() if plan] == [destinations("10.0.0.2:8080")]


def test_service_cidrs_and_interface_addresses_reach_the_backend_with_the_node() -> None:
    settings = NodeSettings(name="node1", node_ports=cidrs("192.0.2.0/24"))
    rig = Rig(settings=settings, addresses=addresses("192.0.2.1 10.1.1.1"))
    rig.start(WEB)
    updates = rig.say(ServiceCidrSet("kubernetes", cidrs("10.96.0.0/12 fd00::/108")))
    assert [u.node.service_cidrs for u in updates] == [cidrs("10.96.0.0/12"), cidrs("fd00::/108")]
    assert [(u.node_changed, u.changed) for u in updates] == [(True, {}), (True, {})]
    rig.loop.set_addresses(frozenset(addresses("192.0.2.1 192.0.2.2")))
    (update,) = rig.turn()
    assert update.node.node_port_addresses == addresses("192.0.2.1 192.0.2.2")


def test_addresses_of_a_family_reach_its_backend_alone() -> None:
    settings = NodeSettings(name="node1", node_ports=cidrs("192.0.2.0/24"))
    rig = Rig(settings=settings, addresses=addresses("192.0.2.1"))
    rig.start(WEB)
    for added, families in (
        ("10.96.0.1", [V4]), ("fd00:96::1", [Family.IPV6]), ("fe80::1", []), ("127.0.0.2", []),
    ):  # fmt: skip
        held = frozenset({*rig.loop.addresses, *addresses(added)})
        rig.loop.set_addresses(held)
        updates = rig.turn()
        assert [(each.family, each.addresses, each.changed) for each in updates] == [
            (family, held, {}) for family in families]
    rig.loop.set_addresses(frozenset(addresses("192.0.2.1")))
    assert [each.family for each in rig.turn()] == list(Family)


# Changes in the log


def objects(caplog: pytest.LogCaptureFixture) -> list[list[str]]:
    """Return the API objects that the log names, by sync."""
    found = [record.__dict__["fields"]["objects"] for record in caplog.records
             if record.getMessage() == "programmed"]
    caplog.clear()
    return found


def test_a_change_can_be_followed_from_its_resource_version(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(families=[V4])
    logging.getLogger("kproxy").propagate = True
    with caplog.at_level(logging.DEBUG, "kproxy.run"):
        rig.start(WEB, WEB_SLICE)
        caplog.clear()
        rig.backend.problems = [SyncFailed("EBUSY")]
        rig.say(SliceSet(endpoint_slice("web", "10.0.0.2"), "resource version 7"))
        rig.say(ServiceSet(service("web", "81"), "resource version 9"))
        rig.settle()
        assert objects(caplog) == [[
            f"EndpointSlice {WEB_SLICE.slice.name} resource version 7",
            "Service default/web resource version 9",
        ]]  # fmt: skip
        rig.say(SliceGone(WEB_SLICE.slice.name))
        assert objects(caplog) == [[f"EndpointSlice {WEB_SLICE.slice.name} deleted"]]
        rig.say(*(ServiceSet(service(f"s{n}", ip=f"10.96.1.{n}")) for n in range(30)))
        assert [len(named) for named in objects(caplog)] == [20]


# Failures


def test_a_failed_update_is_retried_with_later_changes() -> None:
    rig = Rig(families=[V4])
    rig.start(WEB, WEB_SLICE)
    rig.backend.problems = [SyncFailed("EBUSY")]
    rig.say(SliceSet(endpoint_slice("web", "10.0.0.2")))
    assert rig.say(ServiceSet(service("other", ip="10.96.0.2"))) == [], "not before the delay is over"
    (update,) = rig.settle()
    assert sorted(key.name for key in update.changed) == ["other", "web"]
    assert rig.backend.held[V4] == update.plans


def test_the_retry_delay_grows_and_the_second_retry_is_a_full_sync() -> None:
    rig = Rig(families=[V4])
    rig.start(WEB)
    rig.backend.problems = [SyncFailed("EBUSY")] * 4
    updates = rig.say(WEB_SLICE)
    times = []
    while rig.backend.problems:
        at = rig.loop.next_wakeup()
        assert at is not None
        times.append(at - rig.clock.now)
        rig.clock.now = at
        updates += rig.turn()
    assert times == pytest.approx([0.1, 0.2, 0.4])
    assert [u.scope for u in updates] == [Scope.CHANGED, Scope.CHANGED, Scope.RESYNC, Scope.RESYNC]


def test_an_unserved_service_port_is_retried_and_delays_no_other() -> None:
    rig = Rig(families=[V4])
    (update,) = rig.start(WEB)
    (web,) = update.plans
    rig.backend.unserved = {web: "port 30080: Address already in use"}
    (update,) = rig.say(WEB_SLICE)
    assert rig.health.healthy()
    assert f"not served: {web}: port 30080: Address already in use" in rig.health.healthz().body.decode()
    (update,) = rig.say(ServiceSet(service("other", ip="10.96.0.2")))
    assert sorted(key.name for key in update.changed) == ["other", "web"]
    for delay in (0.2, 0.4, 0.8):
        assert rig.loop.next_wakeup() == pytest.approx(rig.clock.now + delay)
        rig.clock.now += delay
        (update,) = rig.turn()
        assert (update.scope, list(update.changed)) == (Scope.CHANGED, [web])
    assert rig.value('kproxy_sync_retries_total{ip_family="IPv4"}') == 4
    rig.clock.now += 60.0
    rig.backend.unserved = {}
    assert len(rig.turn()) == 1
    assert b"not served" not in rig.health.healthz().body
    assert rig.turn() == []
    assert rig.loop.next_wakeup() == pytest.approx(3600.0)


def test_a_degraded_mode_is_retried_and_delays_no_change() -> None:
    rig = Rig(families=[V4])
    rig.backend.degraded = "programs do not load"
    rig.start(WEB, WEB_SLICE)
    assert rig.health.healthy()
    assert "IPv4: programs do not load" in rig.health.healthz().body.decode()
    for delay in (0.1, 0.2, 0.4):
        assert rig.loop.next_wakeup() == pytest.approx(rig.clock.now + delay)
        rig.clock.now += delay
        (update,) = rig.turn()
        assert (update.scope, list(update.changed)) == (Scope.CHANGED, [])
    (update,) = rig.say(ServiceSet(service("other", ip="10.96.0.2")))
    assert [key.name for key in update.changed] == ["other"]
    rig.backend.degraded = ""
    rig.clock.now += 60.0
    assert len(rig.turn()) == 1
    assert b"problems" not in rig.health.healthz().body
    assert rig.turn() == []


def test_an_unserved_service_can_be_removed() -> None:
    rig = Rig(families=[V4])
    (update,) = rig.start(WEB)
    (web,) = update.plans
    rig.backend.unserved = {web: "taken"}
    rig.say(WEB_SLICE)
    rig.backend.unserved = {}
    (update,) = rig.say(ServiceGone(web.service))
    assert update.changed == {web: None}
    assert rig.turn() == []


def test_one_family_that_fails_leaves_the_other_alone() -> None:
    rig = Rig()
    rig.backend.problems = [SyncFailed("no IPv4 today"), None]
    assert kinds(rig.start(WEB)) == [("IPv4", "full"), ("IPv6", "full")]
    rig.backend.problems = []
    assert kinds(rig.say(SliceSet(endpoint_slice("web", "fd00::1")))) == [], "no IPv6 ClusterIP"
    six = ServiceSet(service("six", ip="fd00:96::1"))
    assert kinds(rig.say(six)) == [("IPv6", "partial")]
    rig.clock.now += 1.0
    assert kinds(rig.turn()) == [("IPv4", "full")]
    assert rig.health.healthy()


@pytest.mark.parametrize("problem", [TrustLost("ENOENT"), KeyError("a bug")], ids=["trust lost", "a bug"])
def test_lost_trust_is_followed_by_a_full_update_at_once(problem: Exception) -> None:
    rig = Rig(families=[V4])
    rig.start(WEB)
    rig.clock.now = 1.0
    rig.backend.problems = [problem]
    assert kinds(rig.say(WEB_SLICE)) == [("IPv4", "partial")]
    (update,) = rig.turn()
    assert (update.scope, len(update.changed)) == (Scope.RESYNC, 1)


def test_an_unsupported_backend_ends_the_loop() -> None:
    rig = Rig(families=[V4])
    rig.backend.problems = [Unsupported("no such kernel feature")]
    with pytest.raises(Unsupported, match="no such kernel feature"):
        rig.start(WEB)


# Damage


def test_damage_is_repaired_at_once_despite_the_minimum_interval() -> None:
    rig = Rig(min_interval=10.0)
    rig.start(WEB, WEB_SLICE)
    rig.clock.now = 0.5
    assert rig.backend.damaged is not None
    rig.backend.damaged(V4, "table ip kproxy was deleted")
    assert kinds(rig.turn()) == [("IPv4", "full")]
    assert rig.value('kproxy_foreign_changes_total{ip_family="IPv4"}') == 1


def test_repairs_of_constant_damage_take_a_fifth_of_the_time_at_most() -> None:
    rig = Rig(families=[V4])
    rig.start(WEB)
    rig.backend.seconds = 0.3
    rig.clock.now = 100.0
    assert rig.backend.damaged is not None
    while rig.clock.now < 200.0:
        rig.backend.damaged(V4, "flushed")
        rig.loop.turn()
        rig.clock.now += 0.01
    assert 50 <= len(rig.backend.take()) <= 70  # 67 in 100 s, and those of the credit


def test_damage_during_a_repair_is_repaired_after_it() -> None:
    rig = Rig(families=[V4])
    rig.start(WEB)
    rig.clock.now = 1.0
    assert rig.backend.damaged is not None
    rig.backend.damaged(V4, "flushed")
    rig.backend.damaged(V4, "flushed again")
    assert len(rig.turn()) == 1
    rig.backend.damaged(V4, "and again")
    assert rig.turn() == []
    assert kinds(rig.settle()) == [("IPv4", "full")]


# The observers


def test_health_check_node_ports_follow_the_acknowledgement() -> None:
    rig = Rig(families=[V4])
    lb = service("lb", "a:80@30000", "b:81@30001", external_local=True, health_check_node_port=32000)
    here = endpoint_slice(
        "lb", endpoint("10.0.0.1", "node1"), endpoint("10.0.0.2", "node1"), endpoint("10.0.0.3", "node2"),
        ports=["a:8080", "b:8081"],
    )
    rig.start(ServiceSet(lb), SliceSet(here))
    (health,) = rig.service_health
    name = service_name("lb")
    assert health.told == {name: HealthCheck(32000, 2)}
    rig.backend.problems = [SyncFailed("not yet")]
    rig.say(SliceGone(SliceName("default", "lb-1")))
    assert health.told == {name: HealthCheck(32000, 2)}
    rig.settle()
    assert health.told == {name: HealthCheck(32000, 0)}
    rig.say(ServiceGone(name))
    assert health.told == {}


LB = ServiceSet(service("lb", "a:80@30000", "b:81@30001", external_local=True, health_check_node_port=32000))


def here(*ips: str) -> SliceSet:
    """Ready endpoints of `LB` on this node."""
    return SliceSet(endpoint_slice("lb", *(endpoint(ip, "node1") for ip in ips), ports=["a:8080", "b:8081"]))


def test_a_health_check_node_port_waits_for_the_first_acknowledgement_and_for_that_of_new_endpoints() -> None:
    rig = Rig(families=[V4])
    (health,) = rig.service_health
    name = service_name("lb")
    rig.backend.problems = [SyncFailed("not yet")]
    rig.start(LB, here("10.0.0.1"))
    assert health.told == {}
    rig.settle()
    assert health.told == {name: HealthCheck(32000, 1)}
    rig.say(here())
    assert health.told == {name: HealthCheck(32000, 0)}
    rig.backend.problems = [SyncFailed("not yet")]
    rig.say(here("10.0.0.1", "10.0.0.2"))
    assert health.told == {name: HealthCheck(32000, 0)}
    rig.settle()
    assert health.told == {name: HealthCheck(32000, 2)}


def test_a_health_check_node_port_counts_no_new_endpoint_while_its_service_is_not_served() -> None:
    rig = Rig(families=[V4])
    (health,) = rig.service_health
    name = service_name("lb")
    (port, _) = plans(node_view("node1"), LB.service)
    rig.backend.unserved = {port: "port 30000: Address already in use"}
    rig.start(LB, here("10.0.0.1"), WEB)
    assert health.told == {name: HealthCheck(32000, 0)}
    rig.backend.unserved = {}
    rig.settle()
    assert health.told == {name: HealthCheck(32000, 1)}
    rig.backend.unserved = {port: "port 30000: Address already in use"}
    rig.say(here("10.0.0.1", "10.0.0.2"))
    assert health.told == {name: HealthCheck(32000, 1)}
    rig.say(here())
    assert health.told == {name: HealthCheck(32000, 0)}
    rig.say(here("10.0.0.2"))
    assert health.told == {name: HealthCheck(32000, 0)}
    rig.backend.unserved = {}
    rig.settle()
    assert health.told == {name: HealthCheck(32000, 1)}


def test_endpoints_that_arrive_before_their_service_are_served_with_it() -> None:
    rig = Rig(families=[V4])
    rig.start()
    assert rig.say(WEB_SLICE) == []
    for _ in range(2):
        (update,) = rig.say(WEB)
        (plan,) = filter(None, update.changed.values())
        assert plan.cluster == destinations("10.0.0.1:8080")
        (update,) = rig.say(ServiceGone(service_name("web")))
        assert list(update.changed.values()) == [None]
    assert rig.say(SliceSet(endpoint_slice("web", "10.0.0.2"))) == []
    (update,) = rig.say(WEB)
    (plan,) = filter(None, update.changed.values())
    assert plan.cluster == destinations("10.0.0.2:8080")


def test_a_success_tells_whether_it_is_the_first_and_whether_rules_were_missing() -> None:
    rig = Rig(families=[V4])

    def told() -> list[tuple[bool, bool]]:
        successes, rig.recorder.successes = rig.recorder.successes, []
        return [(synced.is_first, synced.rules_were_missing) for synced in successes]

    rig.backend.operations = 0
    rig.start(WEB)
    assert told() == [(True, False)]
    rig.backend.operations = 1
    rig.say(WEB_SLICE)
    assert told() == [(False, False)]
    rig.backend.operations = 0
    assert rig.backend.damaged is not None
    rig.backend.damaged(V4, "flushed")
    rig.backend.problems = [SyncFailed("busy")]
    rig.settle()
    assert told() == [(False, True)]
    for operations in (0, 1):
        rig.backend.operations = operations
        rig.clock.now += 3600
        rig.settle()
        assert told() == [(False, bool(operations))]


def test_a_first_sync_that_writes_tells_that_rules_were_missing() -> None:
    rig = Rig(families=[V4])
    rig.start(WEB)
    assert [(one.is_first, one.rules_were_missing) for one in rig.recorder.successes] == [(True, True)]


def test_stale_flows_of_a_changed_udp_port_are_deleted_once() -> None:
    rig = Rig(families=[V4])
    dns = ServiceSet(service("dns", "53/UDP"))
    rig.start(WEB, dns, SliceSet(endpoint_slice("dns", "10.0.0.1", "10.0.0.2", ports=["53/UDP"])))
    rig.flows_deleted()
    rig.say(WEB_SLICE)
    assert rig.cleaner.under_way == []
    rig.say(SliceSet(endpoint_slice("dns", "10.0.0.1", ports=["53/UDP"])))
    ((family, stale),) = rig.cleaner.under_way
    assert family is V4
    vip = (addresses("10.96.0.1")[0], 53)
    assert stale.is_stale(vip, destinations("10.0.0.2:53")[0])
    assert not stale.is_stale(vip, destinations("10.0.0.1:53")[0])


def test_flows_that_a_newer_sync_starts_are_not_deleted_as_stale() -> None:
    rig = Rig(families=[V4])
    dns = ServiceSet(service("dns", "53/UDP"))
    vip, (old, new) = (addresses("10.96.0.1")[0], 53), destinations("10.0.0.1:53 10.0.0.2:53")
    rig.start(dns, SliceSet(endpoint_slice("dns", "10.0.0.1", ports=["53/UDP"])))
    rig.flows_deleted()
    rig.say(SliceSet(endpoint_slice("dns", ports=["53/UDP"], family=V4)))
    ((_, deletion),) = rig.cleaner.under_way
    assert deletion.is_stale(vip, old)
    assert deletion.is_stale(vip, new)
    rig.say(SliceSet(endpoint_slice("dns", "10.0.0.2", ports=["53/UDP"])))
    assert not deletion.is_stale(vip, new)
    rig.flows_deleted()
    ((_, again),) = rig.cleaner.under_way
    assert again.is_stale(vip, old)
    assert not again.is_stale(vip, new)


class RelayingBackend(RecordingBackend):
    """A mode that relays in its own process."""

    ports = frozenset({40001})

    def relays(self, family: Family, key: ServicePortKey) -> frozenset[int]:
        return self.ports


@pytest.mark.parametrize("is_running", [False, True])
def test_flows_to_relays_of_a_new_mode_are_not_stale(is_running: bool) -> None:
    """It serves node ports on more addresses, whose older flows are deleted while relays answer new ones."""
    here, other = addresses("172.18.0.2 172.19.0.2")
    rig = Rig(families=[V4], addresses=[here, other],
              settings=NodeSettings(name="node1", node_ports=cidrs("172.18.0.0/16")))  # fmt: skip
    dns = ServiceSet(service("dns", "53/UDP@30053"))
    rig.start(dns, SliceSet(endpoint_slice("dns", "10.0.0.1", ports=["53/UDP"])))
    if not is_running:
        rig.flows_deleted()
    rig.serve_with(RelayingBackend(rig.clock), NodeSettings(name="node1", node_ports=cidrs("0.0.0.0/0")))
    ((_, deletion),) = rig.cleaner.under_way
    relayed = (here, 30053), (here, 40001)
    assert not deletion.is_stale(*relayed)
    if is_running:  # Flows that were spared are judged again.
        rig.flows_deleted()
        ((_, deletion),) = rig.cleaner.under_way
        assert not deletion.is_stale(*relayed)
    assert deletion.is_stale((here, 30053), (here, 30053))
    assert deletion.is_stale((other, 30053), (other, 30053))


def test_flows_to_relays_of_an_earlier_mode_are_not_stale_at_new_node_port_addresses() -> None:
    here, other = addresses("172.18.0.2 172.19.0.2")
    narrow = NodeSettings(name="node1", node_ports=cidrs("172.18.0.0/16"))
    rig = Rig(families=[V4], addresses=[here, other], settings=narrow)
    dns = ServiceSet(service("dns", "53/UDP@30053"))
    rig.start(dns, SliceSet(endpoint_slice("dns", "10.0.0.1", ports=["53/UDP"])))
    rig.flows_deleted()
    rig.serve_with(RelayingBackend(rig.clock), narrow)
    rig.serve_with(RecordingBackend(rig.clock), narrow)
    assert rig.cleaner.under_way == []
    rig.serve_with(RecordingBackend(rig.clock), NodeSettings(name="node1", node_ports=cidrs("0.0.0.0/0")))
    ((_, deletion),) = rig.cleaner.under_way
    assert not deletion.is_stale((here, 30053), (here, 40001))
    assert deletion.is_stale((other, 30053), (other, 30053))


def test_flows_to_a_relay_that_found_its_port_late_are_not_stale() -> None:
    here, other = addresses("172.18.0.2 172.19.0.2")
    backend = RelayingBackend(Clock())
    rig = Rig(families=[V4], addresses=[here], backend=backend, settings=NodeSettings(
        name="node1", node_ports=cidrs("0.0.0.0/0")))  # fmt: skip
    backend.ports = frozenset()
    backend.unserved = {ServicePortKey("default", "dns", "", Protocol.UDP): "no port is free"}
    rig.start(ServiceSet(service("dns", "53/UDP@30053")),
              SliceSet(endpoint_slice("dns", "10.0.0.1", ports=["53/UDP"])))  # fmt: skip
    rig.flows_deleted()
    backend.ports, backend.unserved = frozenset({40001}), {}
    rig.settle()
    rig.loop.set_addresses(frozenset({here, other}))
    rig.settle()
    ((_, deletion),) = rig.cleaner.under_way
    assert not deletion.is_stale((here, 30053), (here, 40001))
    assert deletion.is_stale((here, 30053), (here, 40002))


def test_no_flow_is_stale_while_another_mode_is_programmed() -> None:
    """Its relays answer new flows before it serves."""
    rig = Rig(families=[V4])
    relayed = (addresses("10.96.0.1")[0], 53), destinations("172.18.0.2:40001")[0]
    dns = ServiceSet(service("dns", "53/UDP"))
    rig.start(dns, SliceSet(endpoint_slice("dns", "10.0.0.1", "10.0.0.2", ports=["53/UDP"])))
    rig.flows_deleted()
    rig.say(SliceSet(endpoint_slice("dns", "10.0.0.1", ports=["53/UDP"])))
    ((_, deletion),) = rig.cleaner.under_way
    assert deletion.is_stale(*relayed)
    rig.loop.hold()
    assert not deletion.is_stale(*relayed)
    rig.flows_deleted()
    assert rig.cleaner.under_way == []
    rig.serve_with(RelayingBackend(rig.clock), NodeSettings(name="node1"))
    ((_, deletion),) = rig.cleaner.under_way
    assert not deletion.is_stale(*relayed)
    assert deletion.is_stale(relayed[0], destinations("10.0.0.2:53")[0])


def test_no_flow_is_stale_after_a_failed_sync() -> None:
    """The kernel may have taken a part of it."""
    rig = Rig(families=[V4])
    rig.start(ServiceSet(service("dns", "53/UDP")),
              SliceSet(endpoint_slice("dns", "10.0.0.1", ports=["53/UDP"])))  # fmt: skip
    rig.backend.problems = [TrustLost("half of it")]
    rig.say(SliceSet(endpoint_slice("dns", "10.0.0.2", ports=["53/UDP"])))
    rig.flows_deleted()
    assert rig.cleaner.under_way == []
    rig.settle()
    ((_, deletion),) = rig.cleaner.under_way
    vip, (old, new) = (addresses("10.96.0.1")[0], 53), destinations("10.0.0.1:53 10.0.0.2:53")
    assert deletion.is_stale(vip, old)
    assert not deletion.is_stale(vip, new)


class CorrectingBackend(RecordingBackend):
    """Each full sync finds something to write."""

    def sync(self, update: Update) -> SyncReport:
        super().sync(update)
        return SyncReport(operations=int(update.scope is Scope.RESYNC))


@pytest.mark.parametrize("is_reported", [True, False])
def test_flows_that_began_while_rules_were_missing_are_stale_once_these_are_back(is_reported: bool) -> None:
    rig = Rig(families=[V4])
    rig.start(ServiceSet(service("dns", "53/UDP")),
              SliceSet(endpoint_slice("dns", "10.0.0.1", ports=["53/UDP"])))  # fmt: skip
    rig.flows_deleted()
    rig.clock.now += 60.0
    if is_reported:
        assert rig.backend.damaged is not None
        rig.backend.damaged(V4, "flushed")
        rig.turn()
    else:
        rig.serve_with(CorrectingBackend(rig.clock), NodeSettings(name="node1"))
    ((_, deletion),) = rig.cleaner.under_way
    vip = addresses("10.96.0.1")[0], 53
    assert deletion.is_stale(vip, vip)
    assert not deletion.is_stale(vip, destinations("10.0.0.1:53")[0])
    rig.flows_deleted()
    assert rig.cleaner.under_way == []


def test_flows_that_could_not_be_deleted_are_due_again_after_the_next_sync() -> None:
    rig = Rig(families=[V4])
    rig.start(ServiceSet(service("dns", "53/UDP")))
    rig.flows_deleted(None)
    rig.say(ServiceSet(service("web", ip="10.96.0.2")))
    assert len(rig.cleaner.under_way) == 1


def test_serving_endpoints_are_compared_even_if_the_plan_is_the_same() -> None:
    rig = Rig(families=[V4])
    dns = ServiceSet(service("dns", "53/UDP"))
    ready, gone = endpoint("10.0.0.1"), endpoint("10.0.0.2", ready=False, serving=True, terminating=True)
    rig.start(dns, SliceSet(endpoint_slice("dns", ready, gone, ports=["53/UDP"])))
    rig.flows_deleted()
    assert rig.say(SliceSet(endpoint_slice("dns", ready, ports=["53/UDP"]))) == []
    assert len(rig.cleaner.under_way) == 1


def test_metrics_follow_syncs() -> None:
    rig = Rig(families=[V4])
    local = service("local", internal_local=True)
    rig.start(ServiceSet(local), SliceSet(endpoint_slice("local", "10.0.0.1")))
    gauge = 'kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="internal"}'
    assert rig.value(gauge) == 1
    rig.clock.now = 5.0
    rig.say(SliceSet(endpoint_slice("local", endpoint("10.0.0.1", "node1")), trigger_time=WALL + 3))
    assert rig.value(gauge) == 0
    assert rig.value('kubeproxy_network_programming_duration_seconds_sum{ip_family="IPv4"}') == 2.0
    assert rig.value("kubeproxy_sync_proxy_rules_service_changes_total") == 1
    assert rig.value("kubeproxy_sync_proxy_rules_endpoint_changes_total") == 2
    assert rig.value("kubeproxy_sync_proxy_rules_endpoint_changes_pending") == 0


def test_a_bad_object_is_logged_and_affects_no_other(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(families=[V4])
    first = rig.start(BadObject("Service", "a/b", "spec.ports[0].port", "0 is not a port"), WEB)
    assert len(first[0].plans) == 1
    assert "Service a/b: spec.ports[0].port: 0 is not a port" in caplog.text


def test_a_conflict_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(families=[V4])
    rig.start(WEB, ServiceSet(service("other")))
    rig.say(WEB_SLICE)
    assert [r.message for r in caplog.records].count("frontend conflict") == 1


# Threads


def test_events_and_stop_wake_a_sleeping_loop() -> None:
    synced = threading.Event()
    rig = Rig(families=[V4], all_synced=synced.set)
    thread = threading.Thread(target=rig.loop.run)
    thread.start()
    rig.loop.emit([WEB])
    rig.loop.emit([Complete("test")])
    assert synced.wait(120)
    rig.loop.stop()
    thread.join(120)
    assert not thread.is_alive()
    assert [len(update.plans) for update in rig.backend.take()] == [1]


# Bugs: what one Service, event or observer causes stops no other


def test_a_service_that_cannot_be_planned_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planned = plan_service
    bad = "bad"

    def plan(service: Service, *rest: Any, **named: Any) -> tuple[ServicePlan, ...]:
        if service.name.name == bad:
            raise KeyError("a bug")
        return planned(service, *rest, **named)

    monkeypatch.setattr("kproxy_core.sync.plans.plan_service", plan)
    rig = Rig(families=[V4])
    rig.start(WEB, WEB_SLICE, ServiceSet(service("bad", ip="10.96.0.2")))
    assert {key.name for key in rig.backend.held[V4]} == {"web"}
    assert "not served: default/bad: it cannot be planned: KeyError: 'a bug'" in body(rig)
    bad = "web"
    rig.say(ServiceSet(service("bad", ip="10.96.0.3")), SliceSet(endpoint_slice("web", "10.0.0.2")))
    assert {key.name for key in rig.backend.held[V4]} == {"web", "bad"}
    (held,) = [plan for key, plan in rig.backend.held[V4].items() if key.name == "web"]
    assert held.cluster == destinations("10.0.0.1:8080"), "its last plan is kept"
    assert "not served: default/web" in body(rig)
    rig.backend.take()
    rig.say(ServiceSet(service("other", ip="10.96.0.4")))
    assert "not served: default/web" in body(rig)
    bad = ""
    rig.clock.now += 60
    rig.turn()
    assert rig.backend.held[V4] == dict(rig.loop.plans[V4].plans)
    assert "not served" not in body(rig)
    assert [r.getMessage() for r in caplog.records].count("bug: a Service cannot be planned") == 2
    caplog.clear()


def test_a_service_that_cannot_be_planned_is_deleted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(families=[V4])
    rig.start(WEB, WEB_SLICE)

    def plan(*_: Any, **__: Any) -> tuple[ServicePlan, ...]:
        raise KeyError("a bug")

    monkeypatch.setattr("kproxy_core.sync.plans.plan_service", plan)
    rig.say(SliceSet(endpoint_slice("web", "10.0.0.2")))
    rig.say(ServiceGone(service_name("web")))
    assert rig.backend.held[V4] == {}
    assert "not served" not in body(rig)
    caplog.clear()


def test_an_observer_with_a_bug_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    class Buggy(SyncObserver):
        def sync_succeeded(self, synced: Synced) -> None:
            raise KeyError("a bug")

        def events_folded(self, folded: Folded) -> None:
            raise KeyError("a bug")

    rig = Rig(families=[V4], observers=lambda _: [Buggy()])
    rig.start(WEB, WEB_SLICE)
    rig.say(SliceSet(endpoint_slice("web", "10.0.0.2")))
    assert rig.recorder.successes
    assert rig.health.healthy()
    assert [r.getMessage() for r in caplog.records].count("bug: an observer failed") == 2
    caplog.clear()


def test_an_event_with_a_bug_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fold = Store.fold

    def buggy(store: Store, event: Event, now: float) -> None:
        if isinstance(event, ServiceGone):
            raise KeyError("a bug")
        fold(store, event, now)

    monkeypatch.setattr(Store, "fold", buggy)
    rig = Rig(families=[V4])
    rig.start(WEB, ServiceGone(service_name("web")), ServiceSet(service("other", ip="10.96.0.2")))
    assert {key.name for key in rig.backend.held[V4]} == {"web", "other"}

    def call() -> None:
        raise KeyError("a bug")

    rig.loop.post(call)
    rig.say(ServiceSet(service("third", ip="10.96.0.3")))
    assert {key.name for key in rig.backend.held[V4]} == {"web", "other", "third"}
    caplog.clear()


def body(rig: Rig) -> str:
    return rig.health.healthz().body.decode()


def test_failures_that_repeat_are_logged_at_growing_intervals(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(families=[V4])
    rig.backend.problems = [*[SyncFailed("locked")] * 20, SyncFailed("full"), SyncFailed("locked")]
    with caplog.at_level(logging.INFO, "kproxy.run"):
        rig.start(WEB, WEB_SLICE)
        rig.settle()
    fields = [(record.getMessage(), record.__dict__.get("fields", {})) for record in caplog.records]
    told = [(of["failures"], of["error"]) for message, of in fields if message == "sync failed"]
    assert told[:5] == [(number, "locked") for number in (1, 2, 4, 8, 16)]
    assert [error for _, error in told[5:]] == ["full"]
    assert sum(message.startswith("looking for") for message, _ in fields) == 1
    assert [of["failures"] > 16 for message, of in fields if message == "sync works again"] == [True]
