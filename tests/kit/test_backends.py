"""Every backend of this repository passes all of the kit, each as an author would run it."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.kit.conftest import Runs
from tests.kit.kit_runs import IN_A_GUEST, INI, Results, play, to_be_asked


@pytest.mark.parametrize("mode", sorted(INI.keys() - {IN_A_GUEST}))
def test_backend(mode: str, played: Runs) -> None:
    found = played[mode].result()
    assert not found.wrong, found.problems
    assert found.asked == to_be_asked(mode)


def play_in_a_guest(items: Sequence[pytest.Item], directory: Path) -> Results:
    return play(IN_A_GUEST, directory / IN_A_GUEST)


@pytest.mark.in_a_guest(play=play_in_a_guest)
def test_backend_in_a_guest(from_guest: Results) -> None:
    assert not from_guest.wrong, from_guest.problems
    assert from_guest.asked == to_be_asked(IN_A_GUEST)
