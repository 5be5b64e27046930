"""The rules and elements that packets meet in the nftables mode, as the kernel holds them and as written."""

import subprocess
from collections.abc import Iterator

import pytest

from kproxy_core.backend.api import KernelSide, Question
from kproxy_core.model.address import Family, parse_address
from kproxy_core.plan.fate import Fate, Origin, Outcome, Packet, decide, stand_in
from kproxy_core.testing.conformance.features import ADDRESSES, everything
from kproxy_core.testing.conformance.network import node_only
from kproxy_core.testing.conformance.subject import Subject, Wanted, full
from kproxy_nftables.explain import explain

FAMILIES = pytest.mark.parametrize("family", Family, ids=lambda family: family.label)


@pytest.fixture
def kernel(family: Family) -> Iterator[None]:
    """A node whose kernel holds every feature's rules."""
    node = node_only()
    try:
        with node.entered():
            subject = Subject(Wanted("nftables"), (family,))
            full(subject.start(), family, everything(family))
            yield
            subject.end_all()
    finally:
        node.close()


def questions(family: Family) -> list[Question]:
    """Every frontend of every feature, asked by senders of each origin and by an endpoint."""
    at, found = ADDRESSES[family], []
    view = at.view()
    senders = [(origin, stand_in(origin, view)) for origin in Origin]
    senders += [(Origin.POD, parse_address(at.near[0])), (Origin.OUTSIDE, parse_address(at.clients[0]))]
    for plan in everything(family).values():
        for frontend in plan.frontends():
            to = frontend.address or view.node_port_addresses[0]
            for origin, source in senders:
                packet = Packet(origin, source, to, frontend.protocol, frontend.port)
                found.append(Question(packet, view, frontend, plan))
    return found


def decided(question: Question) -> Fate:
    assert question.frontend is not None
    assert question.plan is not None
    return decide(question.packet, question.frontend, question.plan, question.node)


def essence(fate: Fate | None) -> object:
    """What two fates have in common if they are the same."""
    assert fate is not None
    return fate.outcome, {(c.where, round(c.share, 4), c.masqueraded) for c in fate.choices}


@FAMILIES
def test_the_rules_in_the_kernel_decide_as_the_plans_say(family: Family, kernel: None) -> None:
    asked = questions(family)
    for question, side in zip(asked, explain(asked, live=True), strict=True):
        assert essence(side.fate) == essence(decided(question)), (question.packet, side.objects)


@FAMILIES
def test_the_rules_that_would_be_written_decide_as_the_plans_say(family: Family) -> None:
    asked = questions(family)
    for question, side in zip(asked, explain(asked, live=False), strict=True):
        assert essence(side.fate) == essence(decided(question)), (question.packet, side.objects)


def first(live: list[KernelSide]) -> KernelSide:
    assert live[0].fate is not None
    return live[0]


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
    fate = first(explain(asked, live=True)).fate
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
