"""Every backend of this repository passes the kit, each as an author would run it."""

from collections.abc import Mapping
from concurrent.futures import Future

import pytest

from tests.kit.kit_runs import INI, Results


@pytest.mark.parametrize("mode", INI)
def test_backend(mode: str, played: Mapping[str, "Future[Results]"]) -> None:
    found = played[mode].result()
    assert len(found) > 20
    assert {check: wrong for check, wrong in found.items() if wrong} == {}
