"""Numbers from two sources that agree once everything under way has ended."""

import time
from collections.abc import Callable

from tests.patience import PATIENCE


def expect_equal(ours: Callable[[], object], theirs: Callable[[], object]) -> None:
    """Fail unless both return the same in the end."""
    deadline = time.monotonic() + PATIENCE
    while (found := ours()) != (wanted := theirs()):
        assert time.monotonic() < deadline, f"{found} instead of {wanted}"
        time.sleep(0.02)
