"""Wirings as data: which there are, which one is drawn, and what a machine or a scenario makes impossible."""

from contextlib import closing
from pathlib import Path

import pytest

from kproxy_conformance.network import wiring
from kproxy_conformance.network.addresses import resolve
from kproxy_conformance.network.dialing import dial
from kproxy_conformance.network.rights import MissingRight
from kproxy_conformance.network.servers import EchoServers
from kproxy_conformance.network.topology import Topology
from kproxy_conformance.network.wiring import Lack, Wiring, chosen, draw, names, read
from kproxy_conformance.suite.scenario import Scenario, find

SCENARIOS = {scenario.name: scenario for scenario in find()}


@pytest.mark.parametrize("name", names())
def test_every_host_reaches_every_other_in_every_wiring(name: str) -> None:
    with closing(Topology(wiring=read(name))) as topology, closing(EchoServers(topology)):
        for family in topology.families:
            for client in ("node", "client", "pod1", "pod2", "pod3"):
                for server in ("node", "node2", "pod1", "pod2", "pod3", "pod4", "many3"):
                    outcome = dial(topology[client], resolve(server, family), 8080, timeout=5)
                    assert outcome.endpoint == server, f"{client} to {server}, {family}: {outcome}"


def test_a_wiring_that_the_machine_cannot_make_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Wiring("No kernel has it.", name="absent", sysctls={"net/absent": 1})
    with pytest.raises(MissingRight, match="needs the wiring absent: net/absent: No such file or directory"):
        Topology(wiring=absent)
    monkeypatch.setattr("kproxy_conformance.network.cni.DIRECTORIES", (Path("/absent"),))
    with pytest.raises(MissingRight, match="needs network plugins: the package containernetworking-plugins"):
        Topology(wiring=read("cni-ptp"))


def test_a_command_that_fails_is_quoted() -> None:
    command = wiring.Command("ip link add x type absent")
    broken = Wiring("A device of no kind.", name="broken", setup=(command,))
    with pytest.raises(MissingRight, match=r"(?s)the wiring broken: .*ip link add x type absent.*exit 2"):
        Topology(wiring=broken)


def test_a_seed_draws_the_same_wiring_each_time_and_every_one_for_some_scenario() -> None:
    drawn = {chosen("seed:1", name, "nftables")[0] for name in SCENARIOS}
    assert drawn == set(names())
    assert [chosen("seed:1", name, "nftables") for name in SCENARIOS] == [
        chosen("seed:1", name, "nftables") for name in SCENARIOS]
    assert any(chosen("seed:1", name, "nftables") != chosen("seed:2", name, "nftables") for name in SCENARIOS)


def test_another_wiring_changes_only_what_draws_it() -> None:
    with_one_more = {name: draw("", name, "ebpf", [*names(), "new"]) for name in SCENARIOS}
    before = {name: draw("", name, "ebpf", names()) for name in SCENARIOS}
    assert all(with_one_more[name] in ("new", before[name]) for name in SCENARIOS)


def test_a_choice_is_checked() -> None:
    for choice in ("default", "all", "seed:7"):
        wiring.check_choice(choice)
    with pytest.raises(ValueError, match=r"there is no wiring 'absent'; known are bridge-unfiltered, .*"):
        wiring.check_choice("absent")


def test_a_malformed_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "WIRINGS", tmp_path)
    (tmp_path / "odd.yaml").write_text("description: odd\npods: {pod1: {attach: string}}\n")
    with pytest.raises(ValueError, match=r"odd\.yaml: Invalid enum value 'string' - at .*attach"):
        read("odd")


REACHING = Scenario("reaching", "", steps=(
    {"probe": {"from": "pod1", "to": "vip1", "port": 80}, "expect": {"reaches": ["pod1:8080"]}},
    {"repeat": {"times": 2, "steps": [
        {"probe": {"from": "pod2", "to": "vip1", "port": 80}, "expect": {"reaches": ["pod1", "pod3"]}}]}},
))  # fmt: skip


@pytest.mark.parametrize(("lack", "mode", "is_playable"), [
    (Lack("hairpin", reaching=frozenset({"itself"})), "nftables", False),
    (Lack("direct", reaching=frozenset({"neighbour"})), "nftables", False),
    (Lack("direct", reaching=frozenset({"neighbour"}), spares=("ebpf",)), "ebpf", True),
    (Lack("named", scenarios=("reach*",)), "nftables", False),
    (Lack("named", scenarios=("others",)), "nftables", True),
])  # fmt: skip
def test_what_a_wiring_lacks_excuses_the_scenarios_that_need_it(
    lack: Lack, mode: str, *, is_playable: bool
) -> None:
    reason = REACHING.unplayable_in(Wiring("One.", name="one", lacks=(lack,)), mode, "ipv4")
    assert reason == ("" if is_playable else f"wiring one: {lack.why}")


def test_a_family_and_a_device_may_be_lacking() -> None:
    assert REACHING.unplayable_in(read("ipv6-only"), "nftables", "ipv4") == "wiring ipv6-only has no ipv4"
    by_bridge = SCENARIOS["detect-local-by-bridge"]
    assert by_bridge.unplayable_in(read("routed"), "nftables", "ipv4") == "wiring routed has no device kcbr0"
    assert by_bridge.unplayable_in(read("default"), "nftables", "ipv4") == ""
