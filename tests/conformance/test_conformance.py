"""Every scenario of the conformance harness, in every mode and family it is meant for.

A case is one pytest case; ``pytest tests/conformance -k hairpin`` plays only what it names.
"""

from collections.abc import Iterator

import pytest

from tests.conformance.harness import FAMILIES, HARNESS, LEGACY, Case, Run, Scenario, runs, scenarios

MODES = ("nftables", "iptables", "iptables" + LEGACY)

LEFT_OUT: dict[str, str] = {}
"""Scenarios that are not played yet, and why."""


def applies(scenario: Scenario, mode: str, family: str) -> bool:
    """Whether the scenario itself says that it is meant for *mode* and *family*."""
    of = mode.removesuffix(LEGACY)
    return of in (scenario.modes or MODES) and family in scenario.families


def cases() -> list[Case]:
    return [
        Case(mode, family, scenario.name)
        for mode in MODES
        for family in FAMILIES
        for scenario in scenarios()
        if applies(scenario, mode, family) and scenario.name not in LEFT_OUT
    ]


@pytest.fixture(scope="module")
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Run]]:
    """The runs for the cases of this session, all under way."""
    chosen = [
        case
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_scenario"
        if isinstance(case := item.callspec.params["case"], Case)
    ]
    found = runs(chosen, tmp_path_factory.mktemp("conformance"))
    try:
        for run in found.values():
            run.start()
        yield found
    finally:
        for run in found.values():
            run.end()


def test_harness_is_there() -> None:
    assert (HARNESS / "run").exists(), (
        f"no conformance harness in {HARNESS}: put `shared` beside the checkout, or name it in KPROXY_SHARED"
    )


def test_only_documented_cases_are_left_out() -> None:
    """A scenario is not played only where it says so itself, or where LEFT_OUT does."""
    assert set(LEFT_OUT) <= {scenario.name for scenario in scenarios()}, "LEFT_OUT names what does not exist"
    played = {case.scenario for case in cases()}
    for scenario in scenarios():
        meant_for_another_mode = scenario.modes and not set(scenario.modes) & set(MODES)
        assert scenario.name in played | set(LEFT_OUT) or meant_for_another_mode, scenario.name


@pytest.mark.parametrize("case", cases(), ids=str)
def test_scenario(case: Case, started: dict[str, Run]) -> None:
    outcome = started[case.run].outcome(case.scenario)
    assert outcome.status == "passed", outcome.detail
