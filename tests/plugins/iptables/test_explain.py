"""The rules that packets meet in the iptables mode, as the kernel holds them and as written."""

import subprocess
from collections.abc import Iterator

import pytest

from kproxy_conformance.builders import endpoint_slice, node_view, plans, service
from kproxy_conformance.checks.bench import lonely_node
from kproxy_conformance.checks.subject import Subject, Wanted, full
from kproxy_core.contract.values import BackendSettings
from kproxy_core.model.address import Family, format_address
from kproxy_core.plan.fate import Origin, Outcome
from kproxy_iptables.backend import IptablesBackend
from tests.plugins.explained import agrees, decided, essence, questions, questions_about, serving

BACKEND = IptablesBackend(BackendSettings(tuple(Family)))
FAMILIES = pytest.mark.parametrize("family", Family, ids=lambda family: family.label)


@pytest.fixture
def kernel(family: Family) -> Iterator[None]:
    with serving("iptables", family):
        yield


@FAMILIES
def test_the_rules_in_the_kernel_decide_as_the_plans_say(family: Family, kernel: None) -> None:
    asked = questions(family)
    for question, side in zip(asked, BACKEND.explain(asked, live=True), strict=True):
        assert essence(side.fate) == essence(decided(question)) or side.deviation, side.objects


@FAMILIES
def test_the_rules_that_would_be_written_decide_as_the_plans_say(family: Family) -> None:
    asked = questions(family)
    for question, side in zip(asked, BACKEND.explain(asked, live=False), strict=True):
        assert essence(side.fate) == essence(decided(question)) or side.deviation, side.objects


@FAMILIES
def test_the_frontends_in_the_kernel_are_those_of_the_plans(family: Family, kernel: None) -> None:
    assert set(BACKEND.frontends(family)) == {question.frontend for question in questions(family)}


DAMAGE = {
    "-t nat -F KUBE-SERVICES": Outcome.UNTOUCHED,
    "-t filter -I KUBE-SERVICES -j DROP": Outcome.DROPPED,
    "-t nat -F KUBE-POSTROUTING": Outcome.FORWARDED,
}


@pytest.mark.parametrize("family", [Family.IPV4])
@pytest.mark.parametrize("command", DAMAGE)
def test_damage_is_seen_on_the_packet_s_way(family: Family, kernel: None, command: str) -> None:
    asked = [q for q in questions(family) if q.packet.origin is Origin.NODE and len(decided(q).choices) > 1]
    subprocess.run(["iptables", *command.split()], check=True)
    fate = BACKEND.explain(asked[:1], live=True)[0].fate
    assert fate is not None
    assert fate.outcome is DAMAGE[command]
    assert essence(fate) != essence(decided(asked[0]))


@pytest.mark.parametrize("family", [Family.IPV4])
def test_an_endpoint_whose_packets_are_dropped_is_missing(family: Family, kernel: None) -> None:
    asked = [q for q in questions(family) if q.packet.origin is Origin.NODE and len(decided(q).choices) > 1]
    dropped, *others = decided(asked[0]).choices
    address = format_address(dropped.where.address)
    subprocess.run(
        ["iptables", "-w", "-t", "filter", "-I", "KUBE-SERVICES", "-d", address, "-j", "DROP"], check=True)
    fate = BACKEND.explain(asked[:1], live=True)[0].fate
    assert fate is not None
    assert fate.outcome is Outcome.FORWARDED
    assert {choice.where for choice in fate.choices} == {choice.where for choice in others}


@pytest.mark.parametrize("family", [Family.IPV4])
def test_a_rule_that_is_not_understood_makes_the_result_uncertain(family: Family, kernel: None) -> None:
    asked = questions(family)[:1]
    rule = ["iptables", "-w", "-t", "nat", "-I", "KUBE-SERVICES", "-m", "ttl", "--ttl-eq", "7"]
    subprocess.run(rule, check=True)
    (without_effect,) = BACKEND.explain(asked, live=True)
    subprocess.run([*rule, "-j", "ACCEPT"], check=True)
    (side,) = BACKEND.explain(asked, live=True)
    assert essence(without_effect.fate) == essence(decided(asked[0]))
    assert side.fate is None
    for each in (without_effect, side):
        assert any("not understood" in item.text for item in each.objects)


@pytest.mark.parametrize("affinity", [0, 60])
@pytest.mark.parametrize("live", [False, True])
def test_endpoints_in_groups_have_the_shares_of_the_plan(live: bool, affinity: int) -> None:
    node = node_view(pods="10.244.0.0/16", anywhere=True)
    slices = [endpoint_slice("web", *(f"10.{n}.{at // 250}.{at % 250 + 1}" for at in range(200)),
                             name=f"web-{n}", weight=weight) for n, weight in ((1, 3), (2, 1))]
    of = plans(node, service("web", affinity=affinity), *slices)
    asked = questions_about(of, node)
    with lonely_node():
        subject = Subject(Wanted("iptables"), (Family.IPV4,))
        full(subject.start(), Family.IPV4, of, node)
        for question, side in zip(asked, BACKEND.explain(asked, live=live), strict=True):
            assert agrees(question, side), side.objects
            assert side.fate is not None
            assert len(side.fate.choices) == 400
        subject.end_all()
