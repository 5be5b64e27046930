"""Every check of the kit can fail: it does when a good backend is sabotaged, and no other check does."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kproxy_core.model.address import Family
from kproxy_core.testing.conformance import bench, contract, dialing, lifecycle, packets, play
from kproxy_core.testing.conformance.checks import Check, NotApplicable
from kproxy_core.testing.conformance.subject import Wanted
from tests.kit.sabotage import Sabotage
from tests.kit.sabotages import GROUPS

KINDS = ("takes-udp", "takes-all-of-it")
"""The Services of every kind are all taken in the same way: some stand for the others."""

CHECKS = {
    "contract": [
        check
        for check in (*lifecycle.CHECKS, *contract.CHECKS)
        if not check.name.startswith("takes-") or check.name in KINDS
    ],
    "packets": packets.CHECKS,
}
RUN: dict[str, Callable[[Check, Wanted, Any], None]] = {
    "contract": bench.run_check,
    "packets": play.run_check,
}
TOGETHER = [(group, part) for group, parts in GROUPS.items() for part in parts]
ANNOUNCED = "affinity-keeps-a-client-at-its-endpoint"
OF_A_BASE = "keeps-its-base-at-work"
"""Sabotaged in test_base_modes.py: the example backend builds on no other mode."""

Problems = Mapping[str, str]


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the wait for packets that are dropped on purpose."""
    monkeypatch.setattr(dialing, "PATIENCE", 1.0)


def ask(group: str, *sabotages: Sabotage, **declared: str) -> Problems:
    """Return the complaints of each check of *group*, in IPv4 or for both families."""
    plugins = ("kproxy_plain", *(f"tests.kit.sabotages:do_{sabotage}" for sabotage in sabotages))
    wanted = Wanted("plain", plugins, not_applicable=declared)
    problems = {}
    for check in CHECKS[group]:
        try:
            RUN[group](check, wanted, None if None in check.families else Family.IPV4)
        except NotApplicable:
            continue
        except Exception as error:  # noqa: BLE001 - whatever a backend raises counts
            problems[check.name] = str(error)
    return problems


@pytest.mark.parametrize(("group", "sabotages"), TOGETHER)
def test_sabotage_is_noticed_by_its_check_and_by_no_other(
    group: str, sabotages: tuple[Sabotage, ...], example_on_path: None
) -> None:
    problems = ask(group, *sabotages, **{ANNOUNCED: ""})
    expected = {sabotage.check for sabotage in sabotages}
    assert not expected - problems.keys()
    assert not {check: problem for check, problem in problems.items() if check not in expected}
    for sabotage in sabotages:
        assert re.search(sabotage.words, problems[sabotage.check], re.DOTALL), problems[sabotage.check]


def test_every_check_has_a_sabotage() -> None:
    sabotaged = {sabotage.check for _, part in TOGETHER for sabotage in part} | {ANNOUNCED, OF_A_BASE}
    assert {check.name for checks in CHECKS.values() for check in checks} - set(KINDS) == sabotaged - set(
        KINDS
    )
    assert sabotaged & set(KINDS)


def test_a_failure_that_the_backend_announces_is_told_and_excused_only_if_the_author_says_so(
    example_on_path: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    affinity = [check for check in packets.CHECKS if check.name == ANNOUNCED]
    monkeypatch.setitem(CHECKS, "packets", affinity)
    assert "The backend announces: session affinity is not kept" in ask("packets")[ANNOUNCED]
    assert ask("packets", **{ANNOUNCED: ""}) == {}
