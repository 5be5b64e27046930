"""The rules and elements that packets meet in the nftables mode, as the kernel holds them and as written."""

import subprocess
from collections.abc import Iterator

import pytest

from kproxy_conformance.builders import endpoint_slice, plans, service
from kproxy_conformance.checks.bench import lonely_node
from kproxy_conformance.checks.features import ADDRESSES
from kproxy_conformance.checks.subject import Subject, Wanted, full
from kproxy_core.contract.values import Question
from kproxy_core.model.address import Family, format_address
from kproxy_core.plan.fate import Outcome
from kproxy_nftables.explain import explain, frontends
from kproxy_nftables.settings import DEFAULTS, Settings
from kproxy_nftables.skeleton import affinity_maps
from tests.plugins.explained import decided, essence, questions, questions_about, serving

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


SETTINGS = {
    "as-usual": DEFAULTS, "counted": Settings(counted=True),
    "with-a-flowtable": Settings(flowtable=("eth0",)), "without-hash": Settings(without_hash=True),
}


@pytest.mark.parametrize("settings", SETTINGS)
@FAMILIES
def test_the_rules_that_would_be_written_decide_as_the_plans_say(family: Family, settings: str) -> None:
    asked = questions(family)
    sides = explain(asked, live=False, settings=SETTINGS[settings])
    for question, side in zip(asked, sides, strict=True):
        assert essence(side.fate) == essence(decided(question)), (question.packet, side.objects)


DISTURBANCES = {
    "nothing": "",
    "a rule for one destination": "insert rule {ip} kproxy services {ip} daddr {vip} drop",
    "a rule for a port": "insert rule {ip} kproxy services th dport 80 goto reject-traffic",
    "a rule for all others": "insert rule {ip} kproxy filter-forward {ip} daddr != {endpoint} drop",
    "a rule for many ports": "insert rule {ip} kproxy services th dport 30000-32767 drop",
    "a rule for a network": "insert rule {ip} kproxy filter-forward {ip} daddr {network} drop",
    "a rule for no element": "insert rule {ip} kproxy services {ip} daddr != @cluster-ips drop",
    "a mark by destination":
        "insert rule {ip} kproxy services meta mark set {ip} daddr map {{ {vip} : 0x4000 }}",
    "a rule for a mark": "insert rule {ip} kproxy filter-forward meta mark and 0x4000 != 0 drop",
    "an endpoint that is lost": "delete element {ip} kproxy tcp-vip-endpoints {{ {vip} . 80 . 1 }}",
    "a hairpin that is lost": "flush set {ip} kproxy hairpins",
    "another destination": "insert rule {ip} kproxy services meta l4proto udp dnat to {endpoint}",
}


@pytest.mark.parametrize("disturbance", DISTURBANCES)
@FAMILIES
def test_packets_that_are_asked_about_together_do_what_each_does_alone(
    family: Family, kernel: None, monkeypatch: pytest.MonkeyPatch, disturbance: str
) -> None:
    asked = questions(family)
    chosen = next(q for q in asked if q.packet.port == 80 and q.plan and len(q.plan.cluster) > 1)
    assert chosen.plan is not None
    network = "10.244.1.0/28" if family is Family.IPV4 else "fd00:10:244:1::/68"
    subprocess.run(["nft", DISTURBANCES[disturbance].format(
        ip=family.ip, vip=format_address(chosen.packet.destination), network=network,
        endpoint=format_address(chosen.plan.cluster[0].address))], check=True)
    together = explain(asked, live=True)
    monkeypatch.setattr("kproxy_nftables.explain._MOST_EXAMPLES", 0)
    for question, side, alone in zip(asked, together, explain(asked, live=True), strict=True):
        assert side == alone, question.packet


def large(family: Family) -> list[Question]:
    """Return packets to a Service with more endpoints than random numbers of other tables are followed."""
    view, made = ADDRESSES[family].view(), service("large", ip=ADDRESSES[family].cluster_ip(1))
    prefix, separator = ("10.244", ".") if family is Family.IPV4 else ("fd00:10:244:", ":")
    ips = [f"{prefix}{separator}{number // 200 + 2}{separator}{number % 200 + 1}" for number in range(4100)]
    found = plans(view, made, endpoint_slice("large", *ips, family=family))
    return questions_about(found, view)


@FAMILIES
def test_a_service_with_thousands_of_endpoints_is_decided_as_written(family: Family) -> None:
    asked = large(family)
    for question, side in zip(asked, explain(asked, live=False), strict=True):
        assert essence(side.fate) == essence(decided(question))


@FAMILIES
def test_a_service_with_thousands_of_endpoints_is_decided_in_the_kernel(family: Family) -> None:
    asked = large(family)
    with lonely_node():
        subject = Subject(Wanted("nftables"), (family,))
        assert asked[0].plan is not None
        full(subject.start(), family, {asked[0].plan.key: asked[0].plan})
        for question, side in zip(asked, explain(asked, live=True), strict=True):
            assert essence(side.fate) == essence(decided(question))
        subject.end_all()


@FAMILIES
def test_the_frontends_in_the_kernel_are_those_of_the_plans(family: Family, kernel: None) -> None:
    assert set(frontends(family)) == {question.frontend for question in questions(family)}


DAMAGE = {
    "delete element ip kproxy vips {{ {vip} . tcp . 80 }}": Outcome.UNTOUCHED,
    "flush map ip kproxy tcp-vip-endpoints": Outcome.REFUSED,
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
def test_a_number_without_an_endpoint_is_named_beside_what_becomes_of_its_share(
    family: Family, kernel: None
) -> None:
    asked = next(q for q in questions(family) if q.packet.port == 80 and q.plan and len(q.plan.cluster) == 3)
    vip = format_address(asked.packet.destination)
    subprocess.run(["nft", f"delete element ip kproxy tcp-vip-endpoints {{ {vip} . 80 . 1 }}"], check=True)
    (side,) = explain([asked], live=True)
    assert side.fate is not None
    assert [round(choice.share, 3) for choice in side.fate.choices] == [0.333, 0.333]
    shown = [item.text.partition(" : ")[0] for item in side.objects if item.where == "map tcp-vip-endpoints"]
    assert shown == [f"{vip} . 80 . 0", f"{vip} . 80 . 1  (missing)", f"{vip} . 80 . 2"]
    assert any("reject" in item.text for item in side.objects)


@FAMILIES
def test_the_endpoint_that_is_remembered_for_a_client_is_named(family: Family, kernel: None) -> None:
    asked = next(
        q for q in questions(family) if q.plan and q.plan.affinity_seconds and len(q.plan.cluster) > 1
        and decided(q).outcome is Outcome.FORWARDED)
    assert asked.plan is not None
    where = asked.plan.cluster[-1]
    (name,) = (name for name, of in affinity_maps(asked.plan).items() if where.address in of)
    source, endpoint = format_address(asked.packet.source), format_address(where.address)
    (before,) = explain([asked], live=True)
    subprocess.run(
        ["nft", f"add element {family.ip} kproxy {name} {{ {source} timeout 60s : {endpoint} }}"], check=True)
    (side,) = explain([asked], live=True)
    assert (before.remembered, side.remembered) == (None, where)
    assert before.fate == side.fate
    assert (f"map {name}", f"{source} : {endpoint}") in side.objects


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
