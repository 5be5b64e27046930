"""Services of any shape, changed at random: packets go where the specification says."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import ClassVar

import pytest

from kproxy_conformance.__main__ import SOCKET_MODES
from kproxy_conformance.drivers.driver import NO_OPTIONS, Driver
from kproxy_conformance.drivers.kproxy import KproxyDriver
from kproxy_conformance.network.addresses import FAMILIES, resolve
from kproxy_conformance.network.cgroup import NodeCgroup
from kproxy_conformance.network.dialing import Outcome, dial
from kproxy_conformance.network.patience import patience
from kproxy_conformance.suite import objects
from kproxy_conformance.suite.stage import Stage
from tests.conformance.any_services import Attempt, Fate, Json, Where, World, turns

CASES = 400
"""Packets, at least, in rounds of up to 50."""
SIDE_BY_SIDE = 16
TRIES = 6
"""Connections for each endpoint that may be reached: one that must not be is then noticed."""
MOST_TRIES = 40
"""Connections for each endpoint until all have been reached: random choice misses one in 10^16 runs."""


_TIMEOUTS = {"reached": 2.0, "refused": 0.4, "dropped": 0.4 / patience()}
"""Seconds, multiplied by `patience`, by expected outcome."""


class Play:
    """A kproxy in the harness's topology, and what packets to it tell."""

    make_driver: Callable[..., Driver] = KproxyDriver
    config: ClassVar[Json | None] = None

    def __init__(self, mode: str, family: str, directory: Path) -> None:
        self._mode, self._family = mode, family
        # A port that is used again within the lifetime of a tracked connection continues that connection.
        self._source_ports: defaultdict[str, Iterator[int]] = defaultdict(lambda: count(20_000))
        with ExitStack() as stack:
            cgroup, options = None, NO_OPTIONS
            if mode in SOCKET_MODES:
                cgroup = NodeCgroup()
                stack.callback(cgroup.close)
                options = {mode: {"cgroup": str(cgroup.path)}}
            self._stage = Stage(partial(self.make_driver, options=options), directory, cgroup)
            stack.callback(self._stage.close)
            self._stage.driver.start(mode, self.config)
            self.close = stack.pop_all().close

    def apply(self, world: World) -> None:
        """Change *world*, and wait until that is in effect."""
        self.apply_changes(world.change())

    def apply_changes(self, changes: Iterable[Json | str]) -> None:
        """Apply objects and delete those referred to, and wait until that is in effect."""
        driver = self._stage.driver
        for change in changes:
            if isinstance(change, str):
                driver.delete(objects.reference(change))
            else:
                driver.apply(objects.build(change, self._family))
        self._stage.barrier.wait()

    def problems(self, attempts: Sequence[Attempt], fates: Iterable[Fate]) -> list[str]:
        """Return how the results of *attempts* differ from their *fates*. Sticky ones take `turns`."""
        expected = dict(zip(map(id, attempts), fates, strict=True))
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            found = pool.map(
                lambda turn: [self.problem(attempt, expected[id(attempt)]) for attempt in turn],
                turns(attempts),
            )
            return [problem for turn in found for problem in turn if problem]

    def problem(self, attempt: Attempt, fate: Fate) -> str:
        """Return how the result of *attempt* differs from its *fate*; "": not at all."""
        tries = most = 1
        if fate.outcome == "reached":
            tries = most = 2
            if not attempt.sticky:
                tries, most = TRIES * len(fate.endpoints), MOST_TRIES * len(fate.endpoints)
        seen: list[Outcome] = []
        while len(seen) < tries or (len(seen) < most and _reached(seen) < fate.endpoints):
            seen.append(self._try(attempt, _TIMEOUTS[fate.outcome]))
            if seen[-1].kind != "reached":
                break
        outcomes = {outcome.kind for outcome in seen}
        if outcomes != {fate.outcome} and not self._is_as_good(attempt, fate, outcomes):
            return f"{attempt}: {outcomes} instead of {fate}"
        if fate.outcome != "reached":
            return ""
        reached = _reached(seen)
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

    def _try(self, attempt: Attempt, timeout: float) -> Outcome:
        host, source = ("client", attempt.client) if attempt.client == "crowd5" else (attempt.client, None)
        return dial(
            self._stage.topology[host], resolve(attempt.to, self._family), attempt.port, timeout=timeout,
            source=source and resolve(source, self._family), protocol=attempt.protocol.lower(),
            source_port=next(self._source_ports[attempt.client]),
        )  # fmt: skip

    def _is_as_good(self, attempt: Attempt, fate: Fate, outcomes: set[str]) -> bool:
        """A drop is an error at once for a local UDP client; and kube-proxy's iptables rules omit source
        ranges without endpoints, and refuse the node nothing at external addresses."""
        good = set()
        if attempt.client == "node" and attempt.protocol == "UDP" and fate.outcome != "reached":
            good.add("unreachable")
        if self._mode == "iptables" and fate.empty and attempt.kind in ("ext", "lb"):
            if fate.outcome == "dropped":
                good.add("refused")
            if attempt.client == "node":
                good.add("dropped")
        return bool(outcomes) and outcomes <= good


def _reached(outcomes: Iterable[Outcome]) -> set[Where]:
    return {(outcome.endpoint, outcome.port) for outcome in outcomes}


@pytest.fixture
def play(mode: str, family: str, tmp_path: Path) -> Iterator[Play]:
    with closing(Play(mode, family, tmp_path)) as play:
        yield play


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["nftables", "iptables", "ebpf"])
def test_packets_have_the_fate_of_the_specification(play: Play, mode: str, family: str) -> None:
    world = World(Random(f"{mode} {family}"))
    cases = 0
    while cases < CASES:
        play.apply(world)
        attempts = list(world.attempts())
        cases += len(attempts)
        assert play.problems(attempts, map(world.fate, attempts)) == []


def test_attempts_that_share_an_affinity_take_turns() -> None:
    world = World(Random(1))
    sticky: set[tuple[str, str, str]] = set()
    for _ in range(40):
        list(world.change())
        attempts = list(world.attempts())
        groups = turns(attempts)
        assert sorted(map(str, attempts)) == sorted(str(each) for turn in groups for each in turn)
        shared = [turn[0].affinity for turn in groups if turn[0].sticky]
        assert len(shared) == len(set(shared))
        assert all(each.affinity == turn[0].affinity for turn in groups for each in turn)
        sticky.update(turn[0].affinity for turn in groups if len(turn) > 1)
    assert sticky
