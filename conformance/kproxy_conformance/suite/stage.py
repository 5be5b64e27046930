"""The stage: topology, servers and one proxy, on which scenarios are played one after the other."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from kproxy_conformance.drivers.driver import Driver, Unavailable
from kproxy_conformance.network.cgroup import NodeCgroup
from kproxy_conformance.network.namespaces import CommandFailed
from kproxy_conformance.network.patience import patience
from kproxy_conformance.network.servers import EchoServers
from kproxy_conformance.network.topology import Topology
from kproxy_conformance.network.wiring import DEFAULT, Wiring
from kproxy_conformance.suite.barrier import Barrier
from kproxy_conformance.suite.evidence import Capture, state
from kproxy_conformance.suite.limit import Overdue, limit
from kproxy_conformance.suite.player import GIVEN_UP, PROBLEMS, Player
from kproxy_conformance.suite.scenario import Scenario

LONGEST = 60.0
"""Seconds until a scenario is given up, several times what the longest needs, multiplied by `patience`."""

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True, slots=True)
class Result:
    scenario: str
    mode: str
    family: str
    status: str
    """`PASSED`, `FAILED` or `SKIPPED`."""
    detail: str = ""
    announced: str = ""
    """After a failure, the caveats that the backend announces, if it is in this process."""
    seconds: float = 0.0
    wiring: str = DEFAULT

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Stage:
    """A context. Scenarios with equal configuration are best played one after the other: fewer restarts."""

    def __init__(
        self, make_driver: Callable[[Topology, Path], Driver], directory: Path,
        cgroup: NodeCgroup | None = None, wiring: Wiring | None = None,
    ) -> None:  # fmt: skip
        """*directory* is for logs, and evidence of failures. *cgroup* is for the sockets of the node and its
        pods, if the mode works at sockets; it belongs to the caller. Raises MissingRight if the machine does
        not allow *wiring*."""
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            self.topology = Topology(cgroup, wiring=wiring)
            stack.callback(self.topology.close)
            self._servers = EchoServers(self.topology)
            stack.callback(self._servers.close)
            self._capture = Capture(self.topology["node"])
            stack.callback(self._capture.close)
            self.driver = make_driver(self.topology, directory)
            stack.callback(self.driver.close)
            self.barrier = Barrier(self.topology["node"], self.driver, self.topology.families)
            self.close = stack.pop_all().close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def play(self, scenario: Scenario, mode: str, family: str, *, is_excusable: bool = False) -> Result:
        """Play one scenario, once. The calling thread is in the node's network namespace meanwhile.

        *is_excusable*: skip it if the backend announces a caveat about its objects.
        """
        wiring = self.topology.wiring
        if reason := (scenario.unsuitable_for(mode, family, self.driver.name)
                      or scenario.unplayable_in(wiring, mode, family)):
            return Result(scenario.name, mode, family, SKIPPED, reason, wiring=wiring.name)
        # Programs read /proc/net, which shows the namespace of the process's first thread.
        with self.topology["node"].joined():
            return self._play(scenario, mode, family, is_excusable)

    def _play(self, scenario: Scenario, mode: str, family: str, is_excusable: bool) -> Result:
        began = time.monotonic()
        player = Player(scenario, mode, family, self.topology, self.driver, self.barrier)
        problem = lacking = ""
        longest = LONGEST * patience() + GIVEN_UP
        try:
            with limit(longest):
                self._capture.clear()
                self._servers.astray.clear()
                player.play(is_excusable=is_excusable)
            if self._servers.astray:
                problem = "\n".join(["answers did not reach the client:", *self._servers.astray])
        except Unavailable as error:
            lacking = str(error)
        except Overdue as error:
            problem = self._overdue(error)
        except (*PROBLEMS, CommandFailed) as error:
            problem = str(error)
        except (KeyError, TypeError, ValueError) as error:
            problem = f"malformed step: {error!r}"
        status, detail, announced = SKIPPED if lacking else PASSED, lacking, ""
        if problem:
            status, detail = FAILED, self._explain(player, mode, family, problem)
            announced = self.driver.announced()
        try:
            with limit(longest):
                player.tidy()
        except Overdue as error:
            status, detail = FAILED, detail or f"after its last step: {self._overdue(error)}"
        except PROBLEMS as error:
            status, detail = FAILED, detail or f"after its last step: {error}"
        if status == FAILED:
            self.driver.discard()
        seconds = round(time.monotonic() - began, 2)
        wiring = self.topology.wiring.name
        return Result(scenario.name, mode, family, status, detail, announced, seconds, wiring)

    def _overdue(self, error: Overdue) -> str:
        return "\n".join([str(error), *([f"proxy:\n{stacks}"] if (stacks := self.driver.stacks()) else [])])

    def write_packets(self, path: Path) -> None:
        """Write the node's packets of the last scenario to *path*."""
        self._capture.write(path)

    def _explain(self, player: Player, mode: str, family: str, problem: str) -> str:
        """Save the evidence of a failure, and return all that is needed to understand it."""
        base = self.directory / f"{player.scenario.name}-{mode}-{family}"
        state_path, packets_path = base.with_suffix(".state"), base.with_suffix(".pcap")
        self._capture.write(packets_path)
        state_path.write_text(state(self.topology["node"]))
        log_path = self.directory / "proxy.log"
        shown = yaml.safe_dump_all(
            player.applied.values(), sort_keys=False, default_flow_style=None, width=120
        )
        return "\n".join(
            [
                f"{player.scenario.name} in mode {mode}, {family}: {player.scenario.description}",
                f"wiring: {self.topology.wiring.name}",
                f"step:\n{_indented(player.step_text)}",
                f"problem: {problem}",
                f"rules, connections and counters: {state_path}",
                f"packets at the node: {packets_path}",
                *([f"log of the proxy: {log_path}"] if log_path.exists() else []),
                f"objects:\n{_indented(shown)}",
            ]
        )


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines())
