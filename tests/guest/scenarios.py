"""The conformance scenarios in one mode, in a guest. All cases of a session are played in one guest."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kproxy_conformance.network.patience import PATIENCE, patience
from kproxy_conformance.suite.scenario import BACKEND, SCENARIOS, Scenario, find
from kproxy_conformance.suite.stage import FAILED, Result
from tests.conformance.cases import DRIVER, Case
from tests.guest.guest import Guest, with_nft

LEAST = 4.0
"""The patience in a guest, on a quiet machine."""

FOUND = {scenario.name: scenario for scenario in find()}


def play_scenarios(mode: str, items: Sequence[pytest.Item], directory: Path) -> dict[Case, Result]:
    """Return the results of the cases of *items*, which are their parameters named ``case``."""
    chosen = {
        case
        for item in items
        if isinstance(item, pytest.Function) and isinstance(case := item.callspec.params["case"], Case)
    }
    runs: dict[tuple[str, ...], set[str]] = {}
    """The scenarios that are played with the same driver and in the same families."""
    for name in sorted({case.scenario for case in chosen}):
        families = sorted(case.family for case in chosen if case.scenario == name)
        runs.setdefault((driver_of(FOUND[name]), *families), set()).add(name)
    commands, reports = [], []
    for (driver, *families), names in runs.items():
        scenarios = directory / "-".join([driver, *families])
        scenarios.mkdir()
        for name in names:
            (scenarios / f"{name}.yaml").symlink_to(SCENARIOS / f"{name}.yaml")
        reports.append(scenarios.with_suffix(".json"))
        commands.append(shlex.join([
            sys.executable, "-B", "-m", "kproxy_conformance", "--driver", driver, "--mode", mode,
            *(f"--family={family}" for family in families),
            "--dir", str(scenarios), "--report", str(reports[-1]),
        ]))  # fmt: skip
    # The log and the manifests are not in the share, which is the host's: the guest is not notified of files
    # that change there. The evidence of failures is printed.
    with Guest(
        with_nft(["sh", "-c", "; ".join(commands)]), directory / "log", share=directory,
        environment={PATIENCE: f"{max(LEAST, 2 * patience()):.2f}"},
    ) as guest:  # fmt: skip
        guest.status()
        lost = f"the guest did not report it:\n{guest.output[-4000:]}"
    written = [json.loads(report.read_text()) for report in reports if report.exists()]
    results = [Result(**result) for results in written for result in results]
    found = {Case(mode, result.family, result.scenario): result for result in results}
    return {case: found.get(case, Result(case.scenario, mode, case.family, FAILED, lost)) for case in chosen}


def driver_of(scenario: Scenario) -> str:
    """Return the driver for *scenario*: the backend in the player's process if a proxy would have to start.

    That takes as long in a guest as ten scenarios. Scenarios that need a process get one.
    """
    is_started = bool(scenario.config) or any("proxy" in step for step in scenario.steps)
    return BACKEND if is_started and not scenario.process_need else DRIVER
