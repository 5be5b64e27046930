"""Service ports that a backend fails to program are left out, and all others are served."""

import errno
import os
from collections.abc import Callable, Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_conformance.builders import endpoint_slice, service
from kproxy_core.contract.errors import SyncFailed, TrustLost
from kproxy_core.contract.values import Scope, Update
from kproxy_core.model.address import Family, Protocol
from kproxy_core.model.events import Event, ServiceGone, ServiceSet, SliceSet
from kproxy_core.model.service import ServiceName, ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_core.sync.isolation import MOST_FAILURES, Isolation, UnservedServices
from tests.core.loop_rig import Rig

V4 = Family.IPV4
Failure = Callable[[Collection[ServicePortKey]], Exception]

FAILURES: dict[str, Failure] = {
    "refused": lambda _: SyncFailed("EINVAL"),
    "trust lost": lambda _: TrustLost("ENOENT"),
    "unexpected": lambda _: KeyError("x"),
    "named": lambda keys: SyncFailed("too large", service_ports=keys),
}


def key_of(number: int) -> ServicePortKey:
    return ServicePortKey("default", f"s{number}", "", Protocol.TCP)


def events_of(*numbers: int, endpoint: str = "10.0.0.1") -> list[Event]:
    """Return events of Services with one *endpoint*; the backend can program those at 10.0.0.1 only."""
    return [
        event for number in numbers for event in (
            ServiceSet(service(f"s{number}", ip=f"10.96.{number // 250}.{number % 250 + 1}")),
            SliceSet(endpoint_slice(f"s{number}", endpoint)))
    ]


def is_bad(plan: ServicePlan) -> bool:
    return any(each.address != b"\x0a\0\0\x01" for each in plan.reachable)


class PickyRig(Rig):
    """A backend that fails to program plans with endpoints other than 10.0.0.1."""

    def __init__(self, failure: Failure) -> None:
        self.events: list[str] = []
        self.unserved = UnservedServices(lambda name, text: self.events.append(text))
        super().__init__(families=[V4], observers=lambda _: [self.unserved])
        self.failure = failure
        self.backend.refuse = self.refuse

    def refuse(self, update: Update) -> None:
        asked = update.plans if update.scope is Scope.RESYNC else {
            key: plan for key, plan in update.changed.items() if plan is not None}
        if found := [key for key, plan in asked.items() if is_bad(plan)]:
            raise self.failure(found)

    def work(self) -> list[Update]:
        """Run turns until nothing is due within half a second. Return the updates."""
        updates = self.turn()
        while (at := self.loop.next_wakeup()) is not None and at <= self.clock.now + 0.5:
            self.clock.now = max(self.clock.now, at)
            updates += self.turn()
        return updates

    def live(self, seconds: float) -> None:
        """Run all turns that are due within *seconds*."""
        end = self.clock.now + seconds
        while (at := self.loop.next_wakeup()) is not None and at <= end:
            self.clock.now = max(self.clock.now, at)
            self.turn()
        self.clock.now = end

    def break_kernel(self, error: Exception) -> None:
        """Have all syncs fail with *error*."""
        def refuse(update: Update) -> None:
            raise error

        self.backend.refuse = refuse

    @property
    def served(self) -> set[str]:
        return {key.name for key in self.backend.held[V4]}

    def count(self) -> float:
        (found,) = self.unserved.measure()
        return found.value


@pytest.fixture(params=list(FAILURES))
def rig(request: pytest.FixtureRequest) -> PickyRig:
    return PickyRig(FAILURES[request.param])


def test_others_are_served_and_what_fails_keeps_what_it_had(rig: PickyRig) -> None:
    rig.start(*events_of(*range(40)))
    rig.work()
    before = dict(rig.backend.held[V4])
    rig.say(*events_of(3, 17, endpoint="10.0.0.2"), *events_of(40, 41))
    updates = rig.work()
    assert rig.served == {f"s{number}" for number in range(42)}
    for number in (3, 17):
        assert rig.backend.held[V4][key_of(number)] == before[key_of(number)]
    assert len(updates) < 25
    assert {event.split(" is not served: ")[0] for event in rig.events} == {"default/s3", "default/s17"}
    assert rig.count() == 2
    body = rig.health.healthz().body.decode()
    assert "not served: default/s" in body
    assert ", and 1 more" in body


def test_a_first_sync_serves_others(rig: PickyRig) -> None:
    rig.start(*events_of(*range(20)), *events_of(20, endpoint="10.0.0.2"))
    if isinstance(rig.failure([]), SyncFailed) and not getattr(rig.failure([key_of(0)]), "service_ports", ()):
        rig.live(1)
        assert rig.served == set(), "what an earlier process has written is not deleted for a short failure"
    while not rig.loop.settled:
        at = rig.loop.next_wakeup()
        assert at is not None
        rig.clock.now = max(rig.clock.now, at)
        rig.turn()
    assert rig.served == {f"s{number}" for number in range(20)}
    assert rig.count() == 1


