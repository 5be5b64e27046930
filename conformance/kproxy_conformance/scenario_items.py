"""The scenarios as tests of the pytest plugin, each played by one driver in the author's mode."""

import json
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kproxy_conformance.checks.bench import prepare
from kproxy_conformance.checks.check import Failed
from kproxy_conformance.checks.subject import Wanted
from kproxy_conformance.drivers.backend import BackendDriver
from kproxy_conformance.drivers.driver import Driver
from kproxy_conformance.drivers.kproxy import KPROXY, KproxyDriver, ThroughApiDriver
from kproxy_conformance.network.rights import MissingRight
from kproxy_conformance.network.topology import Topology
from kproxy_conformance.network.wiring import DEFAULT, chosen, read
from kproxy_conformance.processes import own_name
from kproxy_conformance.suite.scenario import BACKEND, Scenario, find
from kproxy_conformance.suite.stage import FAILED, SKIPPED, Stage
from kproxy_core.model.address import Family

DRIVERS = (BACKEND, KproxyDriver.name, ThroughApiDriver.name)

_STAGES = pytest.StashKey[dict[str, Stage]]()
"""The stage of each driver."""


class ScenarioItem(pytest.Item):
    """One scenario in one IP family and wiring."""

    def __init__(
        self, *, scenario: Scenario, family: Family, driver: str, wanted: Wanted, wiring: str, **others: Any
    ) -> None:
        super().__init__(**others)
        self._scenario = scenario
        self._family = family
        self._driver = driver
        self._wanted = wanted
        self._wiring = wiring
        self.add_marker("kproxy")

    def runtest(self) -> None:
        reason = self._scenario.unplayable_by(self._driver) or self._wanted.excuse(self._scenario.name)
        if reason:
            pytest.skip(f"not applicable: {reason}")
        family = self._family.label.lower()
        try:
            stage = self._stage()
        except MissingRight as error:
            pytest.skip(f"missing: {error}")
        result = stage.play(
            self._scenario, self._wanted.mode, family, is_excusable=reason is not None
        )
        if result.status == SKIPPED:
            pytest.skip(f"not applicable: {result.detail}")
        if result.status == FAILED:
            hint = f"""
The backend announces: {result.announced}. If that is why, say so in kproxy_not_applicable."""
            raise Failed(result.detail + (hint if result.announced else ""))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        return str(excinfo.value) if isinstance(excinfo.value, Failed) else super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[str, None, str]:
        return "kproxy-conformance", None, self.name

    def _stage(self) -> Stage:
        stages = self.session.stash.setdefault(_STAGES, {})
        stage = stages.get(self._driver)
        if stage is None or stage.topology.wiring.name != self._wiring:
            if stage is not None:
                stages.pop(self._driver).close()
            directory = Path(tempfile.mkdtemp(prefix=f"{own_name('scenarios')}-"))
            stage = stages[self._driver] = Stage(
                self._make_driver, directory, self._wanted.cgroup, read(self._wiring))
            self.config.add_cleanup(partial(self._remove, directory))
            self.config.add_cleanup(stage.close)
            with stage.topology["node"].entered():
                prepare(self._wanted)
        return stage

    def _remove(self, directory: Path) -> None:
        """Remove logs and manifests, unless there may be evidence of a failure."""
        if not self.session.testsfailed:
            shutil.rmtree(directory)

    def _make_driver(self, topology: Topology, directory: Path) -> Driver:
        plugins, options = self._wanted.plugins, {self._wanted.mode: self._wanted.options}
        if self._driver == BACKEND:
            return BackendDriver(topology, directory, plugins, options)
        command = shlex.join([KPROXY, *(word for plugin in plugins for word in ("-p", plugin))])
        kind = KproxyDriver if self._driver == KproxyDriver.name else ThroughApiDriver
        return kind(topology, directory, command, options)


def scenario_items(parent: pytest.Collector, wanted: Wanted, driver: str) -> Iterator[ScenarioItem]:
    """Yield each scenario for the mode in its families and the chosen wirings.

    Those with equal wiring and configuration follow each other.
    """
    group = "scenarios" if driver == BACKEND else f"scenarios-of-{driver}"
    found = [(wiring, json.dumps(scenario.config, sort_keys=True), scenario.name, scenario)
             for scenario in find() for wiring in chosen(wanted.wiring, scenario.name, wanted.mode)]
    for wiring, _, name, scenario in sorted(found, key=lambda each: each[:3]):
        for family in Family:
            if not scenario.not_for(wanted.mode, family.label.lower()):
                where = family.label if wiring == DEFAULT else f"{family.label}-{wiring}"
                yield ScenarioItem.from_parent(
                    parent, name=f"{group}::{name}[{where}]",
                    scenario=scenario, family=family, driver=driver, wanted=wanted, wiring=wiring,
                )  # fmt: skip
