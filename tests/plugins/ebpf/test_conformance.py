"""The conformance scenarios in ebpf mode on Linux 6.1, in a guest, each in one family.

tests/conformance plays them in both families, here. The older kernel differs in what it loads and lacks; a
scenario in either family finds that, and a guest takes most of a minute of a processor for each family.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from kproxy_core.testing.suite.stage import PASSED, Result
from tests.conformance.cases import Case, cases_of, in_turns
from tests.guest.scenarios import FOUND, play_scenarios


def play(items: Sequence[pytest.Item], directory: Path) -> dict[Case, Result]:
    return play_scenarios("ebpf", items, directory)


@pytest.mark.in_a_guest(play=play)
@pytest.mark.parametrize("case", in_turns(cases_of("ebpf", FOUND.values())), ids=str)
def test_scenario(case: Case, from_guest: dict[Case, Result]) -> None:
    assert from_guest[case].status == PASSED, from_guest[case].detail
