"""Counted connections equal those that were made, whatever happens to rules and processes meanwhile."""

from collections.abc import Iterator

import pytest

from kproxy_core.model.address import Family, Protocol
from kproxy_core.testing.conformance import play as stage
from kproxy_core.testing.conformance.dialing import Frontend
from kproxy_core.testing.conformance.play import Play
from kproxy_core.testing.conformance.subject import Wanted, full

MODES = ("nftables",)
WEB, DNS = 201, 202
"""Numbers of ClusterIPs that no other test uses."""
KEPT_BY_THE_KERNEL = ("nftables",)
"""Modes whose counts a new process finds in the kernel."""


def vip(play: Play) -> Frontend:
    return play.cluster_ip(number=WEB)


@pytest.fixture(params=MODES)
def play(request: pytest.FixtureRequest) -> Iterator[Play]:
    with stage.play(Wanted(request.param), Family.IPV4) as made:
        made.count_traffic()
        yield made


def test_each_connection_is_counted_once_at_every_kind_of_frontend(play: Play) -> None:
    play.serve("web", "80@31780", to="near", external_ips=play.at.external_ip(201), affinity=600, number=WEB)
    play.serve("dns", "53/UDP@31753", to="far", number=DNS, load_balancer_ips=play.at.external_ip(202))
    tcp = [("near", vip(play)), ("node", vip(play)), ("client", play.node_port(31780)),
           ("client", play.external(201)), ("other", play.external(201))]
    udp = [("near", play.cluster_ip(53, Protocol.UDP, DNS)), ("client", play.node_port(31753, Protocol.UDP)),
           ("client", play.external(202, 53)._replace(protocol=Protocol.UDP))]
    wanted: dict[tuple[Frontend, str], int] = {}
    for pod, dials in (("near", tcp), ("far", udp)):
        for tries, (host, frontend) in enumerate(dials, 3):
            play.ask_often(host, frontend, tries=tries)
            wanted[frontend, pod] = wanted.get((frontend, pod), 0) + tries
    assert play.traffic() == wanted


def test_a_connection_with_many_packets_is_one(play: Play) -> None:
    play.serve("web", to="near", number=WEB)
    with play.connection("other", vip(play)) as connection:
        assert all(connection.echoes() for _ in range(20))
    assert play.traffic() == {(vip(play), "near"): 1}


def test_counts_outlive_the_endpoint_the_service_and_a_resync(play: Play) -> None:
    play.serve("web", to="near", number=WEB)
    play.ask_often("other", vip(play), tries=3)
    play.serve("web", to="far", number=WEB)
    play.ask_often("other", vip(play), tries=2)
    play.remove("web")
    full(play.instance, play.family, {})
    assert play.traffic() == {(vip(play), "near"): 3, (vip(play), "far"): 2}


def test_refusals_are_counted_for_frontends_without_endpoints_only(play: Play) -> None:
    play.serve("web", "80@31780", to="", number=WEB)
    for _ in range(3):
        play.refused("near", vip(play))
    play.refused("client", play.node_port(31780))
    assert play.traffic() == {(vip(play), ""): 3, (play.node_port(31780), ""): 1}


@pytest.mark.parametrize("play", KEPT_BY_THE_KERNEL, indirect=True)
def test_a_new_process_finds_the_counts_in_the_kernel(play: Play) -> None:
    play.serve("web", to="near", number=WEB)
    play.ask_often("other", vip(play), tries=3)
    play.subject.end(play.instance)
    play.ask_often("other", vip(play), tries=2)
    play.begin()
    play.ask_often("other", vip(play), tries=1)
    assert play.traffic() == {(vip(play), "near"): 6}


def test_without_the_setting_nothing_is_counted(play: Play) -> None:
    play.serve("web", to="near", number=WEB)
    play.subject.end(play.instance)
    play.subject.settings = type(play.subject.settings)(play.subject.settings.families)
    play.begin()
    play.ask_often("other", vip(play), tries=3)
    assert not play.traffic()
