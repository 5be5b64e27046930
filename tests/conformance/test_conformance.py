"""Every scenario in every mode and family it is meant for, against a kproxy process.

A case is one pytest case, played once; ``pytest tests/conformance -k hairpin`` plays only what it names.
"""

from collections import Counter
from collections.abc import Iterator

import pytest

from kproxy_conformance.network.wiring import DEFAULT, names
from kproxy_conformance.suite.scenario import find
from kproxy_conformance.suite.stage import PASSED
from tests.conformance.cases import LEGACY, NOT_FOR, THROUGH_API, WIRINGS, Case, cases_of, undocumented
from tests.conformance.stages import Stages

MODES = ("nftables", "nftables" + THROUGH_API, "iptables", "iptables" + LEGACY, "userspace", "ebpf")
SCENARIOS = {scenario.name: scenario for scenario in find()}
CASES = [
    case
    for mode in MODES
    for case in cases_of(
        mode, SCENARIOS.values(), NOT_FOR.get(mode, ()), in_turns=mode.endswith((THROUGH_API, LEGACY)),
        wirings=WIRINGS[mode],
    )
]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    made = Stages(tmp_path_factory.mktemp("conformance"))
    yield made
    made.close()


def test_only_documented_cases_are_left_out() -> None:
    """A scenario is not played only where it says so itself, or where NOT_FOR does."""
    left_out = {name for names in NOT_FOR.values() for name in names}
    assert undocumented(CASES, SCENARIOS.values(), left_out - {case.scenario for case in CASES}) == []
    assert left_out <= set(SCENARIOS)


def test_each_wiring_is_played() -> None:
    played = Counter(case.wiring for case in CASES)
    assert set(played) == set(names())
    assert min(played.values()) > 10
    assert played[DEFAULT] > 100


def test_clients_that_are_remembered_are_enough_to_meet_every_endpoint() -> None:
    """A remembered client meets no other endpoint, so a probe cannot wait for one that none has chosen.

    All lanes together send about a hundred of these probes.
    """
    for scenario in SCENARIOS.values():
        for step in scenario.steps:
            expected = step.get("expect")
            if isinstance(expected, dict) and expected.get("sticky") and "at_least" not in expected:
                clients = int(step["probe"]["source"].removeprefix("crowd:"))
                endpoints = len(expected["reaches"])
                missed = endpoints * (1 - 1 / endpoints) ** clients
                assert missed < 1e-8, f"{scenario.name} misses an endpoint once in {1 / missed:.0f} times"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scenario(case: Case, stages: Stages) -> None:
    result = stages.of(case.mode, case.wiring).play(SCENARIOS[case.scenario], case.kernel_mode, case.family)
    assert result.status == PASSED, result.detail
