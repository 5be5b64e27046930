"""``kproxy diff`` beside kube-proxy's iptables mode: the same, unless something is stale or missing."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kproxy_conformance.checks.bench import lonely_node
from kproxy_core.app.explain import Json
from kproxy_core.contract.values import BackendSettings
from kproxy_core.model.address import Family
from kproxy_iptables.backend import IptablesBackend
from tests.plugins.explained import KnownPlans, differences_of
from tests.plugins.iptables import golden_cases

_COUNTED = re.compile(r" -m nfacct --nfacct-name +\S+")
PROGRAMS = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}


@contextmanager
def beside_kube_proxy(case: str) -> Iterator[KnownPlans]:
    """The calling thread is on a node with kube-proxy's rules of *case*; yields what they should do."""
    rules = _COUNTED.sub("", (golden_cases.CASES / case / "rules").read_text())
    with lonely_node():
        restore = f"{PROGRAMS[golden_cases.family(case)]}-restore"
        subprocess.run([restore], input=rules, text=True, check=True)
        yield KnownPlans(golden_cases.update(case))


def found_in(plans: KnownPlans) -> list[Json]:
    backend = IptablesBackend(BackendSettings(tuple(Family)))
    return differences_of(
        plans, lambda questions: backend.explain(questions, live=True), backend.frontends)


@pytest.mark.parametrize("case", golden_cases.names())
def test_kube_proxys_rules_do_what_the_plans_say(case: str) -> None:
    with beside_kube_proxy(case) as plans:
        assert found_in(plans) == []


def damage(pattern: str, family: Family) -> None:
    """Delete the first rule of the nat table that matches *pattern*."""
    listed = subprocess.run(
        [PROGRAMS[family], "-t", "nat", "-S"], capture_output=True, text=True, check=True).stdout
    rule = next(line for line in listed.splitlines() if re.match(pattern, line))
    command = f"{PROGRAMS[family]} -t nat {rule.replace('-A', '-D', 1)}"
    subprocess.run(["sh", "-c", command], check=True)


@pytest.mark.parametrize("case", ["slices-moved-ipv4", "slices-moved-ipv6"])
def test_an_endpoint_that_kube_proxy_lost_is_named(case: str) -> None:
    with beside_kube_proxy(case) as plans:
        damage(r"-A KUBE-SVC-\S+ .*--probability", plans.node.family)
        texts = {each["difference"] for each in found_in(plans)}
        assert any(text.startswith("endpoint ") and text.endswith(" is missing") for text in texts), texts


@pytest.mark.parametrize("case", ["slices-moved-ipv4", "slices-moved-ipv6"])
def test_a_service_that_kube_proxy_kept_is_stale(case: str) -> None:
    with beside_kube_proxy(case) as plans:
        kinds = {each["kind"] for each in found_in(plans.without_services())}
        assert kinds == {"stale"}
