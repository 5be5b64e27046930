"""The lanes of `make test` leave no test out."""

from tests.conformance.test_conformance import MODES
from tests.lanes import ALL
from tests.rooms.modules import CHECKOUT


def test_every_mode_has_a_lane() -> None:
    assert set(MODES) <= {lane.name for lane in ALL}


def test_every_directory_of_tests_is_in_a_lane() -> None:
    directories = {path.parent for path in (CHECKOUT / "tests").rglob("test_*.py")}
    arguments = {argument for lane in ALL for argument in lane.arguments}
    played = [CHECKOUT / argument for argument in arguments if argument.startswith("tests/")]
    assert [str(each) for each in directories if not any(each.is_relative_to(room) for room in played)] == []
