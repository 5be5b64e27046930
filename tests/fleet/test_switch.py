"""``kubectl kproxy switch``: all nodes move, one after another, stop, go on and go back."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.core.namespaces import Namespace
from tests.fleet.canned import STATUS, Canned
from tests.fleet.fleet import KUBECTL_KPROXY, NODES, Fleet
from tests.patience import PATIENCE

WEB = ("10.96.0.10", 80)
NEW, OLD = "iptables", "nftables"

FOREIGN = """table ip nat { chain POSTROUTING {
    type nat hook postrouting priority 100
    ip daddr 1.2.3.4 masquerade persistent
}; }"""
"""A rule that iptables cannot show: docs/modes.md, "Beside tables of other programs"."""


def modes(fleet: Fleet) -> dict[str, str]:
    """Return the mode in which each node serves, while it is healthy and its frontend answers."""
    found = {}
    for node, proxy in fleet.proxies.items():
        assert proxy.health()[0] == 200
        fleet.connect(node, *WEB)
        found[node] = proxy.get(10249, "/proxyMode")[1]
    return found


def all_serve(mode: str) -> dict[str, str]:
    return dict.fromkeys(NODES, mode)


@contextmanager
def clients(fleet: Fleet) -> Iterator[list[str]]:
    """Connect to the Service from every node, again and again. Yields the failures."""
    failures: list[str] = []
    ended = threading.Event()
    counts: list[int] = []

    def connect(name: str, node: Namespace) -> None:
        count = 0
        with node.joined():
            while not ended.wait(0.01):
                count += 1
                try:
                    socket.create_connection(WEB, 5).close()
                except OSError as error:
                    failures.append(f"{name}: {error}")
        counts.append(count)

    threads = [threading.Thread(target=connect, args=item) for item in fleet.nodes.items()]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert len(counts) == len(NODES)
    assert min(counts) > 10


@pytest.fixture
def _back(fleet: Fleet) -> Iterator[None]:
    """After each test, go back to the mode that every node served before."""
    yield
    done = fleet.kubectl("switch", NEW, "--undo", "--yes", "--at-a-time=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert modes(fleet) == dict.fromkeys(NODES, OLD)


def events(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def states(event: dict[str, Any]) -> dict[str, str]:
    return {each["node"]: each["state"] for each in event["nodes"]}


@pytest.mark.usefixtures("_back")
def test_all_nodes_move_without_a_failed_connection(fleet: Fleet) -> None:
    with clients(fleet) as failures:
        done = fleet.kubectl("switch", NEW, "--yes")
        assert done.returncode == 0, done.stdout + done.stderr
    assert failures == []
    assert modes(fleet) == dict.fromkeys(NODES, NEW)
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.endswith(" moved")] == [
        *(f"{name}  moved" for name in NODES), "3 moved"]
    assert lines[-1] == (
        f"the configuration has mode '{OLD}': set '{NEW}' in the DaemonSet's ConfigMap to keep it after a"
        f" reboot of {', '.join(NODES)}")
    again = fleet.kubectl("switch", NEW, "--yes", "-o", "json")
    assert again.returncode == 0
    assert [event["event"] for event in events(again.stdout)] == ["plan", "summary"]
    assert states(events(again.stdout)[-1]) == dict.fromkeys(NODES, "there")


GREEN = "--nodes=pool=green"
"""node-b and node-c."""


@pytest.mark.usefixtures("_back")
def test_it_stops_where_the_mode_does_not_work_and_goes_on_later(fleet: Fleet) -> None:
    fleet.nodes["node-c"].nft(FOREIGN)
    checked = fleet.kubectl("switch", NEW, "--check", GREEN)
    stopped = fleet.kubectl("switch", NEW, "--yes", GREEN)
    assert modes(fleet) == {"node-a": OLD, "node-b": NEW, "node-c": OLD}
    fleet.nodes["node-c"].nft("delete table ip nat")
    resumed = fleet.kubectl("switch", NEW, "--yes", "-o", "json", GREEN)
    assert modes(fleet) == {"node-a": OLD, "node-b": NEW, "node-c": NEW}
    assert checked.returncode == 1
    fine, refused = checked.stdout.splitlines()
    assert fine == "node-b: nothing is lost"
    assert refused.startswith(f"node-c: cannot be switched: {NEW} does not work here: ")
    assert stopped.returncode == 1
    command = f"kubectl kproxy switch {NEW} --nodes pool=green"
    assert stopped.stdout.splitlines()[-5:-1] == [
        "1 moved, 1 refused", f"node-c  refused: {refused.removeprefix('node-c: cannot be switched: ')}",
        f"to go on: {command}", f"to go back: {command} --undo"]
    assert resumed.returncode == 0
    assert states(events(resumed.stdout)[-1]) == {"node-b": "there", "node-c": "moved"}


@contextmanager
def switching(fleet: Fleet, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """The switch as it goes on, with its events in a pipe."""
    with subprocess.Popen(
        fleet.in_hub("switch", NEW, "--yes", "-o", "json", *arguments), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "KUBECONFIG": fleet.kubeconfig},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def await_event(process: "subprocess.Popen[str]", **fields: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if fields.items() <= json.loads(line).items():
            return
    raise AssertionError(f"ended without {fields}")


@pytest.mark.usefixtures("_back")
def test_an_interrupt_lets_nodes_under_way_end(fleet: Fleet) -> None:
    with switching(fleet, GREEN) as process:
        await_event(process, event="step", step=f"{NEW} works here")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    *_, summary = events(output)
    assert summary["interrupted"]
    assert states(summary) == {"node-b": "moved", "node-c": "waiting"}
    assert modes(fleet) == {"node-a": OLD, "node-b": NEW, "node-c": OLD}


@pytest.mark.usefixtures("_back")
def test_a_node_completes_its_switch_after_a_second_interrupt(fleet: Fleet) -> None:
    with switching(fleet, "--nodes=pool=blue") as process:
        await_event(process, event="step", step=f"{NEW} works here")
        process.send_signal(signal.SIGINT)
        await_event(process, event="interrupt")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    deadline = time.monotonic() + PATIENCE
    while modes(fleet)["node-a"] != NEW:
        assert time.monotonic() < deadline


def test_without_a_terminal_it_wants_a_yes(canned: Canned) -> None:
    canned.answer("node", STATUS)
    assert str(canned.kubectl("switch", NEW).exception) == "--yes is required without a terminal"
    assert canned.asked == []


def test_on_a_terminal_it_asks(canned: Canned) -> None:
    canned.answer("node", STATUS)
    ours, theirs = os.openpty()
    os.write(ours, b"n\n")
    with open(ours, "rb", buffering=0), open(theirs, "rb", buffering=0) as terminal:
        done = subprocess.run(
            [KUBECTL_KPROXY, "switch", NEW, "--kubeconfig", canned.kubeconfig], stdin=terminal,
            capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [f"from {OLD} to {NEW}: node"]
    assert "Switch 1 of 1 nodes, 1 at a time? [y/N]:" in done.stderr
    assert canned.asked == ["kproxy status -o json"]


def test_a_check_names_what_each_node_would_lose(canned: Canned) -> None:
    found = {"mode": OLD, "appearing": [], "disappearing": [], "loses": False}
    lost = {"service_port": "shop/web", "what": "SCTP is not served", "lost": True, "only_here": False}
    canned.answer("a", found)
    canned.answer("b", found | {"appearing": [lost], "loses": True}, 1)
    canned.node("c", f"echo 'Error: {NEW} does not work here: no program' >&2; exit 1")
    canned.answer("d", found | {"mode": NEW})
    canned.node("e", pod={"containerStatuses": []})
    done = canned.kubectl("switch", NEW, "--check")
    assert done.return_value == 1
    assert done.output.splitlines() == [
        "a: nothing is lost", "b: lost: shop/web: SCTP is not served",
        f"c: cannot be switched: {NEW} does not work here: no program", f"d: {NEW} already serves",
        "e: cannot be switched: pod kproxy-e: Running"]
    *_, last = events(canned.kubectl("switch", NEW, "--check", "-o", "json").output)
    assert last == {"event": "summary", "well": False}


@pytest.mark.parametrize(("serves", "options", "goal"), [
    (OLD, (), ""),
    (OLD, ("--accept-losses",), NEW),
    (NEW, ("--undo",), OLD),
])  # fmt: skip
def test_losses_are_accepted_on_request_and_on_the_way_back(
    canned: Canned, serves: str, options: tuple[str, ...], goal: str
) -> None:
    lost = {"service_port": "shop/web", "what": "not on 127.0.0.1", "lost": True, "only_here": False}
    canned.answer("a", {
        **STATUS, "mode": serves, "before": OLD, "appearing": [lost], "disappearing": [], "loses": True,
        "frontends": []})
    done = canned.kubectl("switch", NEW, "--yes", *options)
    switched = [
        asked for asked in canned.asked if asked.startswith("kproxy switch ") and "--check" not in asked]
    assert switched == ([f"kproxy switch {goal} -o json"] if goal else [])
    told = "lost: shop/web: not on 127.0.0.1" if goal else (
        "refused: without --accept-losses, nothing may be lost; shop/web: not on 127.0.0.1")
    assert f"a  {told}" in done.output.splitlines()


def test_nodes_that_can_not_be_asked_are_left_out_and_named(canned: Canned) -> None:
    canned.answer("a", {**STATUS, "mode": NEW, "configured": NEW})
    canned.node("b", pod={"containerStatuses": []})
    canned.answer("c", {**STATUS, "mode": NEW, "well": False, "problems": ["IPv4: no memory"]}, 1)
    done = canned.kubectl("switch", NEW, "--yes", "--at-a-time=2")
    assert done.return_value == 1
    assert done.output.splitlines() == [
        f"a  {NEW} already serves",
        f"c  {NEW} already serves, with problems: IPv4: no memory",
        "b  left out: pod kproxy-b: Running",
        "",
        "2 there, 1 unreached",
        "b  unreached: pod kproxy-b: Running",
        "c  there: IPv4: no memory",
        f"to go on: kubectl kproxy switch {NEW} --at-a-time 2 --kubeconfig {canned.kubeconfig}",
        f"the configuration has mode '{OLD}': set '{NEW}' in the DaemonSet's ConfigMap to keep it after a"
        f" reboot of c"]


def test_going_back_from_a_mode_skips_nodes_that_never_moved(canned: Canned) -> None:
    canned.answer("a", STATUS)
    canned.answer("b", {**STATUS, "mode": NEW, "configured": NEW})
    done = canned.kubectl("switch", NEW, "--undo", "--yes")
    assert done.return_value == 0
    assert done.output.splitlines() == [
        f"a  {OLD} already serves", f"b  {NEW} already serves", "", "2 there"]
