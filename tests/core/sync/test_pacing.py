"""Times of the sync loop's runs, with a clock that only the tests move."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_core.contract.values import Scope
from kproxy_core.sync.pacing import Pacing

CHANGED, RESYNC = Scope.CHANGED, Scope.RESYNC


class Loop:
    """Runs as soon as the pacing allows. A run takes `takes` seconds."""

    def __init__(
        self, min_interval: float = 1.0, retry_cap: float = 30.0, burst: int = 2,
        shortest_rest: float = 0.001,
    ) -> None:
        self.pacing = Pacing(
            min_interval=min_interval, retry_cap=retry_cap, burst=burst, shortest_rest=shortest_rest)
        self.now = 1000.0
        self.runs: list[tuple[float, Scope]] = []
        self.ok = True
        self.takes = 0.0

    def request(self, scope: Scope = CHANGED) -> None:
        self.pacing.request(self.now, scope)

    def until(self, end: float) -> list[tuple[float, Scope]]:
        """Sleep and run until *end* seconds after the start. Return the runs with their times."""
        self.runs.clear()
        for _ in range(1000):
            scope = self.pacing.due(self.now)
            if scope is not None:
                self.runs.append((round(self.now - 1000, 6), scope))
                started, self.now = self.now, self.now + self.takes
                self.pacing.ran(started, self.now, scope, self.ok, cost=self.takes)
                continue
            wakeup = self.pacing.next_wakeup(self.now)
            if wakeup is None or wakeup > 1000 + end:
                self.now = 1000 + end
                return self.runs
            assert wakeup > self.now, "woken for nothing"
            self.now = wakeup
        raise AssertionError("a busy loop")


def started(loop: Loop) -> Loop:
    """Return *loop* after its first full sync, at second 10."""
    loop.request(RESYNC)
    assert loop.until(10) == [(0, RESYNC)]
    return loop


def test_nothing_runs_before_the_first_request() -> None:
    loop = Loop()
    assert loop.pacing.next_wakeup(0) is None
    assert loop.until(1_000_000) == []


def test_a_lone_change_does_not_wait() -> None:
    loop = started(Loop())
    loop.request()
    assert loop.until(20) == [(10, CHANGED)]


def test_a_burst_is_two_runs_at_once_then_one_per_interval() -> None:
    loop = started(Loop())
    at: list[float] = []
    for step in range(100):
        loop.request()
        at += [when for when, _ in loop.until(10 + step / 20)]
    assert at == [10, 10, 11, 12, 13, 14]


def test_without_allowance_the_interval_is_always_kept() -> None:
    loop = started(Loop(burst=1))
    loop.request()
    assert loop.until(10.1) == [(10, CHANGED)]
    loop.request()
    assert loop.until(20) == [(11, CHANGED)]


def test_the_interval_counts_from_the_end_of_a_run() -> None:
    loop = started(Loop(burst=1))
    loop.takes = 5
    loop.request()
    loop.until(15)
    loop.request()
    assert loop.until(30) == [(16, CHANGED)]


def test_without_an_interval_a_cheap_run_waits_for_a_millisecond() -> None:
    loop = started(Loop(min_interval=0.0))
    at: list[float] = []
    for step in range(40):
        loop.request()
        at += [when for when, _ in loop.until(10 + step / 4000)]
    assert at == pytest.approx([10 + step / 1000 for step in range(10)])


@pytest.mark.parametrize(("takes", "period"), [(0.002, 0.01), (0.1, 0.5), (2.0, 10.0), (10.0, 40.0)])
def test_without_an_interval_runs_rest_four_times_their_duration(takes: float, period: float) -> None:
    """The retry cap limits the rest, so that health checks do not fail."""
    loop = started(Loop(min_interval=0.0))
    loop.takes = takes
    at: list[float] = []
    while len(at) < 4:
        loop.request()
        at += [when for when, _ in loop.until(loop.now - 1000 + period / 100)]
    assert at == pytest.approx([10 + step * period for step in range(4)], rel=0.02)


def test_without_an_interval_the_first_change_after_quiet_runs_at_once() -> None:
    loop = started(Loop(min_interval=0.0))
    loop.takes = 2.0
    loop.request()
    assert loop.until(20) == [(10, CHANGED)]
    loop.request()
    assert loop.until(30) == [(20, CHANGED)]


def test_a_run_that_waited_for_a_cpu_is_not_followed_by_a_longer_rest() -> None:
    loop = started(Loop(min_interval=0.0))
    loop.pacing.ran(1010.0, 1012.0, CHANGED, True, cost=0.01)
    loop.pacing.request(1012.0)
    assert loop.pacing.next_wakeup(1012.0) == pytest.approx(1012.04)


def test_without_an_interval_a_full_run_delays_no_change() -> None:
    loop = Loop(min_interval=0.0)
    loop.takes = 2.0
    loop.request(RESYNC)
    assert loop.until(3) == [(0, RESYNC)]
    loop.request()
    assert loop.until(3) == [(3, CHANGED)]


def test_repairs_ignore_interval_and_retry_but_rest_four_times_as_long() -> None:
    loop = started(Loop(min_interval=10.0, burst=1))
    loop.takes = 0.5
    loop.ok = False
    loop.request()
    loop.until(11)
    loop.pacing.request_repair()
    loop.pacing.request_repair()
    assert loop.until(12) == [(11, RESYNC)]
    loop.pacing.request_repair()
    assert loop.pacing.next_wakeup(loop.now) == 1000 + 11.5 + 2.0 - 1.0
    assert loop.until(12.6) == [(12.5, RESYNC)]
    loop.pacing.request_repair()
    assert loop.pacing.next_wakeup(loop.now) == 1000 + 13.0 + 2.0


def test_a_cheap_repair_rests_too() -> None:
    loop = started(Loop())
    loop.pacing.request_repair()
    assert loop.until(10) == [(10, RESYNC)]
    loop.pacing.request_repair()
    assert loop.until(11) == [(10.02, RESYNC)]


def test_a_failed_run_is_retried_with_growing_delays_up_to_the_cap() -> None:
    loop = started(Loop(min_interval=0.001, retry_cap=2.0))
    loop.ok = False
    loop.request()
    assert [when for when, _ in loop.until(18)] == [10, 10.1, 10.3, 10.7, 11.5, 13.1, 15.1, 17.1]
    loop.ok = True
    assert loop.until(3000) == [(19.1, CHANGED)]


def test_the_back_off_is_reset_by_a_success() -> None:
    loop = started(Loop(min_interval=0.001))
    for begin in (20, 40):
        loop.until(begin)
        loop.ok = False
        loop.request()
        assert [when for when, _ in loop.until(begin + 0.5)] == [begin, begin + 0.1, begin + 0.3]
        loop.ok = True
        loop.until(begin + 10)


def test_retries_keep_the_interval_too() -> None:
    loop = started(Loop(min_interval=1.0))
    loop.ok = False
    loop.request()
    assert [when for when, _ in loop.until(13)] == [10, 10.1, 11, 12, 13]


def test_a_change_brings_a_far_retry_forward() -> None:
    loop = started(Loop(min_interval=0.001))
    loop.ok = False
    loop.request()
    assert loop.until(30)[-1][0] == 22.7
    assert loop.pacing.next_wakeup(loop.now) == pytest.approx(1000 + 35.5)
    loop.ok = True
    loop.request()
    assert loop.until(40) == [(30, CHANGED)]


def test_a_change_soon_after_a_failure_waits_a_second() -> None:
    loop = started(Loop(min_interval=0.001))
    loop.ok = False
    loop.request()
    assert loop.until(23)[-1][0] == 22.7
    loop.request()
    assert loop.until(24) == [(23.7, CHANGED)]


def test_a_full_run_is_due_a_period_after_the_last_full_one() -> None:
    loop = started(Loop())
    loop.until(1000)
    loop.request()
    assert loop.until(2000) == [(1000, CHANGED)]
    assert loop.until(8000) == [(3600, RESYNC), (7200, RESYNC)]


def test_full_runs_are_frequent_without_a_watch() -> None:
    loop = started(Loop(retry_cap=30.0))
    loop.pacing.look_often()
    assert loop.until(100) == [(30, RESYNC), (60, RESYNC), (90, RESYNC)]


def test_full_runs_follow_a_partial_first_run() -> None:
    loop = Loop(retry_cap=30.0)
    loop.pacing.look_often()
    loop.request()
    assert loop.until(70) == [(0, CHANGED), (30, RESYNC), (60, RESYNC)]


def test_a_full_run_settles_everything() -> None:
    loop = started(Loop())
    loop.now = 1000 + 3600.0
    loop.request()
    assert loop.until(4000) == [(3600, RESYNC)]


def test_a_failed_full_run_is_repeated_as_one() -> None:
    loop = Loop()
    loop.ok = False
    loop.request(RESYNC)
    assert {scope for _, scope in loop.until(5)} == {RESYNC}
    loop.request(CHANGED)
    loop.ok = True
    assert [scope for _, scope in loop.until(100)] == [RESYNC]


def test_a_full_request_is_not_settled_by_a_partial_run() -> None:
    loop = started(Loop())
    loop.request(CHANGED)
    assert loop.pacing.due(loop.now) is CHANGED
    loop.request(RESYNC)
    loop.pacing.ran(loop.now, loop.now, CHANGED, True, cost=0.0)
    assert loop.until(20) == [(10, RESYNC)]


def test_a_request_during_a_run_is_run_after_it() -> None:
    loop = started(Loop())
    loop.request()
    loop.now += 1
    loop.request()
    loop.pacing.ran(loop.now - 0.5, loop.now + 1, CHANGED, True, cost=0.0)
    loop.now += 1
    assert loop.until(20) == [(12, CHANGED)]


@given(
    st.floats(min_value=0.001, max_value=5),
    st.lists(
        st.tuples(st.floats(min_value=0, max_value=3), st.booleans(), st.sampled_from(Scope)), max_size=60
    ),
)
def test_no_request_is_forgotten_and_the_rate_is_kept(
    interval: float, steps: list[tuple[float, bool, Scope]]
) -> None:
    loop = Loop(min_interval=interval)
    runs: list[float] = []
    end = 0.0
    for wait, ok, scope in steps:
        loop.ok = ok
        loop.request(scope)
        end += wait
        runs += [when for when, _ in loop.until(end)]
    loop.ok = True
    runs += [when for when, _ in loop.until(end + 60)]
    assert loop.pacing.due(loop.now) is None
    assert len(runs) >= bool(steps)
    for first, third in zip(runs, runs[2:], strict=False):
        assert third - first >= interval - 1e-5


def test_unserved_service_ports_are_retried_and_delay_no_change() -> None:
    pacing = started(Loop()).pacing
    pacing.request(1010.0)
    pacing.ran(1010.0, 1010.0, CHANGED, True, cost=0.0, incomplete=True)
    assert pacing.next_wakeup(1010.0) == pytest.approx(1010.1)
    assert (pacing.due(1010.0), pacing.due(1010.1)) == (None, CHANGED)
    pacing.request(1010.05)
    assert pacing.due(1010.05) is CHANGED
    pacing.ran(1010.1, 1010.1, CHANGED, True, cost=0.0, incomplete=True)
    pacing.ran(1020.0, 1020.0, RESYNC, True, cost=0.0, incomplete=True)
    assert pacing.next_wakeup(1020.0) == pytest.approx(1020.4), "a change is enough"
    assert pacing.due(1020.4) is CHANGED
    pacing.ran(1020.4, 1020.4, CHANGED, True, cost=0.0)
    assert pacing.next_wakeup(1020.4) == 1020.0 + 3600.0
