"""The scenarios as tests of the pytest plugin: each is played against a whole kproxy in the author's mode."""

import json
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kproxy_core.testing.conformance.checks import Failed
from kproxy_core.testing.conformance.subject import Wanted
from kproxy_core.testing.drivers.driver import Driver
from kproxy_core.testing.drivers.kproxy import KPROXY, KproxyDriver
from kproxy_core.testing.network.addresses import FAMILIES
from kproxy_core.testing.network.topology import Topology
from kproxy_core.testing.suite.scenario import Scenario, find
from kproxy_core.testing.suite.stage import FAILED, SKIPPED, Stage

MARK = "kproxy"
"""Marker of everything that the plugin adds."""

_STAGE = pytest.StashKey[Stage]()


class ScenarioItem(pytest.Item):
    """One scenario in one IP family."""

    def __init__(self, *, scenario: Scenario, family: str, wanted: Wanted, **others: Any) -> None:
        super().__init__(**others)
        self._scenario = scenario
        self._family = family
        self._wanted = wanted
        self.add_marker(MARK)

    def runtest(self) -> None:
        if reason := self._wanted.not_applicable.get(self._scenario.name):
            pytest.skip(f"not applicable: {reason}")
        result = self._stage().play(self._scenario, self._wanted.mode, self._family)
        if result.status == SKIPPED:
            pytest.skip(f"not applicable: {result.detail}")
        if result.status == FAILED:
            raise Failed(result.detail)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, Failed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, None, str]:
        return "kproxy-conformance", None, self.name

    def _stage(self) -> Stage:
        """Return the stage that all scenarios of the session share."""
        stash = self.session.stash
        if _STAGE not in stash:
            def make_driver(topology: Topology, directory: Path) -> Driver:
                plugins = [word for plugin in self._wanted.plugins for word in ("-p", plugin)]
                options = {self._wanted.mode: self._wanted.options}
                return KproxyDriver(topology, directory, shlex.join([KPROXY, *plugins]), options)

            stash[_STAGE] = Stage(make_driver, Path(tempfile.mkdtemp(prefix="kproxy-scenarios-")))
            self.config.add_cleanup(stash[_STAGE].close)
        return stash[_STAGE]


def scenario_items(parent: pytest.Collector, wanted: Wanted) -> Iterator[ScenarioItem]:
    """Yield every scenario in both families; those with equal configuration follow each other."""
    for scenario in sorted(find(), key=lambda s: (json.dumps(s.config, sort_keys=True), s.name)):
        for family in FAMILIES:
            yield ScenarioItem.from_parent(
                parent, name=f"scenarios::{scenario.name}[{family}]",
                scenario=scenario, family=family, wanted=wanted,
            )  # fmt: skip
