"""The stage ends a scenario that would never end, and tells where an answer went astray."""

import shlex
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kproxy_conformance.drivers.kproxy import KproxyDriver
from kproxy_conformance.network.addresses import resolve
from kproxy_conformance.network.patience import patience
from kproxy_conformance.network.topology import Topology
from kproxy_conformance.suite import stage as stages
from kproxy_conformance.suite.evidence import Capture
from kproxy_conformance.suite.limit import limit
from kproxy_conformance.suite.scenario import Scenario
from kproxy_conformance.suite.stage import FAILED, PASSED, Stage

QUICK = Scenario("quick", "A server of a pod answers.", steps=(
    {"probe": {"from": "node", "to": "pod1", "port": 8080}, "expect": {"reaches": ["pod1"]}},
))  # fmt: skip


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(KproxyDriver, tmp_path_factory.mktemp("stage")) as made:
        yield made


def test_a_scenario_that_never_ends_fails_with_all_stacks(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.play(QUICK, "nftables", "ipv4")  # kproxy runs
    with monkeypatch.context() as patch:
        patch.setattr(stages, "LONGEST", 2)
        patch.setattr(stages, "GIVEN_UP", 0)
        never = Scenario("never", "It waits.", steps=({"wait": 3600},))
        result = stage.play(never, "nftables", "ipv4")
    assert result.status == FAILED
    player, proxy = result.detail.split("proxy:\n")
    assert "time.sleep(seconds)" in player
    assert "thread echo:" in player
    assert "[MainThread]" in proxy
    assert stage.play(QUICK, "nftables", "ipv4").status == PASSED


def test_an_answer_to_a_server_is_a_failure_and_not_answered(stage: Stage) -> None:
    """It would be answered for ever."""
    datagram = _datagram(resolve("pod1", "ipv4"), 9053, resolve("pod3", "ipv4"), 8080)
    send = (
        "import socket as s; "
        "with_header = s.socket(s.AF_INET, s.SOCK_RAW, s.IPPROTO_RAW); "
        f"with_header.sendto(bytes.fromhex('{datagram.hex()}'), ('{resolve('pod3', 'ipv4')}', 0))"
    )
    answered = {"from": "node", "to": "pod3", "port": 8080, "proto": "udp"}
    astray = Scenario("astray", "pod1's server seems to ask that of pod3.", steps=(
        {"exec": {"in": "node", "run": shlex.join([sys.executable, "-c", send])}},
        {"probe": answered, "expect": {"reaches": ["pod3"]}},
    ))  # fmt: skip
    result = stage.play(astray, "nftables", "ipv4")
    assert result.status == FAILED
    assert result.detail.count("10.244.2.13 port 8080 to 10.244.1.11 port 9053: ") == 1
    assert stage.play(QUICK, "nftables", "ipv4").status == PASSED


def test_packets_that_never_stop_are_not_read_for_ever(tmp_path: Path) -> None:
    """There is always one more: they arrive faster than they are read."""

    class Endless:
        def recvmsg(self, *_: int) -> tuple[bytes, list[Any], int, tuple[Any, ...]]:
            now = struct.pack("@ll", *divmod(time.time_ns(), 1_000_000_000))
            return b"packet", [(socket.SOL_SOCKET, 35, now)], 0, ("eth0", 0x800, 0, 1, b"\2" * 6)

        def close(self) -> None:
            pass

    topology = Topology()
    try:
        capture = Capture(topology["node"])
        capture._socket.close()
        capture._socket = Endless()  # type: ignore[assignment]
        with limit(10 * patience()):
            capture.clear()
            capture.write(tmp_path / "packets")
            capture.close()
        assert b"packet" in (tmp_path / "packets").read_bytes()
    finally:
        topology.close()


def _datagram(source: str, source_port: int, to: str, port: int) -> bytes:
    """Return an IPv4 packet."""
    udp = struct.pack("!HHHH", source_port, port, 14, 0) + b"again\n"
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(udp), 1, 0, 64, socket.IPPROTO_UDP, 0)
    return head + socket.inet_aton(source) + socket.inet_aton(to) + udp
