"""Metrics of the mode."""

import subprocess

import pytest

from kproxy_conformance.builders import changed_update, full_update
from kproxy_core.contract.errors import TrustLost
from kproxy_core.contract.values import BackendSettings
from kproxy_iptables.backend import IptablesBackend
from kproxy_iptables.skeleton import Facts
from kproxy_iptables.wanted import make_style, wanted
from tests.core.golden import golden
from tests.plugins.iptables.rig import NFT, V4, V6, run
from tests.plugins.iptables.scenes import NODES, Scene, all_plans, plain

SYNC = "kubeproxy_sync_proxy_rules_iptables"


def measured(backend: IptablesBackend) -> dict[tuple[str, ...], float]:
    """Return values by metric name and label values, these in the order of their names."""
    return {
        (m.name, *(m.labels[name] for name in sorted(m.labels))): m.value for m in backend.measure()
    }


def test_names_and_labels_are_kube_proxys(netns: None) -> None:
    backend = IptablesBackend(BackendSettings((V4, V6)))
    backend.sync(full_update(NODES[V4], all_plans(V4, plain(1, 1))))
    ours = {
        f"{m.name} {m.kind} labels={','.join(sorted(m.labels)) or '-'}" for m in backend.measure()
    }
    theirs = {
        line.partition(" buckets=")[0] for line in golden("metrics-iptables.txt").read_text().splitlines()
        if "iptables" in line
    }  # fmt: skip
    assert theirs <= ours


def test_rules_are_counted_by_table(netns: None) -> None:
    backend = IptablesBackend(BackendSettings((V4,)))
    plans = all_plans(V4, plain(1, 1, 2), plain(3, 1), Scene(2, "TCP", (), "node port", False, False, False))
    backend.sync(full_update(NODES[V4], plans))
    saved = run(NFT, "save").partition("*nat")
    before = measured(backend)
    for table, text in (("filter", saved[0]), ("nat", saved[2])):
        # Jumps from built-in chains and kubelet's chain do not count, as in kube-proxy.
        held = text.count("\n-A KUBE-") - text.count("\n-A KUBE-FIREWALL")
        assert before[f"{SYNC}_total", "IPv4", table] == held
        assert before[f"{SYNC}_last", "IPv4", table] == held, "a full sync counts everything"
    backend.sync(changed_update(NODES[V4], plans | (new := all_plans(V4, plain(1, 1, 3))), new))
    after = measured(backend)
    assert after[f"{SYNC}_total", "IPv4", "nat"] == before[f"{SYNC}_total", "IPv4", "nat"]
    # kube-proxy writes the whole filter table, and in nat all but the chains of unchanged Services.
    assert after[f"{SYNC}_last", "IPv4", "filter"] == after[f"{SYNC}_total", "IPv4", "filter"]
    style = make_style(NODES[V4], Facts(), 1)
    chains = {chain for plan in plans.values() if plan.key not in new for chain in wanted(plan, style).chains}
    unchanged = sum(line.split(" ")[1] in chains for line in saved[2].splitlines() if line.startswith("-A"))
    assert unchanged > 0
    assert after[f"{SYNC}_last", "IPv4", "nat"] == after[f"{SYNC}_total", "IPv4", "nat"] - unchanged
    backend.sync(full_update(NODES[V4], plans | new))
    again = measured(backend)
    assert again[f"{SYNC}_last", "IPv4", "nat"] == again[f"{SYNC}_total", "IPv4", "nat"], "nothing to write"


def test_failures_are_counted(netns: None) -> None:
    backend = IptablesBackend(BackendSettings((V4,)))
    plans = all_plans(V4, plain(1, 1))
    backend.sync(full_update(NODES[V4], plans))
    run(NFT, "-t", "nat", "-D", "KUBE-SERVICES", "1")
    with pytest.raises(TrustLost):
        backend.sync(changed_update(NODES[V4], {}, plans))
    found = measured(backend)
    assert found[f"{SYNC}_restore_failures_total", "IPv4"] == 1
    assert found[f"{SYNC}_partial_restore_failures_total", "IPv4"] == 1


def test_the_kernel_counts_connections_to_node_ports_on_localhost(netns: None) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    backend = IptablesBackend(BackendSettings((V4,)))
    of = all_plans(V4, Scene(1, "UDP", (2,), "node port", False, False, False))
    backend.sync(full_update(NODES[V4], of))
    name = "kubeproxy_iptables_localhost_nodeports_accepted_packets_total"
    assert measured(backend)[name,] == 0
    subprocess.run(["bash", "-c", "echo >/dev/udp/127.0.0.1/30001"], check=False)
    assert measured(backend)[name,] == 1
