"""20,000 packets through random rules, each of which does what is predicted."""

from random import Random

import pytest

from kproxy_core.model.address import Family
from tests.core.nft.packet_judge import compare, judging
from tests.core.nft.random_rules import iptables_rules, nft_rules, probes

PACKETS = 60
"""Through each set of rules."""


@pytest.mark.parametrize("is_certain", [True, False], ids=["certain", "with-limits"])
@pytest.mark.parametrize("kind", ["nft", "iptables", "both"])
@pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
def test_packets_end_where_it_is_predicted(family: Family, kind: str, *, is_certain: bool) -> None:
    compared, unclear, seed = 0, 0, 1000
    with judging() as judge:
        while compared < 1700:
            seed += 1
            random = Random(seed)
            nft = "" if kind == "iptables" else nft_rules(random, family, is_certain=is_certain)
            iptables = "" if kind == "nft" else iptables_rules(random, family, is_certain=is_certain)
            if judge.load(family, nft, iptables):
                found = compare(judge, probes(random, family, PACKETS))
                assert not found.problems, (seed, nft, iptables, found.problems)
                compared, unclear = compared + found.compared, unclear + found.unclear
    if is_certain:
        assert unclear <= compared * 0.02
