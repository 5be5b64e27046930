"""Every scenario of the conformance harness, in every mode and family it is meant for.

A case is one pytest case; ``pytest tests/conformance -k hairpin`` plays only what it names.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.conformance.harness import (
    FAMILIES,
    HARNESS,
    LEGACY,
    OWN,
    SIDE_BY_SIDE,
    THROUGH_API,
    Case,
    Outcome,
    Run,
    Scenario,
    kernel_mode,
    read_scenarios,
    runs,
    scenarios,
)

MODES = ("nftables", "nftables" + THROUGH_API, "iptables", "iptables" + LEGACY, "userspace")
SCENARIOS = {scenario.name: scenario for scenario in [*scenarios(), *read_scenarios(OWN)]}

LEFT_OUT: dict[str, str] = {}
"""Scenarios that are not played yet, and why."""

_SOURCE = "endpoints see the node, never the client"
_POLICY = "traffic policies are not for a mode that does not keep client addresses"
_PROCESS = "nothing is forwarded while the process does not run"
NOT_FOR: dict[str, dict[str, str]] = {
    "userspace": {
        "clusterip-from-outside": _SOURCE,
        "clusterip-udp": _SOURCE,
        "detect-local-by-bridge": _SOURCE,
        "detect-local-by-node-cidr": _SOURCE,
        "detect-local-by-prefix": _SOURCE,
        "hairpin": _SOURCE,
        "affinity-follows-policies": _POLICY,
        "affinity-local-policies": _POLICY,
        "both-policies-local": _POLICY,
        "internal-policy-local": _POLICY,
        "loadbalancer-local": _POLICY,
        "nodeport-etp-local": _POLICY,
        "nodeport-etp-local-none": _POLICY,
        "mode-switch": _PROCESS,
        "proxy-restart": _PROCESS,
    },
}
"""By mode, the scenarios that ask for what it does not do, and why; docs/userspace.md has them as a table."""


def applies(scenario: Scenario, mode: str, family: str) -> bool:
    """Whether the scenario is meant for *mode* and *family*, by its own account and by ours."""
    meant = kernel_mode(mode) in (scenario.modes or MODES) and family in scenario.families
    return meant and scenario.name not in NOT_FOR.get(mode, ())


def cases() -> list[Case]:
    return [
        Case(mode, family, scenario.name)
        for mode in MODES
        for family in FAMILIES
        for scenario in SCENARIOS.values()
        if applies(scenario, mode, family) and scenario.name not in LEFT_OUT
    ]


Started = dict[str, tuple[Run, Future[dict[str, Outcome]]]]


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """The runs for the cases of this session, under way or waiting for their turn."""
    chosen = [
        (case, SCENARIOS[case.scenario])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_scenario"
        if isinstance(case := item.callspec.params["case"], Case)
        if case.mode in MODES
    ]
    found = runs(chosen, tmp_path_factory.mktemp("conformance"))
    with ThreadPoolExecutor(SIDE_BY_SIDE) as players:
        try:
            yield {name: (run, players.submit(run.play)) for name, run in found.items()}
        finally:
            players.shutdown(wait=False, cancel_futures=True)
            for run in found.values():
                run.end()


def test_harness_is_there() -> None:
    assert (HARNESS / "run").exists(), (
        f"no conformance harness in {HARNESS}: put `shared` beside the checkout, or name it in KPROXY_SHARED"
    )


def test_only_documented_cases_are_left_out() -> None:
    """A scenario is not played only where it says so itself, or where LEFT_OUT or NOT_FOR does."""
    assert set(LEFT_OUT) <= set(SCENARIOS), "LEFT_OUT names what does not exist"
    played = {case.scenario for case in cases()}
    modes = set(map(kernel_mode, MODES))
    for scenario in SCENARIOS.values():
        meant_for_another_mode = scenario.modes and not set(scenario.modes) & modes
        assert scenario.name in played | set(LEFT_OUT) or meant_for_another_mode, scenario.name


@pytest.mark.parametrize("case", cases(), ids=str)
def test_scenario(case: Case, started: Started) -> None:
    run, outcomes = started[case.run]
    outcome = outcomes.result().get(case.scenario) or run.lost()
    assert outcome.status == "passed", outcome.detail
