"""The mode on Linux 6.1, without a JIT compiler and with hashes that lack memory for a moment, in a guest."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.guest.checks import Problems, names_of, problems_of

_HERE = Path(__file__).parent
CHECKS = [
    _HERE / f"{name}.py"
    for name in ("older_kernel_checks", "test_detect", "test_kernel", "test_backend", "test_counts")
]


def play(items: Sequence[pytest.Item], directory: Path) -> Problems:
    return problems_of(CHECKS, directory)


@pytest.mark.in_a_guest(play=play)
@pytest.mark.parametrize("name", names_of(CHECKS))
def test_on_an_older_kernel(from_guest: Problems, name: str) -> None:
    assert set(from_guest[name]) == {""}
