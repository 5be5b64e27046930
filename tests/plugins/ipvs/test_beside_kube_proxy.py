"""``kproxy diff`` beside kube-proxy's ipvs mode: the same, unless something is stale or missing."""


import pytest
from msgspec import structs
from msgspec.structs import replace

from kproxy_core.app.explain import DEVIATES, Json, judge
from kproxy_core.contract.values import Update
from kproxy_core.model.address import format_socket
from kproxy_core.plan.fate import Outcome
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_ipvs.explain import State, side_of
from tests.plugins.explained import KnownPlans, decided, differences_of, questions_about
from tests.plugins.iptables import golden_cases
from tests.plugins.ipvs.kube_proxy_state import kube_proxys_state


def found_in(update: Update, state: State) -> list[Json]:
    """Return what ``kproxy diff`` finds on a node with the objects of *state*."""
    return differences_of(
        KnownPlans(update), lambda asked: [side_of(question, state) for question in asked], lambda family: ())


@pytest.mark.parametrize("case", golden_cases.names())
def test_kube_proxys_objects_do_what_the_plans_say(case: str) -> None:
    update = golden_cases.update(case)
    assert found_in(update, kube_proxys_state(update)) == []


def changed(update: Update, plan: ServicePlan) -> Update:
    return replace(update, plans={**update.plans, plan.key: plan})


@pytest.mark.parametrize("case", ["slices-moved-ipv4", "slices-moved-ipv6"])
def test_an_endpoint_that_kube_proxy_lost_is_named(case: str) -> None:
    update = golden_cases.update(case)
    plan = next(plan for plan in update.plans.values() if len(plan.cluster) > 1)
    state = kube_proxys_state(changed(update, structs.replace(plan, cluster=plan.cluster[:1])))
    assert f"endpoint {format_socket(*plan.cluster[1])} is missing" in {
        each["difference"] for each in found_in(update, state)}


@pytest.mark.parametrize("case", ["clusterip-tcp-ipv4", "clusterip-tcp-ipv6"])
def test_an_address_that_the_device_lost_is_a_difference(case: str) -> None:
    update = golden_cases.update(case)
    found = found_in(update, kube_proxys_state(update)._replace(local=frozenset()))
    assert "the packet is not touched, and should be forwarded" in {each["difference"] for each in found}
    assert {sender for each in found for sender in each["senders"]} == {"pod", "outside"}


@pytest.mark.parametrize("case", ["loadbalancer-source-ranges-ipv4", "loadbalancer-source-ranges-ipv6"])
def test_a_source_range_that_kube_proxy_lost_is_a_difference(case: str) -> None:
    update = golden_cases.update(case)
    plan = next(plan for plan in update.plans.values() if plan.source_ranges)
    found = found_in(update, kube_proxys_state(changed(update, structs.replace(plan, source_ranges=()))))
    assert {each["difference"] for each in found} == {"the packet is forwarded, and should be dropped"}


@pytest.mark.parametrize("case", ["nodeport-etp-local-none-ipv4", "nodeport-etp-local-none-ipv6"])
def test_kube_proxys_disregard_of_policy_local_is_no_damage(case: str) -> None:
    update = golden_cases.update(case)
    asked = [question for question in questions_about(update.plans, update.node)
             if decided(question).outcome is Outcome.DROPPED]
    assert asked
    for question in asked:
        side = side_of(question, kube_proxys_state(update))
        verdict, differences = judge(question.packet, decided(question), side)
        assert verdict == DEVIATES
        assert "the packet is forwarded, and should be dropped" in differences
