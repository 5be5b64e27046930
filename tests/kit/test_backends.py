"""Every backend of this repository passes all of the kit, each as an author would run it."""

import pytest

from tests.kit.conftest import Runs
from tests.kit.kit_runs import INI, to_be_asked


@pytest.mark.parametrize("mode", INI)
def test_backend(mode: str, played: Runs) -> None:
    found = played[mode].result()
    assert found.wrong == {}
    assert found.asked == to_be_asked()
