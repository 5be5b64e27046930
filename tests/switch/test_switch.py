"""``kproxy switch`` from every mode to every other, and no connection, datagram or byte is lost on the way.

One tour goes every way once. Modes that this kernel lacks go theirs in guests.
"""

import json
import subprocess
from collections.abc import Sequence
from itertools import pairwise, permutations
from pathlib import Path

import pytest

from tests.guest.guest import Guest
from tests.switch.tour import COMMAND, CONNECTIONS, GUEST, HERE, LEGS, Leg, belongs

PACE = ("SWITCH_PATIENCE=240", "SWITCH_EACH_TICK=8")
"""Of a guest, whose only processor does a tenth of the work of one here."""

LONGEST = 600
"""Seconds for a tour."""
LONGEST_IN_A_GUEST = 1500

CHECKOUT = Path(__file__).parents[2]


def read(directory: Path) -> dict[tuple[str, str], Leg]:
    legs = [Leg(**leg) for leg in json.loads((directory / LEGS).read_text())]
    return {(leg.before, leg.after): leg for leg in legs}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Leg]:
    directory = tmp_path_factory.mktemp("tour")
    command = ["nice", "-n", "5", *COMMAND, str(directory), str(CONNECTIONS), *HERE]
    subprocess.run(command, cwd=CHECKOUT, check=False, timeout=LONGEST)
    return read(directory)


def play(items: Sequence[pytest.Item], directory: Path) -> dict[tuple[str, str], Leg]:
    command = ["env", *PACE, *COMMAND, str(directory), str(CONNECTIONS), *GUEST]
    with Guest(command, directory / "log", share=directory, seconds=LONGEST_IN_A_GUEST) as running:
        running.status()
        assert (directory / LEGS).exists(), running.output
    return read(directory)


def test_tours_go_every_way_there_is() -> None:
    iptables = {"iptables-nft", "iptables-legacy"}  # one mode: kproxy is started again for the other
    assert set(pairwise(HERE)) == {way for way in permutations(set(HERE), 2) if set(way) != iptables}
    assert set(pairwise(GUEST)) == set(permutations(set(GUEST), 2))


@pytest.mark.parametrize(("before", "after"), list(pairwise(HERE)))
def test_no_connection_is_lost(here: dict[tuple[str, str], Leg], before: str, after: str) -> None:
    check_leg(here, before, after)


@pytest.mark.in_a_guest(play=play)
@pytest.mark.parametrize(("before", "after"), list(pairwise(GUEST)))
def test_no_connection_is_lost_where_there_is_ipvs(
    from_guest: dict[tuple[str, str], Leg], before: str, after: str
) -> None:
    check_leg(from_guest, before, after)


def check_leg(legs: dict[tuple[str, str], Leg], before: str, after: str) -> None:
    assert (before, after) in legs, "the tour ended before"
    leg = legs[before, after]
    assert leg.status == 0, leg.said
    assert leg.failures == []
    assert leg.made >= CONNECTIONS
    assert leg.exchanged > 0
    assert belongs(leg.left, after), f"on the node: {leg.left}"
