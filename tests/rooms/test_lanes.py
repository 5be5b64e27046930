"""The lanes of `make test` leave no test out."""

import json
import subprocess
import sys
from collections import Counter

from tests.conformance.test_conformance import MODES
from tests.lanes import ALL, tally_of
from tests.rooms.modules import CHECKOUT
from tests.rooms.pure import is_pure


def test_every_mode_has_a_lane() -> None:
    assert set(MODES) <= {lane.name for lane in ALL}


def test_every_test_is_in_one_lane() -> None:
    command = [sys.executable, "-m", "tests.rooms.selection"]
    found = json.loads(subprocess.run(command, cwd=CHECKOUT, stdout=subprocess.PIPE, check=True).stdout)
    assert {test: lanes for test, lanes in found["lanes"].items() if len(lanes) != 1} == {}
    modules = {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "tests").rglob("test_*.py")}
    assert modules == {test.partition("::")[0] for test in found["lanes"]}
    checks = {str(path) for path in (CHECKOUT / "tests").rglob("*_checks.py")
              if not path.name.startswith("test_")}
    assert checks - set(found["checks"]) == set()


def test_a_test_that_is_left_out_fails_its_lane() -> None:
    assert tally_of("1 failed, 2 passed, 3 deselected in 1.00s") == Counter(passed=2, failed=1)
    assert tally_of("4 passed, 3 skipped, 2 xfailed, 1 error in 1.00s") == Counter(passed=4, failed=6)
    assert tally_of("no tests ran in 0.01s") == Counter()


def test_pure_modules_are_those_that_start_nothing_themselves_or_by_an_import() -> None:
    assert is_pure("tests.core.plan.test_claims")
    assert is_pure("tests.core.kube.test_decode_service")  # imports an encoder of kproxy_conformance
    assert not is_pure("tests.core.cli.test_cli")  # starts processes
    assert not is_pure("tests.switch.tour")  # by its room
