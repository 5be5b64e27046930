"""The token bucket, told the time by the test."""

import pytest

from kproxy_core.model.timing import TokenBucket


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
