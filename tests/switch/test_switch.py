"""``kproxy switch`` from every mode to every other, without losing a connection, datagram or byte.

The tours together cover every pair. Those with IPVS, which this kernel may lack, run in guests.
"""

import json
import subprocess
from collections.abc import Sequence
from functools import partial
from itertools import pairwise, permutations
from pathlib import Path

import pytest

from tests.guest.guest import Guest, with_nft
from tests.switch.tour import (
    COMMAND,
    CONNECTIONS,
    CONNECTIONS_IN_A_GUEST,
    GUESTS,
    HERE,
    LEGS,
    SOCKETS,
    Leg,
    belongs,
)

PACE = ("SWITCH_PATIENCE=240", "SWITCH_EACH_TICK=2")
"""Settings of a guest. Its only processor has a tenth of this machine's speed, and must switch as well."""

LONGEST = 3000
"""Seconds for a tour; on a quiet machine it takes a tenth."""

CHECKOUT = Path(__file__).parents[2]


def read(directory: Path) -> dict[tuple[str, str], Leg]:
    legs = [Leg(**leg) for leg in json.loads((directory / LEGS).read_text())]
    return {(leg.before, leg.after): leg for leg in legs}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Leg]:
    """Make both tours in this kernel, at the same time, and return their legs."""
    directories = {stops: tmp_path_factory.mktemp("tour") for stops in (HERE, SOCKETS)}
    running = [
        subprocess.Popen(
            ["nice", "-n", "5", *COMMAND, str(directory), str(CONNECTIONS), *stops], cwd=CHECKOUT)
        for stops, directory in directories.items()
    ]
    try:
        for process in running:
            process.wait(LONGEST)
    finally:
        for process in running:
            process.terminate()
            process.wait()
    return {way: leg for directory in directories.values() for way, leg in read(directory).items()}


def play(
    stops: Sequence[str], items: Sequence[pytest.Item], directory: Path
) -> dict[tuple[str, str], Leg]:
    command = ["env", *PACE, *COMMAND, str(directory), str(CONNECTIONS_IN_A_GUEST), *stops]
    with Guest(with_nft(command), directory / "log", share=directory) as running:
        running.status()
        assert (directory / LEGS).exists(), running.output
    return read(directory)


def test_the_tours_cover_every_pair_of_modes() -> None:
    tours = (HERE, SOCKETS, *GUESTS)
    iptables = {"iptables-nft", "iptables-legacy"}  # one mode: kproxy is started again for the other
    stops = {stop for tour in tours for stop in tour}
    gone = {way for tour in tours for way in pairwise(tour)}
    assert gone == {way for way in permutations(stops, 2) if set(way) != iptables}


@pytest.mark.parametrize(("before", "after"), [*pairwise(HERE), *pairwise(SOCKETS)])
def test_no_connection_is_lost(here: dict[tuple[str, str], Leg], before: str, after: str) -> None:
    check_leg(here, before, after, CONNECTIONS)


@pytest.mark.parametrize(("before", "after"), [
    pytest.param(*way, marks=mark)
    for stops in GUESTS
    for mark in [pytest.mark.in_a_guest(play=partial(play, stops))]
    for way in pairwise(stops)
])  # fmt: skip
def test_no_connection_is_lost_in_guests_with_ipvs(
    from_guest: dict[tuple[str, str], Leg], before: str, after: str
) -> None:
    check_leg(from_guest, before, after, CONNECTIONS_IN_A_GUEST)


@pytest.mark.parametrize("way", [("nftables", "ebpf"), ("ebpf", "nftables")])
def test_the_rules_that_ebpf_stands_on_are_kept(
    here: dict[tuple[str, str], Leg], way: tuple[str, str]
) -> None:
    assert ("the rules of nftables are kept" in here[way].said) is (way[1] == "ebpf")
    assert "nftables is removed" not in here[way].said
    kept = [table.partition(" #")[0] for table in here[way].kept]
    assert {"table ip kproxy", "table ip6 kproxy"} <= set(kept)


def check_leg(legs: dict[tuple[str, str], Leg], before: str, after: str, connections: int) -> None:
    assert (before, after) in legs, f"the tour ended before: {[leg for leg in legs.values() if leg.status]}"
    leg = legs[before, after]
    assert leg.status == 0, leg.said
    assert leg.failures == [], f"{leg.said}\n{leg.log}"
    assert leg.made >= connections
    assert leg.exchanged > 0
    left = [(of.after, of.left) for of in legs.values()]
    assert belongs(leg.left, after), f"on the node: {left}\n{leg.log}"
