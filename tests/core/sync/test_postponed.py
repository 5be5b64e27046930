"""Changes that take much: a turn writes a part of them, the smallest first. New ones precede the rest."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy_conformance.builders import endpoint_slice, service, service_name
from kproxy_core.app.answers import Snapshot
from kproxy_core.app.explain import stale
from kproxy_core.contract.errors import SyncFailed
from kproxy_core.contract.values import Scope, Update
from kproxy_core.model.address import Protocol
from kproxy_core.model.events import Event, ServiceGone, ServiceSet, SliceSet
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan import budget
from kproxy_core.plan.budget import OF_PORT
from kproxy_core.plan.service_plan import Frontend
from kproxy_core.sync import family
from kproxy_core.sync.node_facts import NodeSettings
from tests.core.loop_rig import V4, RecordingBackend, Rig

PORTS = 12


@pytest.fixture(autouse=True)
def small_turns() -> Iterator[None]:
    """Let a turn have room for two small service ports."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GIANT", "_SMALLEST_PART", "_LARGEST_PART"):
            patch.setattr(family, name, 2 * (OF_PORT + 2))
        yield


def many_ports(name: str = "many", number: int = PORTS, **of_service: str) -> list[Event]:
    ports = tuple(f"p{at}:{at + 1}" for at in range(number))
    numbers = tuple(f"p{at}:8080" for at in range(number))
    return [ServiceSet(service(name, *ports, ip="10.96.0.9", **of_service)),  # type: ignore[arg-type]
            SliceSet(endpoint_slice(name, "10.0.0.1", ports=numbers))]


def small(name: str, host: int) -> list[Event]:
    return [ServiceSet(service(name, ip=f"10.96.1.{host}")), SliceSet(endpoint_slice(name, f"10.1.0.{host}"))]


def sizes(updates: list[Update]) -> list[int]:
    return [len(update.changed) for update in updates]


def is_settled(rig: Rig) -> bool:
    return rig.backend.held[V4] == rig.loop.plans[V4].plans


