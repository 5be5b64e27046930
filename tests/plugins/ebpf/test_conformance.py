"""The conformance scenarios in ebpf mode on Linux 6.1, in a guest; tests/conformance plays them here."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from kproxy_conformance.suite.stage import PASSED, Result
from tests.conformance.cases import Case, cases_of
from tests.guest.scenarios import FOUND, play_scenarios


def play(items: Sequence[pytest.Item], directory: Path) -> dict[Case, Result]:
    return play_scenarios("ebpf", items, directory)


NOT_IN_A_GUEST = dict.fromkeys(
    ("removed-endpoints-reset", "removed-endpoints-restart", "localhost-node-ports-reset"),
    "its kernel has no CONFIG_INET_DIAG_DESTROY")


@pytest.mark.in_a_guest(play=play)
@pytest.mark.parametrize("case", cases_of("ebpf", FOUND.values(), NOT_IN_A_GUEST, in_turns=True), ids=str)
def test_scenario(case: Case, from_guest: dict[Case, Result]) -> None:
    assert from_guest[case].status == PASSED, from_guest[case].detail
