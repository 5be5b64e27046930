"""The rules and elements that packets meet in the nftables mode, as the kernel holds them and as written."""

import subprocess
from collections.abc import Iterator

import pytest

from kproxy_core.model.address import Family
from kproxy_core.plan.fate import Outcome
from kproxy_nftables.explain import explain, frontends
from tests.plugins.explained import decided, essence, questions, serving

FAMILIES = pytest.mark.parametrize("family", Family, ids=lambda family: family.label)


@pytest.fixture
def kernel(family: Family) -> Iterator[None]:
    with serving("nftables", family):
        yield


@FAMILIES
def test_the_rules_in_the_kernel_decide_as_the_plans_say(family: Family, kernel: None) -> None:
    asked = questions(family)
    for question, side in zip(asked, explain(asked, live=True), strict=True):
        assert essence(side.fate) == essence(decided(question)), (question.packet, side.objects)


@FAMILIES
def test_elements_that_are_read_at_once_decide_the_same(
    family: Family, kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = questions(family)
    one_by_one = explain(asked, live=True)
    monkeypatch.setattr("kproxy_nftables.explain._FEW", 0)
    assert explain(asked, live=True) == one_by_one


@FAMILIES
def test_the_rules_that_would_be_written_decide_as_the_plans_say(family: Family) -> None:
    asked = questions(family)
    for question, side in zip(asked, explain(asked, live=False), strict=True):
        assert essence(side.fate) == essence(decided(question)), (question.packet, side.objects)


@FAMILIES
def test_the_frontends_in_the_kernel_are_those_of_the_plans(family: Family, kernel: None) -> None:
    assert set(frontends(family)) == {question.frontend for question in questions(family)}


DAMAGE = {
    "delete element ip kproxy vips {{ {vip} . tcp . 80 }}": Outcome.UNTOUCHED,
    "flush map ip kproxy tcp-vip-endpoints": Outcome.FORWARDED,
    "insert rule ip kproxy services drop": Outcome.DROPPED,
}


@pytest.mark.parametrize("family", [Family.IPV4])
@pytest.mark.parametrize("command", DAMAGE)
def test_damage_is_seen_on_the_packet_s_way(family: Family, kernel: None, command: str) -> None:
    asked = [q for q in questions(family) if q.packet.port == 80 and q.plan and len(q.plan.cluster) > 1][:1]
    vip = ".".join(map(str, asked[0].packet.destination))
    subprocess.run(["nft", command.format(vip=vip)], check=True)
    fate = explain(asked, live=True)[0].fate
    assert fate is not None
    assert essence(fate) != essence(decided(asked[0]))
    if "vips {{" not in command:
        assert fate.outcome is DAMAGE[command]


@pytest.mark.parametrize("family", [Family.IPV4])
def test_a_rule_that_is_not_understood_makes_the_result_uncertain(family: Family, kernel: None) -> None:
    subprocess.run(["nft", "insert rule ip kproxy services ip ttl 7 counter drop"], check=True)
    (side, *_) = explain(questions(family)[:1], live=True)
    assert side.fate is None
    assert any("not understood" in item.text for item in side.objects)


@pytest.mark.parametrize("family", [Family.IPV4])
def test_every_answer_is_about_the_rules_of_that_moment(family: Family, kernel: None) -> None:
    asked = [q for q in questions(family) if decided(q).outcome is Outcome.FORWARDED][:1]

    def outcome() -> Outcome | None:
        fate = explain(asked, live=True)[0].fate
        return fate.outcome if fate is not None else None

    assert outcome() is Outcome.FORWARDED
    subprocess.run(["nft", "insert rule ip kproxy services drop"], check=True)
    assert outcome() is Outcome.DROPPED
    listed = subprocess.run(
        ["nft", "-a", "list", "chain", "ip", "kproxy", "services"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    handle = next(line.split()[-1] for line in listed.stdout.splitlines() if " drop #" in f" {line.strip()}")
    subprocess.run(["nft", f"delete rule ip kproxy services handle {handle}"], check=True)
    assert outcome() is Outcome.FORWARDED
