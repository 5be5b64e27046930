"""Every check of the contract fails for a sabotaged backend, and no other check does; so do scenarios."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from kproxy_conformance.checks import bench, contract, lifecycle
from kproxy_conformance.checks.check import NotApplicable
from kproxy_conformance.checks.subject import Wanted
from kproxy_conformance.drivers.backend import BackendDriver
from kproxy_conformance.network.topology import Topology
from kproxy_conformance.suite import player
from kproxy_conformance.suite.scenario import SCENARIOS as DIRECTORY
from kproxy_conformance.suite.scenario import read
from kproxy_conformance.suite.stage import FAILED, Result, Stage
from kproxy_core.model.address import Family
from tests.kit.sabotage import Sabotage
from tests.kit.sabotages import CONTRACT
from tests.kit.scenario_sabotages import SCENARIOS

KINDS = ("takes-udp", "takes-all-of-it")
"""The Services of every kind are all taken in the same way: some stand for the others."""

CHECKS = [
    check
    for check in (*lifecycle.CHECKS, *contract.CHECKS)
    if not check.name.startswith("takes-") or check.name in KINDS
]
OF_A_BASE = "keeps-its-base-at-work"
"""Sabotaged in test_base_modes.py: the example backend builds on no other mode."""

pytestmark = pytest.mark.usefixtures("example_on_path")


def plugins(*sabotages: Sabotage) -> tuple[str, ...]:
    return ("kproxy_plain", *(f"tests.kit.sabotages:do_{sabotage}" for sabotage in sabotages))


def problems_of(sabotages: tuple[Sabotage, ...]) -> Mapping[str, str]:
    """Return the complaints of each check of the contract, in IPv4 or for both families."""
    wanted = Wanted("plain", plugins(*sabotages))
    problems = {}
    for check in CHECKS:
        try:
            bench.run_check(check, wanted, None if None in check.families else Family.IPV4)
        except NotApplicable:
            continue
        except Exception as error:  # noqa: BLE001 - whatever a backend raises counts
            problems[check.name] = str(error)
    return problems


def play(scenario: str, directory: Path, *sabotages: Sabotage) -> Result:
    """Play *scenario* with the sabotaged example, in IPv4."""
    def make_driver(topology: Topology, directory: Path) -> BackendDriver:
        return BackendDriver(topology, directory, plugins(*sabotages))

    with Stage(make_driver, directory) as stage:
        return stage.play(read(DIRECTORY / f"{scenario}.yaml"), "plain", "ipv4")


@pytest.mark.parametrize("sabotages", CONTRACT)
def test_sabotage_is_noticed_by_its_check_and_by_no_other(sabotages: tuple[Sabotage, ...]) -> None:
    problems = problems_of(sabotages)
    assert problems.keys() == {sabotage.check for sabotage in sabotages}
    for sabotage in sabotages:
        assert re.search(sabotage.words, problems[sabotage.check], re.DOTALL), problems[sabotage.check]


def test_every_check_has_a_sabotage() -> None:
    sabotaged = {sabotage.check for part in CONTRACT for sabotage in part} | {OF_A_BASE}
    assert {check.name for check in CHECKS} - set(KINDS) == sabotaged - set(KINDS)
    assert sabotaged & set(KINDS)


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the wait for expectations that do not come true."""
    monkeypatch.setattr(player, "DEADLINE", 0.7)


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("sabotage", SCENARIOS, ids=str)
def test_scenario_notices_its_sabotage(sabotage: Sabotage, tmp_path: Path) -> None:
    result = play(sabotage.check, tmp_path, sabotage)
    assert result.status == FAILED
    assert re.search(f"problem: .*(?:{sabotage.words})", result.detail), result.detail


@pytest.mark.usefixtures("hurry")
def test_a_failed_scenario_has_the_caveats_of_the_backend(tmp_path: Path) -> None:
    result = play("affinity-client-ip", tmp_path)
    assert result.status == FAILED
    assert "session affinity is not kept" in result.announced