def test_many_ports_are_written_in_parts() -> None:
    rig = Rig(families=[V4])
    rig.start()
    rig.loop.emit(many_ports())
    assert sizes(rig.settle()) == [2] * (PORTS // 2)
    assert is_settled(rig)
    assert all(update.scope is Scope.CHANGED for update in rig.backend.updates)


def test_they_are_removed_in_parts() -> None:
    rig = Rig(families=[V4])
    rig.start(*many_ports())
    rig.loop.emit([ServiceGone(service_name("many"))])
    assert sizes(rig.settle()) == [2] * (PORTS // 2)
    assert rig.backend.held[V4] == {}


def test_what_the_backend_leaves_unfinished_follows_the_changes_of_others() -> None:
    rig = Rig(families=[V4])
    rig.start(*small("web", 1))
    (web,) = rig.loop.plans[V4].plans
    rig.backend.unfinished = frozenset({web})
    (update,) = rig.say(SliceSet(endpoint_slice("web", "10.1.0.9")))
    assert update.changed.keys() == {web}
    assert rig.loop.plans[V4].difference.postponed == {web}
    (update,) = rig.say(*small("other", 2))
    assert web not in update.changed
    rig.backend.unfinished = frozenset()
    assert [update.changed.keys() for update in rig.settle()] == [{web}]
    assert not rig.loop.plans[V4].difference.postponed
    assert is_settled(rig)


@pytest.mark.parametrize("new", [False, True])
def test_what_is_unfinished_is_told_again_if_it_is_as_before(new: bool) -> None:
    rig = Rig(families=[V4])
    rig.start(*([] if new else small("web", 1)))
    rig.backend.unfinished = frozenset({ServicePortKey("default", "web", "", Protocol.TCP)})
    rig.say(*small("web", 1), SliceSet(endpoint_slice("web", "10.1.0.9")))
    rig.backend.unfinished = frozenset()
    rig.loop.emit([ServiceGone(service_name("web"))] if new else small("web", 1))
    assert [set(update.changed.values()) for update in rig.settle()] == [
        {None} if new else set(rig.loop.plans[V4].plans.values())]
    assert is_settled(rig)


@pytest.mark.parametrize("first", [False, True])
def test_a_full_sync_may_leave_a_part_of_one(first: bool) -> None:
    rig = Rig(families=[V4])
    web = ServicePortKey("default", "web", "", Protocol.TCP)
    rig.backend.unfinished = frozenset({web}) if first else frozenset()
    rig.start(*small("web", 1))
    if not first:
        rig.backend.unfinished = frozenset({web})
        assert rig.backend.damaged is not None
        rig.backend.damaged(V4, "flushed")
        rig.clock.now += 0.1
        assert [update.scope for update in rig.turn()] == [Scope.RESYNC]
    assert rig.loop.plans[V4].difference.postponed == {web}
    (update,) = rig.say(*small("other", 2))
    assert web not in update.changed
    rig.backend.unfinished = frozenset()
    assert [update.changed.keys() for update in rig.settle()] == [{web}]
    assert is_settled(rig)


def test_a_full_sync_has_all_of_them() -> None:
    rig = Rig(families=[V4])
    assert sizes(rig.start(*many_ports())) == [PORTS]
    assert sizes(rig.say(*many_ports(external_ips="192.0.2.1"))) == [1]
    assert not is_settled(rig)
    assert rig.backend.damaged is not None
    rig.backend.damaged(V4, "flushed")
    rig.turn()
    rig.clock.now += 0.1
    assert Scope.RESYNC in [update.scope for update in rig.turn()]
    assert is_settled(rig)
    assert rig.settle() == []


def test_many_services_of_one_moment_are_written_in_parts_the_smallest_first() -> None:
    rig = Rig(families=[V4])
    rig.start()
    large = endpoint_slice("a", *(f"10.2.0.{host}" for host in range(1, 30)))
    some = [event for at in range(6) for event in small(f"s{at}", at + 1)]
    rig.loop.emit([*small("a", 9), SliceSet(large), *some])
    updates = rig.settle()
    assert sizes(updates) == [2, 2, 2, 1]
    assert [key.name for key in updates[-1].changed] == ["a"]


def test_a_new_change_precedes_what_was_postponed() -> None:
    rig = Rig(families=[V4])
    rig.start(*small("web", 1))
    assert sizes(rig.say(*many_ports())) == [2]
    assert [sorted(key.name for key in update.changed) for update in rig.say(
        SliceSet(endpoint_slice("web", "10.1.0.2")))] == [["web"]]
    rig.settle()
    assert is_settled(rig)


def test_what_was_postponed_rests_when_it_is_done_and_others_do_not_wait() -> None:
    rig = Rig(families=[V4])
    rig.start(*small("web", 1))
    rig.say(*many_ports())
    rig.backend.seconds = 1.0
    assert sizes(rig.turn()) == [2]
    assert sizes(rig.turn()) == [2], "no rest between two parts"
    rig.settle()
    ended = rig.clock.now
    rig.backend.seconds = 0.0
    rig.say(*many_ports(external_ips="192.0.2.1"))
    assert rig.loop.next_wakeup() == ended + 4.0 * (PORTS // 2 - 1)
    assert sizes(rig.say(SliceSet(endpoint_slice("web", "10.1.0.2")))) == [1]


def test_a_frontend_that_moves_is_released_and_taken_in_one_update() -> None:
    """Else, two service ports would have it for a moment."""
    rig = Rig(families=[V4])
    rig.start(*many_ports())
    renamed = tuple(f"q{at}:{at + 1}" for at in range(PORTS))
    rig.loop.emit([ServiceSet(service("many", *renamed, ip="10.96.0.9"))])
    for update in rig.settle():
        gone = {key.port_name[1:] for key, plan in update.changed.items() if plan is None}
        assert gone == {key.port_name[1:] for key, plan in update.changed.items() if plan is not None}
        assert len(gone) == 1
    assert is_settled(rig)


def test_a_failure_loses_nothing_that_was_postponed() -> None:
    rig = Rig(families=[V4])
    rig.start()
    rig.backend.problems = [None, SyncFailed("no"), None, *[SyncFailed("no")] * 3]
    rig.loop.emit(many_ports())
    rig.settle()
    assert is_settled(rig)


def test_stale_flows_of_what_was_postponed_are_found_when_it_is_written() -> None:
    rig = Rig(families=[V4])
    ports = tuple(f"p{at}:{at + 1}/UDP" for at in range(PORTS))
    numbers = tuple(f"p{at}:8080/UDP" for at in range(PORTS))
    rig.start(ServiceSet(service("dns", *ports)),
              SliceSet(endpoint_slice("dns", "10.0.0.1", "10.0.0.2", ports=numbers)))
    rig.recorder.successes.clear()
    rig.loop.emit([SliceSet(endpoint_slice("dns", "10.0.0.1", ports=numbers))])
    rig.settle()
    found = rig.recorder.successes
    assert len(found) > 2
    assert all(synced.follow_ups.udp_ports == {step.key for step in synced.steps} for synced in found)


def test_a_removed_service_that_waits_is_not_taken_for_a_stale_one() -> None:
    rig = Rig(families=[V4])
    rig.start(*many_ports())
    assert sizes(rig.say(ServiceGone(service_name("many")))) == [2]
    plans_now = rig.loop.plans[V4]
    held = [frontend for plan in rig.backend.held[V4].values() for frontend in plan.frontends()]
    assert len(held) == PORTS - 2
    assert not list(stale(held, Snapshot(rig.loop, plans_now, lambda *_: "")))
    rig.settle()
    assert len(list(stale(held, Snapshot(rig.loop, plans_now, lambda *_: "")))) == PORTS - 2


def test_explain_says_that_a_service_port_waits() -> None:
    rig = Rig(families=[V4])
    rig.start()
    rig.say(*many_ports())
    waiting = Snapshot(rig.loop, rig.loop.plans[V4], lambda *_: "").unserved
    assert len(waiting) == PORTS - 2
    assert set(waiting.values()) == {"its change waits for smaller ones of other Services"}


def test_a_shift_of_all_ports_is_written_in_parts() -> None:
    """Each port's frontend belongs to the next one then: no two of them are written together."""
    rig = Rig(families=[V4])
    rig.start(*many_ports())
    shifted = tuple(f"p{at}:{(at + 1) % PORTS + 1}" for at in range(PORTS))
    rig.loop.emit([ServiceSet(service("many", *shifted, ip="10.96.0.9"))])
    assert max(sizes(rig.settle())) <= 4
    assert is_settled(rig)


def test_another_service_takes_the_address_of_one_whose_removal_waits() -> None:
    rig = Rig(families=[V4])
    rig.start(*many_ports())
    rig.say(ServiceGone(service_name("many")))
    rig.say(ServiceSet(service("web", f"{PORTS}", ip="10.96.0.9")),
            SliceSet(endpoint_slice("web", "10.1.0.1")))
    owners = [key.name for key, plan in rig.backend.held[V4].items()
              if any(frontend.port == PORTS for frontend in plan.frontends())]
    assert owners == ["web"]
    rig.settle()
    assert [key.name for key in rig.backend.held[V4]] == ["web"]


def test_parts_are_as_large_as_the_backend_writes_within_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "_SMALLEST_PART", OF_PORT + 2)
    monkeypatch.setattr(family, "_LARGEST_PART", 4 * (OF_PORT + 2))
    rig = Rig(families=[V4])
    rig.start()
    rig.loop.emit(many_ports())
    assert sizes(rig.settle()) == [2, 4, 4, 2]
    rig.backend.seconds = 1.0
    rig.loop.emit([ServiceGone(service_name("many"))])
    assert sizes(rig.settle()) == [4, 2, 1, 1, 1, 1, 1, 1]


def test_another_backend_is_given_what_waits() -> None:
    rig = Rig(families=[V4])
    rig.start()
    rig.say(*many_ports())
    other = RecordingBackend(rig.clock)
    rig.serve_with(other, NodeSettings(name="node1"))
    assert other.held[V4] == rig.loop.plans[V4].plans
    rig.settle()
    assert other.held[V4] == rig.loop.plans[V4].plans


# Any history.

NAMES = ("a", "b", "c")


@st.composite
def events(draw: st.DrawFn) -> Event:
    name = draw(st.sampled_from(NAMES))
    if draw(st.integers(0, 5)) == 0:
        return ServiceGone(service_name(name))
    count = draw(st.sampled_from((1, 2, 8)))
    if draw(st.booleans()):
        hosts = range(draw(st.integers(1, 4)))
        ports = tuple(f"p{at}:8080" for at in range(count))
        return SliceSet(endpoint_slice(name, *(f"10.0.0.{host + 1}" for host in hosts), ports=ports))
    first = draw(st.integers(0, 4))
    return ServiceSet(service(
        name, *(f"p{at}:{first + at + 1}" for at in range(count)),
        ip=f"10.96.0.{draw(st.sampled_from((NAMES.index(name), 0, 1)))}",
        external_ips=draw(st.sampled_from(("", "192.0.2.1", "192.0.2.1 192.0.2.2"))),
        created=f"2026-01-0{draw(st.integers(1, 3))}T00:00:00Z"))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(events(), st.integers(0, 2), st.sampled_from(("", "", "", "fail", "damage"))),
                min_size=1, max_size=25), st.booleans())
