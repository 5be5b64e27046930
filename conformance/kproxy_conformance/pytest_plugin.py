"""The pytest plugin ``kproxy-conformance``: checks a backend's contract, and plays every scenario with it.

``pytest --kproxy-mode=MODE`` adds them to whatever else pytest runs. Without that option nothing of
kproxy is imported but this module.
"""

from __future__ import annotations

import fnmatch
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kproxy_conformance.checks.check import Check
    from kproxy_conformance.checks.subject import Wanted
    from kproxy_core.model.address import Family

MARK = "kproxy"
NODE_CGROUP = "$node_cgroup"
"""Value of an option that stands for the cgroup of the sockets of the node and its pods."""

_NOT_APPLICABLE = "not applicable: "


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options for the command line, and for the ini file those that are constant for a backend."""
    group = parser.getgroup("kproxy", "conformance of kproxy backends")
    group.addoption("--kproxy-mode", metavar="MODE", help="Run every check on the backend of MODE.")
    group.addoption(
        "--kproxy-driver", metavar="DRIVER", action="append",
        choices=("backend", "kproxy", "kproxy-through-api"),
        help="Play scenarios with the backend in this process (default), or with a whole kproxy.",
    )
    group.addoption(
        "--kproxy-plugin", metavar="PLUGIN", action="append", default=[],
        help="Load a plugin of kproxy that is not installed, as kproxy -p does.",
    )
    group.addoption(
        "--kproxy-option", metavar="NAME=VALUE", action="append", default=[],
        help=f"An option of the backend: JSON, or else text; {NODE_CGROUP}: see NodeCgroup.",
    )
    group.addoption(
        "--kproxy-wiring", metavar="WIRING", default="default",
        help="How pods are attached where scenarios are played: a name, or seed:N to draw one for each.",
    )
    for name, about in (
        (
            "kproxy_not_applicable",
            "NAME: REASON for what does not apply; NAME alone if a caveat gives the reason.",
        ),
        ("kproxy_node", "Commands that create kernel objects which the backend expects."),
        ("kproxy_state", "Commands that print state kept outside the kernel's tables."),
        ("kproxy_damage", "Commands that destroy that state."),
    ):
        parser.addini(name, about, "linelist", [])


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}: a check of kproxy's conformance kit")
    if config.getoption("--kproxy-mode"):
        if os.geteuid() != 0:
            raise pytest.UsageError(
                "--kproxy-mode needs root: the checks make network namespaces and program rules"
            )
        _use_own_xtables_lock(config)


def _use_own_xtables_lock(config: pytest.Config) -> None:
    """Have legacy programs not wait for those of the machine."""
    from kproxy_conformance.processes import own_name

    directory = tempfile.TemporaryDirectory(prefix=f"{own_name('kit')}-")
    patch = pytest.MonkeyPatch()
    patch.setenv("XTABLES_LOCKFILE", f"{directory.name}/xtables.lock")
    config.add_cleanup(patch.undo)
    config.add_cleanup(directory.cleanup)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add the checks before other plugins select tests."""
    mode = config.getoption("--kproxy-mode")
    if mode:
        collector = Conformance.from_parent(session, name=f"kproxy-{mode}", wanted=_wanted(config, mode))
        report = collector.ihook.pytest_make_collect_report(collector=collector)
        collector.ihook.pytest_collectreport(report=report)
        items += report.result


class Conformance(pytest.Collector):
    """All checks for one mode."""

    def __init__(self, *, wanted: Wanted, **others: Any) -> None:
        super().__init__(**others)
        self._wanted = wanted

    def collect(self) -> Iterator[pytest.Item]:
        from kproxy_conformance.checks import contract, lifecycle
        from kproxy_conformance.scenario_items import scenario_items

        for check in (*lifecycle.CHECKS, *contract.CHECKS):
            for family in check.families:
                name = f"contract::{check.name}" + (f"[{family.label}]" if family else "")
                yield CheckItem.from_parent(self, name=name, check=check, family=family, wanted=self._wanted)
        for driver in self.config.getoption("--kproxy-driver") or ("backend",):
            yield from scenario_items(self, self._wanted, driver)


