"""What `ipvs_checks` found in a guest whose kernel has IPVS, one case for each of its tests."""

from pathlib import Path

import pytest

from tests.guest.checks import names_of, problems_of

CHECKS = [Path(__file__).with_name("ipvs_checks.py")]
LONGEST = 900
"""Seconds."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return problems_of(CHECKS, tmp_path_factory.mktemp("guest"), seconds=LONGEST)


@pytest.mark.parametrize("name", names_of(CHECKS))
def test_in_the_guest(name: str, results: dict[str, list[str]]) -> None:
    assert name in results
    assert not any(results[name]), "\n".join(results[name])
