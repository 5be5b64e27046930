"""The conformance scenarios in ipvs mode, with packets, in a guest kernel that has IPVS."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from kproxy_conformance.suite.stage import PASSED, Result
from tests.conformance.cases import NOT_FOR, Case, cases_of, undocumented
from tests.guest.scenarios import FOUND, play_scenarios

MODE = "ipvs"
CASES = cases_of(MODE, FOUND.values(), NOT_FOR[MODE])


def play(items: Sequence[pytest.Item], directory: Path) -> dict[Case, Result]:
    return play_scenarios(MODE, items, directory)


def test_only_documented_scenarios_are_left_out() -> None:
    assert undocumented(CASES, FOUND.values(), NOT_FOR[MODE]) == []


@pytest.mark.in_a_guest(play=play)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_scenario(case: Case, from_guest: dict[Case, Result]) -> None:
    assert from_guest[case].status == PASSED, from_guest[case].detail
