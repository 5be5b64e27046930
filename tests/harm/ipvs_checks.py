"""The kinds that are played in mode ipvs. `test_harm` runs this in a guest, whose kernel has IPVS."""

from pathlib import Path

import pytest

from tests.harm.kinds import IPVS, KINDS, Kind
from tests.harm.test_harm import check_others_are_served


@pytest.mark.parametrize("kind", [kind for kind in KINDS if IPVS in kind.modes], ids=str)
def test_others_are_served_in_mode_ipvs(tmp_path: Path, kind: Kind) -> None:
    check_others_are_served(tmp_path, kind, IPVS)
