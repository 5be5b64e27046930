"""Results of `ipvs_checks` in a guest whose kernel has IPVS, one case for each check."""

from pathlib import Path

import pytest

from tests.guest.checks import Problems, names_of, play

CHECKS = [Path(__file__).with_name("ipvs_checks.py")]


@pytest.mark.in_a_guest(play=play)
@pytest.mark.parametrize("name", names_of(CHECKS))
def test_in_the_guest(name: str, from_guest: Problems) -> None:
    assert name in from_guest
    assert not any(from_guest[name]), "\n".join(from_guest[name])
