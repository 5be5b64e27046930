"""Services that take very much: they wait for others, never the other way round, and are bounded."""

import logging

import pytest

from kproxy_conformance.builders import endpoint_slice, service, service_name
from kproxy_core.contract.errors import SyncFailed
from kproxy_core.contract.values import Scope, Update
from kproxy_core.model.events import ServiceGone, ServiceSet, SliceSet
from kproxy_core.model.service import EndpointSlice
from kproxy_core.plan import budget
from kproxy_core.plan.budget import OF_PORT
from kproxy_core.sync.isolation import UnservedServices
from tests.core.loop_rig import V4, Rig


@pytest.fixture(autouse=True)
def small_giants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a Service with four endpoints be a giant, and have six at most."""
    monkeypatch.setattr(budget, "GIANT", OF_PORT + 4)
    monkeypatch.setattr(budget, "MOST_DESTINATIONS", 6)


def giant(number: int = 0, last: int = 4, *, name: str = "") -> EndpointSlice:
    endpoints = (f"10.0.{number}.{host}" for host in range(1, last + 1))
    return endpoint_slice(f"giant{number}", *endpoints, name=name or f"giant{number}-a")


def rig_with_giants(count: int = 1) -> Rig:
    rig = Rig(families=[V4])
    rig.start(
        ServiceSet(service("web", ip="10.96.1.1")),
        *(ServiceSet(service(f"giant{n}", ip=f"10.96.0.{n + 1}")) for n in range(count)),
        *(SliceSet(giant(n)) for n in range(count)),
    )
    return rig


def changed(updates: list[Update]) -> list[list[str]]:
    return [sorted(key.name for key in update.changed) for update in updates]


def test_another_service_is_synced_before_a_giant_of_the_same_moment() -> None:
    rig = rig_with_giants()
    rig.loop.emit([SliceSet(giant(last=5)), SliceSet(endpoint_slice("web", "10.1.0.1"))])
    assert changed(rig.settle()) == [["web"], ["giant0"]]
    assert rig.backend.held[V4] == rig.loop.plans[V4].plans


def test_a_giant_that_flaps_waits_for_four_times_its_cost_and_others_do_not() -> None:
    rig = rig_with_giants()
    rig.backend.seconds = 2.0
    rig.say(SliceSet(giant(last=5)))
    assert changed(rig.turn()) == [["giant0"]]
    rig.backend.seconds = 0.0
    ended = rig.clock.now
    assert rig.say(SliceSet(giant(last=6))) == []
    assert changed(rig.say(SliceSet(endpoint_slice("web", "10.1.0.1")))) == [["web"]]
    assert rig.loop.next_wakeup() == ended + 8.0
    rig.clock.now = ended + 7.9
    assert rig.turn() == []
    rig.clock.now = ended + 8.0
    assert changed(rig.turn()) == [["giant0"]]
    assert rig.backend.held[V4] == rig.loop.plans[V4].plans


def test_one_giant_is_synced_at_a_time() -> None:
    rig = rig_with_giants(3)
    rig.loop.emit([SliceSet(giant(n, last=5)) for n in range(3)])
    assert changed(rig.settle()) == [["giant0"], ["giant1"], ["giant2"]]
    assert rig.backend.held[V4] == rig.loop.plans[V4].plans


def test_a_giant_that_ends_is_removed() -> None:
    rig = rig_with_giants()
    rig.loop.emit([ServiceGone(service_name("giant0"))])
    assert changed(rig.settle()) == [["giant0"]]
    assert [key.name for key in rig.backend.held[V4]] == ["web"]


def test_a_full_sync_does_not_have_giants_that_wait() -> None:
    """A mode that does not notice foreign changes makes one every 30 s."""
    rig = rig_with_giants(3)
    rig.loop.emit([SliceSet(giant(n, last=5)) for n in range(3)])
    assert rig.backend.damaged is not None
    rig.backend.damaged(V4, "flushed")
    rig.clock.now += 0.1
    seen = rig.settle()
    assert [update.scope for update in seen] == [Scope.RESYNC, *[Scope.CHANGED] * 3]
    assert changed(seen) == [[], ["giant0"], ["giant1"], ["giant2"]]
    assert rig.backend.held[V4] == rig.loop.plans[V4].plans


def test_a_giant_is_served_after_failures() -> None:
    rig = rig_with_giants()
    rig.backend.problems = [SyncFailed("no")] * 3
    rig.loop.emit([SliceSet(giant(last=5)), SliceSet(endpoint_slice("web", "10.1.0.1"))])
    rig.settle()
    assert len(next(p for p in rig.backend.held[V4].values() if p.key.name == "giant0").cluster) == 5


def test_endpoints_beyond_the_limit_are_not_used_and_the_operator_is_told(
    caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("kproxy").propagate = True
    events: list[str] = []
    rig = Rig(families=[V4], observers=lambda _: [UnservedServices(
        lambda name, text: events.append(f"{name}: {text}"))])
    rig.start(ServiceSet(service("giant0")), SliceSet(giant()))
    (key,) = rig.backend.held[V4]
    rig.loop.emit([SliceSet(endpoint_slice("giant0", "10.1.0.1", "10.1.0.2", "10.1.0.3", name="giant0-b"))])
    rig.settle()
    assert len(rig.backend.held[V4][key].cluster) == 6, "three of each slice"
    limit = "endpoints: at most 100,000 endpoints times ports, 400,000 times addresses"
    assert [record.__dict__["fields"] for record in caplog.records] == [{
        "ip_family": "IPv4", "service": "default/giant0", "left_out": limit}]
    assert rig.health.problems() == [f"IPv4: beyond the limits: default/giant0: {limit}"]
    assert rig.health.healthy()
    assert events == [f"default/giant0: not served in full: {limit}"]
    assert len(rig.loop.plans[V4].candidates(key)) == 6
    caplog.clear()
    rig.loop.emit([SliceSet(giant(last=1))])
    with caplog.at_level(logging.INFO, "kproxy.run"):
        rig.settle()
    assert len(rig.backend.held[V4][key].cluster) == 4
    assert "service is served in full again" in caplog.text
    assert rig.health.problems() == []


def test_services_that_find_no_room_on_the_node_are_served_once_there_is(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "ORDINARY", 20)
    monkeypatch.setattr(budget, "MOST_OF_NODE", 3 * 1100)
    monkeypatch.setattr(budget, "MOST_OF_NAMESPACE", 3 * 1100)
    rig = Rig(families=[V4])
    for number in range(5):
        rig.say(ServiceSet(service(f"s{number}", ip=f"10.96.0.{number + 1}", hash_by="client")),
                SliceSet(endpoint_slice(f"s{number}", "10.0.0.1", "10.0.0.2")))
    rig.start()
    rig.settle()

    def hashed() -> set[str]:
        return {key.name for key, plan in rig.backend.held[V4].items() if plan.hash_by}

    assert hashed() == {"s0", "s1", "s2"}
    assert rig.health.problems() == [
        "IPv4: beyond the limits: default/s3: hash: at most 1,000,000 elements for all Services, 500,000 for "
        "those of a namespace, and 1 more"]
    rig.say(SliceSet(endpoint_slice("s1", "10.0.0.1", "10.0.0.3")))
    rig.settle()
    assert hashed() == {"s0", "s1", "s2"}
    rig.say(ServiceGone(service_name("s0")))
    rig.settle()
    assert hashed() == {"s1", "s2", "s3"}
    rig.say(ServiceSet(service("s1", ip="10.96.0.2")))
    rig.settle()
    assert hashed() == {"s2", "s3", "s4"}
    assert rig.health.problems() == []
