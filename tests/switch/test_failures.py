"""A failed switch is rolled back, or finished at the next start, without disturbing connections."""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.core.installed_plugins import install
from tests.switch.room import PATIENCE, Loads, Proxy, Room, room
from tests.switch.tour import belongs

HERE = Path(__file__).parent
SYNCS = (1, 2, 5, 6, 7, 8)
"""Syncs of a switch that change the kernel, and the last: program (1, 2), read back, add the probe (5, 6),
remove it (7, 8); each in two families."""
STEPS = [
    ("kproxy_make_backend", 1), *(("kproxy_sync", number) for number in SYNCS),
    ("kproxy_retire", 1), ("close", 1), ("kproxy_cleanup", 1),
]  # fmt: skip
KILLS = [
    *(("nftables", "iptables", *step) for step in STEPS),
    *(("iptables", "nftables", *step) for step in (STEPS[2], STEPS[3], *STEPS[-3:])),
]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    with room(tmp_path_factory.mktemp("room")) as made:
        made.choose_iptables("nft")
        yield made


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Return the environment in which kproxy finds the plugins of these tests."""
    directory = tmp_path_factory.mktemp("plugins")
    sources = {name: (HERE / f"{name}.py").read_text() for name in ("faults", "hollow")}
    install(directory, "faults", {"faults": "faults"}, "kproxy.observers", faults=sources["faults"])
    install(directory, "hollow", {"hollow": "hollow"}, hollow=sources["hollow"])
    return {"PYTHONPATH": str(directory), "KPROXY_FAULT": str(directory / "fault")}


@contextmanager
def proxy(where: Room, mode: str, state: Path, environment: Mapping[str, str]) -> Iterator[Proxy]:
    with where.proxy(mode, {"stateDirectory": str(state)}, environment=environment) as running:
        yield running


def arm(environment: Mapping[str, str], hook: str, number: int, what: str) -> None:
    file = Path(environment["KPROXY_FAULT"])
    beside = file.with_suffix(".new")
    beside.write_text(f"{hook} {number} {what}")
    os.replace(beside, file)


@pytest.fixture
def _disarmed(environment: Mapping[str, str]) -> Iterator[None]:
    yield
    Path(environment["KPROXY_FAULT"]).unlink(missing_ok=True)


def await_traces(where: Room, loads: Loads, mode: str) -> None:
    """Wait, under load, until only *mode* has traces on the node."""
    loads.more(200)
    loads.renew()
    for _ in range(round(PATIENCE)):
        loads.more(200)
        if belongs(where.traces(), mode):
            return
    assert where.traces() == {mode}


@pytest.mark.usefixtures("_disarmed")
@pytest.mark.parametrize(("number", "what"), [
    *((number, "fail") for number in (1, 2, 3, 5, 8)), (3, "restless"),
])  # fmt: skip
def test_a_backend_that_fails_is_rolled_back(
    where: Room, environment: Mapping[str, str], tmp_path: Path, number: int, what: str
) -> None:
    with proxy(where, "nftables", tmp_path, environment) as running, where.used(sparing=True) as loads:
        arm(environment, "kproxy_sync", number, what)
        done = where.kproxy("switch", "iptables")
        assert done.returncode == 1
        reason = "does not hold what was programmed" if what == "restless" else "failed on purpose"
        assert reason in done.stderr
        Path(environment["KPROXY_FAULT"]).unlink(missing_ok=True)
        await_traces(where, loads, "nftables")
        assert running.mode == "nftables"
        assert loads.failures() == []


@pytest.mark.usefixtures("_disarmed")
def test_a_backend_that_cannot_be_made_changes_nothing(
    where: Room, environment: Mapping[str, str], tmp_path: Path
) -> None:
    with proxy(where, "nftables", tmp_path, environment) as running, where.used(sparing=True) as loads:
        arm(environment, "kproxy_make_backend", 1, "fail")
        done = where.kproxy("switch", "iptables")
        assert (done.returncode, running.mode) == (1, "nftables")
        assert "failed on purpose" in done.stderr
        await_traces(where, loads, "nftables")
        assert loads.failures() == []


def test_a_backend_that_programs_nothing_is_exposed_by_the_probe(
    where: Room, environment: Mapping[str, str], tmp_path: Path
) -> None:
    with proxy(where, "nftables", tmp_path, environment) as running, where.used(sparing=True) as loads:
        done = where.kproxy("switch", "hollow")
        assert (done.returncode, running.mode) == (1, "nftables")
        assert "did not reach its endpoint" in done.stderr
        await_traces(where, loads, "nftables")
        assert loads.failures() == []


def test_a_udp_client_of_a_relay_is_served_after_a_switch_and_the_end_of_the_process(
    where: Room, environment: Mapping[str, str], tmp_path: Path
) -> None:
    def ask(flow: socket.socket) -> bytes:
        flow.send(b"?")
        return flow.recv(1)

    with where.client.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as flow:
        flow.settimeout(PATIENCE)
        with proxy(where, "userspace", tmp_path, environment):
            flow.connect(("10.96.0.53", 53))
            assert ask(flow) == b"?"
            assert where.kproxy("switch", "nftables").returncode == 0
        assert ask(flow) == b"?"


@pytest.mark.usefixtures("_disarmed")
@pytest.mark.parametrize(("before", "after", "hook", "number"), KILLS)
def test_a_killed_switch_is_finished_or_rolled_back_by_the_next_start(
    where: Room, environment: Mapping[str, str], tmp_path: Path, before: str, after: str, hook: str,
    number: int,
) -> None:
    with proxy(where, before, tmp_path, environment) as running, where.used(sparing=True) as loads:
        arm(environment, hook, number, "kill")
        where.kproxy("switch", after)
        running.process.wait(PATIENCE)
        loads.more(200)  # the rules serve without a process
        with proxy(where, before, tmp_path, environment) as again:
            serving = before if hook in ("kproxy_make_backend", "kproxy_sync") else after
            assert again.mode == serving
            await_traces(where, loads, serving)
            assert loads.failures() == []
