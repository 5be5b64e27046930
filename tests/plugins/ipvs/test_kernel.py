"""What `kernel_checks` and `switch_checks` found, one case for each of their tests.

They run in a guest with IPVS:
``tests/guest/run .venv/bin/python -m pytest -p tests.plugins.ipvs.rig tests/plugins/ipvs/kernel_checks.py``
"""

from pathlib import Path

import pytest

from tests.guest.checks import names_of, problems_of

CHECKS = [Path(__file__).with_name(f"{name}_checks.py") for name in ("kernel", "switch")]
FIXTURES = "tests.plugins.ipvs.rig"
LONGEST = 900
"""Seconds."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return problems_of(CHECKS, tmp_path_factory.mktemp("guest"), "-p", FIXTURES, seconds=LONGEST)


@pytest.mark.parametrize("name", names_of(CHECKS))
def test_in_the_guest(name: str, results: dict[str, list[str]]) -> None:
    assert name in results
    assert not any(results[name]), "\n".join(results[name])
