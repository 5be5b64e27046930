"""``kproxy --cleanup`` removes the leftovers of kube-proxy and kproxy in any mode, and nothing else."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.namespaces import Namespace, namespace
from tests.core.processes import kproxy
from tests.leftovers.kernel import held, working
from tests.leftovers.kube_proxy import KUBE_PROXYS, load, load_foreign

CHANGED = (
    ("ipvs", "iptables"),
    ("iptables", "ipvs"),
    ("ipvs 1.14", "iptables 1.23"),
    ("iptables 1.23", "ipvs 1.14"),
    ("userspace", "iptables 1.23", "ipvs", "nftables"),
)
"""kube-proxy was started in one mode after another, which removes nothing."""


OURS = """*mangle
:KUBE-IPVS-ACCESS - [0:0]
:KUBE-IPVS-SHORT-CIRCUIT - [0:0]
-A PREROUTING -m comment --comment "kubernetes ipvs policies" -j KUBE-IPVS-ACCESS
-A OUTPUT -m comment --comment "kubernetes ipvs policies" -j KUBE-IPVS-ACCESS
-A KUBE-IPVS-ACCESS -m set --match-set KUBE-SHORT-CIRCUIT dst,dst -g KUBE-IPVS-SHORT-CIRCUIT
-A KUBE-IPVS-ACCESS -m set --match-set KUBE-NO-LOCAL-ENDPOINT dst,dst -j DROP
COMMIT
"""
"""Chains of the ipvs mode with names that kube-proxy does not use."""


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Namespace]:
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    with namespace() as made:
        yield made


def cleaned(node: Namespace, *flags: str) -> list[str]:
    """Run a clean-up without errors and return its output."""
    done = kproxy("--cleanup", *flags, node=node)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize("modes", [*((one,) for one in KUBE_PROXYS), *CHANGED], ids=" then ".join)
def test_everything_of_kube_proxy_is_removed(node: Namespace, modes: tuple[str, ...]) -> None:
    variants = working()
    assert sorted(variant.nft for variant in variants) == [False, True]
    load_foreign(node, variants)
    foreign = held(node)
    for mode in modes:
        for variant in variants:
            load(node, mode, variant)
    everything = held(node)
    assert everything != foreign
    told = cleaned(node, "--dry-run")
    assert held(node) == everything
    assert len(told) == len(set(told))
    assert [line.replace(" would be ", " ") for line in told] == cleaned(node)
    assert held(node) == foreign
    assert cleaned(node) == []


@pytest.mark.parametrize("mode", KUBE_PROXYS)
def test_own_only_keeps_the_rules_of_a_running_kube_proxy(node: Namespace, mode: str) -> None:
    load_foreign(node, working())
    load(node, mode, working()[0])
    everything = held(node)
    assert cleaned(node, "--own-only", "--dry-run") == cleaned(node, "--own-only") == []
    assert held(node) == everything


def test_own_only_removes_what_only_kproxy_creates(node: Namespace) -> None:
    load(node, "ipvs", working()[0])
    kube_proxys = held(node)
    node.nft("table ip kproxy {}; table ip6 kproxy {}; table ip kproxy-userspace {}")
    node.run("ipset", "create", "KUBE-SHORT-CIRCUIT", "hash:ip,port", "skbinfo")
    node.run("ipset", "create", "KUBE-NO-LOCAL-ENDPOINT", "hash:ip,port")
    node.run("iptables-nft-restore", "--noflush", stdin=OURS)
    told = cleaned(node, "--own-only", "--dry-run")
    assert [line.replace(" would be ", " ") for line in told] == cleaned(node, "--own-only")
    assert len(told) == 3 + 2 + 4
    assert held(node) == kube_proxys
