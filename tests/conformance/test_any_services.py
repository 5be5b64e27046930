"""Services of any shape, changed at random: packets go where the specification says."""

import importlib
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.conformance.any_services import Attempt, Fate, World
from tests.conformance.harness import FAMILIES, HARNESS, KPROXY

ROUNDS = 40
SIDE_BY_SIDE = 16
TRIES = 10
"""Connections for each endpoint that may be reached: one that is never chosen is then noticed."""


def library(name: str) -> Any:
    """A module of the harness, which is no part of this project."""
    if str(HARNESS) not in sys.path:
        sys.path.append(str(HARNESS))
    return importlib.import_module(f"conformance.{name}")


class Play:
    """A kproxy in the harness's topology, and what packets to it tell."""

    def __init__(self, mode: str, family: str, directory: Path) -> None:
        self._mode, self._family = mode, family
        topology, drivers = library("topology"), library("drivers")
        with ExitStack() as stack:
            self._topology = topology.Topology()
            stack.callback(self._topology.close)
            for host in ("client", "node", "node2"):  # who was sent elsewhere once would not come back
                self._topology[host].sysctl(
                    ipv4__conf__all__accept_redirects=0, ipv4__conf__eth0__accept_redirects=0,
                    ipv6__conf__all__accept_redirects=0, ipv6__conf__eth0__accept_redirects=0)
            stack.callback(library("servers").EchoServers(self._topology).close)
            self._driver = drivers.KproxyDriver(self._topology, str(directory), str(KPROXY))
            stack.callback(self._driver.close)
            self._driver.start_proxy(mode, {})
            self._barrier = library("barrier").Barrier(self._topology, self._driver)
            self.close = stack.pop_all().close

    def apply(self, world: World) -> None:
        """Change *world*, and wait until that is in effect."""
        objects = library("objects")
        for change in world.change():
            if isinstance(change, str):
                self._driver.delete(objects.reference(change))
            else:
                self._driver.apply(objects.build(json.loads(json.dumps(change)), self._family))
        self._barrier.wait((self._family,))

    def problem(self, attempt: Attempt, fate: Fate) -> str:
        """How what becomes of *attempt* differs from its *fate*; "": not at all."""
        tries = 1
        if fate.outcome == "reached":
            tries = 2 if attempt.sticky else TRIES * len(fate.endpoints)
        seen = []
        for _ in range(tries):
            seen.append(self._try(attempt, 2.0 if fate.outcome == "reached" else 0.4))
            if seen[-1].kind != "reached":
                break
        outcomes = {outcome.kind for outcome in seen}
        if outcomes != {fate.outcome} and not self._is_as_good(attempt, fate, outcomes):
            return f"{attempt}: {outcomes} instead of {fate}"
        if fate.outcome != "reached":
            return ""
        reached = {(outcome.endpoint, outcome.port) for outcome in seen}
        if not reached <= fate.endpoints or (reached != fate.endpoints and not attempt.sticky):
            return f"{attempt}: reached {sorted(reached)} instead of {fate}"
        if attempt.sticky and len(reached) > 1 and self._mode == "nftables":
            return f"{attempt}: is not sticky, reached {sorted(reached)}"
        for outcome in seen:
            # What ends on the node itself is not masqueraded, and what comes back to its client always is.
            telling = outcome.endpoint not in ("node", attempt.client) and attempt.client != "node"
            if telling and fate.masqueraded is (outcome.seen_client == outcome.own_client):
                return f"{attempt}: {outcome} instead of {fate}"
        return ""

    def _try(self, attempt: Attempt, timeout: float) -> Any:
        host, source = ("client", attempt.client) if attempt.client == "crowd5" else (attempt.client, None)
        resolve = library("topology").resolve
        return library("probes").attempt(
            self._topology[host], resolve(attempt.to, self._family), attempt.port, timeout=timeout,
            source=source and resolve(source, self._family), protocol=attempt.protocol.lower(),
        )  # fmt: skip

    def _is_as_good(self, attempt: Attempt, fate: Fate, outcomes: set[str]) -> bool:
        """The kernel tells a local UDP client at once, whatever it is told; and kube-proxy's iptables rules
        leave source ranges out without endpoints, and refuse the node nothing at external addresses."""
        good = set()
        if attempt.client == "node" and attempt.protocol == "UDP" and fate.outcome != "reached":
            good.add("unreachable")
        if self._mode == "iptables" and fate.empty and attempt.kind in ("ext", "lb"):
            if fate.outcome == "dropped":
                good.add("refused")
            if attempt.client == "node":
                good.add("dropped")
        return bool(outcomes) and outcomes <= good


@pytest.fixture
def play(mode: str, family: str, tmp_path: Path) -> Iterator[Play]:
    play = Play(mode, family, tmp_path)
    try:
        yield play
    finally:
        play.close()


@pytest.mark.parametrize("family", FAMILIES if HARNESS.is_dir() else ())
@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_packets_go_where_the_specification_says(play: Play, mode: str, family: str) -> None:
    world = World(Random(f"{mode} {family}"))
    for _ in range(ROUNDS):
        play.apply(world)
        expected = [(attempt, world.fate(attempt)) for attempt in world.attempts()]
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            problems = list(pool.map(lambda each: play.problem(*each), expected))
        # A busy machine may keep an answer back; what is wrong is wrong once more.
        wrong = [each for each, problem in zip(expected, problems, strict=True) if problem]
        assert [problem for each in wrong if (problem := play.problem(*each))] == []
