"""Results of `conntrack_checks`, which runs in a guest kernel."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.guest.checks import names_of, problems_of

CHECKS = [Path(__file__).with_name("conntrack_checks.py")]
LONGEST = 300
"""Seconds."""


def play(items: Sequence[pytest.Item], directory: Path) -> dict[str, list[str]]:
    return problems_of(CHECKS, directory, seconds=LONGEST)


@pytest.mark.in_a_guest(play=play)
@pytest.mark.parametrize("name", names_of(CHECKS))
def test_in_the_guest(name: str, from_guest: dict[str, list[str]]) -> None:
    assert name in from_guest
    assert not any(from_guest[name]), "\n".join(from_guest[name])
