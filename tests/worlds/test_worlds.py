"""Beside other programs, real packets do what `kproxy explain` says; `python -m tests.worlds` plays more."""

from contextlib import closing
from pathlib import Path

import pytest

from kproxy_conformance.network.addresses import FAMILIES
from tests.worlds.worlds import WorldPlay, played

ANSWERS = 150
UNCLEAR = 0.02
"""Of answers: those that depend on more than the endpoint that is drawn, where nothing limits rates."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["nftables", "iptables", "ebpf"])
def test_packets_beside_other_programs_do_what_is_explained(mode: str, family: str, tmp_path: Path) -> None:
    with closing(WorldPlay(mode, family, tmp_path)) as play:
        found = played(play, f"{mode} {family}", ANSWERS)
    assert found.wrong == []
    assert found.counts["unclear"] <= UNCLEAR * found.counts["right"]
