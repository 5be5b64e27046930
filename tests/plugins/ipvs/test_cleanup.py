"""Which rules clean-up takes for this mode's, where the iptables mode has chains of the same names."""

from kproxy_core.model.address import Family
from kproxy_core.testing.builders import node_view
from kproxy_ipvs import names
from kproxy_ipvs.cleanup import what_to_remove
from kproxy_ipvs.names import FILTER, MANGLE, NAT
from kproxy_ipvs.skeleton import JUMPS, KUBE_PROXY_JUMPS, ChainKey, skeleton

FOREIGN = "-d 192.0.2.3/32 -j DROP"


def held_by_us() -> dict[ChainKey, list[str]]:
    """A kernel with our rules, and one of somebody else in every built-in chain."""
    held: dict[ChainKey, list[str]] = dict(skeleton(node_view(pods="10.244.1.0/24")))
    for jump in JUMPS:
        held.setdefault((jump.table, jump.chain), [FOREIGN]).append(jump.spec)
    return held


def test_all_of_ours_goes_and_nothing_else() -> None:
    jumps, chains = what_to_remove(held_by_us())
    assert set(chains) == set(skeleton(node_view(family=Family.IPV4)))
    removed = {(*key, spec) for key, specs in jumps.items() for spec in specs}
    assert removed == {(jump.table, jump.chain, jump.spec) for jump in JUMPS}


def test_chains_that_the_iptables_mode_has_taken_over_stay() -> None:
    held = held_by_us()
    held[NAT, names.SERVICES] = ["-d 10.96.0.1/32 -p tcp -j KUBE-SVC-X"]
    jumps, chains = what_to_remove(held)
    for shared in (names.SERVICES, names.POSTROUTING, names.MARK_MASQ):
        assert (NAT, shared) not in chains
    assert (NAT, "PREROUTING") not in jumps
    assert (FILTER, "FORWARD") not in jumps
    assert (MANGLE, names.IPVS_ACCESS) in chains


def test_what_only_kube_proxy_has_goes_too() -> None:
    held = held_by_us()
    held[FILTER, "KUBE-PROXY-FIREWALL"] = ["-m set --match-set KUBE-LOAD-BALANCER-FW dst,dst -j DROP"]
    for jump in KUBE_PROXY_JUMPS:
        held.setdefault((jump.table, jump.chain), []).append(jump.spec)
    jumps, chains = what_to_remove(held)
    assert (FILTER, "KUBE-PROXY-FIREWALL") in chains
    assert KUBE_PROXY_JUMPS[0].spec in jumps[FILTER, "INPUT"]


def test_firewall_of_the_iptables_mode_stays() -> None:
    held = {(FILTER, "KUBE-PROXY-FIREWALL"): ["-d 203.0.113.1/32 -p tcp -j DROP"]}
    assert what_to_remove(held) == ({}, [])


def test_an_empty_firewall_is_whose_jump_leads_to_it() -> None:
    theirs = '-m conntrack --ctstate NEW -m comment --comment "..." -j KUBE-PROXY-FIREWALL'
    key = (FILTER, "KUBE-PROXY-FIREWALL")
    assert what_to_remove({key: [], (FILTER, "INPUT"): [theirs]}) == ({}, [])
    spec = KUBE_PROXY_JUMPS[0].spec
    assert what_to_remove({key: [], (FILTER, "INPUT"): [spec]}) == ({(FILTER, "INPUT"): [spec]}, [key])


def test_there_is_nothing_to_do_in_an_empty_kernel() -> None:
    assert what_to_remove({}) == ({}, [])
