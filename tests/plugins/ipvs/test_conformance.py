"""The conformance scenarios in ipvs mode, with packets, in a guest kernel that has IPVS.

A case is one pytest case; all of a session are played in one guest.
"""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kproxy_core.testing.network.patience import PATIENCE
from kproxy_core.testing.suite.scenario import BACKEND, SCENARIOS, Scenario, find
from kproxy_core.testing.suite.stage import FAILED, PASSED, Result
from tests.conformance.cases import DRIVER, Case, cases_of, undocumented
from tests.guest.guest import Guest

MODE = "ipvs"
LONGEST = 1200
"""Seconds; both families take two minutes of a processor."""

LEFT_OUT = {
    "affinity-timeout": (
        "IPVS remembers a client as long as it has connections to the Service, those in TIME_WAIT included,"
        " which it keeps for two minutes: no shorter timeout can be had"
    ),
}
"""Scenarios of the harness that are not played, with the reason."""

FOUND = {scenario.name: scenario for scenario in find()}
CASES = cases_of(MODE, FOUND.values(), LEFT_OUT)


def play(items: Sequence[pytest.Item], directory: Path) -> dict[Case, Result]:
    """Return the results of the cases of *items*."""
    chosen = {
        case
        for item in items
        if isinstance(item, pytest.Function) and isinstance(case := item.callspec.params["case"], Case)
    }
    drivers = {case.scenario: driver_of(FOUND[case.scenario]) for case in chosen}
    commands, reports = [], []
    for driver in set(drivers.values()):
        scenarios, report = directory / driver, directory / f"{driver}.json"
        scenarios.mkdir()
        for name in (name for name, its in drivers.items() if its == driver):
            (scenarios / f"{name}.yaml").symlink_to(SCENARIOS / f"{name}.yaml")
        commands.append(shlex.join([
            sys.executable, "-B", "-m", "kproxy_core.testing", "--driver", driver, "--mode", MODE,
            "--dir", str(scenarios), "--report", str(report),
        ]))  # fmt: skip
        reports.append(report)
    # The log and the manifests are not in the share, which is the host's: the guest is not notified of files
    # that change there. The evidence of failures is printed.
    with Guest(
        ["sh", "-c", "; ".join(commands)], directory / "log", share=directory, seconds=LONGEST,
        environment={PATIENCE: "4"},
    ) as guest:  # fmt: skip
        guest.status()
        lost = f"the guest did not report it:\n{guest.output[-4000:]}"
    written = [json.loads(report.read_text()) for report in reports if report.exists()]
    results = [Result(**result) for results in written for result in results]
    found = {Case(MODE, result.family, result.scenario): result for result in results}
    return {case: found.get(case, Result(case.scenario, MODE, case.family, FAILED, lost)) for case in chosen}


def driver_of(scenario: Scenario) -> str:
    """Return the driver for *scenario*: the backend in the player's process if a proxy would have to start.

    That takes as long in a guest as ten scenarios. Scenarios that need a process get one.
    """
    is_started = bool(scenario.config) or any("proxy" in step for step in scenario.steps)
    return BACKEND if is_started and not scenario.needs_process else DRIVER


def test_only_documented_scenarios_are_left_out() -> None:
    assert undocumented(CASES, FOUND.values(), LEFT_OUT) == []


@pytest.mark.in_a_guest(play=play)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_scenario(case: Case, from_guest: dict[Case, Result]) -> None:
    assert from_guest[case].status == PASSED, from_guest[case].detail
