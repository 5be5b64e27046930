"""Back-off, repeated problems, token bucket and agenda, told the time by the test."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_core.model.timing import LONGEST_ASKED, STABLE, Agenda, Backoff, Repeats, TokenBucket

# -- back-off


def test_failures_double_the_delay_up_to_half_a_minute() -> None:
    backoff = Backoff(chance=lambda: 0.0)
    assert [backoff.delay(lasted=0) for _ in range(11)] == pytest.approx(
        [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30])


def test_chance_shortens_the_delay_by_up_to_a_half() -> None:
    backoff = Backoff(chance=lambda: 1.0)
    assert [backoff.delay(lasted=0) for _ in range(3)] == pytest.approx([0.05, 0.1, 0.2])


def test_a_stable_attempt_resets_the_delay() -> None:
    backoff = Backoff(chance=lambda: 0.0)
    for _ in range(8):
        backoff.delay(lasted=STABLE - 1)
    assert backoff.delay(lasted=STABLE) == 0.1
    assert backoff.delay(lasted=0) == 0.2


@pytest.mark.parametrize(("asked", "waited"), [(0, 0.1), (0.05, 0.1), (7, 7), (10**9, LONGEST_ASKED)])
def test_the_servers_delay_is_the_minimum(asked: float, waited: float) -> None:
    assert Backoff(chance=lambda: 0.0).delay(lasted=0, asked=asked) == waited


# -- token bucket

def test_a_problem_that_repeats_is_logged_at_growing_intervals() -> None:
    repeats = Repeats()
    logged = [number for number in range(1, 600) if repeats.count("broken")]
    assert logged == [1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512]
    assert repeats.count("in another way") == 1
    repeats.end()
    assert repeats.count("broken") == 1


def test_problems_that_never_repeat_are_logged_at_growing_intervals() -> None:
    repeats = Repeats()
    assert sum(repeats.count(f"broken {number}") > 0 for number in range(1000)) < 30


def test_a_burst_passes_at_once_then_one_each_interval() -> None:
    bucket = TokenBucket(0.2, 3)
    assert [bucket.reserve(100.0) for _ in range(6)] == pytest.approx([0, 0, 0, 0.2, 0.4, 0.6])
    now = 100.0 + 0.6 + 0.4  # two tokens were added since the last one was due
    assert [bucket.reserve(now) for _ in range(3)] == pytest.approx([0, 0, 0.2])
    assert [bucket.reserve(now + 3600) for _ in range(4)] == pytest.approx([0, 0, 0, 0.2])


@pytest.mark.parametrize(("interval", "burst", "delays"), [
    (0.0, 10, [0, 0, 0]), (1.0, 0, [0, 1, 2]), (0.001, 1, [0, 0.001, 0.002]),
])
def test_edge_cases(interval: float, burst: int, delays: list[float]) -> None:
    bucket = TokenBucket(interval, burst)
    assert [bucket.reserve(0.0) for _ in delays] == pytest.approx(delays)


def test_a_refused_token_is_not_owed() -> None:
    bucket = TokenBucket(10.0, 2)
    assert [bucket.try_take(50.0) for _ in range(4)] == [True, True, False, False]
    assert bucket.next_at == 60.0
    assert [bucket.try_take(60.0) for _ in range(2)] == [True, False]


def test_refilling_pauses_during_charged_work_and_work_leaves_no_debt() -> None:
    bucket = TokenBucket(1.0, 2)
    bucket.charge(100.0, 105.0)
    assert bucket.next_at <= 105.0
    bucket.charge(105.0, 108.0)
    assert bucket.next_at == 109.0
    bucket.charge(108.0, 108.0)
    bucket.charge(108.0, 108.0)
    assert bucket.next_at == 109.0


# -- agenda

def test_keys_are_due_in_order_each_at_its_earliest_time() -> None:
    agenda: Agenda[str] = Agenda()
    for key, at in [("a", 30.0), ("b", 20.0), ("a", 10.0), ("b", 25.0), ("c", 5.0)]:
        agenda.add(key, at)
    agenda.discard("c")
    assert agenda.next_at == 10.0
    assert agenda.take_due(9.9) == []
    assert agenda.take_due(20.0) == ["a", "b"]
    assert agenda.next_at is None


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 9)), max_size=400), st.integers(0, 9))
def test_an_agenda_agrees_with_a_dictionary(steps: list[tuple[int, int | None]], now: int) -> None:
    agenda: Agenda[int] = Agenda()
    times: dict[int, int] = {}
    for key, at in steps:
        if at is None:
            agenda.discard(key)
            times.pop(key, None)
        else:
            agenda.add(key, at)
            times[key] = min(at, times.get(key, at))
    assert agenda.next_at == min(times.values(), default=None)
    assert sorted(agenda.take_due(now)) == sorted(key for key, at in times.items() if at <= now)
    assert agenda.next_at == min((at for at in times.values() if at > now), default=None)
