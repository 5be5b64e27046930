"""The lanes of `make test` leave no test out."""

import re
from collections.abc import Iterable
from pathlib import Path

from tests.conformance.test_conformance import MODES
from tests.lanes import ALL, Lane
from tests.rooms.modules import CHECKOUT
from tests.rooms.pure import is_pure


def test_every_mode_has_a_lane() -> None:
    assert set(MODES) <= {lane.name for lane in ALL}


MODULES = list((CHECKOUT / "tests").rglob("test_*.py"))


def left_out(directories: Iterable[Path], lanes: Iterable[Lane]) -> list[Path]:
    """Return those of *directories* that no lane of *lanes* has."""
    arguments = {argument for lane in lanes for argument in lane.arguments}
    rooms = [CHECKOUT / argument for argument in arguments if argument.startswith("tests/")]
    return [each for each in directories if not any(each.is_relative_to(room) for room in rooms)]


def test_every_directory_of_tests_is_in_a_lane() -> None:
    assert left_out({path.parent for path in MODULES}, ALL) == []


def test_every_directory_of_tests_in_guests_is_in_a_lane_with_guests() -> None:
    marked = re.compile(r"[ @[]pytest\.mark\.in_a_guest\(")
    directories = {path.parent for path in MODULES if marked.search(path.read_text(encoding="utf-8"))}
    assert len(directories) > 5
    assert left_out(directories, [lane for lane in ALL if lane.in_a_guest]) == []


def test_every_test_in_a_guest_is_in_a_lane_for_guests() -> None:
    rooms = [CHECKOUT / argument for lane in ALL if lane.in_a_guest for argument in lane.arguments
             if argument.startswith("tests/")]  # fmt: skip
    tests = (CHECKOUT / "tests").rglob("test_*.py")
    marked = [path for path in tests if "\n@pytest.mark.in_a_guest" in path.read_text()]
    assert marked
    assert [str(each) for each in marked if not any(each.is_relative_to(room) for room in rooms)] == []


def test_pure_modules_are_those_that_start_nothing_themselves_or_by_an_import() -> None:
    assert is_pure("tests.core.plan.test_claims")
    assert is_pure("tests.core.kube.test_decode_service")  # imports an encoder of kproxy_core.testing
    assert not is_pure("tests.core.cli.test_cli")  # starts processes
    assert not is_pure("tests.switch.tour")  # by its room
