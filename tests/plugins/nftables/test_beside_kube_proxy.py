"""``kproxy diff`` beside kube-proxy's nftables mode: the same, unless something is stale or missing."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from msgspec import structs
from msgspec.structs import replace

from kproxy_conformance.checks.bench import lonely_node
from kproxy_core.app.explain import Json
from kproxy_core.contract.errors import BackendError
from kproxy_core.contract.values import BackendSettings, Question
from kproxy_core.linux import libnftables
from kproxy_core.linux.libnftables import list_table
from kproxy_core.model.address import Address, Family, format_address, format_socket
from kproxy_core.model.service import Destination
from kproxy_core.plan.fate import Origin, Outcome, Packet
from kproxy_nftables.backend import NftablesBackend
from kproxy_nftables.explain import explain, frontends
from tests.nft_releases.releases import BOOKWORM, RELEASES, TRIXIE, Release
from tests.plugins.explained import KnownPlans, differences_of, questions, questions_about
from tests.plugins.iptables import golden_cases
from tests.plugins.nftables.kube_proxy_table import kube_proxys_table

on_each = pytest.mark.parametrize("release", RELEASES, ids=str)


@contextmanager
def beside_kube_proxy(case: str, nft: str = "nft", *, release: str = "1.36") -> Iterator[KnownPlans]:
    """The calling thread is on a node with kube-proxy's table for *case*; yields what it should do."""
    update = golden_cases.update(case)
    with lonely_node():
        run(kube_proxys_table(update, release=release), nft)
        yield KnownPlans(update)


def run(commands: str, nft: str = "nft") -> None:
    subprocess.run([nft, "-f", "-"], input=commands, text=True, check=True)


def found_in(plans: KnownPlans) -> list[Json]:
    return differences_of(plans, lambda questions: explain(questions, live=True), frontends)


@pytest.mark.parametrize("case", golden_cases.names())
def test_kube_proxys_rules_do_what_the_plans_say(case: str) -> None:
    with beside_kube_proxy(case) as plans:
        assert found_in(plans) == []


@pytest.mark.parametrize("case", ["nodeport-etp-local-ipv4", "nodeport-etp-local-ipv6"])
def test_the_rules_of_kube_proxy_1_38_are_understood(case: str) -> None:
    with beside_kube_proxy(case, release="1.38") as plans:
        assert found_in(plans) == []
        here = plans.node.family.loopback
        packets = [Packet(Origin.NODE, here, here, plan.key.protocol, plan.node_port)
                   for plan in plans.plans.values() if plan.node_port]
        for side in explain([Question(packet, plans.node, None, None) for packet in packets], live=True):
            assert side.fate is not None
            assert side.fate.outcome is Outcome.REFUSED
            assert "localhost-nodeport-rejected" in side.fate.because


@pytest.mark.parametrize("case", ["slices-moved-ipv4", "slices-moved-ipv6"])
def test_an_endpoint_that_kube_proxy_lost_is_named(case: str) -> None:
    with beside_kube_proxy(case) as plans:
        plan = next(plan for plan in plans.plans.values() if len(plan.cluster) > 1)
        lost = dict(plans.plans) | {plan.key: structs.replace(plan, cluster=plan.cluster[:1])}
        run(f"delete table {plan.family.ip} kube-proxy")
        run(kube_proxys_table(replace(golden_cases.update(case), plans=lost)))
        found = {each["difference"] for each in found_in(plans) if each["service_port"] == str(plan.key)}
        assert f"endpoint {format_socket(*plan.cluster[1])} is missing" in found


@on_each
def test_tables_of_a_newer_nft_do_not_hide_kube_proxys(
    release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libnftables, "interpreters", lambda: [release.python])
    with beside_kube_proxy("clusterip-tcp-ipv4", BOOKWORM.nft) as plans:
        run("table ip foreign { set s { type ifname; }; }", TRIXIE.nft)
        assert found_in(plans) == []


@on_each
def test_a_table_of_kube_proxy_that_crashes_libnftables_is_judged_without_its_text(
    release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libnftables, "interpreters", lambda: [release.python])
    with beside_kube_proxy("clusterip-tcp-ipv4", TRIXIE.nft) as plans:
        assert found_in(plans) == []
        sides = explain(questions_about(plans.plans, plans.node), live=True)
        crash = "libnftables 1.0.6 crashes (SIGSEGV) on table ip kube-proxy"
        assert all((crash in side.objects[0].text) is (release is BOOKWORM) for side in sides)


@pytest.mark.parametrize("case", ["slices-moved-ipv4", "slices-moved-ipv6"])
def test_a_service_that_kube_proxy_kept_is_stale(case: str) -> None:
    with beside_kube_proxy(case) as plans:
        kept = found_in(plans.without_services())
        assert {each["kind"] for each in kept} == {"stale"}
        assert len(kept) == len({frontend for plan in plans.plans.values() for frontend in plan.frontends()})


@pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
def test_the_endpoint_that_kube_proxy_remembers_for_a_client_is_found(family: Family) -> None:
    with beside_kube_proxy(f"affinity-client-ip-{family.label.lower()}") as plans:
        asked, where = next(
            (question, question.plan.cluster[-1]) for question in questions_about(plans.plans, plans.node)
            if question.plan is not None and question.plan.affinity_seconds)
        listed = list_table(family.ip, "kube-proxy")
        host = format_address(where.address).replace(":", ".")
        name = re.search(rf"affinity-\S+__{re.escape(host)}/", listed)
        assert name
        source = format_address(asked.packet.source)
        run(f"add element {family.ip} kube-proxy {name[0]}{where.port} {{ {source} }}")
        (side,) = explain([asked], live=True)
        assert side.remembered == where


def test_a_service_with_thousands_of_endpoints_is_decided() -> None:
    update = golden_cases.update("clusterip-tcp-ipv4")
    plan = next(iter(update.plans.values()))
    endpoints = tuple(
        Destination(Address(bytes([10, 99, *number.to_bytes(2, "big")])), 8080) for number in range(4100))
    update = replace(update, plans={plan.key: structs.replace(plan, cluster=endpoints)})
    with lonely_node():
        run(kube_proxys_table(update))
        assert found_in(KnownPlans(update)) == []


def test_kproxys_own_table_is_judged_where_both_exist() -> None:
    update = golden_cases.update("clusterip-tcp-ipv4")
    with beside_kube_proxy("clusterip-tcp-ipv4") as plans:
        backend = NftablesBackend(BackendSettings(families=(Family.IPV4,)))
        backend.sync(replace(update, plans={}))
        backend.close()
        assert found_in(plans) != []


@pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
def test_a_node_that_no_proxy_serves_is_no_difference_but_an_error(family: Family) -> None:
    asked = questions(family)[:1]
    with lonely_node(), pytest.raises(BackendError, match=r"neither table ip6? kproxy nor ip6? kube-proxy"):
        explain(asked, live=True)