def test_a_full_sync_that_fails_because_of_what_was_acknowledged_serves_others(rig: PickyRig) -> None:
    """Its change was programmed, but all at once it is too much."""
    rig.start(*events_of(*range(10)))
    rig.work()

    def refuse(update: Update) -> None:
        if key_of(4) in (update.plans if update.scope is Scope.RESYNC else {}):
            raise rig.failure([key_of(4)])

    rig.backend.refuse = refuse
    rig.backend.held[V4].clear()
    assert rig.backend.damaged is not None
    rig.backend.damaged(V4, "flushed")
    rig.say(*events_of(11))
    rig.live(10)
    assert rig.served >= {f"s{number}" for number in (*range(10), 11)} - {"s4"}


def test_what_fails_is_found_after_a_failure_of_the_machine(rig: PickyRig) -> None:
    rig.start(*events_of(*range(10)))
    rig.work()
    rig.break_kernel(SyncFailed("EINVAL"))
    rig.say(*events_of(10))
    rig.live(10)
    rig.say(*events_of(3, endpoint="10.0.0.2"))
    rig.live(5)
    rig.backend.refuse = rig.refuse
    rig.live(90)
    assert rig.served == {f"s{number}" for number in range(11)}
    assert rig.count() == 1


def test_an_innocent_service_port_is_tried_again_soon(rig: PickyRig) -> None:
    """Left out because of a short failure of the machine, while a guilty one has waited for long."""
    rig.start(*events_of(*range(3)))
    rig.work()
    rig.say(*events_of(1, endpoint="10.0.0.2"))
    rig.live(900)
    at = rig.loop.next_wakeup()
    assert at is not None
    rig.clock.now = at
    rig.backend.problems = [None, SyncFailed("EBUSY")]
    rig.say(*events_of(7))
    rig.turn()
    assert "s7" not in rig.served
    rig.live(5)
    assert "s7" in rig.served
    assert rig.count() == 1


@pytest.mark.parametrize("number", [errno.EPERM, errno.EMFILE, errno.EINTR])
def test_an_error_of_the_machine_accuses_no_service(rig: PickyRig, number: int) -> None:
    error = SyncFailed("no")
    error.__cause__ = OSError(number, os.strerror(number))
    rig.start(*events_of(*range(10)))
    rig.work()

    def refuse(update: Update) -> None:
        if update.plans != rig.backend.held[V4]:  # The kernel may still be read.
            raise error

    rig.backend.refuse = refuse
    rig.say(*events_of(10))
    rig.live(600)
    assert rig.events == []
    assert rig.served == {f"s{number}" for number in range(10)}
    assert not rig.health.healthy()


def test_a_change_of_what_fails_is_tried_at_once_and_others_need_not_wait(rig: PickyRig) -> None:
    rig.start(*events_of(*range(10)))
    rig.work()
    rig.say(*events_of(5, endpoint="10.0.0.2"))
    rig.work()
    assert rig.count() == 1
    rig.say(*events_of(6, endpoint="10.0.0.1"), *events_of(11))
    assert "s11" in rig.served
    assert rig.count() == 1
    rig.say(ServiceSet(service("s11", ip="10.96.0.12", affinity=5)), *events_of(11))
    assert "not served: default/s5" in rig.health.healthz().body.decode(), "also after a sync of nothing"
    rig.say(*events_of(5, endpoint="10.0.0.1"))
    rig.work()
    assert (rig.count(), rig.served) == (0, {f"s{number}" for number in (*range(10), 11)})
    assert rig.backend.held[V4] == dict(rig.loop.plans[V4].plans)


def test_what_fails_is_tried_again_at_growing_intervals(rig: PickyRig) -> None:
    rig.start(*events_of(*range(10)))
    rig.work()
    rig.say(*events_of(4, 5, endpoint="10.0.0.2"))
    rig.work()
    rig.backend.take()
    rig.clock.now += 100
    rig.turn()
    rig.work()
    assert len(rig.events) == 2, "it is reported once"
    rig.backend.refuse = lambda update: None
    rig.clock.now += 1000
    rig.turn()
    rig.work()
    assert rig.count() == 0
    assert rig.backend.held[V4] == dict(rig.loop.plans[V4].plans)


def test_a_deleted_service_is_not_tried_again(rig: PickyRig) -> None:
    rig.start(*events_of(*range(4)))
    rig.work()
    rig.say(*events_of(2, endpoint="10.0.0.2"))
    rig.work()
    rig.say(ServiceGone(ServiceName("default", "s2")))
    rig.work()
    assert (rig.served, rig.count()) == ({"s0", "s1", "s3"}, 0)