def test_every_update_can_be_written_and_the_last_state_is_that_of_the_plans(
    history: list[tuple[Event, int, str]], has_giants: bool
) -> None:
    """After every update each frontend has one owner, as in a kernel map."""
    with pytest.MonkeyPatch.context() as patch:
        if has_giants:
            patch.setattr(budget, "GIANT", 15)
        rig = Rig(families=[V4])
        wrong: list[object] = []

        def check(update: Update) -> None:
            held = dict(rig.backend.held[V4]) if update.scope is Scope.CHANGED else dict(update.plans)
            for key, plan in update.changed.items():
                held.pop(key, None)
                if plan is not None:
                    held[key] = plan
            owners: dict[Frontend, object] = {}
            for key, plan in held.items():
                wrong.extend((frontend, key) for frontend in plan.frontends()
                             if owners.setdefault(frontend, key) != key)
            if held != update.plans:
                wrong.append(update)

        rig.backend.refuse = check
        rig.start()
        for event, turns, trouble in history:
            rig.loop.emit([event])
            if trouble == "fail":
                rig.backend.problems = [SyncFailed("no")]
            elif trouble and rig.backend.damaged is not None:
                rig.backend.damaged(V4, "flushed")
            for _ in range(turns):
                rig.turn()
        rig.settle(500)
        assert is_settled(rig)
        assert not wrong
