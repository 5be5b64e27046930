"""The stage of one mode after the other, for the tests of a module."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from kproxy_conformance.__main__ import SOCKET_MODES
from kproxy_conformance.drivers.driver import NO_OPTIONS, Driver
from kproxy_conformance.drivers.kproxy import KproxyDriver, ThroughApiDriver
from kproxy_conformance.network.cgroup import NodeCgroup
from kproxy_conformance.network.topology import Topology
from kproxy_conformance.network.wiring import DEFAULT, read
from kproxy_conformance.suite.stage import Stage
from tests.conformance.cases import LEGACY, THROUGH_API


class Stages:
    """At most one stage at a time: tests are ordered by mode and wiring."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ("", "")
        self._stage: Stage | None = None
        self._cgroup: NodeCgroup | None = None
        self._patch = pytest.MonkeyPatch()

    def of(self, mode: str, wiring: str = DEFAULT) -> Stage:
        """Return the stage of *mode* in *wiring*; any other is closed. Raises MissingRight."""
        if self._stage is None or self._key != (mode, wiring):
            self.close()
            directory = Path(tempfile.mkdtemp(prefix=f"{mode}-{wiring}-", dir=self._directory))
            if mode.endswith(LEGACY):
                self._prefer_legacy(directory)

            def make_driver(topology: Topology, directory: Path) -> Driver:
                kind = ThroughApiDriver if mode.endswith(THROUGH_API) else KproxyDriver
                return kind(topology, directory, options=options)

            options = NO_OPTIONS
            if mode in SOCKET_MODES:
                self._cgroup = NodeCgroup()
                options = {mode: {"cgroup": str(self._cgroup.path)}}
            self._stage = Stage(make_driver, directory, self._cgroup, read(wiring))
            self._key = mode, wiring
        return self._stage

    def close(self) -> None:
        if self._stage is not None:
            self._stage.close()
            self._stage = None
        if self._cgroup is not None:
            self._cgroup.close()
            self._cgroup = None
        self._patch.undo()

    def _prefer_legacy(self, directory: Path) -> None:
        """Have the legacy programs found first: which iptables is the default is decided by PATH."""
        programs = directory / "programs"
        programs.mkdir()
        for base in ("iptables", "ip6tables"):
            for action in ("", "-save", "-restore"):
                program = shutil.which(f"{base}{LEGACY}{action}")
                assert program, f"{base}{LEGACY}{action} is not installed"
                (programs / f"{base}{action}").symlink_to(program)
        self._patch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
