"""``kproxy switch`` from every mode to every other, and no connection, datagram or byte is lost on the way.

One tour goes every way once. Modes that this kernel lacks go theirs in guests.
"""

import json
import subprocess
from itertools import pairwise, permutations
from pathlib import Path

import pytest

from tests.guest.guest import Guest
from tests.switch.tour import COMMAND, CONNECTIONS, GUEST, HERE, LEGS, Leg, belongs

IN_A_GUEST = 1_500
"""New connections for each way there, whose only processor does a tenth of the work of one here."""

PACE = ("SWITCH_PATIENCE=240", "SWITCH_EACH_TICK=2")
"""So that it is not the guest's processor that loses connections."""

LATE = 5
"""Answers in a leg that may not come in time there: what is on its way when IPVS gives a flow up is lost, and
a guest's only processor can be busy for seconds while rules change. Nothing is refused or reset."""

LONGEST = 600
"""Seconds for a tour."""

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


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Leg]:
    directory = tmp_path_factory.mktemp("guest")
    command = ["env", *PACE, *COMMAND, str(directory), str(IN_A_GUEST), *GUEST]
    with Guest(command, directory / "log", share=directory, seconds=LONGEST) as running:
        running.status()
        assert (directory / LEGS).exists(), running.output
    return read(directory)


def test_tours_go_every_way_there_is() -> None:
    iptables = {"iptables-nft", "iptables-legacy"}  # one mode: kproxy is started again for the other
    assert set(pairwise(HERE)) == {way for way in permutations(set(HERE), 2) if set(way) != iptables}
    assert set(pairwise(GUEST)) == set(permutations(set(GUEST), 2))


@pytest.mark.parametrize(("before", "after"), list(pairwise(HERE)))
def test_no_connection_is_lost(here: dict[tuple[str, str], Leg], before: str, after: str) -> None:
    check_leg(here, before, after, CONNECTIONS)
    assert here[before, after].failures == []


@pytest.mark.parametrize(("before", "after"), list(pairwise(GUEST)))
def test_no_connection_is_lost_where_there_is_ipvs(
    guest: dict[tuple[str, str], Leg], before: str, after: str
) -> None:
    check_leg(guest, before, after, IN_A_GUEST)
    late = [failure for failure in guest[before, after].failures if failure.endswith("no answer")]
    assert guest[before, after].failures == late
    assert len(late) <= LATE


def check_leg(legs: dict[tuple[str, str], Leg], before: str, after: str, connections: int) -> None:
    assert (before, after) in legs, "the tour ended before"
    leg = legs[before, after]
    assert leg.status == 0, leg.said
    assert leg.made >= connections
    assert leg.exchanged > 0
    assert belongs(leg.left, after), f"on the node: {leg.left}"
