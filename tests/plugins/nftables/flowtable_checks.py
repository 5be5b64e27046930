"""The option `flowtable`, which needs a kernel with flow offload. `test_flowtable` runs these in a guest."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kproxy_core.testing.drivers.backend import BackendDriver
from kproxy_core.testing.drivers.driver import merged
from kproxy_core.testing.network.addresses import FAMILIES
from kproxy_core.testing.suite.scenario import SCENARIOS, Scenario, find
from kproxy_core.testing.suite.stage import PASSED, Stage

HERE = Path(__file__).with_name("flowtable")
EVERYWHERE = {"kproxy": {"backendOptions": {"nftables": {"flowtable": ["eth0", "kcbr0", "kcveth2"]}}}}
OTHERS = ("connection-survives", "udp-endpoint-removed", "hairpin", "nodeport-etp-local")
"""Scenarios of the kit in which an established flow must change its way, or has an unusual one."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(BackendDriver, tmp_path_factory.mktemp("stage")) as stage:
        yield stage


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scenario", find([HERE]), ids=lambda scenario: scenario.name)
def test_flows_of_the_flowtable(stage: Stage, scenario: Scenario, family: str) -> None:
    result = stage.play(scenario, "nftables", family)
    assert result.status == PASSED, result.detail


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", OTHERS)
def test_a_flowtable_changes_no_packets_way(stage: Stage, name: str, family: str) -> None:
    (scenario,) = find([SCENARIOS], name)
    result = stage.play(replace(scenario, config=merged(EVERYWHERE, scenario.config)), "nftables", family)
    assert result.status == PASSED, result.detail
