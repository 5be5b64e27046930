"""Pure modules: names, probabilities, comments, and the rendered text."""

import re

import msgspec
import pytest

from kproxy_conformance.builders import endpoint, endpoint_slice, full_update, node_view, plans, service
from kproxy_core.model.address import Family, Protocol
from kproxy_core.model.node import LocalSource
from kproxy_core.model.service import ServicePortKey
from kproxy_iptables.names import endpoint_chain, service_chains
from kproxy_iptables.render import render_text
from kproxy_iptables.settings import Settings
from kproxy_iptables.skeleton import Facts
from kproxy_iptables.wanted import LARGE_CLUSTER, Style, make_style, wanted
from tests.plugins.iptables.rig import INTERFACES, run
from tests.plugins.iptables.scenes import NODES, Scene, all_plans

NODE = node_view(pods="10.244.0.0/16", anywhere=True)
SETTINGS = Settings(localhost_node_ports=True, canary_period=30.0)


@pytest.mark.parametrize(
    ("key", "where", "suffix"),
    [
        (ServicePortKey("ns1", "svc1", "p80", Protocol.TCP), "", "XPGD46QRK7WJZT7O"),
        (ServicePortKey("ns1", "svc1", "p80", Protocol.TCP), "10.180.0.1:80", "SXIVWICOYRO3J4NJ"),
        (ServicePortKey("ns1", "svc1", "p80", Protocol.TCP), "[fd00::1]:80", "T5UNFIPVCZXM3U7X"),
        (ServicePortKey("ns1", "svc1", "", Protocol.UDP), "", "A2PEVXD55OHK2IVW"),
    ],
)
def test_names_are_kube_proxys(key: ServicePortKey, where: str, suffix: str) -> None:
    chains = service_chains(key)
    if where:
        assert endpoint_chain(chains.endpoint_seed, where) == f"KUBE-SEP-{suffix}"
    else:
        assert chains[:4] == (
            f"KUBE-SVC-{suffix}", f"KUBE-SVL-{suffix}", f"KUBE-EXT-{suffix}", f"KUBE-FW-{suffix}"
        )  # fmt: skip


def style(*, comments: bool = True) -> Style:
    return make_style(NODE, Facts(), 1 if comments else LARGE_CLUSTER + 1)


def own_rules(endpoints: int, *, comments: bool = True) -> list[str]:
    """Return the rules in the chains of a Service with *endpoints* endpoints."""
    found = [endpoint(f"10.244.{number // 250}.{number % 250 + 1}") for number in range(endpoints)]
    (plan,) = plans(NODE, service("web"), endpoint_slice("web", *found)).values()
    own = wanted(plan, style(comments=comments)).chains
    return [rule for body in own.values() for rule in body.splitlines()]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100, 1000])
def test_every_endpoint_has_the_same_chance(count: int) -> None:
    chosen = [rule for rule in own_rules(count) if " -> " in rule]
    left = 1.0
    for rule in chosen:
        found = re.search(r"--probability (\S+)", rule)
        chance = left * (float(found[1]) if found else 1.0)
        assert chance == pytest.approx(1 / count, rel=1e-4)
        left -= chance
    assert left == pytest.approx(0, abs=1e-6)


def test_each_source_range_is_admitted() -> None:
    ranges = "192.0.2.0/24 198.51.100.0/24"
    exposed = service("web", load_balancer_ips="203.0.113.1", source_ranges=ranges)
    (plan,) = plans(NODE, exposed, endpoint_slice("web", "10.244.0.1")).values()
    found = wanted(plan, style()).chains[service_chains(plan.key).firewall]
    assert re.findall(r"-s (\S+)", found) == ranges.split()


def test_probabilities_follow_weights() -> None:
    pieces = [endpoint_slice("web", f"10.244.0.{n}", name=f"web-{n}", weight=weight)
              for n, weight in ((1, 60), (2, 30), (3, 10), (4, 0))]
    (plan,) = plans(NODE, service("web"), *pieces).values()
    chain = wanted(plan, style()).chains[service_chains(plan.key).cluster]
    chance = r"-> ([\d.]+):8080\"(?: -m statistic --mode random --probability ([\d.]+))?"
    assert re.findall(chance, chain) == [
        ("10.244.0.1", "0.60000000009"), ("10.244.0.2", "0.75000000000"), ("10.244.0.3", "")]


def test_rules_for_endpoints_are_in_the_order_of_their_texts_as_kube_proxys() -> None:
    piece = endpoint_slice("web", "10.244.0.1", "10.244.0.2", "10.244.0.10")
    (plan,) = plans(NODE, service("web"), piece).values()
    chains = wanted(plan, style()).chains
    chosen = re.findall(r"-> ([\d.]+):", chains[service_chains(plan.key).cluster])
    made = re.findall(r"--to-destination ([\d.]+):", "".join(chains.values()))
    assert chosen == made == ["10.244.0.10", "10.244.0.1", "10.244.0.2"]


def test_a_large_cluster_has_no_comments_on_endpoints() -> None:
    (masquerade,) = [rule for rule in own_rules(3, comments=False) if "comment" in rule]
    assert masquerade.endswith('--comment "default/web cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ')


def test_a_cluster_is_large_with_more_than_a_thousand_endpoints() -> None:
    for count, commented in ((LARGE_CLUSTER, True), (LARGE_CLUSTER + 1, False)):
        found = [endpoint(f"10.244.{number // 250}.{number % 250 + 1}") for number in range(count)]
        of = plans(NODE, service("web"), endpoint_slice("web", *found))
        text = render_text(full_update(NODE, of), SETTINGS)
        assert ("default/web -> " in text) is commented


def test_pods_are_matched_by_network_or_interface() -> None:
    (plan,) = plans(NODE, service("web"), endpoint_slice("web", "10.244.0.1")).values()
    for source, match in (
        (LocalSource(interface="cni0"), "-d 10.96.0.1/32 ! -i cni0 -p tcp"),
        (LocalSource(interface_prefix="veth"), "-d 10.96.0.1/32 ! -i veth+ -p tcp"),
        (NODE.local_source, "! -s 10.244.0.0/16 -d 10.96.0.1/32 -p tcp"),
    ):
        node = msgspec.structs.replace(NODE, local_source=source)
        made = Style(node=node, localhost_node_ports_counted=False, comments=True)
        rules = "".join(wanted(plan, made).chains.values())
        assert f"{match} -m comment" in rules


@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize("family", Family)
def test_iptables_restore_accepts_the_rendered_text(
    netns: None, family: Family, interface: str
) -> None:
    scenes = (
        Scene(1, "TCP", (1, 2), "ranges", True, False, True),
        Scene(2, "UDP", (), "load balancer", False, True, False),
        Scene(3, "SCTP", (3,), "node port", False, True, True),
    )
    text = render_text(full_update(NODES[family], all_plans(family, *scenes)), SETTINGS)
    run(interface, "restore", "--noflush", family=family, stdin=text)
    saved = run(interface, "save", family=family).splitlines()
    given = [line for line in text.splitlines() if line.startswith("-A")]
    assert sorted(given) == sorted(line for line in saved if line.startswith("-A KUBE"))