def test_a_full_sync_keeps_what_was_left_out_as_it_was(rig: PickyRig) -> None:
    rig.start(*events_of(*range(6)))
    rig.work()
    before = dict(rig.backend.held[V4])
    rig.say(*events_of(2, endpoint="10.0.0.2"))
    rig.work()
    assert rig.backend.damaged is not None
    rig.backend.damaged(V4, "something")
    (update, *_) = rig.work()
    assert update.scope is Scope.RESYNC
    assert rig.backend.held[V4] == before


def test_an_address_that_moves_from_what_was_left_out_is_served(rig: PickyRig) -> None:
    rig.start(*events_of(*range(3)))
    rig.work()
    rig.say(ServiceSet(service("s1", ip="10.96.9.9")), SliceSet(endpoint_slice("s1", "10.0.0.2")))
    rig.work()
    rig.say(ServiceSet(service("heir", ip="10.96.0.2")), SliceSet(endpoint_slice("heir", "10.0.0.1")))
    assert rig.served == {"s0", "heir", "s2"}, "its former owner is deleted in the same sync"
    assert rig.backend.damaged is not None
    rig.backend.damaged(V4, "something")
    rig.work()
    assert rig.served == {"s0", "heir", "s2"}
    rig.say(ServiceGone(ServiceName("default", "heir")), *events_of(1))
    rig.work()
    assert rig.served == {"s0", "s1", "s2"}


@pytest.mark.parametrize("lasts", [0.3, 1, 3, 10, 30, 300])
def test_a_failure_of_the_kernel_accuses_no_service_and_deletes_nothing(lasts: float) -> None:
    rig = PickyRig(FAILURES["refused"])
    rig.start(*events_of(*range(100)))
    rig.work()
    rig.break_kernel(SyncFailed("EINVAL"))
    rig.say(*events_of(100))
    rig.live(lasts)
    assert (rig.served, rig.events) == ({f"s{number}" for number in range(100)}, [])
    rig.backend.refuse = lambda update: None
    rig.live(60)
    assert (rig.served, rig.events) == ({f"s{number}" for number in range(101)}, [])


def test_a_kernel_that_recovers_during_a_search_serves_all_at_once() -> None:
    rig = PickyRig(FAILURES["refused"])
    rig.start(*events_of(*range(100)))
    rig.work()
    for works_after in range(9, 30):
        left = works_after

        def refuse(update: Update) -> None:
            nonlocal left
            left -= 1
            if left > 0:
                raise SyncFailed("EINVAL")

        rig.backend.refuse = refuse
        rig.say(*events_of(100 + works_after))
        rig.live(400)
        rig.work()
        assert rig.served == {f"s{number}" for number in (*range(100), *range(109, 101 + works_after))}
    assert rig.count() == 0


@given(st.one_of(
    st.tuples(st.sets(st.integers(0, 59)), st.just(True)),
    st.tuples(st.sets(st.integers(0, 59), max_size=3), st.just(False)),
), st.integers(1, 60))
def test_halves_find_exactly_what_fails(how: tuple[set[int], bool], number: int) -> None:
    bad, first_without = how
    suspects = [key_of(each) for each in range(number)]
    wanted = {key_of(each) for each in bad if each < number}
    isolation = Isolation(longest=300)
    isolation.search(suspects, 0.0, first_without=first_without)
    programmed: set[ServicePortKey] = set()
    syncs = failures = 0
    while isolation.trial is not None:
        syncs += 1
        assert not isolation.withheld & set(isolation.trial)
        if wanted & set(isolation.trial):
            failures += 1
            assert isolation.failed("no", 0.0)
        else:
            programmed.update(isolation.trial)
            isolation.succeeded(0.0, wrote=True)
    assert (set(isolation.left_out), programmed) == (wanted, set(suspects) - wanted)
    assert syncs <= 2 * len(wanted) * number.bit_length() + 3
    assert (isolation.retry_at is None) == (not wanted)


def test_a_search_among_too_many_ends() -> None:
    isolation = Isolation(longest=300)
    isolation.search([key_of(each) for each in range(10_000)], 0.0, first_without=True)
    isolation.succeeded(0.0, wrote=True)
    failures = 0
    while isolation.trial is not None:
        assert isolation.failed("no", 0.0)
        failures += 1
    assert failures == MOST_FAILURES
    assert len(isolation.left_out) == 10_000


def test_a_search_that_finds_no_cause_accuses_nobody() -> None:
    isolation = Isolation(longest=300)
    isolation.search([key_of(each) for each in range(1000)], 0.0, first_without=False)
    failures = 0
    while isolation.failed("no", 0.0):
        failures += 1
    assert failures < 20
    assert (isolation.left_out, isolation.withheld, isolation.retry_at) == ({}, set(), None)
