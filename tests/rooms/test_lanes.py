"""The lanes of `make test` and `make gate` leave no test out."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.test_conformance import MODES
from tests.lanes import GATE, TEST, Lane, logged, run, tally_of
from tests.rights import NEEDS, refused_in
from tests.rooms.modules import CHECKOUT
from tests.rooms.pure import is_pure


def test_every_mode_has_a_lane() -> None:
    assert set(MODES) <= {lane.name for lane in (*TEST, *GATE)}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The lanes of every test."""
    command = [sys.executable, "-m", "tests.rooms.selection"]
    done = subprocess.run(command, cwd=CHECKOUT, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout))


def test_every_test_is_in_one_lane(found: dict[str, Any]) -> None:
    assert {test: lanes for test, lanes in found["lanes"].items() if len(lanes) != 1} == {}
    modules = {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "tests").rglob("test_*.py")}
    assert modules == {test.partition("::")[0] for test in found["lanes"]}
    checks = {str(path) for path in (CHECKOUT / "tests").rglob("*_checks.py")
              if not path.name.startswith("test_")}
    assert checks - set(found["checks"]) == set()


def test_a_test_that_is_left_out_fails_its_lane() -> None:
    assert tally_of("1 failed, 2 passed, 3 deselected in 1.00s") == Counter(passed=2, failed=1)
    summary = "4 passed, 3 skipped, 2 xfailed, 1 error in 1.00s"
    assert tally_of(summary, every=True) == Counter(passed=4, failed=6)
    assert tally_of(summary, every=False) == Counter(passed=4, failed=3, skipped=3)
    assert tally_of("no tests ran in 0.01s") == Counter()


@pytest.mark.parametrize("deaf", [False, True], ids=["interrupted", "killed"])
def test_a_lane_that_hangs_is_ended_and_has_failed(
    deaf: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tests.lanes.SILENT", 0.2)
    monkeypatch.setattr("tests.lanes.TO_CLEAN_UP", 0.2)
    program = f"import signal, time\nif {deaf}: signal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(600)"
    hanging = Lane("hangs", (sys.executable, "-c", program), is_program=True)
    assert run([hanging], tmp_path) == Counter(failed=1)


@pytest.mark.parametrize("status", [0, 1], ids=["passed", "failed"])
def test_logs_are_kept_of_failures_only(
    status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    logged([Lane("ends", (sys.executable, "-c", f"exit({status})"), is_program=True)])
    kept = list(tmp_path.iterdir())
    assert [bool(re.fullmatch("kproxy-lanes-[^-]+", path.name)) for path in kept] == [True] * status
    announced = re.findall("^logs: (.*)", capsys.readouterr().out, re.MULTILINE)
    assert announced == [str(path) for path in kept]
    assert all((path / "0-ends.log").exists() for path in kept)


def test_a_failure_with_errors_that_cause_each_other_is_no_missing_right() -> None:
    first, second = OSError("first"), OSError("second")
    first.__cause__, second.__context__ = second, first
    assert refused_in(first) is None


def test_rights_are_those_of_tests_that_exist(found: dict[str, Any]) -> None:
    for start in NEEDS:
        assert any(test.startswith(start) for test in found["lanes"]), start


def test_pure_modules_are_those_that_start_nothing_themselves_or_by_an_import() -> None:
    assert is_pure("tests.core.plan.test_claims")
    assert is_pure("tests.core.kube.test_decode_service")  # imports an encoder of kproxy_conformance
    assert not is_pure("tests.core.cli.test_cli")  # starts processes
    assert not is_pure("tests.switch.tour")  # by its room
