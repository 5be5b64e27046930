"""The mode by a label of the Node, under load, with the objects of an API server."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import yaml

from tests.core.api_servers import BenchServer, Json
from tests.core.installed_plugins import install
from tests.switch.room import MANIFEST, PATIENCE, Proxy, Room, room
from tests.switch.test_failures import arm, await_traces
from tests.switch.tour import belongs

KEY = "kproxy.dev/mode"
(NODE, *_) = yaml.safe_load_all(MANIFEST)


class Cluster:
    """The room's node, and the API server that has its objects."""

    def __init__(self, where: Room) -> None:
        self.where = where
        self.server = BenchServer("--manifests", str(where.manifests), node=where.node)

    def label(self, mode: str | None) -> None:
        meta = NODE["metadata"] | ({} if mode is None else {"labels": {KEY: mode}})
        self.server.post("apply", **(NODE | {"metadata": meta}))

    def proxy(
        self, mode: str, state: Path, environment: Mapping[str, str] = {}
    ) -> AbstractContextManager[Proxy]:
        return self.where.proxy(
            mode, {"stateDirectory": str(state), "modeFromNodeLabel": KEY}, environment=environment,
            api_server=self.server.url)

    def await_traces(self, mode: str) -> None:
        """Wait until only *mode* has traces on the node."""
        until(lambda: belongs(self.where.traces(), mode), self.where.log_tail)

    def events(self, reason: str = "ModeSwitchFailed") -> list[Json]:
        return [event for event in self.server.events() if event["reason"] == reason]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with room(tmp_path_factory.mktemp("room")) as where:
        where.choose_iptables("nft")
        made = Cluster(where)
        yield made
        made.server.stop()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    directory = tmp_path_factory.mktemp("plugins")
    faults = Path(__file__).with_name("faults.py").read_text()
    install(directory, "faults", {"faults": "faults"}, "kproxy.observers", faults=faults)
    return {"PYTHONPATH": str(directory), "KPROXY_FAULT": str(directory / "fault")}


def until(holds: Callable[[], bool], what: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


def await_mode(running: Proxy, mode: str) -> None:
    until(lambda: running.mode == mode, lambda: running.log)


def test_a_label_moves_a_node_and_back_without_losing_a_connection(
    cluster: Cluster, tmp_path: Path
) -> None:
    where = cluster.where
    cluster.label(None)
    with cluster.proxy("nftables", tmp_path) as running, where.used(sparing=True) as loads:
        cluster.label("iptables")
        await_mode(running, "iptables")
        await_traces(where, loads, "iptables")
        for command in (["switch", "nftables"], ["switch", "--check", "nftables"]):
            refused = where.kproxy(*command)
            assert refused.returncode == 1
            assert f"the label {KEY} of this Node names mode iptables" in refused.stderr
        cluster.label("no-such-mode\x1b[2J")
        until(lambda: len(cluster.events()) == 1, lambda: running.log)
        (event,) = cluster.events()
        assert event["regarding"]["kind"] == "Node"
        assert event["note"].startswith(f"label {KEY}: names none of the installed modes, ")
        status, health = running.health
        assert (status, event["note"] in health) == (200, True)
        assert running.mode == "iptables"
        cluster.label(None)
        await_mode(running, "nftables")
        await_traces(where, loads, "nftables")
        until(lambda: "problems" not in running.health[1], lambda: running.health)
        until(lambda: len(cluster.events("ModeSwitched")) == 2, lambda: running.log)
        assert [event["note"] for event in cluster.events("ModeSwitched")] == ["iptables", "nftables"]
        assert "no-such-mode" not in running.log
        assert loads.failures() == []


def test_the_next_process_starts_in_the_mode_of_the_label_and_sees_that_it_went(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.label("iptables")
    with cluster.proxy("nftables", tmp_path) as running:
        await_mode(running, "iptables")
    with cluster.proxy("nftables", tmp_path) as running:
        assert "resuming earlier mode switch configured=nftables mode=iptables" in running.log
        assert running.mode == "iptables"
    cluster.label(None)
    with cluster.proxy("nftables", tmp_path) as running:
        await_mode(running, "nftables")
        cluster.await_traces("nftables")


def test_a_switch_that_is_killed_is_made_by_the_next_process_and_one_that_fails_is_rolled_back(
    cluster: Cluster, environment: Mapping[str, str], tmp_path: Path
) -> None:
    cluster.label(None)
    before = len(cluster.events())
    with cluster.proxy("nftables", tmp_path, environment) as running:
        arm(environment, "kproxy_sync", 5, "kill")
        cluster.label("iptables")
        running.process.wait(PATIENCE)
    with cluster.proxy("nftables", tmp_path, environment) as running:
        await_mode(running, "iptables")
        cluster.await_traces("iptables")
        arm(environment, "kproxy_sync", 3, "restless")
        cluster.label("nftables")
        until(lambda: len(cluster.events()) > before, lambda: running.log)
        Path(environment["KPROXY_FAULT"]).unlink()
        problem = "could not switch to nftables: nftables: the kernel does not hold what was programmed"
        status, health = running.health
        assert (status, problem in health) == (200, True)
        cluster.await_traces("iptables")
        assert running.mode == "iptables"
