"""Incremental changes end in the same rules as a restart, and cost what they touch."""

import fcntl
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace

from kproxy_conformance.builders import node_view
from kproxy_core.contract.errors import TrustLost
from kproxy_core.linux import sysctl
from kproxy_core.model.address import Family
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_iptables import applied
from kproxy_iptables.family import FamilyState
from kproxy_xtables.tables import Busy, Tables
from tests.plugins.iptables.golden_cases import normalised
from tests.plugins.iptables.rig import INTERFACES, LEGACY, NFT, V4, family_state, rules, run, variant
from tests.plugins.iptables.scenes import NODES, Scene, all_plans, plain, scenes

STEPS = st.lists(
    st.lists(st.one_of(scenes(st.integers(0, 3)), st.integers(0, 3)), min_size=1, max_size=3),
    min_size=1,
    max_size=6,
)
"""Steps: in each some Services change, or are deleted (a bare number)."""


def play(
    steps: list[list[Scene | int]], family: Family
) -> list[tuple[dict[ServicePortKey, ServicePlan | None], dict[ServicePortKey, ServicePlan]]]:
    """Return for each step the changed plans, and all plans after it."""
    held: dict[int, Scene] = {}
    turns = []
    before: dict[ServicePortKey, ServicePlan] = {}
    for step in steps:
        for change in step:
            if isinstance(change, int):
                held.pop(change, None)
            else:
                held[change.number] = change
        after = all_plans(family, *held.values())
        keys = {*before, *after}
        changed = {key: after.get(key) for key in keys if before.get(key) != after.get(key)}
        turns.append((changed, after))
        before = after
    return turns


@pytest.mark.parametrize(("interface", "family"), list(zip(INTERFACES, Family, strict=True)))
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(steps=STEPS, many=st.sampled_from((0, 1, 100)))
def test_any_sequence_of_changes_ends_in_the_rules_of_a_restart(
    netns: None, interface: str, family: Family, steps: list[list[Scene | int]], many: int
) -> None:
    """*many* deletions are made one by one, and chains with more are replaced."""
    node = NODES[family]
    live = family_state(interface, family)
    live.resync(node, {})
    for changed, plans in play(steps, family):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(applied, "MANY_DELETIONS", many)
            live.change(node, changed)
        assert family_state(interface, family).resync(node, plans).operations == 0
    final = normalised(run(interface, "save", family=family).splitlines())
    for table in ("filter", "nat"):
        for action in ("-F", "-X"):
            run(interface, "-t", table, action, family=family)
    family_state(interface, family).resync(node, plans)
    assert normalised(run(interface, "save", family=family).splitlines()) == final


@pytest.mark.parametrize("interface", INTERFACES)
def test_replacing_an_endpoint_touches_only_its_service(netns: None, interface: str) -> None:
    tables = family_state(interface)
    node = NODES[V4]
    tables.resync(node, all_plans(V4, *(plain(number, 1, 2, 3) for number in range(20))))
    before = run(interface, "save")
    report = tables.change(node, all_plans(V4, plain(7, 1, 2, 4)))
    # The new endpoint's chain, the Service's chain, the old endpoint's chain.
    assert report.operations == 3
    differing = set(before.splitlines()) ^ set(run(interface, "save").splitlines())
    assert all("web7" in line or line.startswith((":KUBE-SEP-", "#")) for line in differing)


def test_the_cost_of_a_change_does_not_depend_on_the_number_of_services(netns: None) -> None:
    costs = set()
    for count in (3, 200):
        tables = family_state(NFT)
        tables.resync(NODES[V4], all_plans(V4, *(plain(number, 1, 2) for number in range(count))))
        costs.add(tables.change(NODES[V4], all_plans(V4, plain(1, 5))).operations)
    assert len(costs) == 1


@pytest.mark.parametrize(("count", "one_by_one"), [(100, 100), (101, 0)])
def test_many_rules_are_deleted_by_replacing_their_chain(
    netns: None, monkeypatch: pytest.MonkeyPatch, count: int, one_by_one: int
) -> None:
    """Each deletion costs as much as the chain is long: 30,000 of them took 18 s."""
    tables, node = family_state(NFT), NODES[V4]
    plans = all_plans(V4, *(plain(number, 1) for number in range(count + 1)))
    tables.resync(node, plans)
    given: list[str] = []
    restore = tables.tables.restore

    def noted(text: str) -> None:
        given.append(text)
        restore(text)

    monkeypatch.setattr(tables.tables, "restore", noted)
    last = min(plans)
    tables.change(node, dict.fromkeys(plans.keys() - {last}))
    assert "".join(given).count("-D KUBE-SERVICES") == one_by_one
    assert len(rules(NFT, "nat", "KUBE-SERVICES")) == 2
    assert family_state(NFT).resync(node, {last: plans[last]}).operations == 0


