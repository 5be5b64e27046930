"""Selection of rules to clean up, where the iptables mode has chains of the same names."""

import subprocess
import sys

from kproxy_conformance.builders import node_view
from kproxy_core.model.address import Family
from kproxy_ipvs import names
from kproxy_ipvs.cleanup import plan_cleanup, plan_kube_proxy_cleanup, plan_own_cleanup
from kproxy_ipvs.names import FILTER, MANGLE, NAT
from kproxy_ipvs.skeleton import JUMPS, skeleton
from kproxy_xtables.rules import ChainKey

FOREIGN = "-d 192.0.2.3/32 -j DROP"
FIREWALL = (FILTER, "KUBE-PROXY-FIREWALL")
KUBE_PROXYS_JUMP = '-m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL'
JUMP_OF_IPTABLES = '-m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL'


def held_by_us() -> dict[ChainKey, list[str]]:
    """Return our rules, with a foreign rule in every built-in chain."""
    held: dict[ChainKey, list[str]] = dict(skeleton(node_view(pods="10.244.1.0/24")))
    for jump in JUMPS:
        held.setdefault((jump.table, jump.chain), [FOREIGN]).append(jump.spec)
    return held


def test_own_rules_are_removed_and_foreign_ones_kept() -> None:
    removal = plan_cleanup(held_by_us())
    assert set(removal.chains) == set(skeleton(node_view(family=Family.IPV4)))
    assert sorted(removal.rules) == sorted((jump.table, jump.chain, jump.spec) for jump in JUMPS)
    assert (removal.emptied, removal.kept) == ([], [])


def test_chains_taken_over_by_the_iptables_mode_are_kept() -> None:
    held = held_by_us()
    held[NAT, names.SERVICES] = ["-d 10.96.0.1/32 -p tcp -j KUBE-SVC-AAAAAAAAAAAAAAAA"]
    removal = plan_cleanup(held)
    for shared in (names.SERVICES, names.POSTROUTING, names.MARK_MASQ):
        assert (NAT, shared) not in removal.chains
    assert not {(NAT, "PREROUTING"), (FILTER, "FORWARD")} & {rule[:2] for rule in removal.rules}
    assert (MANGLE, names.IPVS_ACCESS) in removal.chains
    assert removal.kept == []


def test_chains_of_kube_proxy_alone_are_removed() -> None:
    held = held_by_us()
    held[FIREWALL] = ["-m set --match-set KUBE-LOAD-BALANCER-FW dst,dst -j KUBE-SOURCE-RANGES-FIREWALL"]
    held[FILTER, "KUBE-SOURCE-RANGES-FIREWALL"] = ["-j DROP"]
    held[FILTER, "INPUT"].append(KUBE_PROXYS_JUMP)
    removal = plan_cleanup(held)
    assert {FIREWALL, (FILTER, "KUBE-SOURCE-RANGES-FIREWALL")} <= set(removal.chains)
    assert (FILTER, "INPUT", KUBE_PROXYS_JUMP) in removal.rules


def test_firewall_of_the_iptables_mode_is_kept_without_our_jumps() -> None:
    held: dict[ChainKey, list[str]] = {
        FIREWALL: ["-d 203.0.113.1/32 -p tcp -j DROP"],
        (FILTER, "INPUT"): [JUMP_OF_IPTABLES, KUBE_PROXYS_JUMP],
    }
    removal = plan_cleanup(held)
    assert (removal.chains, removal.kept) == ([], [])
    assert removal.rules == [(FILTER, "INPUT", KUBE_PROXYS_JUMP)]


def test_empty_firewall_belongs_to_the_mode_that_jumps_to_it() -> None:
    held: dict[ChainKey, list[str]] = {FIREWALL: [], (FILTER, "INPUT"): [JUMP_OF_IPTABLES]}
    assert plan_cleanup(held) == ([], [], [], [])
    held[FILTER, "INPUT"] = [KUBE_PROXYS_JUMP]
    assert plan_cleanup(held) == ([(FILTER, "INPUT", KUBE_PROXYS_JUMP)], [FIREWALL], [], [])


def test_own_cleanup_keeps_objects_of_kube_proxy() -> None:
    held = held_by_us()
    held[FILTER, "INPUT"].append(KUBE_PROXYS_JUMP)
    held[FIREWALL] = []
    removal = plan_own_cleanup(held)
    assert set(removal.chains) == {key for key in skeleton(node_view()) if key[0] == MANGLE}
    assert {rule[0] for rule in removal.rules} == {MANGLE}


def test_jumps_of_older_kube_proxies_are_removed() -> None:
    held = held_by_us()
    assert plan_kube_proxy_cleanup(held) == ([], [], [], [])
    older = '-m comment --comment "kubernetes forward rules" -j KUBE-FORWARD'
    held[FILTER, "FORWARD"] += [older, KUBE_PROXYS_JUMP]
    held[FIREWALL] = []
    removal = plan_kube_proxy_cleanup(held)
    assert removal.rules == [(FILTER, "FORWARD", older), (FILTER, "FORWARD", KUBE_PROXYS_JUMP)]
    assert removal.chains == [FIREWALL]


def test_empty_kernel_needs_no_cleanup() -> None:
    assert plan_cleanup({}) == ([], [], [], [])


def test_cleanup_in_another_mode_does_not_load_pyroute2(netns: None) -> None:
    """It takes 19 MiB. Only the creation of the device is worth that."""
    program = (
        "import sys, subprocess, kproxy_ipvs.backend; from kproxy_ipvs import cleanup, retire\n"
        "subprocess.run(['ip', 'link', 'add', 'kube-ipvs0', 'type', 'bridge'], check=True)\n"
        "print(cleanup.cleanup(dry_run=False).removed, retire.retire(()).errors, 'pyroute2' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "('interface kube-ipvs0',) () False"
