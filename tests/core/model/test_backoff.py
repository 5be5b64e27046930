"""Delays between attempts that fail."""

import pytest

from kproxy_core.model.timing import LONGEST_ASKED, STABLE, Backoff


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