@pytest.mark.parametrize("interface", INTERFACES)
def test_the_jump_to_node_ports_remains_the_last_rule(netns: None, interface: str) -> None:
    tables = family_state(interface)
    tables.resync(NODES[V4], all_plans(V4, plain(1, 1)))
    tables.change(NODES[V4], all_plans(V4, plain(2, 1)))
    held = rules(interface, "nat", "KUBE-SERVICES")
    assert [rule.endswith("-j KUBE-NODEPORTS") for rule in held] == [False, False, True]


@pytest.mark.parametrize("interface", INTERFACES)
def test_a_failed_change_is_repaired_by_a_resync(netns: None, interface: str) -> None:
    tables = family_state(interface)
    node = NODES[V4]
    plans = all_plans(V4, plain(1, 1), plain(2, 2))
    tables.resync(node, plans)
    wanted = normalised(run(interface, "save").splitlines())
    run(interface, "-t", "nat", "-D", "KUBE-SERVICES", "1")
    gone: dict[ServicePortKey, ServicePlan | None] = dict.fromkeys(plans)
    with pytest.raises(TrustLost, match="restore: exit"):
        tables.change(node, gone)
    assert tables.must_resync(node)
    tables.resync(node, plans)
    assert normalised(run(interface, "save").splitlines()) == wanted


def test_a_lock_timeout_changes_nothing(netns: None) -> None:
    tables = FamilyState(Tables(V4, variant(LEGACY), lock_timeout=1), localhost_node_ports=True)
    node = NODES[V4]
    tables.resync(node, all_plans(V4, plain(1, 1)))
    with open(os.environ["XTABLES_LOCKFILE"], "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Busy):
            tables.change(node, all_plans(V4, plain(2, 1)))
    assert not tables.must_resync(node)
    tables.change(node, all_plans(V4, plain(2, 1)))
    assert family_state(LEGACY).resync(node, all_plans(V4, plain(1, 1), plain(2, 1))).operations == 0


@pytest.mark.parametrize("interface", INTERFACES)
def test_stale_chains_with_foreign_jumps_do_not_block_a_resync(netns: None, interface: str) -> None:
    foreign = """*nat
:KUBE-SEP-AAAAAAAAAAAAAAAA - [0:0]
:KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]
-A KUBE-SVC-AAAAAAAAAAAAAAAA -j KUBE-SEP-AAAAAAAAAAAAAAAA
-A PREROUTING -d 192.0.2.9/32 -j KUBE-SVC-AAAAAAAAAAAAAAAA
COMMIT
"""
    run(interface, "restore", "--noflush", stdin=foreign)
    family_state(interface).resync(NODES[V4], all_plans(V4, plain(1, 1)))
    assert any("web1:http cluster IP" in rule for rule in rules(interface, "nat", "KUBE-SERVICES"))
    run(interface, "-t", "nat", "-D", "PREROUTING", "-d", "192.0.2.9/32", "-j", "KUBE-SVC-AAAAAAAAAAAAAAAA")
    family_state(interface).resync(NODES[V4], all_plans(V4, plain(1, 1)))
    assert "AAAAAAAAAAAAAAAA" not in run(interface, "save")


def test_node_ports_on_localhost_can_be_enabled_by_network(netns: None) -> None:
    node = replace(node_view(node_port_addresses="192.0.2.1"), node_ports_on_loopback=True)
    family_state(NFT).resync(node, {})
    dispatch = [rule.partition(" -m")[0] for rule in rules(NFT, "nat", "KUBE-SERVICES")]
    assert dispatch == ["-d 192.0.2.1/32", "-d 127.0.0.1/32"]
    assert sysctl.read("net/ipv4/conf/all/route_localnet") == "1"


def test_invalid_packets_are_dropped_unless_conntrack_is_liberal(netns: None) -> None:
    liberal = "net/netfilter/nf_conntrack_tcp_be_liberal"
    tables = family_state(NFT)
    for value, drops in ((0, True), (1, False), (0, True)):
        sysctl.ensure(liberal, value)
        tables.resync(NODES[V4], {})
        forward = rules(NFT, "filter", "KUBE-FORWARD")
        assert any("--ctstate INVALID" in rule and rule.endswith("-j DROP") for rule in forward) is drops
        assert tables.resync(NODES[V4], {}).operations == 0


def test_a_refused_rule_affects_only_its_service(
    netns: None, caplog: pytest.LogCaptureFixture
) -> None:
    node = NODES[V4]
    good = all_plans(V4, plain(1, 1))
    (key, plan), *_ = all_plans(V4, plain(2, 1)).items()
    bad = {key: structs.replace(plan, affinity_seconds=10**12)}
    tables = family_state(NFT)
    tables.resync(node, good | bad)
    said = [record.__dict__ for record in caplog.records if record.name == "kproxy.iptables"]
    assert [record["fields"]["service_port"] for record in said] == ["default/web2:http"]
    assert "web2" not in run(NFT, "save")
    assert any("web1:http cluster IP" in rule for rule in rules(NFT, "nat", "KUBE-SERVICES"))
    tables.change(node, all_plans(V4, plain(3, 1)))
    tables.change(node, {key: plan})
    everything = all_plans(V4, plain(1, 1), plain(2, 1), plain(3, 1))
    assert family_state(NFT).resync(node, everything).operations == 0