class CheckItem(pytest.Item):
    """One check of the contract, for one IP family or for both."""

    def __init__(self, *, check: Check, family: Family | None, wanted: Wanted, **others: Any) -> None:
        super().__init__(**others)
        self.check = check
        self._family = family
        self._wanted = wanted
        self.add_marker(MARK)

    def runtest(self) -> None:
        from kproxy_conformance.checks import bench
        from kproxy_conformance.checks.check import NotApplicable

        if declared := self._wanted.excuse(self.check.name):
            pytest.skip(_NOT_APPLICABLE + declared)
        try:
            bench.run_check(self.check, self._wanted, self._family)
        except NotApplicable as error:
            pytest.skip(_NOT_APPLICABLE + str(error))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the property, the finding, and the traceback if the backend raised."""
        from kproxy_conformance.checks.check import Failed

        asked = f"What must hold: {self.check.about}\n\n"
        if isinstance(excinfo.value, Failed) and not _in_backend(excinfo.value.__cause__):
            return f"{asked}{excinfo.value}"
        return f"{asked}{excinfo.getrepr(style='short', chain=True)}"

    def reportinfo(self) -> tuple[str, None, str]:
        return "kproxy-conformance", None, f"{self.parent.name if self.parent else ''}::{self.name}"


def _in_backend(cause: BaseException | None) -> bool:
    """Return whether the traceback of a failure says more than its message."""
    return cause is not None and not isinstance(cause, OSError)


def pytest_report_header(config: pytest.Config) -> list[str]:
    mode = config.getoption("--kproxy-mode")
    if not mode:
        return []
    from kproxy_core import __version__
    from kproxy_core.contract.values import CONTRACT

    return [f"kproxy-conformance: mode {mode}, contract {CONTRACT[0]}.{CONTRACT[1]} of kproxy {__version__}"]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the totals, and every check that does not apply to this backend."""
    mode = config.getoption("--kproxy-mode")
    if not mode:
        return
    passed, failed, skipped = (
        [*_ours(terminalreporter.stats.get(outcome, []))] for outcome in ("passed", "failed", "skipped")
    )
    terminalreporter.section(f"kproxy-conformance of mode {mode}")
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        name = report.nodeid.partition("::")[2]
        terminalreporter.write_line(f"{name}: {reason.removeprefix('Skipped: ')}")
    terminalreporter.write_line(f"{len(passed)} passed, {len(failed)} failed, {len(skipped)} not applicable")


def _ours(reports: Sequence[pytest.TestReport]) -> Iterator[pytest.TestReport]:
    return (report for report in reports if MARK in report.keywords)


def _wanted(config: pytest.Config, mode: str) -> Wanted:
    from kproxy_conformance.checks import contract, lifecycle
    from kproxy_conformance.checks.subject import Wanted
    from kproxy_conformance.network.cgroup import NodeCgroup
    from kproxy_conformance.suite.scenario import SCENARIOS

    declared = dict(map(_declared, config.getini("kproxy_not_applicable")))
    known = {check.name for check in (*lifecycle.CHECKS, *contract.CHECKS)}
    known |= {path.stem for path in SCENARIOS.glob("*.yaml")}
    if unknown := sorted(pattern for pattern in declared if not fnmatch.filter(known, pattern)):
        raise pytest.UsageError(f"kproxy_not_applicable: there is no check {', '.join(unknown)}")
    options, cgroup = dict(map(_option, config.getoption("--kproxy-option"))), None
    if NODE_CGROUP in options.values():
        cgroup = NodeCgroup()
        config.add_cleanup(cgroup.close)
        path = str(cgroup.path)
        options = {name: path if value == NODE_CGROUP else value for name, value in options.items()}
    return Wanted(
        mode,
        tuple(config.getoption("--kproxy-plugin")),
        options,
        tuple(config.getini("kproxy_node")),
        tuple(config.getini("kproxy_state")),
        tuple(config.getini("kproxy_damage")),
        declared,
        cgroup,
        _wiring(config.getoption("--kproxy-wiring")),
    )


def _wiring(choice: str) -> str:
    from kproxy_conformance.network.wiring import check_choice

    try:
        check_choice(choice)
    except ValueError as error:
        raise pytest.UsageError(f"--kproxy-wiring: {error}") from None
    return choice


def _option(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise pytest.UsageError(f"--kproxy-option {text!r} must be NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _declared(line: str) -> tuple[str, str]:
    name, _, reason = line.partition(":")
    return name.strip(), reason.strip()
