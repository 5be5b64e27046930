"""The pytest plugin ``kproxy-conformance``: runs every check of the kit on a backend.

``pytest --kproxy-mode=MODE`` adds the checks to whatever else pytest runs. Without that option nothing of
kproxy is imported but this module.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kproxy_core.model.address import Family
    from kproxy_core.testing.conformance.checks import Check
    from kproxy_core.testing.conformance.subject import Wanted

MARK = "kproxy"
CONTRACT, PACKETS = "contract", "packets"

_NOT_APPLICABLE = "not applicable: "


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options for the command line, and for the ini file those that are constant for a backend."""
    group = parser.getgroup("kproxy", "conformance of kproxy backends")
    group.addoption("--kproxy-mode", metavar="MODE", help="Run every check on the backend of MODE.")
    group.addoption(
        "--kproxy-scenarios",
        action="store_true",
        help="Play every scenario against a whole kproxy in that mode, too.",
    )
    group.addoption(
        "--kproxy-plugin",
        metavar="PLUGIN",
        action="append",
        default=[],
        help="Load a plugin of kproxy that is not installed, as kproxy -p does.",
    )
    group.addoption(
        "--kproxy-option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="An option of the backend; the value is JSON, or else text.",
    )
    for name, about in (
        (
            "kproxy_not_applicable",
            "CHECK: REASON for a check that does not apply; CHECK alone if a caveat gives the reason.",
        ),
        ("kproxy_node", "Commands that create kernel objects which the backend expects."),
        ("kproxy_state", "Commands that print state kept outside the kernel's tables."),
        ("kproxy_damage", "Commands that destroy that state."),
    ):
        parser.addini(name, about, "linelist", [])


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}: a check of kproxy's conformance kit")
    if config.getoption("--kproxy-mode") and os.geteuid() != 0:
        raise pytest.UsageError(
            "--kproxy-mode needs root: the checks make network namespaces and program rules"
        )


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
        if config.getoption("--kproxy-scenarios"):
            from kproxy_core.testing.scenario_items import scenario_items

            items += scenario_items(collector, _wanted(config, mode))


class Conformance(pytest.Collector):
    """All checks for one mode."""

    def __init__(self, *, wanted: Wanted, **others: Any) -> None:
        super().__init__(**others)
        self._wanted = wanted

    def collect(self) -> list[pytest.Item]:
        from kproxy_core.testing.conformance import contract, lifecycle, packets

        groups = ((CONTRACT, [*lifecycle.CHECKS, *contract.CHECKS]), (PACKETS, packets.CHECKS))
        return [
            CheckItem.from_parent(
                self, name=f"{group}::{check.name}" + (f"[{family.label}]" if family else ""),
                check=check, family=family, wanted=self._wanted, group=group,
            )
            for group, checks in groups for check in checks for family in check.families
        ]  # fmt: skip


class CheckItem(pytest.Item):
    """One check, for one IP family or for both."""

    def __init__(
        self, *, check: Check, family: Family | None, wanted: Wanted, group: str, **others: Any
    ) -> None:
        super().__init__(**others)
        self.check = check
        self._family = family
        self._wanted = wanted
        self._group = group
        self.add_marker(MARK)

    def runtest(self) -> None:
        from kproxy_core.testing.conformance import bench, play
        from kproxy_core.testing.conformance.checks import NotApplicable

        if declared := self._wanted.not_applicable.get(self.check.name):
            pytest.skip(_NOT_APPLICABLE + declared)
        try:
            if self._group == CONTRACT:
                bench.run_check(self.check, self._wanted, self._family)
            elif self._family is not None:
                play.run_check(self.check, self._wanted, self._family)
        except NotApplicable as error:
            pytest.skip(_NOT_APPLICABLE + str(error))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the property, the finding, and the traceback if the backend raised."""
        from kproxy_core.testing.conformance.checks import Failed

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
    from kproxy_core.backend.api import CONTRACT

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
    from kproxy_core.testing.conformance import contract, lifecycle, packets
    from kproxy_core.testing.conformance.subject import Wanted
    from kproxy_core.testing.suite.scenario import SCENARIOS

    declared = dict(map(_declared, config.getini("kproxy_not_applicable")))
    known = {check.name for check in (*lifecycle.CHECKS, *contract.CHECKS, *packets.CHECKS)}
    known |= {path.stem for path in SCENARIOS.glob("*.yaml")}
    if unknown := sorted(declared.keys() - known):
        raise pytest.UsageError(f"kproxy_not_applicable: there is no check {', '.join(unknown)}")
    return Wanted(
        mode,
        tuple(config.getoption("--kproxy-plugin")),
        dict(map(_option, config.getoption("--kproxy-option"))),
        tuple(config.getini("kproxy_node")),
        tuple(config.getini("kproxy_state")),
        tuple(config.getini("kproxy_damage")),
        declared,
    )


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
