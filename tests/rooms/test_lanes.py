"""The lanes of `make test` leave no test out."""

from tests.conformance.test_conformance import MODES
from tests.lanes import ALL
from tests.rooms.modules import CHECKOUT
from tests.rooms.pure import is_pure


def test_every_mode_has_a_lane() -> None:
    assert set(MODES) <= {lane.name for lane in ALL}


def test_every_directory_of_tests_is_in_a_lane() -> None:
    directories = {path.parent for path in (CHECKOUT / "tests").rglob("test_*.py")}
    arguments = {argument for lane in ALL for argument in lane.arguments}
    played = [CHECKOUT / argument for argument in arguments if argument.startswith("tests/")]
    assert [str(each) for each in directories if not any(each.is_relative_to(room) for room in played)] == []


def test_every_test_in_a_guest_is_in_a_lane_for_guests() -> None:
    rooms = [CHECKOUT / argument for lane in ALL if lane.in_a_guest for argument in lane.arguments
             if argument.startswith("tests/")]  # fmt: skip
    tests = (CHECKOUT / "tests").rglob("test_*.py")
    marked = [path for path in tests if "\n@pytest.mark.in_a_guest" in path.read_text()]
    assert marked
    assert [str(each) for each in marked if not any(each.is_relative_to(room) for room in rooms)] == []


def test_pure_modules_are_those_that_start_nothing_themselves_or_by_an_import() -> None:
    assert is_pure("tests.core.test_claims")
    assert is_pure("tests.core.test_decode_service")  # imports an encoder of kproxy_core.testing
    assert not is_pure("tests.core.test_cli")  # starts processes
    assert not is_pure("tests.switch.tour")  # by its room
