"""The conformance harness, run once for each mode and address family.

The harness (``shared/conformance``, see its README) plays scenarios against a kproxy process with
real packets in namespaces of its own, so several runs go on side by side.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

CHECKOUT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("KPROXY_SHARED") or CHECKOUT.parent / "shared")
HARNESS = SHARED / "conformance"
KPROXY = Path(sys.executable).with_name("kproxy")
OWN = Path(__file__).with_name("scenarios")

FAMILIES = ("ipv4", "ipv6")

LEGACY = "-legacy"
"""At the end of a mode's name: with the iptables programs for the kernel's legacy interface."""

THROUGH_API = "-through-api"
"""At the end of a mode's name: with objects from an API server instead of manifests."""

SIDE_BY_SIDE = 2
"""Runs at a time: what they check has deadlines."""

LONGEST_RUN = 900
"""Seconds. A run of everything takes a few minutes; one that hangs is ended and has failed."""

APART = ("affinity-timeout",)
"""Scenarios that need a harness of their own.

Before this one comes ``affinity-client-ip`` with the same Service, clients and endpoints. When a busy machine
lets a proxy see its deletion and the next creation as one change, the clients stay pinned to two endpoints.
"""

PATIENCE = 20
"""Seconds that a harness has to remove its namespaces once told to end."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario file, as far as it says where it applies."""

    path: Path
    modes: tuple[str, ...] = ()
    """Empty: every mode."""
    families: tuple[str, ...] = FAMILIES

    @property
    def name(self) -> str:
        return self.path.stem

    @classmethod
    def read(cls, path: Path) -> "Scenario":
        body: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        return cls(path, tuple(body.get("modes") or ()), tuple(body.get("families") or FAMILIES))


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """One scenario in one mode and family."""

    mode: str
    family: str
    scenario: str

    @property
    def run(self) -> str:
        """The name of the run that it belongs to."""
        return str(self) if self.scenario in APART else f"{self.mode}-{self.family}"

    def __str__(self) -> str:
        return f"{self.mode}-{self.family}-{self.scenario}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the harness found for one case."""

    status: str
    """``passed``, ``failed`` or ``skipped``."""
    detail: str


def scenarios() -> list[Scenario]:
    """Every scenario of the harness, by name; none if the harness is not there."""
    return read_scenarios(HARNESS / "scenarios")


def read_scenarios(directory: Path) -> list[Scenario]:
    """The scenarios in *directory*, by name."""
    return [Scenario.read(path) for path in sorted(directory.glob("*.yaml"))]


def kernel_mode(mode: str) -> str:
    """The mode that kproxy is started in for *mode*."""
    return mode.removesuffix(LEGACY).removesuffix(THROUGH_API)


@dataclass
class Run:
    """One process of the harness: scenarios of one mode and family."""

    mode: str
    family: str
    scenarios: list[Scenario]
    directory: Path
    """Of this run alone: reports, proxy logs and rule sets of failures are kept here."""
    _process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)
    _ended: bool = False

    @property
    def _log(self) -> Path:
        return self.directory / "harness.log"

    def play(self) -> dict[str, Outcome]:
        """Play every scenario: what became of each that the harness reports, by name.

        One that fails is played once more by itself, with nothing beside it in its harness: its deadlines
        are for a machine that has time for it. Only what fails again has failed.
        """
        outcomes = self._play(self.scenarios, self.directory)
        failed = [scenario for scenario in self.scenarios if _failed(outcomes.get(scenario.name))]
        if failed and not self._ended:
            outcomes |= self._play(failed, self.directory / "again")
        return outcomes

    def _play(self, scenarios: list[Scenario], directory: Path) -> dict[str, Outcome]:
        chosen, report = directory / "scenarios", directory / "report.json"
        chosen.mkdir(parents=True)
        for scenario in scenarios:
            (chosen / scenario.path.name).symlink_to(scenario.path)
        command: list[str | Path] = [sys.executable, "-B", HARNESS / "run", "--keep-going", "--verbose"]
        command += ["--command", self._command(), "--mode", kernel_mode(self.mode), "--family", self.family]
        command += ["--dir", chosen, "--report", report, "--workdir", directory / "work"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment()
            )
        if self._ended:
            self.end()
        try:
            self._process.wait(LONGEST_RUN)
        except subprocess.TimeoutExpired:
            self.end()
        if not report.exists():
            return {}
        results = json.loads(report.read_text())["results"]
        return {result["scenario"]: Outcome(result["status"], result["detail"]) for result in results}

    def lost(self) -> Outcome:
        """The outcome of a scenario that the harness did not report."""
        log = self._log.read_text(errors="replace")
        return Outcome("lost", f"the harness did not report it:\n{log[-4000:]}")

    def _command(self) -> str:
        if not self.mode.endswith(THROUGH_API):
            return str(KPROXY)
        bridge = Path(__file__).with_name("through_api.py")
        return shlex.join(map(str, [sys.executable, "-B", bridge, SHARED / "bench", KPROXY]))

    def _environment(self) -> dict[str, str]:
        """That of the tests; which iptables is the default is decided by who comes first in PATH."""
        if not self.mode.endswith(LEGACY):
            return dict(os.environ)
        programs = self.directory / "programs"
        programs.mkdir(exist_ok=True)
        for base in ("iptables", "ip6tables"):
            for action in ("", "-save", "-restore"):
                program = shutil.which(f"{base}{LEGACY}{action}")
                assert program, f"{base}{LEGACY}{action} is not installed"
                if not (programs / f"{base}{action}").exists():
                    (programs / f"{base}{action}").symlink_to(program)
        return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}

    def end(self) -> None:
        """End the harness if it runs, with time to remove its namespaces; it will not be started again."""
        self._ended = True
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _failed(outcome: Outcome | None) -> bool:
    return outcome is None or outcome.status == "failed"


def runs(cases: Iterable[tuple[Case, Scenario]], directory: Path) -> dict[str, Run]:
    """The runs that *cases* need, by name; not started."""
    wanted: dict[str, Run] = {}
    for case, scenario in cases:
        if case.run not in wanted:
            wanted[case.run] = Run(case.mode, case.family, [], directory / case.run)
        wanted[case.run].scenarios.append(scenario)
    return wanted
