"""Pure modules: names, probabilities, comments, and the rendered text."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from kproxy_conformance.builders import endpoint, endpoint_slice, full_update, node_view, plans, service
from kproxy_core.model.address import Family, Protocol
from kproxy_core.model.node import LocalSource
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_iptables.batch import References, deletions, inputs
from kproxy_iptables.names import endpoint_chain, is_service_chain, service_chains
from kproxy_iptables.render import render_text
from kproxy_iptables.settings import Settings
from kproxy_iptables.skeleton import Facts
from kproxy_iptables.wanted import LARGE_CLUSTER, MOST_IN_CHAIN, Style, make_style, wanted
from kproxy_xtables.tables import CHAINS_PER_CALL
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


def chances(chains: Mapping[str, str], chain: str) -> dict[str, float]:
    """Return the chance of each endpoint's chain to be chosen by *chain*, directly or in a group."""
    found: dict[str, float] = {}
    left = 1.0
    for rule in chains[chain].splitlines():
        if "--rcheck" in rule or not (jump := re.search(r"-j (KUBE-S\S+)", rule)):
            continue
        share = re.search(r"--probability (\S+)", rule)
        chance = left * (float(share[1]) if share else 1.0)
        if jump[1].startswith("KUBE-SEP-"):
            found[jump[1]] = chance
        elif of_group := chances(chains, jump[1]):
            found |= {name: chance * part for name, part in of_group.items()}
        else:  # It only asks for the client's last destination.
            continue
        left -= chance
    return found


def plan_of(endpoints: int, **fields: Any) -> ServicePlan:
    found = [endpoint(f"10.{number // 65025}.{number // 255 % 255}.{number % 255}")
             for number in range(endpoints)]
    (plan,) = plans(NODE, service("web", **fields), endpoint_slice("web", *found)).values()
    return plan


@pytest.mark.parametrize("affinity", [0, 60])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 100, MOST_IN_CHAIN, MOST_IN_CHAIN + 1, 1000, 5000])
def test_every_endpoint_has_the_same_chance(count: int, affinity: int) -> None:
    plan = plan_of(count, affinity=affinity)
    found = chances(wanted(plan, style()).chains, service_chains(plan.key).cluster)
    assert len(found) == count
    assert list(found.values()) == pytest.approx([1 / count] * count, rel=1e-4)


def test_chances_in_groups_follow_weights() -> None:
    pieces = [endpoint_slice("web", *(f"10.{n}.{at // 250}.{at % 250}" for at in range(200)),
                             name=f"web-{n}", weight=weight) for n, weight in ((1, 3), (2, 1))]
    (plan,) = plans(NODE, service("web"), *pieces).values()
    chains = service_chains(plan.key)
    found = chances(wanted(plan, style()).chains, chains.cluster)
    for n, share in ((1, 0.75), (2, 0.25)):
        for at in range(200):
            name = endpoint_chain(chains.endpoint_seed, f"10.{n}.{at // 250}.{at % 250}:8080")
            assert found[name] == pytest.approx(share / 200, rel=1e-4)


@pytest.mark.parametrize("affinity", [0, 60])
@pytest.mark.parametrize("count", [MOST_IN_CHAIN, MOST_IN_CHAIN + 1, 5000, 20_000])
def test_no_chain_is_long(count: int, affinity: int) -> None:
    found = wanted(plan_of(count, affinity=affinity), style()).chains
    longest = max(body.count("\n") for body in found.values())
    assert longest <= 2 * MOST_IN_CHAIN + 1
    if affinity:
        assert sum(body.count("--rcheck") for body in found.values()) == count


def test_a_chain_precedes_those_that_jump_to_it() -> None:
    found = wanted(plan_of(2000, affinity=60, external_ips="192.0.2.1"), style()).chains
    order = {name: at for at, name in enumerate(found)}
    assert all(order[target] < order[name] for name, body in found.items()
               for target in re.findall(r"-j (KUBE-[SE]\S+)", body))
    assert all(is_service_chain("nat", name) for name in found)


def test_a_change_of_one_of_many_endpoints_writes_one_group() -> None:
    before, after = (wanted(plan_of(count), style()).chains for count in (3000, 3001))
    changed = [name for name, body in after.items() if before.get(name) != body]
    assert len(changed) == 3  # the endpoint, its group, and the choice of a group


@pytest.mark.parametrize("stale", [100, 1000])
def test_groups_are_deleted_after_all_that_jump_to_them_are_flushed(stale: int) -> None:
    names = [*wanted(plan_of(2000), style()).chains][:: -1]
    jumps = wanted(plan_of(2000), style()).chains
    for text in deletions(names, stale):
        for flushed in re.findall(r"^:(\S+)", text, re.MULTILINE):
            jumps[flushed] = ""
        for deleted in re.findall(r"^-X (\S+)", text, re.MULTILINE):
            del jumps[deleted]
            assert not any(f"-j {deleted}\n" in body for body in jumps.values())
    assert not jumps


@pytest.mark.parametrize("count", [1, 3, 300, 5000])
def test_a_call_names_a_limited_number_of_chains(count: int) -> None:
    chains = wanted(plan_of(count, affinity=60), style()).chains
    texts = [*inputs(chains.items(), References, chains_per_call=CHAINS_PER_CALL)]
    for text in texts:
        named = re.findall(r"^:(\S+)| -j (KUBE-S\S+)", text, re.MULTILINE)
        assert len({*map(max, named)}) <= CHAINS_PER_CALL
    assert [*re.findall(r"^:(\S+)", "".join(texts), re.MULTILINE)] == [*chains]


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
