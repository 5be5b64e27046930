"""The option `flowtable`, which needs a kernel with flow offload. `test_flowtable` runs these in a guest."""

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kproxy_conformance.builders import node_view
from kproxy_conformance.drivers.backend import BackendDriver
from kproxy_conformance.drivers.driver import merged
from kproxy_conformance.network.addresses import FAMILIES
from kproxy_conformance.suite.scenario import SCENARIOS, Scenario, find
from kproxy_conformance.suite.stage import PASSED, Stage
from kproxy_core.model.address import Family
from kproxy_core.nft.messages import commands_text
from kproxy_core.nft.objects import Layout
from kproxy_core.nft.transaction import RulesetSocket, constants, difference
from kproxy_nftables import skeleton
from kproxy_nftables.settings import Settings
from tests.core.namespaces import own_network

__all__ = ["own_network"]

HERE = Path(__file__).with_name("flowtable")
EVERYWHERE = {"kproxy": {"backendOptions": {"nftables": {"flowtable": ["eth0", "kcbr0", "kcveth2"]}}}}
OTHERS = (
    "connection-survives", "udp-endpoint-removed", "hairpin", "nodeport-etp-local", "removed-endpoints-reset",
)
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


def nft(*arguments: str, stdin: str = "") -> str:
    done = subprocess.run(
        ["nft", *arguments], input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("own_network")
@pytest.mark.parametrize("family", Family)
def test_messages_and_text_make_the_same_flowtable(family: Family) -> None:
    def layout(*devices: str) -> Layout:
        return skeleton.layout(node_view(family=family), (), {}, Settings(flowtable=devices))

    table, wanted = skeleton.table(family), layout("lo")
    with RulesetSocket.open() as connection:
        connection.run(difference(table, layout(), None))
        connection.run(difference(table, wanted, connection.read(family, table.name, constants(wanted))))
        by_messages = nft("list", "table", family.ip, table.name)
        assert "flow add @" in by_messages
        connection.run([table.delete()])
        nft("-f", "-", stdin=commands_text(difference(table, wanted, None)))
        assert nft("list", "table", family.ip, table.name) == by_messages
        held = connection.read(family, table.name, constants(wanted))
        assert difference(table, wanted, held) == []
