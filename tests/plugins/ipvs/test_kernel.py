"""Results of `kernel_checks`, `switch_checks` and `explain_checks`, one case for each of their tests.

They run in a guest with IPVS:
``tests/guest/run .venv/bin/python -m pytest -p tests.plugins.ipvs.rig tests/plugins/ipvs/kernel_checks.py``
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.guest.checks import Problems, names_of, problems_of

CHECKS = [Path(__file__).with_name(f"{name}_checks.py") for name in ("kernel", "switch", "explain")]
FIXTURES = "tests.plugins.ipvs.rig"


def play(items: Sequence[pytest.Item], directory: Path) -> Problems:
    return problems_of(CHECKS, directory, "-p", FIXTURES)


@pytest.mark.in_a_guest(play=play)
@pytest.mark.parametrize("name", names_of(CHECKS))
def test_in_the_guest(name: str, from_guest: Problems) -> None:
    assert name in from_guest
    assert not any(from_guest[name]), "\n".join(from_guest[name])
