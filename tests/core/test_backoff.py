"""How long to wait before the next attempt."""

import pytest

from kproxy_core.timing.backoff import LONGEST_ASKED, STABLE, Backoff


def test_failures_double_the_wait_up_to_half_a_minute() -> None:
    backoff = Backoff(chance=lambda: 0.0)
    assert [backoff.delay(lasted=0) for _ in range(11)] == pytest.approx(
        [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30])


def test_chance_takes_up_to_half_off() -> None:
    backoff = Backoff(chance=lambda: 1.0)
    assert [backoff.delay(lasted=0) for _ in range(3)] == pytest.approx([0.05, 0.1, 0.2])


def test_a_stable_attempt_makes_failures_forgotten() -> None:
    backoff = Backoff(chance=lambda: 0.0)
    for _ in range(8):
        backoff.delay(lasted=STABLE - 1)
    assert backoff.delay(lasted=STABLE) == 0.1
    assert backoff.delay(lasted=0) == 0.2


@pytest.mark.parametrize(("asked", "waited"), [(0, 0.1), (0.05, 0.1), (7, 7), (10**9, LONGEST_ASKED)])
def test_what_the_server_asks_for_is_the_least(asked: float, waited: float) -> None:
    assert Backoff(chance=lambda: 0.0).delay(lasted=0, asked=asked) == waited
