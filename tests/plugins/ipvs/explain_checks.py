"""Real packets do what `kproxy explain` predicts in mode ipvs, and `kproxy diff` reads kube-proxy's objects.

`test_kernel` runs this in a guest. The backend is in this process, which reads the kernel once for all
packets to one set of objects.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from kproxy_conformance.checks.bench import lonely_node
from kproxy_conformance.network.addresses import FAMILIES
from kproxy_core.contract.values import KernelSide, Question
from kproxy_core.model.address import Family, format_socket
from kproxy_ipvs.explain import explain, frontends
from kproxy_ipvs.kernel.servers import VirtualServers
from kproxy_ipvs.settings import Settings
from tests.conformance.any_services import World
from tests.conformance.test_explained import ExplainedPlay, is_load_balanced, objects_of
from tests.plugins.explained import KnownPlans, differences_of
from tests.plugins.iptables import golden_cases
from tests.plugins.ipvs.kube_proxy_state import write_objects

SERVERS = ("virtual server", "real server")
ROUNDS = 8
"""Of 40 packets each on average."""
CHAINS = ("mangle KUBE-", "nat KUBE-", "filter KUBE-IPVS-FILTER", *SERVERS)
"""Chains that only the first packet of a connection meets, and the servers."""


class IpvsPlay(ExplainedPlay):
    """A play that reads the kernel's counts of connections, too."""

    def counters(self) -> Counter[tuple[str, str]]:
        """Return the packets of each rule, and the connections of each virtual server and real server."""
        found = super().counters()
        family = Family.IPV4 if self._family == "ipv4" else Family.IPV6
        with self._stage.topology["node"].entered(), VirtualServers() as servers:
            for key, (_, items) in servers.count(family).items():
                for item in items:
                    found["virtual server", str(key)] += item.connections
                    text = f"{format_socket(*item.where)} weight {item.weight}"
                    found["real server", text] += item.connections
        return found


@pytest.fixture
def play(family: str, tmp_path: Path) -> Iterator[IpvsPlay]:
    with closing(IpvsPlay("ipvs", family, tmp_path)) as play:
        yield play


@pytest.mark.parametrize("family", FAMILIES)
def test_packets_have_the_fate_of_the_explanation(play: ExplainedPlay, family: str) -> None:
    world = World(Random(f"explained ipvs {family}"))
    cases = 0
    for _ in range(ROUNDS):
        play.apply(world)
        answers = play.compared(list(world.attempts()))
        cases += len(answers)
        assert [answer for answer in answers if answer["kernel"]["verdict"] != "agrees"] == []
    assert cases > 200


@pytest.mark.parametrize("family", FAMILIES)
def test_the_objects_that_count_a_packet_are_those_of_the_explanation(play: IpvsPlay, family: str) -> None:
    for attempt, answer in play.cases(f"counted ipvs {family}", is_load_balanced):
        counted = play.counted(attempt, CHAINS)
        assert {where for where, _ in counted} >= {*SERVERS}
        assert counted <= objects_of(answer)


@pytest.mark.parametrize("case", ["loadbalancer-source-ranges-ipv4", "loadbalancer-source-ranges-ipv6"])
def test_kube_proxys_objects_are_read_from_the_kernel(case: str) -> None:
    update = golden_cases.update(case)
    plans = KnownPlans(update)

    def ask(questions: list[Question]) -> list[KernelSide]:
        return explain(questions, Settings(), live=True)

    with lonely_node():
        write_objects(update)
        assert differences_of(plans, ask, frontends) == []
        kept = differences_of(plans.without_services(), ask, frontends)
    assert {each["kind"] for each in kept} == {"stale"}
