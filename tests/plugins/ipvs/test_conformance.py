"""The conformance scenarios in ipvs mode, with packets, in a guest kernel that has IPVS.

A case is one pytest case; all of a session are played in one guest.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conformance.harness import FAMILIES, HARNESS, KPROXY, Case, Outcome, Scenario, scenarios
from tests.guest.guest import Guest

MODE = "ipvs"
OWN = Path(__file__).with_name("scenarios")
PLAY = Path(__file__).with_name("play_scenarios")
LONGEST = 1200
"""Seconds; both families take four minutes on a quiet machine."""

LEFT_OUT = {
    "affinity-timeout": (
        "IPVS remembers a client as long as it has connections to the Service, those in TIME_WAIT included,"
        " which it keeps for two minutes: no shorter timeout can be had"
    ),
}
"""Scenarios of the harness that are not played, with the reason."""

FILES = {scenario.name: scenario for scenario in [*scenarios(), *map(Scenario.read, OWN.glob("*.yaml"))]}


def cases() -> list[Case]:
    return [
        Case(MODE, family, scenario.name)
        for family in FAMILIES
        for scenario in FILES.values()
        if MODE in (scenario.modes or (MODE,)) and family in scenario.families
        if scenario.name not in LEFT_OUT
    ]


def play(items: Sequence[pytest.Item], directory: Path) -> dict[Case, Outcome]:
    """Return the outcomes of the cases of *items*."""
    chosen = {
        case
        for item in items
        if isinstance(item, pytest.Function) and isinstance(case := item.callspec.params["case"], Case)
    }
    (directory / "scenarios").mkdir()
    for name in {case.scenario for case in chosen}:
        (directory / "scenarios" / f"{name}.yaml").symlink_to(FILES[name].path)
    command: list[str | Path] = [PLAY, directory, sys.executable, "-B", HARNESS / "run", "--command", KPROXY]
    with Guest(command, directory / "log", share=directory, seconds=LONGEST) as guest:
        guest.status()
        lost = Outcome("lost", f"the guest did not report it:\n{guest.output[-4000:]}")
        return dict.fromkeys(chosen, lost) | {
            Case(MODE, result["family"], result["scenario"]): Outcome(result["status"], result["detail"])
            for report in directory.glob("*.json")
            for result in json.loads(report.read_text())["results"]
        }


def test_only_documented_scenarios_are_left_out() -> None:
    assert set(LEFT_OUT) <= set(FILES), "LEFT_OUT names what does not exist"
    played = {case.scenario for case in cases()}
    for scenario in FILES.values():
        meant_for_another_mode = scenario.modes and MODE not in scenario.modes
        assert scenario.name in played | set(LEFT_OUT) or meant_for_another_mode, scenario.name


@pytest.mark.in_a_guest(play=play)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_scenario(case: Case, from_guest: dict[Case, Outcome]) -> None:
    assert from_guest[case].status == "passed", from_guest[case].detail
